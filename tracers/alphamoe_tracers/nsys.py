"""Reader of Nsight Systems SQLite exports: one summary for each process that used a GPU.

Rows are joined on (process, correlation id) only: correlation ids of different processes collide. The order of
processes in the file, and the devices that they used, are never ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from alphamoe_tracers.nsys_columns import Batch, Int64s, StreamClock, labels, pid_of, process_of, table_of
from alphamoe_tracers.nsys_database import NsysDatabase, Row, open_database
from alphamoe_tracers.nsys_host import LaunchRows, read_graph_nodes, read_launches, read_ranges
from alphamoe_tracers.symbols import demangle, is_truncated
from alphamoe_tracers.tables import UNRESOLVED
from alphamoe_tracers.trace_files import Progress, SymbolTable, TraceSink, TraceSummary, sha256_of

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPY, _SET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_COPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "clusterX", "clusterY", "clusterZ")
_LOST = ("dropp", "lost", "incomplete", "not all", "missing", "overflow")
_AS_NODES = "record again with --cuda-graph-trace=node"


@dataclass
class _Process:
    """What is counted of one process."""

    process: int
    key: str
    clock: StreamClock = field(default_factory=StreamClock)
    kernel_ids: list[Int64s] = field(default_factory=list)
    transfer_ids: list[Int64s] = field(default_factory=list)
    graph_trace_ids: list[Int64s] = field(default_factory=list)
    launches: LaunchRows = field(default_factory=LaunchRows)
    kernels: int = 0
    with_node: int = 0
    duplicates: int = 0
    transfers: int = 0
    ranges: int = 0
    graph_traces: int = 0
    unresolved: int = 0
    names: set[str] = field(default_factory=set)


def read_nsys(path: Path, sink: TraceSink, *, progress: Progress | None = None) -> list[TraceSummary]:
    """Read an export of any schema from 2.9 (nsys 2022.2) on; what it has is probed, not assumed.

    Args:
        path: the ``.sqlite`` file.
        sink: takes the rows; the rank key of a process is its process id as text.
        progress: called as (bytes, size); bytes are estimated from rows.

    Returns:
        One summary for each process with GPU records or launches, in the order of process ids.

    Raises:
        EvidenceError: no database, cut, locked or damaged, or a table or column is missing (named, with the version).
    """
    with open_database(path) as db:
        graph_table = _graph_trace_table(db)
        if graph_table is None or KERNEL in db.columns:
            db.need(KERNEL, "start", "end")
            if not db.columns[KERNEL] & {"demangledName", "shortName", "mangledName"}:
                db.need(KERNEL, "demangledName")
        steps = _Steps(db, progress, (KERNEL, _COPY, _SET, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"))
        processes = _Processes()
        _read_kernels(db, sink, processes, steps)
        _read_transfers(db, sink, processes, steps)
        if graph_table is not None:
            _read_graph_traces(db, graph_table, processes)
        kernel_ids = {process: _ids(own.kernel_ids) for process, own in processes.found.items()}
        for process, table in read_launches(db, kernel_ids, processes.launches, steps.add):
            sink.put(processes.of(process).key, "launches", table)
        known = set(processes.found)
        for process, table in read_ranges(db, known, steps.add):
            processes.of(process).ranges += table.num_rows
            sink.put(processes.of(process).key, "ranges", table)
        for process, table in read_graph_nodes(db, known):
            sink.put(processes.of(process).key, "graph_nodes", table)
        if not processes.found:
            return [_nothing(db)]
        return [_summary(db, own) for _, own in sorted(processes.found.items())]


class _Processes:
    """The processes of a file by the upper part of their serialized ids."""

    def __init__(self) -> None:
        self.found: dict[int, _Process] = {}

    def of(self, process: int) -> _Process:
        """Return a process, made when it is new. Where two machines use one process id the keys differ all the same."""
        if process not in self.found:
            key = str(pid_of(process))
            taken = {own.key for own in self.found.values()}
            self.found[process] = _Process(process, key if key not in taken else f"{key}@{process >> 24:x}")
        return self.found[process]

    def launches(self, process: int) -> LaunchRows:
        """Return what is counted of a process's launches."""
        return self.of(process).launches


class _Steps:
    """Turns rows read into bytes of progress."""

    def __init__(self, db: NsysDatabase, progress: Progress | None, tables: tuple[str, ...]) -> None:
        self._progress = progress
        self._size = db.path.stat().st_size
        self._done = 0
        self._total = 1
        if progress is not None:
            for table in tables:
                if table in db.columns:
                    self._total += int(next(db.rows(f'SELECT max(rowid) FROM "{table}"'))[0] or 0)  # noqa: S608

    def add(self, rows: int) -> None:
        """Note that so many rows were read."""
        self._done += rows
        if self._progress is not None:
            self._progress(min(self._size, self._size * self._done // self._total), self._size)


def _read_kernels(db: NsysDatabase, sink: TraceSink, processes: _Processes, steps: _Steps) -> None:
    if KERNEL not in db.columns:
        return
    optional = ("deviceId", "contextId", "streamId", "correlationId", "globalPid", "graphId", "graphNodeId")
    memory = ("staticSharedMemory", "dynamicSharedMemory", "registersPerThread")
    names = ("demangledName", "mangledName", "shortName")
    wanted = ("start", "end", *optional, *memory, *_SHAPE, *names)
    selected = ", ".join(db.column(KERNEL, name) for name in wanted)
    symbols: dict[int, _Names] = {}
    for rows in _distinct(db, f'SELECT {selected} FROM "{KERNEL}" ORDER BY "start"', processes, steps):  # noqa: S608
        for process, own_rows in _by_process(rows, wanted.index("globalPid")):
            own = processes.of(process)
            batch = Batch(db.path, KERNEL, wanted, own_rows)
            if process not in symbols:
                symbols[process] = _Names(db, sink.symbols(own.key), own)
            columns = {name: batch.ints(name, kind=pa.int32()) for name in (*memory, *_SHAPE)}
            place = [batch.ints(name, kind=pa.int32()) for name in ("deviceId", "contextId", "streamId")]
            start, end, correlation = batch.ints("start"), batch.ints("end"), batch.ints("correlationId")
            node = batch.ints("graphNodeId")
            table = {
                "process": np.full(batch.size, pid_of(process), np.int64),
                "start_ns": start,
                "end_ns": end,
                "device": place[0],
                "context": place[1],
                "stream": place[2],
                "correlation_id": batch.ids("correlationId"),
                "graph_id": batch.ids("graphId"),
                "graph_node_id": batch.ids("graphNodeId"),
                "symbol_id": symbols[process].ids(batch),
                "static_smem_bytes": columns["staticSharedMemory"],
                "dynamic_smem_bytes": columns["dynamicSharedMemory"],
                "registers": columns["registersPerThread"],
            }
            table |= {f"{name[:-1]}_{name[-1].lower()}": columns[name] for name in _SHAPE}
            sink.put(own.key, "kernels", table_of("kernels", table))
            own.clock.add(np.stack(place, axis=1).astype(np.int64), start, end)
            own.kernel_ids.append(np.unique(correlation[correlation != 0]))
            own.launches.kernel_rows.append(correlation)
            own.launches.node_rows.append(node)
            own.kernels += batch.size
            own.with_node += int((node != 0).sum())


def _distinct(db: NsysDatabase, sql: str, processes: _Processes, steps: _Steps) -> Iterator[list[Row]]:
    """Yield rows in order of start, each once: a record that was delivered twice agrees in every column."""
    now: object = None
    seen: set[Row] = set()
    for rows in db.batches(sql):
        steps.add(len(rows))
        kept = []
        for row in rows:
            if row[0] != now:
                now = row[0]
                seen = {row}
            elif row in seen:
                pid = row[6]
                processes.of(process_of(pid if isinstance(pid, int) else None)).duplicates += 1
                continue
            else:
                seen.add(row)
            kept.append(row)
        yield kept


def _by_process(rows: list[Row], at: int) -> Iterator[tuple[int, list[Row]]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        value = row[at]
        groups.setdefault(process_of(value if isinstance(value, int) else None), []).append(row)
    yield from groups.items()


class _Names:
    """Symbol ids of one process by the ids of its names in StringIds."""

    def __init__(self, db: NsysDatabase, symbols: SymbolTable, own: _Process) -> None:
        self._db = db
        self._symbols = symbols
        self._own = own
        self._known: dict[tuple[object, ...], int] = {}

    def ids(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Return the symbol id of each row. Names that nothing resolves share one symbol and are counted."""
        keys = list(zip(*(batch.values(name) for name in ("demangledName", "mangledName", "shortName")), strict=True))
        for key in set(keys) - self._known.keys():
            self._known[key] = self._symbols.id_of(self._name(key))
        unresolved = self._symbols.id_of(UNRESOLVED) if UNRESOLVED in self._own.names else -1
        found = np.array([self._known[key] for key in keys], np.int64)
        self._own.unresolved += int((found == unresolved).sum())
        return found.astype(np.int32)

    def _name(self, key: tuple[object, ...]) -> str:
        """Prefer the mangled name where it can be demangled here: it is the most exact form."""
        demangled, mangled, short = (self._text(value) for value in key)
        name = demangled or mangled or short or UNRESOLVED
        if mangled and mangled.startswith("_Z") and demangle(mangled) != mangled:
            name = mangled
        self._own.names.add(name)
        return name

    def _text(self, value: object) -> str | None:
        if isinstance(value, str):  # some exports write names in place of their ids
            return value
        if not isinstance(value, int) or not self._db.has("StringIds", "id", "value"):
            return None
        row = next(self._db.rows("SELECT value FROM StringIds WHERE id = ?", (value,)), None)
        return str(row[0]) if row is not None and row[0] else None


def _read_transfers(db: NsysDatabase, sink: TraceSink, processes: _Processes, steps: _Steps) -> None:
    kinds = (*(f"memcpy {name}" for name in _COPY_KINDS), "memset")
    for source in (_COPY, _SET):
        if not db.has(source, "start", "end"):
            continue
        wanted = (
            "start",
            "end",
            "deviceId",
            "streamId",
            "correlationId",
            "globalPid",
            "bytes",
            "graphNodeId",
            "copyKind",
        )
        selected = ", ".join(db.column(source, name) for name in wanted)
        for rows in db.batches(f'SELECT {selected} FROM "{source}"'):  # noqa: S608
            steps.add(len(rows))
            for process, own_rows in _by_process(rows, wanted.index("globalPid")):
                own = processes.of(process)
                batch = Batch(db.path, source, wanted, own_rows)
                kind = batch.ints("copyKind")
                kind = np.where((kind >= 0) & (kind < len(_COPY_KINDS)), kind, 0)
                kind = kind if source == _COPY else np.full(batch.size, len(_COPY_KINDS), np.int64)
                correlation = batch.ints("correlationId")
                table = {
                    "process": np.full(batch.size, pid_of(process), np.int64),
                    "kind": labels("transfers", "kind", kind, kinds),
                    "bytes": batch.ints("bytes"),
                    "start_ns": batch.ints("start"),
                    "end_ns": batch.ints("end"),
                    "device": batch.ints("deviceId", kind=pa.int32()),
                    "stream": batch.ints("streamId", kind=pa.int32()),
                    "correlation_id": batch.ids("correlationId"),
                    "graph_node_id": batch.ids("graphNodeId"),
                }
                sink.put(own.key, "transfers", table_of("transfers", table))
                own.transfers += batch.size
                own.transfer_ids.append(np.unique(correlation[correlation != 0]))


def _graph_trace_table(db: NsysDatabase) -> str | None:
    """Return the table of graphs that were traced as one block, under any of its names."""
    return next((name for name in sorted(db.columns) if name.endswith("GRAPH_TRACE")), None)


def _read_graph_traces(db: NsysDatabase, table: str, processes: _Processes) -> None:
    wanted = ("correlationId", "globalPid")
    selected = ", ".join(db.column(table, name) for name in wanted)
    for rows in db.batches(f'SELECT {selected} FROM "{table}"'):  # noqa: S608
        for process, own_rows in _by_process(rows, 1):
            own = processes.of(process)
            own.graph_traces += len(own_rows)
            own.graph_trace_ids.append(Batch(db.path, table, wanted, own_rows).ints("correlationId"))


def _ids(parts: list[Int64s]) -> Int64s:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _nothing(db: NsysDatabase) -> TraceSummary:
    """Summarise a sound export without a single GPU record or launch."""
    return TraceSummary(key="0", **_file(db), notes=("0 kernels: nothing ran on a GPU while this was recorded",))


def _summary(db: NsysDatabase, own: _Process) -> TraceSummary:
    launches = own.launches
    device = _ids(own.kernel_ids + own.transfer_ids)
    traced_whole = _ids(own.graph_trace_ids)
    launch_ids = np.unique(launches.all_ids())
    kernel_rows = np.concatenate(launches.kernel_rows) if launches.kernel_rows else np.empty(0, np.int64)
    node_rows = np.concatenate(launches.node_rows) if launches.node_rows else np.empty(0, np.int64)
    graph_ids = launches.ids("graph")
    graph_kernel = np.isin(kernel_rows, graph_ids) | (node_rows != 0)
    loose = ~np.isin(kernel_rows, launch_ids)
    before = loose & (kernel_rows != 0) & (kernel_rows < launch_ids.min()) if len(launch_ids) else loose & False
    unseen_graphs = int((~np.isin(graph_ids, device)).sum())
    lost_graphs = int((~np.isin(graph_ids, np.union1d(device, traced_whole))).sum())
    lost_kernels = int((~np.isin(launches.ids("kernel"), device)).sum())
    notes = []
    if own.graph_traces:
        notes.append(
            f"{own.graph_traces} graph replays were traced as one block: their kernels are invisible; {_AS_NODES}"
        )
    elif unseen_graphs and len(graph_ids):
        notes.append(f"{unseen_graphs} of {len(graph_ids)} graph launches show no kernel; {_AS_NODES}")
    if own.unresolved:
        notes.append(f"{own.unresolved} kernels have a name that StringIds does not hold")
    if KERNEL in db.columns and "graphNodeId" not in db.columns[KERNEL]:
        notes.append(f"no graph node ids in this schema ({db.tool}): graph attribution is not available")
    file = _file(db)
    return TraceSummary(
        key=own.key,
        **file,
        kernels=own.kernels,
        graph_kernels=int(graph_kernel.sum()),
        transfers=own.transfers,
        launches=launches.count,
        graph_launches=len(graph_ids),
        launches_without_kernel=lost_kernels + lost_graphs,
        launches_while_capturing=launches.while_capturing,
        kernels_without_launch=int(loose.sum()),
        submitted_before_window=int(before.sum()),
        duplicates=own.duplicates,
        untimed=own.clock.untimed,
        invalid_times=own.clock.invalid,
        overlapping=own.clock.overlapping,
        summed_ns=own.clock.summed_ns,
        busy_ns=own.clock.busy_ns,
        first_kernel_ns=own.clock.first_ns,
        last_kernel_ns=own.clock.last_ns,
        ranges=own.ranges,
        node_ids=not own.graph_traces and not unseen_graphs and bool((node_rows[graph_kernel] != 0).all()),
        events={"kernels": own.kernels, "graph_traces": own.graph_traces, "launches": launches.count},
        truncated_names=sum(map(is_truncated, own.names)),
        notes=tuple(notes),
    )


def _file(db: NsysDatabase) -> dict[str, Any]:
    """Return what holds for every process of a file."""
    damage, lost = db.damage(), None
    if db.has("DIAGNOSTIC_EVENT", "text"):
        texts = (str(row[0]) for row in db.rows("SELECT text FROM DIAGNOSTIC_EVENT"))
        lost = next((text.splitlines()[0] for text in texts if text and any(w in text.lower() for w in _LOST)), None)
    versions = {"nsys": db.meta.get("EXPORT_PRODUCT_VERSION"), "schema": db.schema_version}
    return {
        "path": str(db.path),
        "sha256": sha256_of(db.path),
        "size_bytes": db.path.stat().st_size,
        "format": "nsys-sqlite",
        "format_version": db.schema_version,
        "whole": lost is None and damage is None,
        "cut": f"damaged: {damage}" if damage else (f"nsys says: {lost}" if lost else None),
        "versions": {name: value for name, value in versions.items() if value},
    }
