"""A run bundle of which a gate reads only the rows that its rules ask about, so that millions of kernels take seconds.

Every row is counted, checked for duplicates and hashed as ever; kernels of symbols that no rule, no receipt and no
condition of the window asks for are then left out, and so are the launches of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.bundle_check import rank_problems
from alphamoe_profiler.bundle_files import inside
from alphamoe_profiler.tables import TableRead
from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.records import TABLES

if TYPE_CHECKING:
    from alphamoe_profiler.run_records import RunInfo

NARROW_FROM_ROWS = 200_000
"""A smaller table of kernels is read whole: narrowing would save nothing."""
_KEYS = ("process", "start_ns", "end_ns", "correlation_id", "graph_node_id", "stream", "symbol_id")
_HEAD_ROWS = 64
"""The first rows are always kept: two ranks that hold the same records are then seen whatever the rules ask for."""

Wanted = Callable[[dict[str, Any]], bool]
"""Asked once a distinct symbol, with its row of the symbols table."""


@dataclass(frozen=True)
class _Keys:
    """The key columns of all kernels of a rank, whole parts only."""

    columns: dict[str, np.ndarray]
    parts: tuple[Path, ...]
    sizes: tuple[int, ...]


class NarrowBundle(RunBundle):
    """See the module's docstring. Tables that are small, damaged or unusual are read whole."""

    def __init__(self, path: Path, run: RunInfo, wanted: Wanted | None = None) -> None:
        super().__init__(path, run)
        self._wanted = wanted
        self._counts: dict[int, dict[str, int]] = {}

    @classmethod
    def narrow(cls, bundle: RunBundle, wanted: Wanted) -> NarrowBundle:
        """Return the same bundle, reading only kernels of wanted symbols."""
        return cls(bundle.path, bundle.run, wanted)

    def prefetch(self) -> None:
        """Read the large tables of all ranks, two ranks at a time: Arrow and numpy leave the interpreter's lock."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._read_rank, self.ranks))

    def _read_rank(self, rank: int) -> None:
        self.read_table("kernels", rank)
        self.read_table("launches", rank)
        rank_problems(self, rank)

    def symbol_counts(self, rank: int) -> dict[str, int]:
        """Return how many kernels of each full name the rank holds, those that were left out included."""
        if rank not in self._counts:
            kernels = self.read_table("kernels", rank).table
            if rank not in self._counts:
                self._counts[rank] = self._counted(rank, column(kernels, "symbol_id"))
        return self._counts[rank]

    def forget(self, rank: int) -> None:
        """Let go of a rank's kernels and launches once they were judged; how many there were stays known."""
        self.symbol_counts(rank)
        for name in ("kernels", "launches"):
            read = self._tables[name, rank]
            empty = TABLES[name].empty_table()
            self._tables[name, rank] = replace(read, table=empty, skipped=read.skipped + read.table.num_rows)

    def read_table(self, name: str, rank: int) -> TableRead:
        """Return one table of one rank; of kernels and launches the rows that are asked about."""
        key = (name, self._rank_checked(rank))
        if self._wanted is not None and key not in self._tables:
            read = None
            if name == "kernels":
                read = self._narrow_kernels(rank)
            elif name == "launches" and self.run.kind == "recorded":
                read = self._narrow_launches(rank)
            if read is not None:
                self._tables[key] = read
        return super().read_table(name, rank)

    def _narrow_kernels(self, rank: int) -> TableRead | None:
        keys = self._keys("kernels", rank, _KEYS)
        if keys is None:
            return None
        symbols = super().read_table("symbols", rank).table
        known = np.unique(column(symbols, "symbol_id"))
        if not len(known) or not np.isin(keys.columns["symbol_id"], known).all():
            return None  # a kernel without a name may be any symbol
        if _repeats(keys.columns):
            return None
        assert self._wanted is not None  # noqa: S101 -- read_table asks before
        wanted = [row["symbol_id"] for row in symbols.to_pylist() if self._wanted(row)]
        keep = np.isin(keys.columns["symbol_id"], np.array(wanted, np.int64))
        if keep.mean() > 0.5:
            return None
        keep[:_HEAD_ROWS] = True
        self._counts[rank] = self._counted(rank, keys.columns["symbol_id"])
        return _rows_of(keys, "kernels", keep)

    def _narrow_launches(self, rank: int) -> TableRead | None:
        kernels = self.read_table("kernels", rank)
        if not kernels.skipped:
            return None
        keys = self._keys("launches", rank, ("process", "thread", "start_ns", "end_ns", "correlation_id"))
        if keys is None or bool((keys.columns["end_ns"] < keys.columns["start_ns"]).any()):
            return None
        wanted = np.unique(column(kernels.table, "correlation_id"))
        keep = np.isin(keys.columns["correlation_id"], wanted)
        keep[:_HEAD_ROWS] = True
        return _rows_of(keys, "launches", keep)

    def _keys(self, name: str, rank: int, columns: tuple[str, ...]) -> _Keys | None:
        """Read a few columns of every part, or None where the table is small or anything about it is unusual."""
        directory = inside(self.path, f"{name}/rank={rank}")
        paths = tuple(sorted(directory.glob("part-*.parquet"))) if directory.is_dir() else ()
        try:
            if any(path.is_symlink() or not path.is_file() for path in paths):
                return None
            metadata = [pq.read_metadata(path) for path in paths]
            sizes = tuple(own.num_rows for own in metadata)
            if sum(sizes) < NARROW_FROM_ROWS or sum(sizes) > 1 << 31:
                return None
            if any(not _as_written(name, own) for own in metadata):
                return None
            parts = []
            for path in paths:
                with pq.ParquetFile(path) as file:
                    parts.append(file.read(list(columns)))
        except (OSError, pa.ArrowException, ValueError):
            return None
        whole = pa.concat_tables(parts)
        required = [field.name for field in TABLES[name] if not field.nullable]
        if any(whole.column(own).null_count for own in columns if own in required):
            return None
        return _Keys({own: column(whole, own) for own in columns}, paths, sizes)

    def _counted(self, rank: int, ids: np.ndarray) -> dict[str, int]:
        symbols = self.read_table("symbols", rank).table
        names = dict(zip(column(symbols, "symbol_id").tolist(), texts(symbols, "full").tolist(), strict=True))
        found: dict[str, int] = {}
        for number, count in zip(*(values.tolist() for values in np.unique(ids, return_counts=True)), strict=True):
            name = names.get(number, f"symbol {number}")
            found[name] = found.get(name, 0) + count
        return found


def _as_written(name: str, metadata: pq.FileMetaData) -> bool:
    """Say whether a part has exactly the columns and types of its table, and no null where the schema has none."""
    found = metadata.schema.to_arrow_schema()
    schema = TABLES[name]
    if found.names != schema.names:
        return False
    for field in schema:
        kind, wanted = found.field(field.name).type, field.type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) != (
            wanted.value_type if pa.types.is_dictionary(wanted) else wanted
        ):
            return False
    for group in range(metadata.num_row_groups):
        for at, field in enumerate(schema):
            statistics = metadata.row_group(group).column(at).statistics
            # Without statistics nothing says that there is no null.
            if not field.nullable and (statistics is None or statistics.null_count != 0):
                return False
    return True


def _repeats(columns: dict[str, np.ndarray]) -> bool:
    """Say whether two rows may be one record: equal in every key column."""
    mixed = columns["start_ns"].astype(np.uint64)
    for name in ("correlation_id", "graph_node_id", "symbol_id", "stream"):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= columns[name].astype(np.uint64)
    mixed.sort()
    return bool((mixed[1:] == mixed[:-1]).any())


def _rows_of(keys: _Keys, name: str, keep: np.ndarray) -> TableRead | None:
    """Read the rows that are kept with all their columns, one part and row group after another."""
    tables, at = [], 0
    try:
        for path in keys.parts:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    mask = keep[at : at + size]
                    at += size
                    if mask.any():
                        tables.append(file.read_row_group(group).filter(pa.array(mask)))
    except (OSError, pa.ArrowException, ValueError):
        return None
    schema = TABLES[name]
    whole = pa.concat_tables(table.cast(schema) for table in tables).unify_dictionaries()
    read = TableRead(table=whole, parts=len(keys.parts), duplicates=0, problems=())
    return replace(read, skipped=len(keep) - whole.num_rows)
