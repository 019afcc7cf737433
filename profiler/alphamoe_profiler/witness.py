"""The first witness summary: did the required symbols of the chosen backend run on all ranks, where it was asked?

One cell for each (rank, execution, symbol) and one check for each way in which records may contradict each other
(DESIGN 8). Only exact base names count, only inside the window, and only steps of purpose ``witness``.
"""

from __future__ import annotations

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.bundle_check import contradictions
from alphamoe_profiler.evidence import Evidence, Identity, counted_as_real, gather, identities, ranks_told
from alphamoe_profiler.gate_cells import Where, forbidden_finding, look, required_finding, submissions_of
from alphamoe_profiler.import_summary import imported_summary
from alphamoe_profiler.integrity import Check, integrity_checks
from alphamoe_profiler.launch_check import RULED_SYMBOL
from alphamoe_profiler.policy_match import Selector
from alphamoe_profiler.run_identity import same_launch_rule
from alphamoe_profiler.verdicts import Finding, Verdict, worst
from alphamoe_profiler.witness_records import Cell, WitnessSummary
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.records import Execution


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
        if contradictions(bundle):
            raise
        return _config_error(str(error))
    if bundle.run.kind == "imported":
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
    """Judge one cell as a gate does: a required or forbidden base name, witness steps only."""
    where, selector = Where(rank, execution), Selector(symbol)
    seen = look(evidence, selector, where, required)
    submissions = submissions_of(evidence, where, selector)
    if required:
        finding = required_finding(evidence, where, seen, submissions)
    else:
        finding = forbidden_finding(evidence, where, seen, symbol)
    return Cell(rank, execution, symbol, required, seen.kernels, submissions, finding)


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
            told = submissions_of(evidence, Where(rank, None), Selector(symbol))
            if told and not (frame["base"] == symbol).any():
                notes.append(f"rank {rank}: its receipts say that forbidden {symbol} was dispatched {told} times")
        forbidden = frame["base"].isin(evidence.forbidden) & ~counted_as_real(frame)
        if forbidden.any():
            notes.append(f"rank {rank}: {int(forbidden.sum())} forbidden kernels ran in other traffic, not judged")
    return notes
