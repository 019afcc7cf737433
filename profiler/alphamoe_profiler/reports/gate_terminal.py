"""The answer of a gate for a terminal: verdict first, then rank x rule, what is open, and what did run."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from alphamoe_profiler.evidence import ranks_told
from alphamoe_profiler.gate_records import GateReport, of_any_rank
from alphamoe_profiler.printable import print_drawn, printable_line
from alphamoe_profiler.reports.fitting import bare_table, print_fitting, titled_table
from alphamoe_profiler.reports.gate_table import gap_lines, open_lines, rule_table
from alphamoe_profiler.verdicts import Verdict

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.CONFIG_ERROR: "bold magenta",
}
_MOST_LINES = 24
_NAME_LETTERS = 140
"""A demangled name may be thousands of letters long; what tells two apart is at its ends."""


def print_gate(report: GateReport, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report. Without a terminal it is plain text without trailing spaces.

    Args:
        report: what ``evaluate`` returned.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    print_drawn(lambda console: _print(console, report), file, width)


def _print(console: Console, report: GateReport) -> None:
    console.print(Text.assemble((report.verdict.value, _STYLE[report.verdict]), " ", printable_line(report.reason)))
    policies = ", ".join(report.policies)
    asked = f"run {report.run}, policy {policies}" if policies else f"run {report.run}"
    console.print(Text(printable_line(asked), style="dim"))
    console.print()
    if report.inspected:
        _table(console, report)
    _lines(console, "Open", [f"{verdict.value} {text}" for verdict, text in open_lines(report)])
    _lines(console, "Known gaps, tolerated", gap_lines(report))
    if report.ran:
        _ran(console, report)
    if report.inspected:
        _inspected(console, report)
    _lines(console, "Warnings", list(report.warnings))
    _lines(console, "Notes", list(report.notes))


def _table(console: Console, report: GateReport) -> None:
    shown = rule_table(report)
    table = bare_table(console, "rule", *shown.columns)
    for title, squares in shown.rows:
        cells = [Text(own.text, style=_STYLE[own.verdict] if own.verdict else "dim") for own in squares]
        table.add_row(Text(printable_line(title)), *cells)
    print_fitting(console, table)
    console.print()


def _ran(console: Console, report: GateReport) -> None:
    groups: dict[tuple[str, str | None, int], list[int]] = {}
    for item in report.ran:
        groups.setdefault((item.symbol, item.execution, item.kernels), []).append(item.rank)
    table = titled_table(console, "What did run", "symbol", "execution", "kernels a rank", "ranks")
    for (symbol, execution, kernels), ranks in list(groups.items())[:_MOST_LINES]:
        table.add_row(Text(_short(symbol)), execution or "-", f"{kernels:,}", ranks_told(ranks).split(" ", 1)[1])
    print_fitting(console, table)
    if len(groups) > _MOST_LINES:
        console.print(f"and {len(groups) - _MOST_LINES} more (--json FILE lists all)")
    console.print()


def _inspected(console: Console, report: GateReport) -> None:
    console.print(Text("Inspected", style="bold"))
    groups: dict[tuple[int, int, int, tuple[str, ...]], list[int]] = {}
    for rank in report.inspected:
        window = tuple(of_any_rank(text, rank.rank) for text in rank.window)
        groups.setdefault((rank.kernels, rank.launches, rank.receipts, window), []).append(rank.rank)
    for (kernels, launches, receipts, window), ranks in groups.items():
        proof = f"; window not proven: {window[0]}" if window else "; window proven complete"
        told = f"{kernels:,} kernels, {launches:,} launches, {receipts:,} receipts"
        each = " each" if len(ranks) > 1 else ""
        console.print(Text(printable_line(f"{ranks_told(ranks)}: {told}{each}{proof}")))
    console.print()


def _lines(console: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    console.print(Text(title, style="bold"))
    for line in lines[:_MOST_LINES]:
        verdict = next((own for own in Verdict if line.startswith(own.value + " ")), None)
        text = Text(printable_line(line))
        if verdict is not None:
            text.stylize(_STYLE[verdict], 0, len(verdict.value))
        console.print(text)
    if len(lines) > _MOST_LINES:
        console.print(f"and {len(lines) - _MOST_LINES} more (--json FILE lists all)")
    console.print()


def _short(name: str) -> str:
    half = _NAME_LETTERS // 2
    whole = printable_line(name)
    return whole if len(whole) <= _NAME_LETTERS else f"{whole[:half]} … {whole[-half:]}"
