"""Triton source of the activation quantisation; imported only where triton is."""

# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _per_token_group_quant_8bit(x, quantised, scale, groups, GROUP: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr):
    """Quantise GROUPS_PER_PROGRAM consecutive groups of GROUP elements of a contiguous matrix."""
    group_ids = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    inside = group_ids < groups
    offsets = group_ids[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    # A NaN must reach the scale: tl.max drops NaNs, so they are put back by hand.
    amax = tl.max(tl.abs(values), axis=1)
    has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
    amax = tl.where(has_nan, float("nan"), amax)
    s = tl.div_rn(amax, 448.0)
    divisor = tl.where(s == 0.0, 1.0, s)
    q = tl.div_rn(values, tl.broadcast_to(divisor[:, None], (GROUPS_PER_PROGRAM, GROUP)))
    q = tl.clamp(q, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(quantised + offsets, q.to(quantised.dtype.element_ty), mask=inside[:, None])
    tl.store(scale + group_ids, s, mask=inside)
