"""Tables that fit a terminal: headings break at words only, and a table that is too wide goes on below itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_ROOMY = 72
"""Columns from which on tables are spaced by two."""
_FOLDED = 20
"""A cell may be folded within a word where its column is this wide: names of kernels are longer than terminals."""


@dataclass
class _Shape:
    """A column with the widths it may have."""

    column: Column
    least: int
    width: int


def titled_table(console: Console, title: str, *columns: str) -> Table:
    """Print a title (as a line, because a table's own title is wrapped to the table) and return its empty table.

    Args:
        console: where to.
        title: what the table shows.
        columns: the headings; an underscore in one is where it may break.
    """
    console.print(Text(title, style="bold"))
    return bare_table(console, *columns)


def bare_table(console: Console, *columns: str) -> Table:
    """Return an empty table without lines or title; arguments are those of :func:`titled_table`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2 if console.width >= _ROOMY else 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    return table


def print_fitting(console: Console, table: Table, keys: int = 1) -> None:
    """Print a table within the console's width, in several parts where one cannot hold every column.

    Args:
        console: where to.
        table: made by :func:`titled_table` or :func:`bare_table`.
        keys: how many of its first columns say which row it is; every part begins with them.
    """
    gap = table.padding[1]
    shapes = [_shape(console, column) for column in table.columns]
    if _total([own.width for own in shapes], gap) > console.width:
        for column in table.columns:
            if isinstance(column.header, str):
                column.header = column.header.replace("_", "_\n")
        shapes = [_shape(console, column) for column in table.columns]
    for part in _parts(shapes, keys, console.width, gap):
        _squeeze(part, console.width, gap)
        drawn = Table(box=None, pad_edge=False, padding=table.padding)
        for own in part:
            drawn.add_column(
                own.column.header,
                overflow="fold",
                header_style=own.column.header_style,
                justify=own.column.justify,
                width=own.width,
            )
        for row in zip(*(own.column.cells for own in part), strict=True):
            drawn.add_row(*row)
        console.print(drawn)


def _shape(console: Console, column: Column) -> _Shape:
    header = _measured(console, column.header)
    cells = [_measured(console, cell) for cell in column.cells]
    least = max([header.minimum, *(min(cell.minimum, _FOLDED) for cell in cells)])
    return _Shape(column, least, max([header.maximum, *(cell.maximum for cell in cells)]))


def _measured(console: Console, cell: RenderableType) -> Measurement:
    """Return the widths of a cell: its longest word and its longest line."""
    text = cell if isinstance(cell, Text) else Text(str(cell))
    return Measurement.get(console, console.options.update(max_width=10_000), text)


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _parts(shapes: list[_Shape], keys: int, room: int, gap: int) -> list[list[_Shape]]:
    """Cut the columns into tables that fit at their least widths; each begins with the key columns."""
    parts = [list(shapes[:keys])]
    for own in shapes[keys:]:
        if len(parts[-1]) > keys and _total([one.least for one in (*parts[-1], own)], gap) > room:
            parts.append(list(shapes[:keys]))
        parts[-1].append(own)
    return [[_Shape(own.column, own.least, own.width) for own in part] for part in parts]


def _squeeze(part: list[_Shape], room: int, gap: int) -> None:
    """Narrow the widest columns, none below its least width, until the part fits."""
    while _total([own.width for own in part], gap) > room:
        slack = [own for own in part if own.width > own.least]
        if not slack:
            return
        max(slack, key=lambda own: own.width).width -= 1
