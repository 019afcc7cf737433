"""The host side of an Nsight Systems export: launch calls, NVTX ranges and the creation of graph nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.launches import fold_launches
from alphamoe_tracers.nsys_columns import Batch, Int64s, labels, pid_of, process_of, table_of, thread_ids
from alphamoe_tracers.nsys_database import NsysDatabase, Row
from alphamoe_tracers.records import LAUNCHES

_API_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
_PUSH_POP, _START_END, _DOMAIN_CREATE = 59, 60, 75
LaunchKind = Literal["kernel", "graph", "other"]
Note = Callable[[int], None]


@dataclass
class LaunchRows:
    """Correlation ids of one process, for counting what has no partner."""

    kernel_rows: list[Int64s] = field(default_factory=list)
    """Correlation id of each kernel record, 0 where it has none."""
    node_rows: list[Int64s] = field(default_factory=list)
    by_kind: dict[LaunchKind, list[Int64s]] = field(default_factory=dict)
    count: int = 0
    while_capturing: int = 0

    def ids(self, kind: LaunchKind) -> Int64s:
        """Return the distinct correlation ids of launches of one kind, captured ones left out."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.by_kind.get(kind, ())]))

    def all_ids(self) -> Int64s:
        """Return the correlation ids of all launches."""
        return np.concatenate([np.empty(0, np.int64), *(ids for own in self.by_kind.values() for ids in own)])


def launch_kind(api: str) -> LaunchKind | None:
    """Say what a host call submits, or None when it is no launch call. A host function runs nothing on the device."""
    name = api.lower()
    if "launch" not in name or "hostfunc" in name:
        return None
    return "graph" if "graphlaunch" in name else "kernel"


def read_launches(
    db: NsysDatabase, kernel_ids: dict[int, Int64s], rows_of: Callable[[int], LaunchRows], note: Note
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the submissions of each process as LAUNCHES rows, one a submission.

    A runtime call and the driver call under it share (thread, correlation id) and are folded. Calls that failed and
    calls that submitted nothing are left out.

    Args:
        db: the export.
        kernel_ids: sorted correlation ids of the kernels of each process: a call that one of them names is a
            submission whatever the call's name is.
        rows_of: where the launches of a process are counted.
        note: called with the number of rows read.
    """
    sources = [table for table in _API_TABLES if db.has(table, "start", "end", "correlationId")]
    if not sources:
        return
    union = " UNION ALL ".join(
        f"SELECT {db.column(table, 'start')} AS s, {db.column(table, 'end')} AS e, "  # noqa: S608
        f"{db.column(table, 'globalTid')} AS t, {db.column(table, 'correlationId')} AS c, {_name(db, table)} AS n, "
        f'{db.column(table, "returnValue", "0")} AS r FROM "{table}"'
        for table in sources
    )
    captures = _capture_times(db, union)
    for thread, submissions in _submissions(db, union, kernel_ids, note):
        if not isinstance(thread, int | None):
            shown = f"{db.path}: the globalTid of an API call is {str(thread)[:40]!r}, not an integer"
            raise EvidenceError(shown, "the export is damaged or was edited")
        process = process_of(thread)
        folded = fold_launches(submissions)
        own = rows_of(process)
        own.count += folded.num_rows
        starts, ids = column(folded, "start_ns"), column(folded, "correlation_id")
        begin, end = captures.get(thread, (np.empty(0, np.int64), np.empty(0, np.int64)))
        at = np.searchsorted(begin, starts, side="right") - 1
        seen = np.isin(ids, kernel_ids.get(process, np.empty(0, np.int64)))
        captured = (at >= 0) & (starts <= end[np.maximum(at, 0)]) & ~seen if len(begin) else np.zeros(len(ids), bool)
        own.while_capturing += int(captured.sum())
        apis, codes = np.unique(texts(folded, "api").astype(str), return_inverse=True)
        for code, api in enumerate(apis.tolist()):
            chosen = ids[(codes.reshape(-1) == code) & ~captured]
            own.by_kind.setdefault(launch_kind(api) or "other", []).append(chosen)
        yield process, folded


def _name(db: NsysDatabase, table: str) -> str:
    """Return the SQL of a call's name: a string id in every known schema, a text column beside it in some."""
    by_id = "NULL"
    if db.has("StringIds", "id", "value") and db.has(table, "nameId"):
        by_id = f'(SELECT value FROM StringIds WHERE StringIds.id = "{table}"."nameId")'  # noqa: S608
    return f"COALESCE({by_id}, {db.column(table, 'name')})"


def _submissions(
    db: NsysDatabase, union: str, kernel_ids: dict[int, Int64s], note: Note
) -> Iterator[tuple[int, pa.Table]]:
    """Yield unfolded submissions by thread; the rows of one submission are never in two tables."""
    kept: list[Row] = []
    last: tuple[object, object] | None = None
    for rows in db.batches(f"SELECT * FROM ({union}) ORDER BY t, c, s"):  # noqa: S608
        note(len(rows))
        for row in rows:
            thread, correlation = row[2], row[3]
            # A new submission may begin a new table, a new thread must.
            if kept and (thread, correlation) != last and (thread != kept[0][2] or len(kept) >= len(rows)):
                yield kept[0][2] or 0, _launch_table(db, kept)
                kept = []
            last = (thread, correlation)
            if not row[5] and (launch_kind(str(row[4])) is not None or _names_kernel(kernel_ids, thread, correlation)):
                kept.append(row)
    if kept:
        yield kept[0][2] or 0, _launch_table(db, kept)


def _names_kernel(kernel_ids: dict[int, Int64s], thread: object, correlation: object) -> bool:
    ids = kernel_ids.get(process_of(thread if isinstance(thread, int) else None))
    if ids is None or not isinstance(correlation, int) or not len(ids):
        return False
    at = int(np.searchsorted(ids, correlation))
    return at < len(ids) and int(ids[at]) == correlation


def _launch_table(db: NsysDatabase, rows: list[Row]) -> pa.Table:
    batch = Batch(
        db.path, "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "n", "r"), rows
    )
    names = [str(name) if name is not None else "<unresolved>" for name in batch.values("n")]
    strings, codes = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    threads = batch.ints("globalTid")
    start, end = batch.ints("start"), batch.ints("end")
    return table_of(
        "launches",
        {
            "process": np.full(batch.size, pid_of(process_of(int(threads[0]))), np.int64),
            "thread": thread_ids(threads),
            "start_ns": start,
            "end_ns": np.maximum(start, end),
            "correlation_id": batch.ids("correlationId"),
            "api": labels("launches", "api", codes.reshape(-1), strings.tolist()),
        },
    ).cast(LAUNCHES)


def _capture_times(db: NsysDatabase, union: str) -> dict[int, tuple[Int64s, Int64s]]:
    """Return by thread when its streams were capturing: a launch made then submits nothing."""
    sql = f"SELECT t, s, e, n FROM ({union}) WHERE n LIKE '%Stream%Capture%' ORDER BY t, s"  # noqa: S608
    found: dict[int, tuple[list[int], list[int]]] = {}
    for thread, start, end, name in db.rows(sql):
        if not all(isinstance(value, int) for value in (thread or 0, start, end)):
            continue
        begins, ends = found.setdefault(thread or 0, ([], []))
        if "BeginCapture" in name and len(begins) == len(ends):
            begins.append(start)
        elif "EndCapture" in name and len(begins) > len(ends):
            ends.append(end)
    for begins, ends in found.values():
        if len(begins) > len(ends):
            ends.append(int(np.iinfo(np.int64).max))
    return {thread: (np.array(b, np.int64), np.array(e, np.int64)) for thread, (b, e) in found.items()}


def read_ranges(db: NsysDatabase, processes: set[int], note: Note) -> Iterator[tuple[int, pa.Table]]:
    """Yield the push/pop and start/end ranges of the given processes as RANGES rows, depths assigned."""
    table = "NVTX_EVENTS"
    if not db.has(table, "start", "end", "eventType"):
        return
    by_id = "NULL"
    if db.has("StringIds", "id", "value") and db.has(table, "textId"):
        by_id = "(SELECT value FROM StringIds WHERE StringIds.id = NVTX_EVENTS.textId)"
    text = f"COALESCE({db.column(table, 'text')}, {by_id})"
    payloads = ("int64Value", "uint64Value", "int32Value", "uint32Value")
    payload = f"COALESCE({', '.join([*(db.column(table, name) for name in payloads), 'NULL'])})"
    thread, domain, end_thread = (db.column(table, name) for name in ("globalTid", "domainId", "endGlobalTid"))
    domains = {
        (process_of(tid if isinstance(tid, int) else None), number): str(name)
        for tid, number, name in db.rows(
            f'SELECT {thread}, {domain}, {text} FROM "{table}" WHERE eventType = ?',  # noqa: S608
            (_DOMAIN_CREATE,),
        )
        if name
    }
    sql = (
        f'SELECT "start", "end", {thread}, {domain}, {text}, {payload}, eventType, {end_thread} FROM "{table}" '  # noqa: S608
        f'WHERE eventType IN (?, ?) ORDER BY {thread}, "start", COALESCE("end", {np.iinfo(np.int64).max}) DESC'
    )
    names = ("start", "end", "globalTid", "domainId", "text", "payload", "eventType", "endGlobalTid")
    depths = _Depths()
    for rows in db.batches(sql, (_PUSH_POP, _START_END)):
        note(len(rows))
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(process_of(row[2] if isinstance(row[2], int) else None), []).append(row)
        for process, own in groups.items():
            if process in processes:
                yield process, _range_table(Batch(db.path, table, names, own), process, domains, depths)


class _Depths:
    """Depth of push/pop ranges that come in order of thread and start: the lowest that no open range has."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._free_at: list[int] = []

    def next(self, thread: int, start: int, end: int) -> int:
        """Return the depth of the next range."""
        if thread != self._thread:
            self._thread, self._free_at = thread, []
        level = next((level for level, ends in enumerate(self._free_at) if ends <= start), len(self._free_at))
        if level == len(self._free_at):
            self._free_at.append(end)
        self._free_at[level] = end
        return level


def _range_table(batch: Batch, process: int, domains: dict[tuple[int, object], str], depths: _Depths) -> pa.Table:
    start, thread, kind = batch.ints("start"), batch.ints("globalTid"), batch.ints("eventType")
    end = batch.ints("end", null=int(np.iinfo(np.int64).max))
    end_thread = batch.ints("endGlobalTid")
    # A range that ends on another thread than it began on does not nest.
    nested = (kind == _PUSH_POP) & ((end_thread == 0) | (end_thread == thread))
    levels = [
        depths.next(tid, begin, finish) if inner else 0
        for tid, begin, finish, inner in zip(
            thread.tolist(), start.tolist(), end.tolist(), nested.tolist(), strict=True
        )
    ]
    numbers = batch.values("domainId")
    texts_ = [str(text) if text is not None else "" for text in batch.values("text")]
    domain_names = [domains.get((process, number), f"domain {number}" if number else "") for number in numbers]
    strings, codes = np.unique(np.array(texts_, dtype=object).astype(str), return_inverse=True)
    domain_strings, domain_codes = np.unique(np.array(domain_names, dtype=object).astype(str), return_inverse=True)
    is_open = end == np.iinfo(np.int64).max
    return table_of(
        "ranges",
        {
            "process": np.full(batch.size, pid_of(process), np.int64),
            "thread": thread_ids(thread),
            "start_ns": start,
            "end_ns": pa.array(np.maximum(end, start), mask=is_open),
            "domain": labels("ranges", "domain", domain_codes.reshape(-1), domain_strings.tolist()),
            "name": labels("ranges", "name", codes.reshape(-1), strings.tolist()),
            "payload": batch.optional("payload"),
            "depth": np.minimum(np.array(levels, np.int64), np.iinfo(np.int16).max).astype(np.int16),
            "kind": labels("ranges", "kind", np.where(nested, 0, 1), ("push_pop", "start_end")),
        },
    )


def read_graph_nodes(db: NsysDatabase, processes: set[int]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the creation of graph nodes as GRAPH_NODES rows: thread and time give a node its capture-time ranges."""
    source = db.first_of("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS")
    if source is None or not db.has(source, "start", "graphNodeId"):
        return
    wanted = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    selected = ", ".join(db.column(source, name) for name in wanted)
    for rows in db.batches(f'SELECT {selected} FROM "{source}"'):  # noqa: S608
        groups: dict[int, list[Row]] = {}
        for row in rows:
            if row[2]:
                groups.setdefault(process_of(row[1] if isinstance(row[1], int) else None), []).append(row)
        for process, own in groups.items():
            if process not in processes:
                continue
            batch = Batch(db.path, source, wanted, own)
            columns = {
                "graph_node_id": batch.ints("graphNodeId"),
                "original_node_id": batch.ids("originalGraphNodeId"),
                "process": np.full(batch.size, pid_of(process), np.int64),
                "thread": thread_ids(batch.ints("globalTid")),
                "created_ns": batch.ints("start"),
            }
            yield process, table_of("graph_nodes", columns)
