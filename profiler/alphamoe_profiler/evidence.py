"""All evidence of one run, read and attributed once, for the witness summary and the reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from alphamoe_backend.experts.registry import forbidden_symbols, required_symbols
from alphamoe_profiler.agreement import Agreement, compare
from alphamoe_profiler.attribution import AttributedKernels, attribute
from alphamoe_profiler.m_buckets import fold, witness_mask
from alphamoe_profiler.windows import WindowProof, prove_window
from alphamoe_tracers.errors import EvidenceError, UsageError
from alphamoe_tracers.records import EXECUTIONS, ModuleRecord, Receipt

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle

MOE_CLASSES = ("alphamoe.", "moe.")
"""Prefixes of the symbol classes that the tables of MoE kernels show."""
NOT_REAL_REQUESTS = ("warmup", "capture", "performance")
"""Purposes that a gate about real requests never counts."""


@dataclass(frozen=True)
class Evidence:
    """What the passes made of one bundle."""

    bundle: RunBundle
    required: tuple[str, ...]
    forbidden: tuple[str, ...]
    kernels: dict[int, AttributedKernels]
    receipts: dict[int, list[Receipt]]
    proofs: dict[int, WindowProof]
    agreements: dict[int, Agreement]

    @property
    def frames(self) -> dict[int, pd.DataFrame]:
        """Attributed kernels by rank."""
        return {rank: own.frame for rank, own in self.kernels.items()}


def gather(bundle: RunBundle) -> Evidence:
    """Read and attribute everything that a judgement needs.

    Raises:
        UsageError: files of the bundle contradict each other (nothing of it is judged), or run.json names a MoE
            backend without known symbols.
    """
    contradictions = bundle.contradictions()
    if contradictions:
        more = f" (and {len(contradictions) - 1} more)" if len(contradictions) > 1 else ""
        raise UsageError(f"{bundle.path}: {contradictions[0]}{more}", "record the run again into an empty directory")
    required = required_symbols(bundle.run.moe_runner_backend)
    forbidden = forbidden_symbols(bundle.run.moe_runner_backend)
    receipts = {rank: bundle.receipts(rank).receipts for rank in bundle.ranks}
    kernels = {rank: attribute(bundle, rank) for rank in bundle.ranks}
    for own in kernels.values():
        own.check()
    proofs = {rank: prove_window(bundle, rank, own.frame) for rank, own in kernels.items()}
    agreements = {rank: compare(own, receipts[rank], (*required, *forbidden)) for rank, own in kernels.items()}
    return Evidence(bundle, required, forbidden, kernels, receipts, proofs, agreements)


def counted_as_real(frame: pd.DataFrame) -> pd.Series:
    """Say which kernels a forbidden symbol is sought in: inside the window and not known to be other traffic."""
    return frame["in_window"] & ~frame["purpose"].isin(NOT_REAL_REQUESTS)


def moe_counts(evidence: Evidence) -> pd.DataFrame:
    """Count MoE kernels of witness steps: rank, execution (null where unknown), symbol, class, kernels."""
    parts = []
    for rank, frame in evidence.frames.items():
        classes = frame["class"].astype(object).fillna("")
        moe = classes.str.startswith(MOE_CLASSES) | frame["base"].isin((*evidence.required, *evidence.forbidden))
        own = frame.loc[moe & counted_as_real(frame), ["execution", "base", "class"]].astype(object)
        sizes = own.groupby(["execution", "base", "class"], dropna=False).size().rename("kernels").reset_index()
        parts.append(sizes.assign(rank=rank))
    whole = pd.concat(parts, ignore_index=True).rename(columns={"base": "symbol"})
    order = {execution: number for number, execution in enumerate(EXECUTIONS)}
    whole["_order"] = whole["execution"].map(order).fillna(len(order))
    whole = whole.sort_values(["rank", "_order", "kernels", "symbol"], ascending=[True, True, False, True])
    return whole[["rank", "execution", "symbol", "class", "kernels"]].reset_index(drop=True)


@dataclass(frozen=True)
class Identity:
    """The loaded code behind a symbol: two implementations can share a name."""

    symbol: str
    module_sha256: str | None
    """Hash of the module image, null where no loaded module, or more than one, holds the symbol."""
    source_sha256: str | None
    """Hash of its CUDA source where that is ours or known."""
    ranks: tuple[int, ...]
    kernels: int

    @property
    def tied(self) -> bool:
        """The module is tied to a known source."""
        return self.source_sha256 is not None

    def told(self) -> str:
        """Name the code in one line."""
        module = f"module {self.module_sha256[:12]}" if self.module_sha256 else "an unknown module"
        source = f"source {self.source_sha256[:12]}" if self.source_sha256 else "of unknown source"
        return f"{self.symbol}: {module}, {source}, ranks {fold(self.ranks)}, {self.kernels} kernels"


def identities(evidence: Evidence) -> list[Identity]:
    """Return the modules behind the AlphaMoE symbols and the required ones, witnessed kernels only."""
    found: dict[tuple[str, str | None], tuple[set[int], int]] = {}
    sources: dict[str, str] = {}
    for rank, frame in evidence.frames.items():
        sources |= {m.sha256: m.source_sha256 for m in _modules(evidence.bundle, rank) if m.source_sha256 is not None}
        alphamoe = frame["class"].astype(object).fillna("").str.startswith("alphamoe.")
        chosen = (alphamoe | frame["base"].isin(evidence.required)) & witness_mask(frame)
        own = frame.loc[chosen, ["base", "module_sha256"]].astype(object)
        sizes = own.groupby(["base", "module_sha256"], dropna=False).size().rename("kernels").reset_index()
        for base, module, count in zip(*(sizes[name].tolist() for name in sizes.columns), strict=True):
            key = (str(base), module if isinstance(module, str) else None)
            ranks, total = found.get(key, (set(), 0))
            found[key] = (ranks | {rank}, total + int(count))
    return [
        Identity(symbol, module, sources.get(module or ""), tuple(sorted(ranks)), total)
        for (symbol, module), (ranks, total) in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    ]


def _modules(bundle: RunBundle, rank: int) -> list[ModuleRecord]:
    try:
        return bundle.modules(rank)
    except EvidenceError:  # told by bundle.check(); identities are then unknown
        return []
