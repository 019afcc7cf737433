"""Rows of an Nsight Systems export as columns of the bundle's tables, strictly typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from alphamoe_tracers.columns import strings_by_code
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.nsys_database import Row
from alphamoe_tracers.records import TABLES

Int64s = npt.NDArray[np.int64]
ID_BITS = 24
_ID_MASK = (1 << ID_BITS) - 1


def process_of(global_id: int | None) -> int:
    """Return what tells processes of one file apart: a serialized id without its thread, 0 where there is none."""
    return 0 if global_id is None else global_id >> ID_BITS


def pid_of(process: int) -> int:
    """Return the process id in the upper part of a serialized id (8 bits machine, 8 bits VM, 24 bits process)."""
    return process & _ID_MASK


def thread_ids(global_ids: Int64s) -> Int64s:
    """Return the thread ids of serialized ids."""
    return global_ids & _ID_MASK


class Batch:
    """Some rows of one query; columns are converted when they are asked for.

    Raises (from every accessor):
        EvidenceError: a value has another type than the schema of nsys gives it; nothing is coerced.
    """

    def __init__(self, path: Path, table: str, names: Sequence[str], rows: Sequence[Row]) -> None:
        self._path = path
        self._table = table
        self._columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        self.size = len(rows)

    def values(self, name: str) -> tuple[Any, ...]:
        """Return a column as it is."""
        return self._columns[name]

    def ints(self, name: str, null: int = 0, kind: pa.DataType | None = None) -> Any:
        """Return an integer column as numpy (int64 unless ``kind`` says otherwise), ``null`` where it has none."""
        return self._array(name, kind or pa.int64()).fill_null(null).to_numpy(zero_copy_only=False)

    def ids(self, name: str) -> Any:
        """Return an id column in which 0 means that there is none."""
        values = self.ints(name)
        return pa.array(values, mask=values == 0)

    def optional(self, name: str) -> Any:
        """Return an integer column with its nulls."""
        return self._array(name, pa.int64())

    def _array(self, name: str, kind: pa.DataType) -> Any:
        column = self._columns[name]
        try:
            return pa.array(column, kind)
        except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
            bad = next((value for value in column if not isinstance(value, int | None)), None)
            told = f"holds {str(bad)[:40]!r}, not an integer" if bad is not None else "holds a number out of range"
            raise EvidenceError(
                f"{self._path}: table {self._table} column {name} {told}", "the export is damaged or was edited"
            ) from error


def table_of(name: str, columns: dict[str, Any]) -> pa.Table:
    """Return columns as one of the bundle's tables."""
    schema = TABLES[name]
    return pa.table([columns[field] for field in schema.names], schema=schema)


def labels(table: str, column: str, codes: npt.ArrayLike, strings: Sequence[str]) -> Any:
    """Return a dictionary column of one of the bundle's tables."""
    return strings_by_code(np.asarray(codes, np.int64), strings, TABLES[table].field(column).type)


class StreamClock:
    """Kernel times by stream, over batches that are ordered by start: overlaps, sums and bounds."""

    def __init__(self) -> None:
        self._last_end: dict[tuple[int, int, int], int] = {}
        self.overlapping = 0
        self.summed_ns = 0
        self.busy_ns = 0
        self.untimed = 0
        self.invalid = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def add(self, places: Int64s, start: Int64s, end: Int64s) -> None:
        """Take one batch. Untimed kernels (0/0) and kernels that end before they start stay out of every sum.

        Args:
            places: [n, 3] device, context and stream.
            start: [n] start times, ascending within and across batches.
            end: [n] end times.
        """
        untimed, invalid = (start == 0) & (end == 0), end < start
        self.untimed += int(untimed.sum())
        self.invalid += int(invalid.sum())
        timed = ~untimed & ~invalid
        placed = start[~untimed]
        if len(placed):
            self.first_ns = min(int(placed.min()), self.first_ns if self.first_ns is not None else int(placed.min()))
            latest = int(np.maximum(end[~untimed], placed).max())
            self.last_ns = max(latest, self.last_ns if self.last_ns is not None else latest)
        keys = places[timed]
        begin, finish = start[timed], end[timed]
        self.summed_ns += int((finish - begin).sum())
        for key in np.unique(keys, axis=0):
            own = np.flatnonzero((keys == key).all(axis=1))
            name = (int(key[0]), int(key[1]), int(key[2]))
            carry = self._last_end.get(name, int(np.iinfo(np.int64).min))
            before = np.maximum.accumulate(np.concatenate([[carry], finish[own]]))
            self.overlapping += int((begin[own] < before[:-1]).sum())
            self.busy_ns += int(np.maximum(finish[own] - np.maximum(begin[own], before[:-1]), 0).sum())
            self._last_end[name] = int(before[-1])
