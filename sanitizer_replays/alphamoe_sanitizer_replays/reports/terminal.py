"""A sanitize session for a terminal: verdict, statement, a row for each capture, what is open, controls, scope."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from alphamoe_profiler.printable import print_drawn, printable_line
from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.lines import (
    CONTROL_WORDS,
    SCOPE_WORDS,
    allow_blocks,
    allowed_lines,
    control_lines,
    open_groups,
    wall_line,
)
from alphamoe_sanitizer_replays.reports.records import SanitizeReport
from alphamoe_sanitizer_replays.reports.rows import ELSEWHERE, ELSEWHERE_WORDS, Row, columns, rows

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.CONFIG_ERROR: "bold magenta",
}
_MOST_LINES = 20
_MOST_SENTENCES = 4
_MOST_ROWS = 24
"""Of a table; beyond that only rows that say something are shown."""


def print_report(report: SanitizeReport, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report. Without a terminal it is plain text without trailing spaces.

    Args:
        report: what the session came to.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    print_drawn(lambda console: _print(console, report), file, width)


def _print(console: Console, report: SanitizeReport) -> None:
    console.print(Text.assemble((report.verdict.value, _STYLE[report.verdict]), " ", printable_line(report.reason)))
    tool = f"compute-sanitizer {report.tool_version}" if report.tool_version else "no compute-sanitizer"
    console.print(Text(printable_line(f"{', '.join(report.targets)}; {tool}; {report.device or 'no GPU'}"), "dim"))
    console.print()
    if any(entry.ran for entry in report.entries):
        console.print(Text("To quote", style="bold"))
        console.print(Text("\n".join(map(printable_line, report.statement.split("\n")))))
        console.print()
        _table(console, report, rows(report))
    for title, lines in open_groups(report):
        _lines(console, title, lines)
    if allow_blocks(report):
        _lines(console, "Known and accepted?", ["report.md holds an [[allow]] entry for each finding"])
    _lines(console, "Allowed, and still in the totals", allowed_lines(report))
    controls = [line for own in report.controls for line in control_lines(own)]
    _lines(console, "Positive controls", [*controls, CONTROL_WORDS] if controls else [])
    scope = report.scope if len(report.scope) <= _MOST_SENTENCES else ["report.md says it for each of them"]
    _lines(console, "Scope of each capture", [*scope, SCOPE_WORDS] if report.scope else [])
    _lines(console, "Notes", report.notes)
    console.print(Text(printable_line(wall_line(report)), "dim"))


def _table(console: Console, report: SanitizeReport, every: Sequence[Row]) -> None:
    shown = every if len(every) <= _MOST_ROWS else [row for row in every if not row.clean][:_MOST_ROWS]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("capture", overflow="fold", header_style="dim")
    for name in ("variant", *columns(report)):
        table.add_column(name, no_wrap=True, header_style="dim")
    for row in shown:
        cells = [Text(cell.text, style=_STYLE[cell.verdict] if cell.verdict else "dim") for cell in row.cells]
        table.add_row(Text(printable_line(row.label)), Text(printable_line(row.variant)), *cells)
    if shown:
        console.print(table)
    if len(every) > len(shown):
        clean = sum(row.clean for row in every) if len(shown) < _MOST_ROWS else 0
        rest = len(every) - len(shown)
        console.print(f"and {rest} more captures" + (", PASS under every tool" if clean == rest else ""))
    if any(ELSEWHERE in cell.text for row in shown for cell in row.cells):
        console.print(ELSEWHERE_WORDS)
    console.print()


def _lines(console: Console, title: str, lines: Iterable[str]) -> None:
    every = list(lines)
    if not every:
        return
    console.print(Text(printable_line(title), style="bold"))
    for line in every[:_MOST_LINES]:
        console.print(Text(f"  {printable_line(line)}"))
    if len(every) > _MOST_LINES:
        console.print(f"  and {len(every) - _MOST_LINES} more (report.json lists all)")
    console.print()
