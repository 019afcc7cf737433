"""The terminal's table of kernels by name and launch shape."""

from __future__ import annotations

from typing import TextIO

import pandas as pd
from rich.console import Console
from rich.text import Text

from alphamoe_profiler.launch_shapes import COLUMNS
from alphamoe_profiler.printable import print_drawn, printable_line
from alphamoe_profiler.reports.fitting import print_fitting, titled_table


def print_launch_shapes(shapes: pd.DataFrame, file: TextIO | None = None, width: int | None = None) -> None:
    """Print what ``kernels_by_launch_shape`` returned, a row for each symbol and shape.

    Args:
        shapes: its columns after those of the shape are the counts of one rank each.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    print_drawn(lambda console: _print(console, shapes), file, width)


def _print(console: Console, shapes: pd.DataFrame) -> None:
    if not len(shapes):
        console.print("no kernel was recorded")
        return
    ranks = [str(name) for name in shapes.columns[len(COLUMNS) :]]
    columns = ("symbol", "grid", "block", "cluster", "smem B", *ranks)
    table = titled_table(console, "Kernels by launch shape, counts by rank", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for symbol, *rest in shapes.itertuples(index=False):
        sizes, counts = rest[:3], rest[3:]
        table.add_row(Text(printable_line(str(symbol))), *map(str, sizes), *(f"{count:,}" for count in counts))
    print_fitting(console, table, keys=5)
