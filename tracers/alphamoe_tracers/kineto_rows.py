"""The columns of a whole trace, gathered from its pieces: about 45 bytes for a kernel, 28 for an API call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from alphamoe_tracers.kineto_chunk import ChunkRows, Rows
from alphamoe_tracers.kineto_numbers import Int64s

_BLOCK_ROWS = 1 << 17


@dataclass
class Table:
    """Rows of one table over all pieces."""

    _kinds: dict[bytes, int] = field(default_factory=dict)
    _columns: dict[str, list[Any]] = field(default_factory=dict)
    _extras: dict[str, list[tuple[int, Int64s]]] = field(default_factory=dict)
    _rows: int = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Rows) -> None:
        """Append the rows of one piece, its kinds renumbered."""
        kinds = self._kinds
        numbers = np.array([kinds.setdefault(kind, len(kinds)) for kind in rows.kinds], np.int32)
        columns: dict[str, Any] = {
            "codes": numbers[rows.codes],
            "start_ns": rows.start_ns,
            "end_ns": rows.end_ns,
            "correlation": rows.correlation,
        }
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
        for name, values in rows.extra.items():
            if values.any():
                self._extras.setdefault(name, []).append((self._rows, values))
        self._rows += len(rows)

    def finish(self) -> Rows:
        """Return all rows and let go of the pieces."""
        names = ("start_ns", "end_ns", "correlation")
        codes = self._joined("codes", np.int32)
        start_ns, end_ns, correlation = (self._joined(name, np.int64) for name in names)
        rows = Rows(list(self._kinds), codes, start_ns, end_ns, correlation)
        for name, parts in self._extras.items():
            column = np.zeros(self._rows, np.int64)
            for first, values in parts:
                column[first : first + len(values)] = values
            rows.extra[name] = column
        self._extras.clear()
        return rows

    def _joined(self, name: str, dtype: type[np.generic]) -> Any:
        parts = self._columns.pop(name, [])
        return np.concatenate(parts) if parts else np.empty(0, dtype)


@dataclass
class TraceRows:
    """Everything that was kept of a trace."""

    kernels: Table = field(default_factory=Table)
    transfers: Table = field(default_factory=Table)
    calls: Table = field(default_factory=Table)
    annotations: Table = field(default_factory=Table)
    marks: Table = field(default_factory=Table)
    labels: list[tuple[bytes, str]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)

    def add(self, chunk: ChunkRows) -> None:
        """Append what one piece of the event array holds; pieces come in the order of the file."""
        for name in ("kernels", "transfers", "calls", "annotations", "marks"):
            rows = getattr(chunk, name)
            if rows is not None:
                getattr(self, name).add(rows)
        self.labels += chunk.labels
        self.events.update(chunk.events)
        self.odd.update(chunk.odd)


def with_rows(rows: Rows, keep: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> Rows:
    """Return some of the rows; kinds keep their numbers."""
    extra = {name: values[keep] for name, values in rows.extra.items()}
    return Rows(rows.kinds, rows.codes[keep], rows.start_ns[keep], rows.end_ns[keep], rows.correlation[keep], extra)


def distinct(values: Int64s) -> Int64s:
    """Return the distinct values in order; numpy's own hashes them, which takes ten times as long for sorted ids."""
    ordered = np.sort(values, kind="stable")
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return np.asarray(ordered[first])


def exact_duplicates(rows: Rows) -> npt.NDArray[np.bool_]:
    """Say which rows repeat an earlier row in every value, as an [n] mask.

    Untimed rows that no correlation id tells apart are kept: a replayed graph has many of them.
    """
    columns: list[Any] = [rows.codes, rows.start_ns, rows.end_ns, rows.correlation, *rows.extra.values()]
    key = np.zeros(len(rows), np.uint64)
    for values in columns:
        key ^= values.astype(np.uint64)
        key *= np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    order = np.argsort(key, kind="stable")
    suspects = np.zeros(len(rows), bool)
    key = key[order]
    suspects[1:] = key[1:] == key[:-1]
    del key
    at = np.flatnonzero(suspects)
    if not len(at):
        return suspects
    for values in columns:
        suspects[at] &= values[order[at]] == values[order[at - 1]]
    duplicates = np.zeros(len(rows), bool)
    duplicates[order[suspects]] = True
    told_apart = (rows.end_ns != 0) | (rows.correlation != 0)
    return np.asarray(duplicates & told_apart)


def overlaps(rows: Rows, lane_of_kind: npt.NDArray[np.int64], good: npt.NDArray[np.bool_]) -> tuple[int, int, int]:
    """Measure how far timed rows overlap within their own lane (a stream of a device).

    Args:
        rows: the rows, in any order.
        lane_of_kind: the lane of each kind.
        good: [n], which rows are timed and possible.

    Returns:
        Rows that start before an earlier row of their lane has ended; the sum of all times; the time during which at
        least one row of a lane ran, summed over lanes.
    """
    lanes, lane_ids = np.unique(lane_of_kind, return_inverse=True)
    lane_of_row = lane_ids.reshape(-1).astype(np.int32)[rows.codes]
    by_lane = np.flatnonzero(good)
    if len(lanes) > 1:
        by_lane = by_lane[np.argsort(lane_of_row[by_lane], kind="stable")]
    bounds = np.searchsorted(lane_of_row[by_lane], np.arange(len(lanes) + 1)).tolist()
    count = summed = busy = 0
    for first, stop in pairwise(bounds):
        members = by_lane[first:stop]
        starts = rows.start_ns[members]
        if (starts[1:] < starts[:-1]).any():
            members = members[np.argsort(starts, kind="stable")]
        latest_end = -(1 << 62)
        for at in range(0, len(members), _BLOCK_ROWS):  # in blocks, for a small memory
            block = members[at : at + _BLOCK_ROWS]
            start, end = rows.start_ns[block], rows.end_ns[block]
            latest = np.maximum(np.maximum.accumulate(end), latest_end)
            before = np.concatenate([[latest_end], latest[:-1]])
            count += int((start < before).sum())
            summed += int((end - start).sum())
            busy += int((latest - np.maximum(start, before)).clip(min=0).sum())
            latest_end = int(latest[-1])
    return count, summed, busy
