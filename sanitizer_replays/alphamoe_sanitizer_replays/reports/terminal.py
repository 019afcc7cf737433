"""A sanitize session for a terminal: verdict, then capture x tool, what was found, controls, scope."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from alphamoe_profiler.printable import printable_console, printable_line
from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.lines import (
    control_lines,
    counts_told,
    entry_reasons,
    finding_lines,
    open_entries,
    output_told,
    seconds,
    wall_lines,
)
from alphamoe_sanitizer_replays.reports.records import SanitizeReport, told

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

_STYLE = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.CONFIG_ERROR: "bold magenta",
}
_MOST_LINES = 40


def print_report(report: SanitizeReport, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report. Without a terminal it is plain text without trailing spaces.

    Args:
        report: what the session came to.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    console = printable_console(file=file, width=width, markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        _print(console, report)
        return
    with console.capture() as captured:
        _print(console, report)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1]))


def _print(console: Console, report: SanitizeReport) -> None:
    console.print(Text.assemble((report.verdict.value, _STYLE[report.verdict]), " ", printable_line(report.reason)))
    tool = f"compute-sanitizer {report.tool_version}" if report.tool_version else "no compute-sanitizer"
    console.print(Text(printable_line(f"{', '.join(report.targets)}; {tool}; {report.device or 'no GPU'}"), "dim"))
    console.print()
    if report.entries:
        _table(console, report)
    for entry in open_entries(report):
        other = [f"in another kernel: {line}" for line in finding_lines(entry.other_findings)]
        _lines(console, told(entry), [*entry_reasons(entry), *finding_lines(entry.findings), *other])
    allowed = [f"{told(entry)}: {line}" for entry in report.entries for line in entry.allowed]
    _lines(console, "Allowed, and still in the totals", allowed)
    _lines(console, "Positive controls", [line for own in report.controls for line in control_lines(own)])
    _lines(console, "Scope", report.scope)
    _lines(console, "Notes", report.notes)
    _lines(console, "Wall time", wall_lines(report))


def _table(console: Console, report: SanitizeReport) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("capture", "variant", "tool", "verdict", "counted", "output", "wall"):
        table.add_column(name, overflow="fold", header_style="dim")
    for entry in report.entries:
        table.add_row(
            Text(printable_line(entry.label)),
            Text(printable_line(entry.variant or "-")),
            entry.tool,
            Text(entry.verdict.value, style=_STYLE[entry.verdict]),
            counts_told(entry),
            Text(printable_line(output_told(entry))),
            seconds(entry.wall_s),
        )
    console.print(table)
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
