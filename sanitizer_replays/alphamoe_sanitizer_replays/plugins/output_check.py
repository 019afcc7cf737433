"""Whether a replay of the routed experts gave what was captured, within the kernels' own tolerance.

Kernels that add with atomics give other last bits in every run. So the replay may differ from the recorded output by
what the order of n bfloat16 additions can do: each rounds a partial sum of at most ``sum|terms|`` by half a step, so
two orders lie at most ``(n - 1) * 2**-8 * sum|terms|`` apart (and 1 % of the RMS, for an intermediate that rounds to
its other e4m3 neighbour in another variant). Both must also lie within :mod:`alphamoe_backend.experts.tolerance` of a
float64 oracle. That tolerance means something from an RMS of 1; a layer's real output is smaller, so all is scaled to
1.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphamoe_sanitizer_replays.captures.store import StoredCapture
from alphamoe_sanitizer_replays.results import OutputCheck
from alphamoe_tracers.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

    from alphamoe_backend.quantization.fp8 import ExpertWeights

SCALED_RMS = 1.15
FLOOR = 0.01
"""Of the RMS: what one intermediate that is rounded to its other e4m3 neighbour can do."""
_PAIRS_FOR_GPU = 2048
"""Token-expert pairs from which the oracle is worth starting CUDA in the parent for."""
TOLERANCE = (
    f"recorded and replayed output differ by at most (n - 1) 2^-8 sum|terms| + {FLOOR:g} RMS, n additions; each within "
    f"max(0.1 + 0.1 |ref|, 2 sum|terms| 2^-7) of a float64 oracle and 3 % of it as a whole, scaled to RMS {SCALED_RMS}"
)


@dataclass(frozen=True)
class _Expected:
    """The oracle of one capture, scaled; float64 [M, H] on the CPU."""

    scale: float
    reference: Tensor
    exact: Tensor
    sum_abs_terms: Tensor
    additions: int
    """bfloat16 additions that make one element: one for each route and 128-wide slice of the intermediate."""


# The oracle costs seconds and every tool and variant of one capture asks for the same: the latest few are kept.
_KEPT_MOST = 6
_kept: dict[object, _Expected | str] = {}
_lock = threading.Lock()


def check_experts(
    stored: StoredCapture,
    tensors: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    canonical: Callable[[Mapping[str, Tensor]], ExpertWeights],
    *,
    name: str = "out",
) -> OutputCheck:
    """Compare a replay's output [M, H] with the captured one, and both with the oracle.

    Args:
        stored: the capture.
        tensors: its inputs and weights on the CPU; ``topk_ids`` among them.
        outputs: the replay's.
        canonical: gives the weights in the canonical layout.
        name: of the output.

    Raises:
        EvidenceError: the captured output cannot be read.
    """
    import torch

    from alphamoe_backend.experts.tolerance import compare

    replayed = outputs.get(name)
    if replayed is None:
        return _told("INCONCLUSIVE", f"the replay left no {name}")
    recorded = stored.load(name)
    if replayed.shape != recorded.shape or replayed.dtype != recorded.dtype:
        return _told(
            "FAIL",
            f"the replay's {name} is {replayed.dtype} {list(replayed.shape)}, "
            f"the captured one {recorded.dtype} {list(recorded.shape)}",
        )
    expected = _expected(stored, tensors, canonical)
    if isinstance(expected, str):
        return _told("INCONCLUSIVE", expected)
    scale = expected.scale
    first, second = recorded.to(torch.float64) * scale, replayed.to(torch.float64) * scale
    difference = (second - first).abs()
    bound = (expected.additions - 1) * 2.0**-8 * expected.sum_abs_terms + FLOOR * SCALED_RMS
    oracle = [compare(values, expected.reference, expected.sum_abs_terms, expected.exact) for values in (first, second)]
    problems = []
    # Written so that a NaN counts.
    outside = ~(difference <= bound)
    if bool(outside.any()):
        excess = torch.where(torch.isnan(difference), torch.inf, difference - bound)
        row, column = divmod(int(excess.argmax()), recorded.shape[1])
        problems.append(
            f"{int(outside.sum())} of {recorded.numel()} elements differ from the captured output by more than the "
            f"order of additions allows, worst [{row}, {column}]: {replayed[row, column].item():.6g} for "
            f"{recorded[row, column].item():.6g}"
        )
    for whose, compared in zip(("the captured output", "the replay's output"), oracle, strict=True):
        if not compared.ok:
            problems.append(f"{whose} is not that of a float64 oracle: {compared.problem}")
    return OutputCheck(
        verdict="FAIL" if problems else "PASS",
        reason="; ".join(problems),
        max_abs_error=_finite(float(difference.max()) / scale),
        relative_error=_finite(oracle[1].relative_error),
        tolerance=TOLERANCE,
    )


def _told(verdict: str, reason: str) -> OutputCheck:
    return OutputCheck(verdict="FAIL" if verdict == "FAIL" else "INCONCLUSIVE", reason=reason, tolerance=TOLERANCE)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _expected(
    stored: StoredCapture, tensors: Mapping[str, Tensor], canonical: Callable[[Mapping[str, Tensor]], ExpertWeights]
) -> _Expected | str:
    """Give the oracle of a capture, or the reason why there is none."""
    arguments = stored.capture.arguments
    key = (stored.capture.plugin, str(arguments), *[(info.name, info.sha256) for info in stored.capture.tensors])
    with _lock:
        if key not in _kept:
            made = _compute(tensors, canonical(tensors), float(arguments.get("routed_scaling_factor", 1.0)))
            while len(_kept) >= _KEPT_MOST:
                del _kept[next(iter(_kept))]
            _kept[key] = made
        return _kept[key]


def _compute(tensors: Mapping[str, Tensor], weights: ExpertWeights, routed_scaling_factor: float) -> _Expected | str:
    import torch

    from alphamoe_backend.experts.reference import Oracle, float64_oracle
    from alphamoe_backend.geometry import GROUP
    from alphamoe_backend.quantization.fp8 import ExpertWeights as Weights

    lacking = [
        name for name in ("hidden_states", "hidden_states_scale", "topk_weights", "topk_ids") if name not in tensors
    ]
    if lacking:
        raise EvidenceError(f"the capture has no {lacking[0]}, which the float64 oracle needs", "record again")
    q, q_scale = tensors["hidden_states"], tensors["hidden_states_scale"]
    topk_weights, topk_ids = tensors["topk_weights"], tensors["topk_ids"]
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpu = torch.cuda.is_available() and (started or topk_ids.numel() >= _PAIRS_FOR_GPU)
    device = torch.device("cuda" if on_gpu else "cpu")
    placed = Weights(*(part.to(device) for part in vars(weights).values()))

    def oracle(requantise: bool) -> Oracle:
        made = float64_oracle(
            q.to(device),
            q_scale.to(device),
            placed,
            topk_weights.to(device),
            topk_ids.to(device),
            routed_scaling_factor=routed_scaling_factor,
            requantise=requantise,
        )
        return Oracle(made.out.cpu(), made.sum_abs_terms.cpu())

    rounded, exact = oracle(True), oracle(False)
    rms = float(rounded.out.square().mean().sqrt())
    # Written so that a NaN counts.
    if not 0.0 < rms < float("inf"):
        return f"the float64 oracle of the captured inputs has the RMS {rms:g}, so no output can be judged by it"
    scale = SCALED_RMS / rms
    additions = topk_ids.shape[1] * (weights.down.shape[2] // GROUP)
    return _Expected(scale, rounded.out * scale, exact.out * scale, rounded.sum_abs_terms * scale, additions)
