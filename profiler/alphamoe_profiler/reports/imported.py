"""The part of the terminal report that only imported runs have: their files, what ran, and what ran in which bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from alphamoe_profiler.import_records import ImportInfo
from alphamoe_profiler.printable import printable_line
from alphamoe_profiler.reports.fitting import bare_table, print_fitting
from alphamoe_profiler.verdicts import Verdict

if TYPE_CHECKING:
    from alphamoe_profiler.inspection import RunReport

_NAMES_TOLD = 24
_LETTERS = 96


def imported_head(info: ImportInfo, world_size: int) -> str:
    """Say in one line what was imported."""
    used = sum(item.used for item in info.files)
    other = len({item.path for item in info.files if not item.used})
    text = f"{used} file{'' if used == 1 else 's'} for {world_size} rank{'' if world_size == 1 else 's'}"
    text += f", {other} not used" if other else ""
    return f"{text}; purpose {info.purpose}, as stated"


def print_imported(console: Console, report: RunReport) -> None:
    """Print which kernels ran on which ranks (MoE kernels first), and by bucket where there are buckets."""
    told = report.ran
    if told is not None and len(told):
        console.print(Text("Kernels that ran, by rank", style="bold"))
        ranks = [rank.rank for rank in report.ranks]
        table = bare_table(console, "class", "symbol", *(str(rank) for rank in ranks))
        first = told.head(_NAMES_TOLD)
        columns = [first["class"].tolist(), first["symbol"].tolist(), *(first[str(rank)].tolist() for rank in ranks)]
        for kind, symbol, *counts in zip(*columns, strict=True):
            table.add_row(Text(kind or ""), Text(_short(symbol)), *(f"{count:,}" for count in counts))
        print_fitting(console, table, keys=2)
        if len(told) > _NAMES_TOLD:
            console.print(f"and {len(told) - _NAMES_TOLD} more names (--json lists all)")
        console.print()
    by_bucket = report.by_bucket
    if by_bucket is not None and len(by_bucket):
        partial = by_bucket[(by_bucket == 0).any(axis=1)]
        title = f"Kernels by bucket: {len(by_bucket)} names, {len(partial)} of them in some buckets only"
        console.print(Text(title, style="bold"))
        if len(partial):
            table = bare_table(console, "symbol", *(str(name) for name in by_bucket.columns))
            for name, counts in zip(partial.index, partial.to_numpy().tolist(), strict=True):
                table.add_row(Text(_short(str(name))), *(f"{count:,}" for count in counts))
            print_fitting(console, table)
        console.print()
    for check in report.witness.checks:
        if check.verdict is not Verdict.PASS and check.name != "question":
            console.print(Text(printable_line(f"{check.verdict.value} {check.name}: {check.reason}")))


def _short(name: str) -> str:
    """Cut a name in its middle, so that names that differ at their end stay apart."""
    line = printable_line(name)
    return line if len(line) <= _LETTERS else f"{line[: _LETTERS // 2]} … {line[-_LETTERS // 2 :]}"
