"""The thread between callbacks and disk: it decodes completed buffers and writes parts by period."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from alphamoe_tracers import tables
from alphamoe_tracers.activity import BrokenBufferError, Kind, decode_buffer
from alphamoe_tracers.graph_nodes import GraphNode, graph_nodes_table
from alphamoe_tracers.modules import ModuleLog
from alphamoe_tracers.parts import Parts
from alphamoe_tracers.range_pairing import RangePairer
from alphamoe_tracers.records import TABLES
from alphamoe_tracers.replay import RawKeeper
from alphamoe_tracers.source import ActivitySource, LoadedModule, RawBuffer


class RecordWriter:
    """Takes what a source hands over (it is the source's sink) and turns it into parts on disk.

    All state but the queue belongs to one thread at a time: the writer thread, and after :meth:`finish` the caller's.
    """

    def __init__(self, out: Path, rank: int, source: ActivitySource, period_s: float, keeper: RawKeeper | None) -> None:
        self.parts = {name: Parts(out, name, rank) for name in TABLES}
        self.modules = ModuleLog(out / "modules" / f"rank={rank}.jsonl")
        self.symbols = tables.StringTable(source.resolve if keeper is None else keeper.resolving(source.resolve))
        self.labels = tables.StringTable(self.symbols.resolve)
        self.pairer = RangePairer()
        self.failure: str | None = None
        """Why recording ended early; what was written before is kept."""
        self.broken_buffers = 0
        self.notes: dict[str, None] = {}
        """What went wrong without ending the recording, each once, in order."""
        self._source = source
        self._period_s = period_s
        self._keeper = keeper
        self._nodes: list[GraphNode] = []
        self._symbols_written = 0
        # SimpleQueue.put may be interrupted by another callback on the same thread; Queue.put may not.
        self._queue: queue.SimpleQueue[RawBuffer | GraphNode | LoadedModule | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="alphamoe-collector", daemon=True)

    def put_buffer(self, buffer: RawBuffer) -> None:
        """Queue a completed buffer."""
        self._queue.put(buffer)

    def put_node(self, node: GraphNode) -> None:
        """Queue a graph node."""
        self._queue.put(node)

    def put_module(self, module: LoadedModule) -> None:
        """Queue a module image."""
        self._queue.put(module)

    def start(self) -> None:
        """Start the thread."""
        tables.symbols_table(["_Z1fv"], 0, {})  # loads the demangler now, not while something is being measured
        self._thread.start()

    def barrier(self) -> None:
        """Wait until everything queued so far is decoded and written as parts."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.5) and self._thread.is_alive():
            pass

    def finish(self) -> None:
        """Decode the rest and end the thread; the last rows stay staged for the compaction."""
        self._queue.put(None)
        self._thread.join()
        self._stage_nodes()
        self.parts["ranges"].append(self.pairer.finish(self.labels.strings))

    def write_parts(self) -> None:
        """Make everything decoded so far durable."""
        self._stage_nodes()
        names = self.symbols.strings
        if len(names) > self._symbols_written:
            self.parts["symbols"].append(tables.symbols_table(names, self._symbols_written, {}))
            self._symbols_written = len(names)
        for parts in self.parts.values():
            parts.write()

    def _run(self) -> None:
        next_flush = time.monotonic() + self._period_s
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, next_flush - time.monotonic()))
                if item is None:
                    return
                self._guarded(item)
            except queue.Empty:
                pass
            if time.monotonic() >= next_flush:
                self._flush_and_write()
                next_flush = time.monotonic() + self._period_s

    def _flush_and_write(self) -> None:
        """Ask for completed records; those that arrive meanwhile are decoded first, then all is written."""
        done = threading.Event()
        try:
            self._source.flush(forced=False)
        except Exception as error:  # whatever CUPTI says, the traced program goes on
            self.notes.setdefault(f"periodic flush: {error}")
        self._queue.put(done)

    def _guarded(self, item: RawBuffer | GraphNode | LoadedModule | threading.Event) -> None:
        try:
            if self.failure is None:
                self._handle(item)
        except OSError as error:
            self._end_early(
                f"recording ended early, {error.strerror or error}: rows up to the last closed part are kept"
            )
        except Exception as error:  # a fault of ours must be told, and must not cost the traced program anything
            self._end_early(f"recording ended early by a fault of the collector, {type(error).__name__}: {error}")
        finally:
            if isinstance(item, RawBuffer):
                item.release()
            elif isinstance(item, threading.Event):
                item.set()

    def _end_early(self, reason: str) -> None:
        self.failure = reason
        try:
            self._source.stop()
        except Exception as error:  # as above
            self.notes.setdefault(f"stop: {error}")

    def _handle(self, item: RawBuffer | GraphNode | LoadedModule | threading.Event) -> None:
        if isinstance(item, RawBuffer):
            self._decode(item.data)
        elif isinstance(item, GraphNode):
            self._nodes.append(item)
            if self._keeper is not None:
                self._keeper.nodes.append(item)
        elif isinstance(item, LoadedModule):
            self.modules.add(item.image, item.loaded_ns)
            if self._keeper is not None:
                self._keeper.modules.append(item)
        else:
            self.write_parts()

    def _decode(self, data: npt.NDArray[np.uint8]) -> None:
        source, layouts = self._source, self._source.layouts
        if self._keeper is not None:
            self._keeper.buffers.append(data.copy())
        try:
            records = decode_buffer(data, layouts)
        except BrokenBufferError:
            self.broken_buffers += 1
            records = decode_buffer(data, layouts, source.record_starts(data))

        def of(kind: Kind) -> np.ndarray:
            return records.get(kind, np.empty(0, layouts.dtypes[kind]))

        stage = self.parts
        stage["kernels"].append(tables.kernels_table(of(Kind.CONCURRENT_KERNEL), source.process, self.symbols))
        if Kind.RUNTIME in records or Kind.DRIVER in records:
            launches = tables.launches_table(of(Kind.RUNTIME), of(Kind.DRIVER), source.api_names())
            stage["launches"].append(launches)
        if Kind.MEMCPY in records or Kind.MEMSET in records:
            stage["transfers"].append(tables.transfers_table(of(Kind.MEMCPY), of(Kind.MEMSET), source.process))
        if Kind.MARKER in records or Kind.MARKER_DATA in records:
            marker_rows = tables.markers(of(Kind.MARKER), self.labels)
            payload_rows = tables.payloads(of(Kind.MARKER_DATA))
            stage["ranges"].append(self.pairer.add(marker_rows, payload_rows, self.labels.strings))

    def _stage_nodes(self) -> None:
        if self._nodes:
            self.parts["graph_nodes"].append(graph_nodes_table(self._nodes, self._source.process))
            self._nodes = []
