"""The terminal's table of kernels by name and launch shape."""

from __future__ import annotations

from typing import TextIO

import pandas as pd
from rich.table import Table
from rich.text import Text

from alphamoe_profiler.launch_shapes import COLUMNS
from alphamoe_profiler.printable import printable_console, printable_line


def print_launch_shapes(shapes: pd.DataFrame, file: TextIO | None = None, width: int | None = None) -> None:
    """Print what ``kernels_by_launch_shape`` returned, a row for each symbol and shape.

    Args:
        shapes: its columns after those of the shape are the counts of one rank each.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    console = printable_console(file=file, width=width, markup=False, highlight=False, emoji=False)
    if not len(shapes):
        console.print("no kernel was recorded")
        return
    ranks = [str(name) for name in shapes.columns[len(COLUMNS) :]]
    table = Table(box=None, pad_edge=False, title="Kernels by launch shape, counts by rank", title_justify="left")
    table.add_column("symbol", overflow="fold")
    for name in ("grid", "block", "cluster", "smem B", *ranks):
        table.add_column(name, justify="right", no_wrap=True)
    for symbol, *rest in shapes.itertuples(index=False):
        sizes, counts = rest[:3], rest[3:]
        table.add_row(Text(printable_line(str(symbol))), *map(str, sizes), *(f"{count:,}" for count in counts))
    console.print(table)
