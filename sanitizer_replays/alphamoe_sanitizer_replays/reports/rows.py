"""The table of a report: a row for each capture and variant, a column for each tool."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport

_SHORT = {Verdict.INCONCLUSIVE: "INCONCL.", Verdict.CONFIG_ERROR: "CONFIG"}
ELSEWHERE = "*"
ELSEWHERE_WORDS = f"{ELSEWHERE} the tool found something outside the kernel under test"


@dataclass(frozen=True)
class Cell:
    """What one tool, or the comparison of outputs, came to."""

    text: str
    verdict: Verdict | None
    """Null where nothing was run."""


@dataclass(frozen=True)
class Row:
    """One capture replayed as one variant."""

    label: str
    variant: str
    cells: tuple[Cell, ...]
    """In the order of :func:`columns`."""
    clean: bool
    """Every cell is PASS without anything to say about it."""


def columns(report: SanitizeReport) -> tuple[str, ...]:
    """Name the columns behind capture and variant: the tools, the output, and times of a replay without a tool."""
    tools = tuple(tool for tool in report.tools if tool != "none")
    return (*tools, "output", *(("median us",) if any(entry.kernel_us for entry in report.entries) else ()))


def rows(report: SanitizeReport) -> tuple[Row, ...]:
    """Make the rows, in the order of the report's entries."""
    grouped: dict[tuple[str, str | None], list[ReplayEntry]] = {}
    for entry in report.entries:
        grouped.setdefault((entry.capture, entry.variant), []).append(entry)
    made = []
    for (_, variant), entries in grouped.items():
        by_tool = {entry.tool: entry for entry in entries}
        cells = [_cell(by_tool.get(tool)) for tool in report.tools if tool != "none"]
        cells.append(_output(entries))
        clean = all(cell.text == Verdict.PASS.value for cell in cells)
        if "median us" in columns(report):
            times = [time for entry in entries for time in entry.kernel_us]
            cells.append(Cell(f"{statistics.median(times):.2f}" if times else "-", None))
        made.append(Row(entries[0].label, variant or "-", tuple(cells), clean))
    return tuple(made)


def _cell(entry: ReplayEntry | None) -> Cell:
    if entry is None or not entry.ran:
        return Cell("not run", None)
    text = _SHORT.get(entry.verdict, entry.verdict.value)
    if entry.verdict is Verdict.PASS and entry.allowed:
        text = f"{len(entry.allowed)} allowed"
    elif entry.verdict is Verdict.FAIL and entry.findings:
        text = f"FAIL {len(entry.findings):,}"
    return Cell(text + (ELSEWHERE if entry.whole is not entry.verdict else ""), entry.verdict)


def _output(entries: list[ReplayEntry]) -> Cell:
    checks = [entry.output for entry in entries if entry.output is not None]
    if not checks:
        return Cell("-", None)
    verdict = worst(Verdict(check.verdict) for check in checks)
    return Cell(_SHORT.get(verdict, verdict.value), verdict)
