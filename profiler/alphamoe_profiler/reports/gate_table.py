"""The rank x rule table of a gate as plain rows, for every report that shows one. Equal columns are one column."""

from __future__ import annotations

from dataclasses import dataclass

from alphamoe_profiler.gate_records import GateCell, GateReport, of_any_rank
from alphamoe_profiler.m_buckets import fold
from alphamoe_profiler.verdicts import Verdict, worst


@dataclass(frozen=True)
class Square:
    """One rule on one group of ranks (or on the run)."""

    verdict: Verdict | None
    """None where the rule does not ask about these ranks."""
    text: str


@dataclass(frozen=True)
class RuleTable:
    """One row a rule, one column a group of ranks that came to the same."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Square, ...]], ...]


def rule_table(report: GateReport) -> RuleTable:
    """Return the table; what a rule asks of the whole run is in the column ``run``."""
    ranks = sorted({cell.rank for cell in report.cells if cell.rank is not None})
    squares: dict[tuple[int, int | None], Square] = {}
    for index in range(len(report.rules)):
        own = report.of_rule(index)
        for rank in (*ranks, None):
            squares[index, rank] = _square([cell for cell in own if cell.rank == rank])
    groups: dict[tuple[Square, ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(tuple(squares[index, rank] for index in range(len(report.rules))), []).append(rank)
    with_run = any(cell.rank is None for cell in report.cells)
    columns = tuple(f"rank{'s' if len(own) > 1 else ''} {fold(own)}" for own in groups.values())
    rows = []
    for index, rule in enumerate(report.rules):
        row = [key[index] for key in groups]
        if with_run:
            row.append(squares[index, None])
        rows.append((rule.title, tuple(row)))
    return RuleTable((*columns, *(("run",) if with_run else ())), tuple(rows))


def _square(cells: list[GateCell]) -> Square:
    if not cells:
        return Square(None, "")
    judged = [cell for cell in cells if cell.tolerated is None]
    if not judged:
        return Square(None, "known gap")
    verdict = worst(cell.finding.verdict for cell in judged)
    kernels = sum(cell.finding.witnesses for cell in judged)
    return Square(verdict, f"{verdict.value} {kernels:,}" if kernels else verdict.value)


def open_lines(report: GateReport) -> list[tuple[Verdict, str]]:
    """Return one line for each thing that is no PASS, worst first, with evidence and what would settle it."""
    groups: dict[tuple[Verdict, int, str, str | None], list[GateCell]] = {}
    for cell in report.cells:
        if cell.finding.verdict is not Verdict.PASS and cell.tolerated is None:
            settled = None if cell.settled_by is None else of_any_rank(cell.settled_by, cell.rank)
            key = (cell.finding.verdict, cell.rule, of_any_rank(cell.finding.reason, cell.rank), settled)
            groups.setdefault(key, []).append(cell)
    order = {Verdict.FAIL: 0, Verdict.CONFIG_ERROR: 1, Verdict.INCONCLUSIVE: 2}
    lines = []
    for (verdict, rule, reason, settled), own in sorted(groups.items(), key=lambda item: order[item[0][0]]):
        ranks = sorted({cell.rank for cell in own if cell.rank is not None})
        executions = list(dict.fromkeys(cell.execution for cell in own if cell.execution))
        where = ", ".join(
            part
            for part in (f"rank{'s' if len(ranks) > 1 else ''} {fold(ranks)}" if ranks else "", ", ".join(executions))
            if part
        )
        cited = own[0]
        evidence = [part for part in (cited.file, f"first {cited.first.told()}" if cited.first else None) if part]
        title = report.rules[rule].title
        text = f"{title}{f' ({where})' if where else ''}: {reason}" if title != reason else title
        text += f" [{'; '.join(evidence)}]" if evidence else ""
        if verdict is Verdict.INCONCLUSIVE and settled:
            text += f"; settled by: {settled}"
        lines.append((verdict, text))
    return lines


def gap_lines(report: GateReport) -> list[str]:
    """Return one line for each tolerated FAIL."""
    lines = []
    for cell in report.tolerated:
        gap = cell.tolerated
        if gap is not None:
            where = f"rank {cell.rank}" + (f" {cell.execution}" if cell.execution else "")
            what = f"{report.rules[cell.rule].title} ({where}): {cell.finding.reason}"
            lines.append(f"{what}; tolerated until {gap.expires}: {gap.reason}")
    return lines
