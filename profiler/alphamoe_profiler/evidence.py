"""All evidence of one run, read and attributed once, for the witness summary and the reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from alphamoe_backend.experts.registry import forbidden_symbols, required_symbols
from alphamoe_profiler.agreement import Agreement, compare
from alphamoe_profiler.attributed_kernels import AttributedKernels
from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle_check import contradictions
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


def gather(
    bundle: RunBundle, required: tuple[str, ...] | None = None, forbidden: tuple[str, ...] | None = None
) -> Evidence:
    """Read and attribute everything that a judgement needs.

    Args:
        bundle: the run.
        required: base names that receipts and witnesses are compared for; null: those of the run's backend.
        forbidden: the same of symbols that must not run.

    Raises:
        UsageError: files of the bundle contradict each other (nothing of it is judged), or run.json names a MoE
            backend without known symbols.
    """
    refuse_contradictions(bundle)
    backend = bundle.run.moe_runner_backend
    # An imported trace does not say which backend was asked for: nothing is required of it until a rule is.
    if required is None:
        required = required_symbols(backend) if backend is not None else ()
    if forbidden is None:
        forbidden = forbidden_symbols(backend) if backend is not None else ()
    receipts = {rank: bundle.receipts(rank).receipts for rank in bundle.ranks}
    kernels = {rank: attribute(bundle, rank) for rank in bundle.ranks}
    for own in kernels.values():
        own.check()
    proofs = {rank: prove_window(bundle, rank, own.frame) for rank, own in kernels.items()}
    agreements = {rank: compare(own, receipts[rank], (*required, *forbidden)) for rank, own in kernels.items()}
    return Evidence(bundle, required, forbidden, kernels, receipts, proofs, agreements)


def refuse_contradictions(bundle: RunBundle) -> None:
    """Refuse a bundle whose files contradict each other: nothing of it is judged.

    Raises:
        UsageError: with the first contradiction.
    """
    found = contradictions(bundle)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UsageError(
            f"{bundle.path}: {found[0]}{more}",
            "remove what does not belong there, or record the run again into an empty directory",
        )


def counted_as_real(frame: pd.DataFrame) -> pd.Series:
    """Say which kernels a forbidden symbol is sought in: inside the window and not known to be other traffic."""
    return frame["in_window"] & ~frame["purpose"].isin(NOT_REAL_REQUESTS)


def moe_counts(evidence: Evidence) -> pd.DataFrame:
    """Count MoE kernels of witness steps: rank, execution (null where unknown), symbol, class, kernels."""
    parts = []
    for rank, frame in evidence.frames.items():
        of_class = [name for name in frame["class"].cat.categories if str(name).startswith(MOE_CLASSES)]
        moe = frame["class"].isin(of_class) | frame["base"].isin((*evidence.required, *evidence.forbidden))
        own = frame.loc[moe & counted_as_real(frame), ["execution", "base", "class"]]
        sizes = own.groupby(["execution", "base", "class"], dropna=False, observed=True).size().rename("kernels")
        parts.append(sizes.reset_index().astype(dict.fromkeys(own.columns, object)).assign(rank=rank))
    whole = pd.concat(parts, ignore_index=True).rename(columns={"base": "symbol"})
    order = {execution: number for number, execution in enumerate(EXECUTIONS)}
    whole["_order"] = whole["execution"].map(order).fillna(len(order))
    whole = whole.sort_values(["rank", "_order", "kernels", "symbol"], ascending=[True, True, False, True])
    return whole[["rank", "execution", "symbol", "class", "kernels"]].reset_index(drop=True)


@dataclass(frozen=True)
class Identity:
    """The loaded code behind a symbol: two implementations can share a name."""

    symbol: str
    modules: tuple[str, ...]
    """Hashes of the loaded module images that hold the symbol. Variants of one kernel are several modules under one
    symbol, and a kernel record does not say which of them it ran."""
    source_sha256: str | None
    """Hash of the CUDA source, where every one of those modules is tied to the same known source."""
    ranks: tuple[int, ...]
    kernels: int

    @property
    def tied(self) -> bool:
        """Whatever module ran, it comes from one known source."""
        return self.source_sha256 is not None

    def told(self) -> str:
        """Name the code in one line."""
        modules = f"modules {', '.join(module[:12] for module in self.modules)}" if self.modules else "no known module"
        source = f"source {self.source_sha256[:12]}" if self.source_sha256 else "of no one known source"
        return f"{self.symbol}: {modules}, {source}, {self.kernels} kernels on {ranks_told(self.ranks)}"


def identities(evidence: Evidence) -> list[Identity]:
    """Return the code behind the AlphaMoE symbols and the required ones, witnessed kernels only."""
    found: dict[tuple[str, tuple[str, ...], str | None], tuple[set[int], int]] = {}
    for rank, frame in evidence.frames.items():
        loaded = _modules(evidence.bundle, rank)
        sources = {module.sha256: module.source_sha256 for module in loaded}
        alphamoe = frame["class"].astype(object).fillna("").str.startswith("alphamoe.")
        chosen = (alphamoe | frame["base"].isin(evidence.required)) & witness_mask(frame)
        names = ["base", "mangled", "module_sha256"]
        own = frame.loc[chosen, names].astype(object)
        sizes = own.groupby(names, dropna=False).size().rename("kernels").reset_index()
        for base, mangled, module, count in zip(*(sizes[name].tolist() for name in sizes.columns), strict=True):
            holders = {item.sha256 for item in loaded if mangled in item.kernels}
            modules = (module,) if isinstance(module, str) else tuple(sorted(holders))
            behind = {sources.get(item) for item in modules}
            source = next(iter(behind)) if len(behind) == 1 else None
            ranks, total = found.get((base, modules, source), (set(), 0))
            found[base, modules, source] = (ranks | {rank}, total + int(count))
    return [
        Identity(symbol, modules, source, tuple(sorted(ranks)), total)
        for (symbol, modules, source), (ranks, total) in sorted(
            found.items(), key=lambda item: (item[0][0], item[0][1])
        )
    ]


def ranks_told(ranks: Iterable[int]) -> str:
    """Write ``rank 2`` or ``ranks 0-3``."""
    own = sorted(set(ranks))
    return f"rank{'s' if len(own) > 1 else ''} {fold(own)}"


def _modules(bundle: RunBundle, rank: int) -> list[ModuleRecord]:
    try:
        return bundle.modules(rank)
    except EvidenceError:  # told by bundle_check.check(); identities are then unknown
        return []
