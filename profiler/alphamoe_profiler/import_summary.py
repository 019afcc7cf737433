"""What an imported run shows when no rule was asked: what ran, where, at which M and in which bucket."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.evidence import MOE_CLASSES, Evidence, ranks_told
from alphamoe_profiler.integrity import Check, integrity_checks
from alphamoe_profiler.m_buckets import DiscreteSet, MBuckets, witness_mask
from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_profiler.witness_records import WitnessSummary
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.records import EXECUTIONS
from alphamoe_tracers.sglang_log import LoggedLine

_SPREAD_TOLD_NS = 1_000_000_000
"""Ranks whose first kernels lie further apart than this did not start recording together."""


def imported_summary(evidence: Evidence) -> WitnessSummary:
    """Judge nothing, because nothing was asked, and say what ran instead. Integrity is checked all the same."""
    checks = [check for check in integrity_checks(evidence) if check.name != "question"]
    reason = f"no symbol was required of an imported run; {_what_ran(evidence)}"
    checks.append(Check("question", Verdict.INCONCLUSIVE, reason, 0))
    verdict = worst([check.verdict for check in checks])
    told = reason if verdict is Verdict.INCONCLUSIVE else "; ".join(c.reason for c in checks if c.verdict is verdict)
    return WitnessSummary(verdict, told, (), tuple(checks), (), tuple(_notes(evidence)))


def _what_ran(evidence: Evidence) -> str:
    counts = {rank: len(frame) for rank, frame in evidence.frames.items()}
    total = sum(counts.values())
    if not total:
        return "0 kernels were recorded on any rank"
    names = {name for frame in evidence.frames.values() for name in frame["full"].cat.categories}
    silent = [rank for rank, count in counts.items() if not count]
    text = f"{total:,} kernels of {len(names)} names ran on {ranks_told(rank for rank, n in counts.items() if n)}"
    return text + (f", none was recorded on {ranks_told(silent)}" if silent else "")


def _notes(evidence: Evidence) -> list[str]:
    notes = []
    for rank in evidence.bundle.ranks:
        record = readable_rank_file(evidence.bundle, rank)
        for item in record.imported if record else ():
            loose = item.kernels_without_launch - item.submitted_before_window
            share = item.overlap_share
            counts = {
                f"{item.duplicates} records were delivered twice and counted once": item.duplicates,
                f"{item.untimed} kernels ran untimed": item.untimed,
                f"{item.invalid_times} kernels end before they start": item.invalid_times,
                f"{item.submitted_before_window} kernels without a launch record, submitted before recording": (
                    item.submitted_before_window
                ),
                f"{loose} kernels have no launch record": loose,
                f"{item.overlapping} kernels overlap another one of their stream ({(share or 0) * 100:.1f} % of the "
                "summed time)": item.overlapping,
            }
            notes += [f"rank {rank}: {text}" for text, count in counts.items() if count]
            notes += [f"rank {rank}: {note}" for note in item.notes]
    notes += _start_spread(evidence.bundle)
    if _unplaced_graphs(evidence):
        execution = evidence.bundle.run.imported.graph_execution if evidence.bundle.run.imported else ""
        notes.append(f"graph replays that no step annotation places are counted as {execution} (--graph-execution)")
    return notes


def _start_spread(bundle: RunBundle) -> list[str]:
    """Say how far apart the ranks' first kernels lie, where their clocks are of one base."""
    first: dict[int, int] = {}
    clocks = set()
    for rank in bundle.ranks:
        record = readable_rank_file(bundle, rank)
        traces = [item for item in (record.imported if record else ()) if item.first_kernel_ns is not None]
        clocks |= {item.clock for item in traces}
        if traces:
            first[rank] = min(item.first_kernel_ns or 0 for item in traces)
    if len(first) < 2:
        return []
    if clocks != {"unix"}:
        return ["the ranks' clocks have no stated common base: their times are not compared"]
    early, late = min(first, key=first.__getitem__), max(first, key=first.__getitem__)
    spread = first[late] - first[early]
    text = f"first kernels of the ranks lie {spread / 1e6:,.3f} ms apart (rank {early} first, rank {late} last)"
    return [f"{text}: their recordings did not start together" if spread > _SPREAD_TOLD_NS else text]


def _unplaced_graphs(evidence: Evidence) -> bool:
    return any(
        bool((frame["graph"] & frame["step"].isna() & frame["execution"].notna()).any()) for frame in _frames(evidence)
    )


def _frames(evidence: Evidence) -> Iterable[pd.DataFrame]:
    return evidence.frames.values()


def imported_buckets(evidence: Evidence) -> list[MBuckets]:
    """Return the M buckets of an imported run: of its server log where it has one, else of its step annotations."""
    logs = {rank: _log(evidence.bundle, rank) for rank in evidence.bundle.ranks}
    rows = []
    for execution in EXECUTIONS:
        own = {}
        for rank, frame in evidence.frames.items():
            chosen = frame.loc[witness_mask(frame) & (frame["execution"] == execution)]
            logged = [
                item for item in logs[rank] if item.execution is not None and item.execution.execution == execution
            ]
            if logged or chosen["step"].notna().any():
                own[rank] = _bucket(execution, rank, chosen, logged)
        if own:
            rows += [_union(execution, list(own.values())), *own.values()]
    return rows


def _bucket(execution: str, rank: int, frame: pd.DataFrame, logged: list[LoggedLine]) -> MBuckets:
    def seen(name: str) -> DiscreteSet:
        return DiscreteSet.of(int(value) for value in frame[name].dropna().unique())

    records = [item.execution for item in logged if item.execution is not None]
    return MBuckets(
        execution=execution,  # type: ignore[arg-type]
        rank=rank,
        steps=int(frame["step"].nunique()),
        real_tokens=DiscreteSet.of(item.real_tokens for item in records) if records else seen("real_tokens"),
        dispatch_M=DiscreteSet.of(item.M for item in records) if records else seen("dispatch_M"),
        kernel_M=DiscreteSet.of(k.M for item in records for k in item.kernels) if records else seen("kernel_M"),
        witnessed_M=seen("kernel_M"),
    )


def _union(execution: str, rows: list[MBuckets]) -> MBuckets:
    def every(name: str) -> DiscreteSet:
        return DiscreteSet.of(value for row in rows for value in getattr(row, name).values)

    return MBuckets(
        execution=execution,  # type: ignore[arg-type]
        rank=None,
        steps=sum(row.steps for row in rows),
        real_tokens=every("real_tokens"),
        dispatch_M=every("dispatch_M"),
        kernel_M=every("kernel_M"),
        witnessed_M=every("witnessed_M"),
    )


def _log(bundle: RunBundle, rank: int) -> list[LoggedLine]:
    try:
        return bundle.dispatch_log(rank)
    except EvidenceError:  # told by bundle_check.check()
        return []


def symbols_by_rank(frames: dict[int, pd.DataFrame]) -> pd.DataFrame:
    """Count kernels by full name and rank, MoE kernels first and then by count.

    Returns:
        symbol, class (null where unknown) and one column a rank, named by its number.
    """
    counts = {str(rank): frame["full"].astype(object).value_counts() for rank, frame in frames.items()}
    table = pd.DataFrame(counts).fillna(0).astype("int64").rename_axis("symbol").reset_index()
    classes: dict[str, str | None] = {}
    for frame in frames.values():
        pairs = frame[["full", "class"]].astype(object).drop_duplicates()
        classes |= {
            full: kind if isinstance(kind, str) else None
            for full, kind in zip(pairs["full"].tolist(), pairs["class"].tolist(), strict=True)
        }
    kinds = [classes.get(name) for name in table["symbol"]]
    table.insert(1, "class", pd.Series(kinds, dtype=object, index=table.index))
    moe = pd.Series([(kind or "").startswith(MOE_CLASSES) for kind in kinds], dtype=bool, index=table.index)
    total = table[list(counts)].sum(axis=1)
    table = table.assign(_moe=~moe, _total=-total).sort_values(["_moe", "_total", "symbol"])
    return table.drop(columns=["_moe", "_total"]).reset_index(drop=True)


def symbols_by_bucket(frames: dict[int, pd.DataFrame]) -> pd.DataFrame:
    """Count kernels by symbol and bucket, over all ranks.

    Args:
        frames: attributed kernels by rank, with ``bucket``.

    Returns:
        One row a full name, one column a bucket (numbers in their order), 0 where it did not run; empty without
        buckets.
    """
    parts = [
        frame.loc[frame["in_window"] & frame["bucket"].notna(), ["full", "bucket"]].astype(str)
        for frame in frames.values()
        if "bucket" in frame.columns
    ]
    whole = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"full": [], "bucket": []})
    table = whole.groupby(["full", "bucket"]).size().unstack(fill_value=0)
    ordered = sorted(
        table.columns, key=lambda name: (not str(name).isdigit(), int(name) if str(name).isdigit() else 0, name)
    )
    return table[ordered]
