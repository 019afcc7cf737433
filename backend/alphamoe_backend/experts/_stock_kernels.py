"""Triton sources of the stock two-GEMM path, under the symbols it is known by; imported only where triton is."""

# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def fused_moe_kernel(
    a,
    a_scale,
    b,
    b_scale,
    c,
    topk_weights,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    pairs,
    routed_scaling_factor,
    N: tl.constexpr,
    K: tl.constexpr,
    A_ROW_DIVISOR: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply the rows of one block of the plan by BLOCK_N weight rows of its expert.

    a e4m3 [*, K] is read at row ``pair // A_ROW_DIVISOR``; b is e4m3 [E, N, K]; c [pairs, N] is written at ``pair``.
    One step of K is one scale group of 128, so that each partial product is scaled once.
    """
    GROUP_K: tl.constexpr = 128
    K_GROUPS: tl.constexpr = K // GROUP_K
    N_BLOCKS: tl.constexpr = N // BLOCK_N
    pid = tl.program_id(0)
    m_blocks = tl.cdiv(tl.load(num_tokens_post_padded), BLOCK_M)
    # Blocks of one expert and the same weight rows run next to each other, so that the weights stay in L2.
    in_group = GROUP_M * N_BLOCKS
    first_m = (pid // in_group) * GROUP_M
    if first_m >= m_blocks:
        return
    group_rows = tl.minimum(m_blocks - first_m, GROUP_M)
    rest = pid % in_group
    if rest >= group_rows * N_BLOCKS:
        return
    block = first_m + rest % group_rows
    block_n = rest // group_rows
    expert = tl.load(expert_ids + block).to(tl.int64)
    pair = tl.load(sorted_token_ids + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = pair < pairs
    row = tl.where(valid, pair // A_ROW_DIVISOR, 0)
    k = tl.arange(0, GROUP_K)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_tile = a + row[:, None] * K + k[None, :]
    b_tile = b + expert * (N * K) + n[None, :] * K + k[:, None]
    a_scales = a_scale + row * K_GROUPS
    # BLOCK_N divides 128, so that one scale covers the whole tile.
    b_scales = b_scale + expert * (N // 128 * K_GROUPS) + (block_n * BLOCK_N // 128) * K_GROUPS
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(K_GROUPS):
        x = tl.load(a_tile, mask=valid[:, None], other=0.0)
        w = tl.load(b_tile)
        scale = tl.load(a_scales + step, mask=valid, other=0.0) * tl.load(b_scales + step)
        acc += tl.dot(x, w) * scale[:, None]
        a_tile += GROUP_K
        b_tile += GROUP_K
    if MUL_ROUTED_WEIGHT:
        weight = tl.load(topk_weights + pair, mask=valid, other=0.0) * routed_scaling_factor
        acc *= weight[:, None]
    tl.store(c + pair[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=valid[:, None])


@triton.jit
def act_and_mul_kernel(gate_up, out, elements, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    """Write silu(gate) * up, in float32, for gate_up [rows, 2I] to out [rows, I]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < elements
    row = offset // I
    gate = tl.load(gate_up + row * I + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * I + offset + I, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _moe_sum_reduce_kernel(by_pair, out, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum by_pair [M, TOP_K, H] over the routes, in float32, to out [M, H]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for route in tl.static_range(TOP_K):
        acc += tl.load(by_pair + (token * TOP_K + route) * H + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, acc.to(out.dtype.element_ty), mask=inside)
