"""The record side of NVTX ranges: pairing of marker records, nesting depth, and which ranges enclose a moment.

CUPTI gives a range as two marker records with one id (start and end) and, where the program set one, a marker-data
record with the same id that holds the payload. Records of one thread arrive in order; threads arrive in any order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from alphamoe_tracers.columns import column, strings_by_code, texts
from alphamoe_tracers.records import RANGES

Int64s = npt.NDArray[np.int64]
OPEN_END_NS = int(np.iinfo(np.int64).max)
"""Stands for "not closed yet" while depths are computed; never written to a table."""

MARKER_START = 1 << 1
MARKER_END = 1 << 2
OBJECT_PROCESS = 1
OBJECT_THREAD = 2

MARKER_DTYPE = np.dtype(
    {
        "names": ["flags", "object_kind", "time_ns", "id", "process", "thread", "name", "domain"],
        "formats": ["i4", "i4", "i8", "i8", "i8", "i8", "i8", "i8"],
    }
)
"""A marker record; name and domain are indices into the strings that travel with the batch."""
PAYLOAD_DTYPE = np.dtype([("id", "i8"), ("value", "i8")])


@dataclass
class RangePairer:
    """Pairs marker records into RANGES rows, batch by batch; what has no partner yet waits for a later batch."""

    _pending: np.ndarray = field(default_factory=lambda: np.empty(0, MARKER_DTYPE))
    _early_ends: np.ndarray = field(default_factory=lambda: np.empty(0, MARKER_DTYPE))
    _payloads: dict[int, int] = field(default_factory=dict)
    _closed: list[Int64s] = field(default_factory=list)
    _stray: Counter[int] = field(default_factory=Counter)
    _unclosed: Counter[int] = field(default_factory=Counter)
    duplicates: int = 0
    """Markers delivered twice and kept once."""

    def add(self, markers: np.ndarray, payloads: np.ndarray, strings: list[str]) -> pa.Table:
        """Take one batch and return the ranges that it closed, as a RANGES table.

        Args:
            markers: records of :data:`MARKER_DTYPE`; instantaneous markers are ignored.
            payloads: records of :data:`PAYLOAD_DTYPE`.
            strings: what the name and domain indices mean. It may grow between batches but not change.
        """
        self._payloads.update(zip(payloads["id"].tolist(), payloads["value"].tolist(), strict=True))
        known = np.concatenate([self._pending, markers[(markers["flags"] & MARKER_START) != 0]])
        _, first = np.unique(known["id"], return_index=True)
        self.duplicates += len(known) - len(first)
        starts = known[first]  # sorted by id now, which is what searchsorted needs
        ends = np.concatenate([self._early_ends, markers[(markers["flags"] & MARKER_END) != 0]])
        _, first = np.unique(ends["id"], return_index=True)
        self.duplicates += len(ends) - len(first)
        ends = ends[first]
        at = np.searchsorted(starts["id"], ends["id"])
        matched = at < len(starts)
        matched[matched] = starts["id"][at[matched]] == ends["id"][matched]
        self._early_ends = self._not_closed_before(ends[~matched])
        closing, ends = at[matched], ends[matched]
        end_ns = np.full(len(starts), OPEN_END_NS, np.int64)
        end_ns[closing] = ends["time_ns"]
        # A start/end range may end on another thread than it began on; a push/pop range cannot.
        moved = starts["thread"][closing] != ends["thread"]
        starts["object_kind"][closing[moved]] = OBJECT_PROCESS
        depths = _depths_of_markers(starts, end_ns)
        is_open = end_ns == OPEN_END_NS
        self._pending = starts[is_open]
        self._closed.append(starts["id"][~is_open].astype(np.int64))
        return self._rows(starts[~is_open], end_ns[~is_open], depths[~is_open], strings)

    def finish(self, strings: list[str]) -> pa.Table:
        """Return the ranges that were never closed, with a null end, and note them as problems."""
        pending, self._pending = self._pending, np.empty(0, MARKER_DTYPE)
        strays, self._early_ends = self._early_ends, np.empty(0, MARKER_DTYPE)
        self._stray.update(strays["thread"].tolist())
        self._unclosed.update(pending["thread"].tolist())
        open_end = np.full(len(pending), OPEN_END_NS, np.int64)
        return self._rows(pending, open_end, _depths_of_markers(pending, open_end), strings)

    @property
    def problems(self) -> tuple[str, ...]:
        """Imbalances, one sentence for each thread and kind."""
        found = [f"thread {thread}: {n} range ends without a start" for thread, n in sorted(self._stray.items())]
        found += [f"thread {thread}: {n} ranges never closed" for thread, n in sorted(self._unclosed.items())]
        return tuple(found)

    def _not_closed_before(self, ends: np.ndarray) -> np.ndarray:
        """Ends whose start may still come (from another thread's buffer); the others were delivered twice."""
        if not len(ends) or not self._closed:
            return ends
        again = np.isin(ends["id"], np.concatenate(self._closed))
        self.duplicates += int(again.sum())
        return ends[~again]

    def _rows(self, starts: np.ndarray, end_ns: Int64s, depths: Int64s, strings: list[str]) -> pa.Table:
        payloads = [self._payloads.pop(key, None) for key in starts["id"].tolist()]
        kinds = np.where(starts["object_kind"] == OBJECT_THREAD, 0, 1)
        columns = {
            "process": pa.array(starts["process"]),
            "thread": pa.array(starts["thread"]),
            "start_ns": pa.array(starts["time_ns"]),
            "end_ns": pa.array(end_ns, mask=end_ns == OPEN_END_NS),
            "domain": strings_by_code(starts["domain"], strings, RANGES.field("domain").type),
            "name": strings_by_code(starts["name"], strings, RANGES.field("name").type),
            "payload": pa.array(payloads, pa.int64()),
            "depth": pa.array(depths.astype(np.int16)),
            "kind": strings_by_code(kinds, ("push_pop", "start_end"), RANGES.field("kind").type),
        }
        return pa.table([columns[name] for name in RANGES.names], schema=RANGES)


def with_depths(ranges: pa.Table) -> pa.Table:
    """Compute the depth column of a RANGES table anew from its times, for rows that came in several batches."""
    if not ranges.num_rows:
        return ranges
    thread = _group_ids(ranges)
    depths = np.zeros(ranges.num_rows, np.int64)
    nested = np.flatnonzero(_is_push_pop(ranges))
    start, end = _times(ranges)
    depths[nested] = range_depths(thread[nested], start[nested], end[nested])
    at = ranges.schema.get_field_index("depth")
    return ranges.set_column(at, RANGES.field("depth"), pa.array(depths.astype(np.int16)))


def range_depths(thread: Int64s, start_ns: Int64s, end_ns: Int64s) -> Int64s:
    """Return for each push/pop range how many ranges of its thread were open when it was pushed.

    Ranges that overlap without nesting (pops of different domains) get the lowest depth that is free, so that ranges
    of one thread and depth never overlap; :func:`enclosing` relies on that.

    Args:
        thread: [n] any ids that tell threads apart.
        start_ns: [n] start times.
        end_ns: [n] end times; :data:`OPEN_END_NS` for a range that is still open.
    """
    depths = np.zeros(len(start_ns), np.int64)
    for key in np.unique(thread):
        rows = np.flatnonzero(thread == key)
        rows = rows[np.lexsort((-end_ns[rows], start_ns[rows]))]
        start, end = start_ns[rows], end_ns[rows]
        nested = np.arange(len(rows)) - np.searchsorted(np.sort(end), start, side="right")
        order = np.lexsort((start, nested))
        follows = nested[order][1:] == nested[order][:-1]
        overlap = follows & (start[order][1:] < end[order][:-1])
        depths[rows] = _free_depths(start, end) if overlap.any() or (end <= start).any() else nested
    return depths


def enclosing(
    ranges: pa.Table, process: npt.ArrayLike, thread: npt.ArrayLike, times_ns: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """Find the path of push/pop ranges that were open on a thread at each of many moments.

    Args:
        ranges: a RANGES table of one rank, depths assigned.
        process: [n] process ids, or one for all.
        thread: [n] thread ids, or one for all.
        times_ns: [n] moments on the ranges' clock. A moment equal to a range's start or end lies inside it.

    Returns:
        [n, deepest + 1] row numbers of ``ranges`` from outermost to innermost, -1 where none was open at that depth.
    """
    times = np.atleast_1d(np.asarray(times_ns, np.int64))
    processes = np.broadcast_to(np.asarray(process, np.int64), times.shape)
    threads = np.broadcast_to(np.asarray(thread, np.int64), times.shape)
    depth = column(ranges, "depth")
    nested = _is_push_pop(ranges)
    deepest = int(depth[nested].max()) if nested.any() else -1
    path = np.full((len(times), deepest + 1), -1, np.int64)
    start, end = _times(ranges)
    range_process, range_thread = column(ranges, "process"), column(ranges, "thread")
    for pid, tid in np.unique(np.stack([processes, threads], axis=1), axis=0):
        queries = np.flatnonzero((processes == pid) & (threads == tid))
        own = np.flatnonzero(nested & (range_process == pid) & (range_thread == tid))
        own = own[np.lexsort((end[own], start[own]))]
        for level in range(deepest + 1):
            rows = own[depth[own] == level]
            if not len(rows):
                continue
            at = np.searchsorted(start[rows], times[queries], side="right") - 1
            inside = (at >= 0) & (times[queries] <= end[rows[np.maximum(at, 0)]])
            path[queries[inside], level] = rows[at[inside]]
    return path


def _depths_of_markers(starts: np.ndarray, end_ns: Int64s) -> Int64s:
    depths = np.zeros(len(starts), np.int64)
    nested = np.flatnonzero(starts["object_kind"] == OBJECT_THREAD)
    depths[nested] = range_depths(starts["thread"][nested], starts["time_ns"][nested], end_ns[nested])
    return depths


def _free_depths(start: Int64s, end: Int64s) -> Int64s:
    """Lowest free depth for each range of one thread, ranges sorted by start."""
    depths = np.zeros(len(start), np.int64)
    free_at: list[int] = []  # by depth: when the last range there ends
    for row, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        level = next((level for level, ends in enumerate(free_at) if ends <= begin), len(free_at))
        if level == len(free_at):
            free_at.append(finish)
        free_at[level] = finish
        depths[row] = level
    return depths


def _times(ranges: pa.Table) -> tuple[Int64s, Int64s]:
    return column(ranges, "start_ns"), column(ranges, "end_ns", null=OPEN_END_NS)


def _is_push_pop(ranges: pa.Table) -> npt.NDArray[np.bool_]:
    return np.asarray(texts(ranges, "kind") == "push_pop")


def _group_ids(ranges: pa.Table) -> Int64s:
    """One number for each (process, thread) of the table's rows."""
    pairs = np.stack([column(ranges, "process"), column(ranges, "thread")], axis=1)
    _, ids = np.unique(pairs, axis=0, return_inverse=True)
    return ids.reshape(-1).astype(np.int64)
