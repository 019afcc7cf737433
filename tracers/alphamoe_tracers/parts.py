"""Bulk tables on disk: closed Parquet parts while the run goes on, one sorted part per table at its end.

A part appears under its name only when it is whole (temporary name, then rename), so what a killed process leaves
behind is readable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alphamoe_tracers.columns import column
from alphamoe_tracers.records import TABLES

_DELTA_COLUMNS = ("start_ns", "end_ns", "created_ns", "correlation_id", "graph_node_id", "original_node_id")
"""Times and ids: nearly sorted after compaction, so their differences are small. Other columns repeat few values."""
_PART_LEVEL = 1
_FINAL_LEVEL = 6


def write_table(path: Path, table: pa.Table, level: int = _FINAL_LEVEL) -> None:
    """Write a table as one Parquet file, whole or not at all.

    Args:
        path: where it appears; an existing file is replaced.
        table: its columns are encoded by name, see ``_DELTA_COLUMNS``.
        level: of zstd compression.

    Raises:
        OSError: nothing was left under ``path`` that was not there before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    deltas = {name: "DELTA_BINARY_PACKED" for name in table.column_names if name in _DELTA_COLUMNS}
    try:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=level,
            use_dictionary=[name for name in table.column_names if name not in deltas],  # type: ignore[arg-type]
            column_encoding=deltas,
            write_statistics=["start_ns"] if "start_ns" in table.column_names else False,
        )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Parts:
    """The parts of one table of one rank."""

    def __init__(self, root: Path, name: str, rank: int) -> None:
        self.name = name
        self.folder = root / name / f"rank={rank}"
        self._staged: list[pa.Table] = []
        self._written: list[Path] = []

    def append(self, table: pa.Table) -> None:
        """Stage rows in memory; :meth:`write` makes them durable."""
        if table.num_rows:
            self._staged.append(table)

    def write(self) -> None:
        """Write the staged rows as the next part, if there are any."""
        if self._staged:
            path = self.folder / f"part-{len(self._written):05d}.parquet"
            table = combine(self.name, self._staged)
            write_table(path, table, _PART_LEVEL)
            self._written.append(path)
            self._staged.clear()

    def read(self) -> pa.Table:
        """Return all rows so far, those on disk and those staged, in order of arrival."""
        tables = [pq.ParquetFile(path).read() for path in self._written]
        return combine(self.name, [*tables, *self._staged])

    def replace(self, table: pa.Table) -> None:
        """Replace all parts by one that holds ``table``, also when it has no rows, so that no table is missing."""
        final = self.folder / "part-00000.parquet"
        write_table(final, table)
        # A crash before this loop leaves rows twice, which readers drop as exact duplicates.
        for path in self._written:
            if path != final:
                path.unlink()
        self._written = [final]
        self._staged.clear()


def rows_on_disk(root: Path, rank: int) -> dict[str, int]:
    """Count the rows of each table in the closed parts of a rank, whoever wrote them."""
    return {
        name: sum(pq.ParquetFile(path).metadata.num_rows for path in (root / name / f"rank={rank}").glob("part-*"))
        for name in TABLES
    }


def combine(name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate rows of one table, with one dictionary per encoded column."""
    schema = TABLES[name]
    if not tables:
        return schema.empty_table()
    return pa.concat_tables([table.cast(schema) for table in tables]).unify_dictionaries().combine_chunks()


def sorted_by_start(table: pa.Table) -> pa.Table:
    """Return the rows in order of start_ns, rows of one start in order of arrival."""
    order = np.argsort(column(table, "start_ns"), kind="stable")
    return table.take(order)


def without_duplicates(table: pa.Table, keys: Sequence[str]) -> tuple[pa.Table, int]:
    """Drop rows that repeat an earlier row in every column, and count them.

    Args:
        table: any bulk table.
        keys: integer columns that tell nearly all distinct rows apart; rows that agree in them are compared in full.

    Returns:
        The table with each row once, order kept, and the number of rows dropped.
    """
    n = table.num_rows
    if n < 2:
        return table, 0
    columns = [column(table, key, null=-1) for key in keys]
    order = np.lexsort(columns[::-1])
    repeats = np.ones(n - 1, bool)
    for values in columns:
        ordered = values[order]
        repeats &= ordered[1:] == ordered[:-1]
    if not repeats.any():
        return table, 0
    suspects = np.union1d(order[1:][repeats], order[:-1][repeats])
    rows = table.take(suspects).to_pylist()
    seen: set[tuple[object, ...]] = set()
    keep = np.ones(n, bool)
    for index, row in zip(suspects.tolist(), rows, strict=True):
        key = tuple(row.values())
        keep[index] = key not in seen
        seen.add(key)
    return table.filter(pa.array(keep)), int(n - keep.sum())
