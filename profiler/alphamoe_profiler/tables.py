"""Read the bulk tables of one rank: all Parquet parts that can be read, checked, with exact duplicates dropped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphamoe_tracers.records import TABLES, check_table

if TYPE_CHECKING:
    import pandas as pd

MAX_PART_ROWS = 100_000_000
"""A few kilobytes can claim more rows than memory holds."""
_NULL = {width: -(2 ** (width - 1)) for width in (8, 16, 32, 64)}
"""Stands for null where rows are compared: the least integer of its width, which no record holds."""


@dataclass(frozen=True)
class TableRead:
    """What one table of one rank came to."""

    table: pa.Table
    """Rows that follow the schema, exact duplicates dropped."""
    parts: int
    """Parts that were read."""
    duplicates: int
    """Rows that were delivered twice and are kept once."""
    problems: tuple[str, ...]
    """One sentence for each part or row that could not be used. What could be read is in ``table`` all the same."""
    skipped: int = 0
    """Sound rows that were counted and left out of ``table``, because nobody asks for them."""


def read_parts(name: str, directory: Path, shown: str) -> TableRead:
    """Read every closed part of a table; a damaged part is reported and the others are still read.

    Args:
        name: a key of :data:`alphamoe_tracers.records.TABLES`.
        directory: for example ``RUN/kernels/rank=0``; a missing one is an empty table.
        shown: how messages call the directory.
    """
    schema = TABLES[name]
    problems: list[str] = []
    tables: list[pa.Table] = []
    for path in sorted(directory.glob("part-*.parquet")) if directory.is_dir() else []:
        if path.is_symlink() or not path.is_file():
            problems.append(f"{shown}/{path.name}: not a file of its own (a link, a pipe or a directory), not read")
            continue
        try:
            # ParquetFile, because read_table would take rank=0 in the path for a column.
            with pq.ParquetFile(path) as file:
                rows = file.metadata.num_rows
                part = file.read() if rows <= MAX_PART_ROWS else None
        except (OSError, pa.ArrowException, ValueError) as error:
            problems.append(f"{shown}/{path.name}: not readable ({_first_line(error)})")
            continue
        if part is None:
            problems.append(f"{shown}/{path.name}: not readable (it says {rows} rows, more than any recording writes)")
            continue
        usable, found = _conform(name, part)
        problems += [f"{shown}/{path.name}: {problem}" for problem in found]
        if usable is not None:
            tables.append(usable)
    whole = pa.concat_tables(tables).unify_dictionaries() if tables else schema.empty_table()
    kept = _without_duplicates(whole)
    return TableRead(kept, len(tables), whole.num_rows - kept.num_rows, tuple(problems))


def _conform(name: str, part: pa.Table) -> tuple[pa.Table | None, list[str]]:
    """Return the rows of a part that follow the schema, and what was wrong with it."""
    schema = TABLES[name]
    problems = check_table(name, part)
    if not problems:
        return part.select(schema.names).cast(schema), []
    if any(column not in part.column_names for column in schema.names):
        return None, problems
    try:
        part = part.select(schema.names)
        mask = None
        for field in schema:
            if not field.nullable and part.column(field.name).null_count:
                valid = pc.is_valid(part.column(field.name))
                mask = valid if mask is None else pc.and_(mask, valid)
        part = (part if mask is None else part.filter(mask)).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        return None, [*problems, f"not usable ({_first_line(error)})"]
    return part, problems


def _without_duplicates(table: pa.Table) -> pa.Table:
    """Drop exact duplicates, keeping the first.

    Rows that share a correlation id are not duplicates when any other column differs: one graph launch is many kernels.
    """
    if table.num_rows < 2:
        return table
    narrow = ("start_ns", "end_ns", "correlation_id", "graph_node_id", "symbol_id", "thread", "created_ns")
    keys = _exact_frame(table.select([c for c in narrow if c in table.column_names]))
    suspects = keys.duplicated(keep=False).to_numpy().nonzero()[0]
    if not len(suspects):
        return table
    # Only rows that agree in the narrow key are compared in full: a million rows by 22 columns would take seconds.
    again = _exact_frame(table.take(suspects)).duplicated(keep="first")
    drop = suspects[again.to_numpy()]
    if not len(drop):
        return table
    import numpy as np

    keep = np.ones(table.num_rows, dtype=bool)
    keep[drop] = False
    return table.filter(pa.array(keep))


def _exact_frame(table: pa.Table) -> pd.DataFrame:
    """Return a frame in which no id was rounded: pandas would turn an integer column with nulls into floats."""
    columns: dict[str, Any] = {}
    for field in table.schema:
        column = table.column(field.name)
        if pa.types.is_integer(field.type) and column.null_count:
            column = column.fill_null(pa.scalar(_NULL[field.type.bit_width], field.type))
        columns[field.name] = column
    return pa.table(columns).to_pandas()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
