"""One look at a run bundle: everything that a report shows, computed once and rendered elsewhere."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.evidence import Evidence, gather, moe_counts
from alphamoe_profiler.import_summary import imported_buckets, symbols_by_bucket, symbols_by_rank
from alphamoe_profiler.m_buckets import MBuckets, buckets, witness_mask
from alphamoe_profiler.rank_skew import RankSkew, compare_ranks, rank_marks
from alphamoe_profiler.run_records import MemorySnapshot, RequestRecord, RunInfo
from alphamoe_profiler.verdicts import Verdict
from alphamoe_profiler.witness import summarise
from alphamoe_profiler.witness_records import WitnessSummary
from alphamoe_tracers.errors import EvidenceError

PROGRAM = "alphamoe-trace"
_NOT_AGAIN = ("--force", "--json", "--no-collector", "--no-nvtx", "--no-receipts")
"""Options that would leave the evidence out once more, or write over what is there."""


@dataclass(frozen=True)
class RankReport:
    """What one rank left behind."""

    rank: int
    host: str | None
    device: str | None
    gpu_name: str | None
    """None on a CPU, and where the rank file is missing."""
    shared_gpu: bool
    ended: str
    """``complete``, ``exception``, ``interrupted``, or ``cut short`` where there is no rank file."""
    error: str | None
    collector: str
    """``on``, or ``off: REASON``, or ``unknown`` where the rank was cut short."""
    window: tuple[str, ...]
    """Conditions of a complete window that failed; none means that absence inside it is proven."""
    kernels: int
    """Kernel records that were read, duplicates counted once."""
    dropped: int | None
    """None where nothing says."""
    duplicates: int
    receipts: int
    attributed: int
    reasons: Counter[str]
    """Why the other kernels are not attributed."""
    moe_kernels: int
    """MoE kernels that the receipts or the backend name, of witness steps inside the window."""
    moe_attributed: int
    memory: tuple[MemorySnapshot, ...]
    wall_s: dict[str, float]
    busy_ns: int
    """Sum of kernel durations in witness steps; untimed and invalid kernels have none."""
    communication: str | None = None
    """``nccl`` or ``gloo``; None where nothing says."""


@dataclass(frozen=True)
class RunReport:
    """Everything that the reports print of one run."""

    path: Path
    run: RunInfo
    witness: WitnessSummary
    ranks: tuple[RankReport, ...]
    moe: pd.DataFrame
    """rank, execution (null where unknown), symbol, class, kernels."""
    m_buckets: tuple[MBuckets, ...]
    requests: tuple[RequestRecord, ...]
    launcher_wall_s: dict[str, float]
    problems: tuple[str, ...]
    """Everything that ``bundle_check.check`` found."""
    next_command: str
    """What to type next."""
    skew: RankSkew | None = None
    """The ranks beside each other; None for one rank alone."""
    ran: pd.DataFrame | None = None
    """Of an imported run: symbol, class and one column a rank with kernel counts."""
    by_bucket: pd.DataFrame | None = None
    """Of an import with buckets: kernels by full name and bucket."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of the witness summary."""
        return self.witness.verdict

    @property
    def shares_gpu(self) -> bool:
        """Some ranks share a GPU: no time of this run is comparable with anything."""
        return any(rank.shared_gpu for rank in self.ranks)


def inspect_run(bundle: RunBundle) -> RunReport:
    """Compute everything that a report shows. Reads the bundle and writes nothing.

    Raises:
        UsageError: files of the bundle contradict each other, or its MoE backend is not known here.
    """
    evidence = gather(bundle)
    witness = summarise(bundle, evidence)
    try:
        requests = tuple(bundle.requests())
        outcome = bundle.outcome()
    except EvidenceError:  # told by bundle_check.check()
        requests, outcome = (), None
    return RunReport(
        path=bundle.path,
        run=bundle.run,
        witness=witness,
        ranks=tuple(_rank(evidence, rank) for rank in bundle.ranks),
        moe=moe_counts(evidence),
        m_buckets=tuple(_m_buckets(evidence)),
        requests=requests,
        launcher_wall_s=dict(outcome.wall_s) if outcome else {},
        problems=tuple(check(bundle)),
        next_command=_next_command(bundle, witness, any(len(frame) for frame in evidence.frames.values())),
        skew=compare_ranks(bundle, [rank_marks(own) for own in evidence.kernels.values()]),
        **_imported(evidence),
    )


def _imported(evidence: Evidence) -> dict[str, pd.DataFrame]:
    if evidence.bundle.run.kind != "imported":
        return {}
    return {"ran": symbols_by_rank(evidence.frames), "by_bucket": symbols_by_bucket(evidence.frames)}


def _m_buckets(evidence: Evidence) -> list[MBuckets]:
    if evidence.bundle.run.kind == "imported":
        return imported_buckets(evidence)
    return buckets(evidence.receipts, evidence.frames)


def _rank(evidence: Evidence, rank: int) -> RankReport:
    record = readable_rank_file(evidence.bundle, rank)
    own = evidence.kernels[rank]
    frame = own.frame
    proof = evidence.proofs[rank]
    witnessed = witness_mask(frame)
    names = {*evidence.required, *evidence.forbidden}
    names |= {item.symbol for receipt in evidence.receipts[rank] for item in receipt.kernels}
    moe = witnessed & frame["base"].isin(names)
    collector = "unknown"
    if record is not None:
        collector = "on" if proof.collector_off is None else f"off: {proof.collector_off}"
        if record.collector is None and proof.collector_off is None:
            collector = ", ".join(dict.fromkeys(f"imported {item.format}" for item in record.imported)) or "imported"
    executions = evidence.bundle.run.executions
    failures = dict.fromkeys(text for execution in executions for text in proof.failures(execution))
    return RankReport(
        rank=rank,
        host=record.host if record else None,
        device=record.device if record else None,
        gpu_name=record.gpu_name if record else None,
        shared_gpu=bool(record and record.shared_gpu),
        ended=record.ended if record else "cut short",
        error=proof.cut if record is None or record.error is None else record.error,
        collector=collector,
        window=((proof.cut,) if proof.cut else ()) + tuple(failures),
        kernels=len(frame),
        dropped=record.collector.dropped if record and record.collector else None,
        duplicates=own.duplicates,
        receipts=len(evidence.receipts[rank]),
        attributed=own.attributed,
        reasons=own.reasons,
        moe_kernels=int(moe.sum()),
        moe_attributed=int((moe & frame["reason"].isna()).sum()),
        memory=record.memory if record else (),
        wall_s=dict(record.wall_s) if record else {},
        busy_ns=int(frame.loc[witnessed, "duration_ns"].sum()),
        communication=record.communication if record else None,
    )


def _next_command(bundle: RunBundle, witness: WitnessSummary, kernels: bool) -> str:
    """Return the command that would settle what is open, or that shows more of what is settled.

    Args:
        bundle: the run.
        witness: what it came to.
        kernels: whether any kernel was recorded.
    """
    again = list(bundle.run.argv[1:])
    if bundle.run.kind == "imported":
        if not kernels:
            ranks = bundle.run.world_size
            return f"{PROGRAM} import NEW_TRACES --ranks {ranks} --out {shlex.quote(str(bundle.path))} --force"
        return f"{PROGRAM} gate {shlex.quote(str(bundle.path))} --help"
    if witness.verdict in (Verdict.PASS, Verdict.FAIL):
        return f"{PROGRAM} show {shlex.quote(str(bundle.path))} --json"
    records = [readable_rank_file(bundle, rank) for rank in bundle.ranks]
    wanted_off = "--no-collector" in again and bundle.run.device_kind == "cuda"
    if not wanted_off and any(
        record is not None and record.collector is not None and record.collector.state == "off" for record in records
    ):
        return f"{PROGRAM} doctor"
    open_reasons = [cell.finding.reason for cell in witness.cells if cell.finding.verdict is witness.verdict]
    if any("not exercised" in reason for reason in open_reasons):
        again = _without(again, "--executions", "--max-new-tokens")
        again += ["--executions", ",".join(bundle.run.executions)]
        again += ["--max-new-tokens", str(max(bundle.run.max_new_tokens or 0, 8))]
    return shlex.join([PROGRAM, *_without(again, "--out", *_NOT_AGAIN)])


def _without(words: Sequence[str], *options: str) -> list[str]:
    """Return the words of a command without these options and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.split("=", 1)[0] in options
        if not dropping:
            kept.append(word)
    return kept
