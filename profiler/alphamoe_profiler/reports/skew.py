"""The part of the terminal report that lays the ranks beside each other: skew and all-reduce kernels."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from alphamoe_profiler.printable import printable_line
from alphamoe_profiler.rank_skew import RankSkew
from alphamoe_profiler.reports.fitting import print_fitting, titled_table

_WIDE = 100
"""Columns from which on an execution's name is one line beside all that is said of it."""


def print_skew(console: Console, skew: RankSkew) -> None:
    """Print how far apart the ranks were, their all-reduce kernels, and what limits both."""
    shared = " (shared GPU: comparable with nothing)" if skew.shared_gpu else ""
    if skew.spreads:
        title = f"Skew: microseconds between the first and the last rank at the same moment{shared}"
        columns = ("execution", "moment", "compared", "median", "worst", "in step", "last", "most often last")
        table = titled_table(console, title, *columns)
        for row in skew.spreads:
            often, count = max(row.last.items(), key=lambda item: item[1])
            table.add_row(
                row.execution.replace("_", "_\n") if console.width < _WIDE else row.execution,
                row.moment,
                f"{row.compared:,}",
                _us(row.median_ns),
                _us(row.worst_ns),
                str(row.worst_step),
                str(row.worst_rank),
                f"{often} ({count:,})",
            )
        print_fitting(console, table, keys=2)
    if skew.clock_error_ns is not None:
        off = f"by {_us(skew.clock_error_ns)} us at least" if skew.clock_error_ns else "by nothing that they show"
        console.print(f"an all-reduce ends on all ranks at about one moment; by that the clocks are off {off}")
    if skew.all_reduces:
        title = f"All-reduce kernels of witness steps; their time holds the wait for the last rank{shared}"
        table = titled_table(console, title, "rank", "symbol", "kernels", "total ms", "median us")
        for own in skew.all_reduces:
            table.add_row(
                str(own.rank),
                Text(printable_line(own.symbol)),
                f"{own.kernels:,}",
                f"{own.total_ns / 1e6:,.3f}",
                _us(own.median_ns),
            )
        print_fitting(console, table, keys=2)
    for note in skew.notes:
        console.print(Text(printable_line(f"ranks beside each other: {note}")))
    console.print()


def _us(ns: int) -> str:
    return f"{ns / 1e3:,.2f}"
