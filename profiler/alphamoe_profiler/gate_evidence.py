"""Gather the evidence of a gate: rank by rank, two at a time, keeping only the columns that rules are judged by."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from alphamoe_profiler.agreement import Agreement, compare
from alphamoe_profiler.attributed_kernels import AttributedKernels
from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.evidence import Evidence, refuse_contradictions
from alphamoe_profiler.launch_check import SHAPE_COLUMNS
from alphamoe_profiler.windows import WindowProof, prove_window

if TYPE_CHECKING:
    from alphamoe_profiler.gate_bundle import NarrowBundle

_COLUMNS = (
    "start_ns", "correlation_id", "graph_node_id", "mangled", "full", "base", "class", "module_sha256", "step", "layer",
    "purpose", "execution", "real_tokens", "dispatch_M", "kernel_M", "shape_ok", "graph", "in_window", "reason",
)  # fmt: skip


def gather_for_gate(
    bundle: NarrowBundle, shown: tuple[str, ...], forbidden: tuple[str, ...], compared: tuple[str, ...]
) -> Evidence:
    """Read and attribute what a gate needs.

    Args:
        bundle: the run, narrowed to what is asked about.
        shown: base names that reports show beside MoE kernels.
        forbidden: base names that must not run.
        compared: base names whose kernels must all be in the receipts, beside those that receipts name.

    Raises:
        UsageError: files of the bundle contradict each other; nothing of it is judged.
    """
    refuse_contradictions(bundle)
    receipts = {rank: bundle.receipts(rank).receipts for rank in bundle.ranks}

    def judged(rank: int) -> tuple[AttributedKernels, WindowProof, Agreement]:
        own = attribute(bundle, rank)
        own.check()
        proof = prove_window(bundle, rank, own.frame)
        agreement = compare(own, receipts[rank], compared)
        if bundle.run.kind == "recorded":  # of an imported run the launches are asked again what was exercised
            bundle.forget(rank)
        kept = [name for name in (*_COLUMNS, *SHAPE_COLUMNS) if name in own.frame.columns]
        return replace(own, frame=own.frame[kept]), proof, agreement

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(bundle.ranks, pool.map(judged, bundle.ranks), strict=True))
    return Evidence(
        bundle=bundle,
        required=shown,
        forbidden=forbidden,
        kernels={rank: own for rank, (own, _, _) in found.items()},
        receipts=receipts,
        proofs={rank: proof for rank, (_, proof, _) in found.items()},
        agreements={rank: agreement for rank, (_, _, agreement) in found.items()},
    )
