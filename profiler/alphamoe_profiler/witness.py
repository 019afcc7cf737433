"""The first witness summary: did the required symbols of the chosen backend run on all ranks, where it was asked?

One cell for each (rank, execution, symbol) and one check for each way in which records may contradict each other
(DESIGN 8). Only exact base names count, only inside the window, and only steps of purpose ``witness``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphamoe_profiler.evidence import Evidence, Identity, counted_as_real, gather, identities, ranks_told
from alphamoe_profiler.integrity import Check, integrity_checks
from alphamoe_profiler.launch_check import RULED_SYMBOL
from alphamoe_profiler.m_buckets import witness_mask
from alphamoe_profiler.run_identity import same_launch_rule
from alphamoe_profiler.verdicts import Finding, Verdict, worst
from alphamoe_profiler.windows import readable_rank_file
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.records import EXECUTIONS, Execution

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle

_HOW_TO_EXERCISE = {
    "eager": "serve a request eagerly: --executions eager",
    "prefill_graph_replay": "a prompt that fits a captured prefill size would exercise it: --cuda-graph-bs-prefill",
    "decode_graph_replay": "more than one new token would exercise it: --max-new-tokens, --executions",
}


@dataclass(frozen=True)
class Cell:
    """One symbol in one execution on one rank."""

    rank: int
    execution: Execution | None
    """None: in no execution that was asked for (only of forbidden symbols)."""
    symbol: str
    required: bool
    """False: forbidden."""
    kernels: int
    """GPU records that count. Shown also where the verdict is INCONCLUSIVE: presence survives damage."""
    submissions: int
    """What the receipts of witness steps submitted."""
    finding: Finding


@dataclass(frozen=True)
class WitnessSummary:
    """The judgement of one run."""

    verdict: Verdict
    reason: str
    cells: tuple[Cell, ...]
    checks: tuple[Check, ...]
    identities: tuple[Identity, ...]
    notes: tuple[str, ...]
    """What a reader should know and no rule judges."""

    def __post_init__(self) -> None:
        """Refuse a summary that its parts do not carry.

        Raises:
            ValueError: the verdict is not the worst of the parts, or a PASS without a single witness.
        """
        parts = [cell.finding.verdict for cell in self.cells] + [check.verdict for check in self.checks]
        if worst(parts) is not self.verdict:
            raise ValueError(f"{self.verdict.value} is not the worst of {sorted({part.value for part in parts})}")
        if self.verdict is Verdict.PASS and not self.witnesses:
            raise ValueError("a PASS needs at least one witness")

    @property
    def witnesses(self) -> int:
        """Kernels of required symbols that count."""
        return sum(cell.kernels for cell in self.cells if cell.required)


def summarise(bundle: RunBundle, evidence: Evidence | None = None) -> WitnessSummary:
    """Judge one run.

    Args:
        bundle: the run.
        evidence: what :func:`evidence.gather` made of it, where the caller has that already.

    Raises:
        UsageError: files of the bundle contradict each other.
    """
    if not bundle.run.executions:
        return _config_error("run.json asks for no execution, so nothing can be witnessed")
    try:
        evidence = evidence or gather(bundle)
    except UsageError as error:
        if bundle.contradictions():
            raise
        return _config_error(str(error))
    if bundle.run.kind == "imported":
        from alphamoe_profiler.import_summary import imported_summary

        return imported_summary(evidence)
    if not evidence.required:
        return _config_error(f"no symbol is required of backend {bundle.run.moe_runner_backend}")
    cells = [
        _cell(evidence, rank, execution, symbol, symbol in evidence.required)
        for rank in bundle.ranks
        for execution in bundle.run.executions
        for symbol in (*evidence.required, *evidence.forbidden)
    ]
    cells += _forbidden_elsewhere(evidence)
    checks = integrity_checks(evidence)
    found = tuple(identities(evidence))
    verdict = worst([cell.finding.verdict for cell in cells] + [check.verdict for check in checks])
    reason = _overall_reason(verdict, cells, checks, bundle)
    return WitnessSummary(verdict, reason, tuple(cells), tuple(checks), found, tuple(_notes(evidence, found)))


def _cell(evidence: Evidence, rank: int, execution: Execution, symbol: str, required: bool) -> Cell:
    frame = evidence.kernels[rank].frame
    of_symbol = frame["base"] == symbol
    real = witness_mask(frame) if required else counted_as_real(frame)
    kernels = int((of_symbol & real & (frame["execution"] == execution)).sum())
    submissions = _submissions(evidence, rank, execution, symbol)
    if required:
        loose = int((of_symbol & frame["in_window"] & (frame["execution"].isna() | frame["purpose"].isna())).sum())
        finding = _required(evidence, rank, execution, kernels, loose, submissions)
        if not kernels and finding.verdict is not Verdict.PASS:
            finding = _with_what_ran_before(finding, int((of_symbol & ~real).sum()) - loose)
    else:
        finding = _forbidden(evidence, rank, execution, symbol, kernels)
    return Cell(rank, execution, symbol, required, kernels, submissions, finding)


def _required(
    evidence: Evidence, rank: int, execution: Execution, kernels: int, loose: int, submissions: int
) -> Finding:
    proof = evidence.proofs[rank]
    if proof.cut is not None:
        return Finding(Verdict.INCONCLUSIVE, proof.cut, kernels)
    if kernels:
        return Finding(Verdict.PASS, "", kernels)
    if proof.collector_off is not None:
        return Finding(Verdict.INCONCLUSIVE, proof.collector_off)
    if not _exercised(evidence, rank, execution):
        return Finding(Verdict.INCONCLUSIVE, _not_exercised(evidence, rank, execution))
    if loose:
        reason = f"not seen there, but {loose} kernels of it ran in the window that could not be attributed"
        return Finding(Verdict.INCONCLUSIVE, reason)
    if not proof.complete(execution):
        return Finding(Verdict.INCONCLUSIVE, f"not seen, window not proven complete: {proof.failures(execution)[0]}")
    submitted = f"{submissions} submissions by receipt" if submissions else "no submission by receipt either"
    return Finding(Verdict.FAIL, f"not seen in a window proven complete ({submitted})")


def _forbidden(evidence: Evidence, rank: int, execution: Execution, symbol: str, kernels: int) -> Finding:
    proof = evidence.proofs[rank]
    if kernels:
        reason = f"forbidden {symbol} ran {kernels} times"
        return Finding(Verdict.FAIL, reason, kernels, must_be_seen=False)
    if proof.cut is not None or proof.collector_off is not None:
        return Finding(Verdict.INCONCLUSIVE, proof.cut or proof.collector_off or "", must_be_seen=False)
    if not _exercised(evidence, rank, execution):
        return Finding(Verdict.INCONCLUSIVE, _not_exercised(evidence, rank, execution), must_be_seen=False)
    if not proof.complete(execution):
        reason = f"absence not proven, window not proven complete: {proof.failures(execution)[0]}"
        return Finding(Verdict.INCONCLUSIVE, reason, must_be_seen=False)
    return Finding(Verdict.PASS, "", must_be_seen=False)


def _forbidden_elsewhere(evidence: Evidence) -> list[Cell]:
    """Judge forbidden kernels in an execution that was not asked for, or in none that is known."""
    cells = []
    asked = evidence.bundle.run.executions
    for rank, frame in evidence.frames.items():
        outside = counted_as_real(frame) & ~frame["execution"].isin(asked)
        for symbol in evidence.forbidden:
            count = int((outside & (frame["base"] == symbol)).sum())
            if count:
                reason = f"forbidden {symbol} ran {count} times in the window (in no execution that was asked for)"
                finding = Finding(Verdict.FAIL, reason, count, must_be_seen=False)
                cells.append(Cell(rank, None, symbol, False, count, 0, finding))
    return cells


def _with_what_ran_before(finding: Finding, count: int) -> Finding:
    if count <= 0:
        return finding
    more = f"{finding.reason}; {count} kernels of it ran outside this execution, the window or its requests"
    return Finding(finding.verdict, more, finding.witnesses, finding.must_be_seen)


def _exercised(evidence: Evidence, rank: int, execution: Execution) -> bool:
    return any(r.purpose == "witness" and r.execution == execution for r in evidence.receipts[rank])


def _not_exercised(evidence: Evidence, rank: int, execution: Execution) -> str:
    """Say what would exercise an execution; where a rank has no receipt at all, nothing says that it was not."""
    if not evidence.receipts[rank]:
        return "no receipt of this rank, so nothing says what was exercised; record the run without --no-receipts"
    return f"not exercised; {_HOW_TO_EXERCISE[execution]}"


def _submissions(evidence: Evidence, rank: int, execution: Execution, symbol: str) -> int:
    chosen = [r for r in evidence.receipts[rank] if r.purpose == "witness" and r.execution == execution]
    return sum(item.symbol == symbol for receipt in chosen for item in receipt.kernels)


def _config_error(reason: str) -> WitnessSummary:
    check = Check("question", Verdict.CONFIG_ERROR, reason, 0)
    return WitnessSummary(Verdict.CONFIG_ERROR, reason, (), (check,), (), ())


def _overall_reason(verdict: Verdict, cells: list[Cell], checks: list[Check], bundle: RunBundle) -> str:
    if verdict is Verdict.PASS:
        symbols = ", ".join(sorted({cell.symbol for cell in cells if cell.required}))
        total = sum(cell.kernels for cell in cells if cell.required)
        ranks = f"all {bundle.world_size} ranks" if bundle.world_size > 1 else "the one rank"
        return f"{symbols} witnessed {total} times on {ranks} in {', '.join(bundle.run.executions)}"
    # A forbidden kernel explains a missing one, so it is named first.
    ordered = sorted(cells, key=lambda cell: cell.required)
    groups: dict[str, set[int]] = {}
    executions: dict[str, list[str | None]] = {}
    for cell in ordered:
        if cell.finding.verdict is verdict:
            groups.setdefault(cell.finding.reason, set()).add(cell.rank)
            executions.setdefault(cell.finding.reason, []).append(cell.execution)
    parts = []
    for reason, on in groups.items():
        where = list(dict.fromkeys(name for name in executions[reason] if name))
        in_some = f" {', '.join(where)}" if 0 < len(where) < len(bundle.run.executions) else ""
        parts.append(f"{ranks_told(on)}{in_some}: {reason}")
    parts += [f"{check.name}: {check.reason}" for check in checks if check.verdict is verdict]
    more = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
    return "; ".join(parts[:4]) + more


def _notes(evidence: Evidence, found: tuple[Identity, ...]) -> list[str]:
    notes = [
        f"unknown code under an AlphaMoE symbol: {identity.told()}"
        for identity in found
        if not identity.tied and identity.symbol.startswith("kernel_alpha_moe")
    ]
    if not same_launch_rule(evidence.bundle.run) and any(identity.symbol == RULED_SYMBOL for identity in found):
        notes.append("launch shapes not checked: the run was recorded with another launch rule than this program's")
    for symbol in sorted({identity.symbol for identity in found if identity.tied}):
        sources = {identity.source_sha256 for identity in found if identity.symbol == symbol and identity.tied}
        if len(sources) > 1:
            notes.append(f"{symbol} was built from {len(sources)} different sources")
    for rank, own in evidence.kernels.items():
        frame = own.frame
        counts = {
            f"{own.duplicates} records were delivered twice and counted once": own.duplicates,
            f"{int(frame['untimed'].sum())} kernels ran untimed": int(frame["untimed"].sum()),
            f"{int(frame['invalid'].sum())} kernels end before they start": int(frame["invalid"].sum()),
            f"{int(frame['early'].sum())} kernels seem to start before their launch": int(frame["early"].sum()),
            f"{evidence.agreements[rank].unplaced} MoE kernels have no known layer": evidence.agreements[rank].unplaced,
        }
        notes += [f"rank {rank}: {text}" for text, count in counts.items() if count]
        record = readable_rank_file(evidence.bundle, rank)
        collector = record.collector if record is not None else None
        if collector is not None and collector.state == "on" and collector.reason:
            notes.append(f"rank {rank}: the collector lacked something: {collector.reason}")
        for symbol in evidence.forbidden:
            told = sum(_submissions(evidence, rank, execution, symbol) for execution in EXECUTIONS)
            if told and not (frame["base"] == symbol).any():
                notes.append(f"rank {rank}: its receipts say that forbidden {symbol} was dispatched {told} times")
        forbidden = frame["base"].isin(evidence.forbidden) & ~counted_as_real(frame)
        if forbidden.any():
            notes.append(f"rank {rank}: {int(forbidden.sum())} forbidden kernels ran in other traffic, not judged")
    return notes
