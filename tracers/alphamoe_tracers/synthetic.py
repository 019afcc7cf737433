"""Made-up activity in CUPTI's own record formats, for tests and for machines without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alphamoe_tracers.activity import BrokenBufferError, Kind, Layouts
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.range_pairing import MARKER_END, MARKER_START, OBJECT_PROCESS, OBJECT_THREAD
from alphamoe_tracers.records import SentinelKind
from alphamoe_tracers.sentinels import sentinel_shape, sentinel_symbol
from alphamoe_tracers.source import LoadedModule, RawBuffer, Sink

RECORD_SIZES = {1: 96, 2: 88, 4: 40, 5: 40, 9: 32, 10: 216, 12: 56, 13: 40, 17: 56, 38: 56}
"""Bytes by kind as libcupti 13.0 writes them (device, overhead and synchronisation records too, which are skipped)."""

_APIS = {
    (Kind.RUNTIME, 211): "cudaLaunchKernel",
    (Kind.RUNTIME, 311): "cudaGraphLaunch",
    (Kind.DRIVER, 307): "cuLaunchKernel",
    (Kind.DRIVER, 514): "cuGraphLaunch",
}
_CBIDS = {name: key for key, name in _APIS.items()}
_PAYLOAD_INT64 = 4

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class SyntheticKernel:
    """A kernel to be recorded; ``graph_node_id`` is 0 outside graphs."""

    symbol: str
    grid: Shape = (1, 1, 1)
    block: Shape = (32, 1, 1)
    cluster: Shape = (0, 0, 0)
    dynamic_smem_bytes: int = 0
    graph_node_id: int = 0
    duration_ns: int = 1000


class SyntheticSource:
    """An :class:`~alphamoe_tracers.source.ActivitySource` whose records are made by its methods.

    Every method advances a clock of its own; what was made is handed over at a flush, as one buffer.
    """

    def __init__(self, *, process: int = 4242, thread: int = 77, start_ns: int = 1_000_000, dropped: int = 0) -> None:
        self.layouts = Layouts.choose(RECORD_SIZES)
        self.process = process
        self.thread = thread
        self.library: str | None = "synthetic"
        self.version: int | None = 130001
        self.python_version: str | None = None
        self.skipped_api_ids: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ("synthetic activity",)
        self.time_ns = start_ns
        self.loses_sentinels = False
        """Whether sentinels are launched but leave no record, as when a collector was not live."""
        self._dropped = dropped
        self._sink: Sink | None = None
        self._strings: dict[int, bytes] = {}
        self._pointers: dict[str, int] = {}
        self._records: list[bytes] = []
        self._nodes: list[GraphNode] = []
        self._modules: list[LoadedModule] = []
        self._open: dict[int, list[int]] = {}
        self._next_marker = 1
        self._next_correlation = 1
        self._next_node = 1 << 32

    # What a test or an engine without a GPU makes.

    def eager(self, kernel: SyntheticKernel, *, stream: int = 7, thread: int | None = None) -> None:
        """Launch one kernel: a runtime record, the driver record under it, and the kernel."""
        correlation = self._launch("cudaLaunchKernel", "cuLaunchKernel", thread)
        self._kernel(kernel, correlation, stream, graph_id=0)

    def replay(self, kernels: Iterable[SyntheticKernel], *, stream: int = 7, thread: int | None = None) -> None:
        """Launch a graph: one launch record, and kernels with node ids that share its correlation id."""
        correlation = self._launch("cudaGraphLaunch", "cuGraphLaunch", thread)
        for kernel in kernels:
            self._kernel(kernel, correlation, stream, graph_id=kernel.graph_node_id >> 32)

    def node(self, original: int = 0, *, thread: int | None = None) -> int:
        """Create a graph node (a clone when ``original`` is given) and return its id."""
        self._next_node += 1
        self._nodes.append(GraphNode(self._next_node, original, thread or self.thread, self._tick()))
        return self._next_node

    def module(self, image: bytes) -> None:
        """Load a module."""
        self._modules.append(LoadedModule(image, self._tick()))

    def push(
        self, name: str, payload: int | None = None, *, thread: int | None = None, domain: str = "alphamoe"
    ) -> None:
        """Open a push/pop range."""
        thread = thread or self.thread
        marker = self.marker(MARKER_START, name, thread=thread, domain=domain)
        self._open.setdefault(thread, []).append(marker)
        if payload is not None:
            fields = {"id": marker, "payload_kind": _PAYLOAD_INT64, "payload": payload}
            self.record(Kind.MARKER_DATA, fields)

    def pop(self, *, thread: int | None = None) -> None:
        """Close the innermost range of a thread; without one, a stray end is recorded."""
        thread = thread or self.thread
        opened = self._open.get(thread)
        self.marker(MARKER_END, marker=opened.pop() if opened else None, thread=thread)

    def marker(
        self,
        flags: int,
        name: str | None = None,
        *,
        marker: int | None = None,
        thread: int | None = None,
        domain: str = "alphamoe",
        of_process: bool = False,
    ) -> int:
        """Record one marker and return its id."""
        if marker is None:
            marker, self._next_marker = self._next_marker, self._next_marker + 1
        fields = {
            "flags": flags,
            "timestamp": self._tick(),
            "id": marker,
            "object_kind": OBJECT_PROCESS if of_process else OBJECT_THREAD,
            "process_id": self.process,
            "thread_id": thread or self.thread,
            "name": 0 if name is None else self.pointer(name),
            "domain": self.pointer(domain),
        }
        self.record(Kind.MARKER, fields)
        return marker

    def memcpy(self, copy_kind: int, size_bytes: int, *, stream: int = 7) -> None:
        """Record a memcpy of a CUpti_ActivityMemcpyKind."""
        start, end = self._tick(), self._tick(500)
        fields = {"copy_kind": copy_kind, "bytes": size_bytes, "start": start, "end": end, "stream_id": stream}
        self.record(Kind.MEMCPY, {**fields, "correlation_id": self._correlation()})

    def memset(self, size_bytes: int, *, stream: int = 7) -> None:
        """Record a memset."""
        start, end = self._tick(), self._tick(500)
        fields = {"bytes": size_bytes, "start": start, "end": end, "stream_id": stream}
        self.record(Kind.MEMSET, {**fields, "correlation_id": self._correlation()})

    def record(self, kind: int, fields: Mapping[str, Any]) -> None:
        """Append a record of any known kind; fields that are not given are zero."""
        dtype = self.layouts.dtypes.get(Kind(kind)) if kind in list(Kind) else None
        row = np.zeros(1, dtype or np.dtype(("V", self.layouts.sizes[kind])))
        for name, value in fields.items():
            row[name] = value
        self.raw(struct.pack("<I", kind) + row.tobytes()[4:])

    def raw(self, record: bytes) -> None:
        """Append the bytes of a record as they are."""
        self._records.append(record)

    def repeat_last(self) -> None:
        """Deliver the last record a second time."""
        self._records.append(self._records[-1])

    def pointer(self, text: str) -> int:
        """Return the made-up address of a string."""
        if text not in self._pointers:
            address = 0x7F00_0000_0000 + 64 * len(self._pointers)
            self._pointers[text] = address
            self._strings[address] = text.encode()
        return self._pointers[text]

    # What the collector asks for.

    def start(self, sink: Sink) -> None:
        """Remember where to hand over to."""
        self._sink = sink

    def api_names(self) -> Mapping[tuple[int, int], str]:
        """Return the launch calls that can be made."""
        return {(int(kind), cbid): name for (kind, cbid), name in _APIS.items()}

    def resolve(self, pointer: int) -> bytes:
        """Return the string at a made-up address."""
        return self._strings.get(pointer, b"")

    def record_starts(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """There is no library that could walk a broken buffer."""
        raise BrokenBufferError(f"a synthetic buffer of {len(data)} bytes is broken")

    def now_ns(self) -> int:
        """Return the made-up time."""
        return self._tick()

    def synchronize(self) -> None:
        """There is no device to wait for."""

    def launch_sentinel(self, kind: SentinelKind, number: int) -> None:
        """Record the sentinel as CUPTI would."""
        if kind == "graph_step":
            self.node()
        elif not self.loses_sentinels:
            node = self.node(self.node()) if kind.startswith("graph_") else 0
            blocks, threads = sentinel_shape(number)
            sentinel = SyntheticKernel(
                sentinel_symbol(kind), grid=(blocks, 1, 1), block=(threads, 1, 1), graph_node_id=node
            )
            if node:
                self.replay([sentinel])
            else:
                self.eager(sentinel)

    def flush(self, forced: bool) -> None:
        """Hand over what was made since the last flush."""
        if self._sink is None:
            return
        modules, self._modules = self._modules, []
        nodes, self._nodes = self._nodes, []
        records, self._records = self._records, []
        for module in modules:
            self._sink.put_module(module)
        for node in nodes:
            self._sink.put_node(node)
        if records:
            self._sink.put_buffer(RawBuffer(np.frombuffer(b"".join(records), np.uint8).copy()))

    def dropped(self) -> int:
        """Return the count that was asked for."""
        return self._dropped

    def stop(self) -> None:
        """Hand over the rest."""
        self.flush(forced=True)

    def _launch(self, runtime: str, driver: str, thread: int | None) -> int:
        correlation = self._correlation()
        begin, inner, inner_end, end = self._tick(), self._tick(), self._tick(), self._tick()
        for name, start_ns, end_ns in ((driver, inner, inner_end), (runtime, begin, end)):
            kind, cbid = _CBIDS[name]
            fields = {"cbid": cbid, "start": start_ns, "end": end_ns, "correlation_id": correlation}
            self.record(kind, {**fields, "process_id": self.process, "thread_id": thread or self.thread})
        return correlation

    def _kernel(self, kernel: SyntheticKernel, correlation: int, stream: int, graph_id: int) -> None:
        start = self._tick()
        fields: dict[str, Any] = {
            "start": start,
            "end": self._tick(kernel.duration_ns),
            "context_id": 1,
            "stream_id": stream,
            "correlation_id": correlation,
            "name": self.pointer(kernel.symbol),
            "graph_id": graph_id,
            "graph_node_id": kernel.graph_node_id,
            "dynamic_shared_memory": kernel.dynamic_smem_bytes,
            "registers_per_thread": 32,
        }
        for name, shape in (("grid", kernel.grid), ("block", kernel.block), ("cluster", kernel.cluster)):
            fields.update({f"{name}_{axis}": size for axis, size in zip("xyz", shape, strict=True)})
        self.record(Kind.CONCURRENT_KERNEL, fields)

    def _correlation(self) -> int:
        self._next_correlation += 1
        return self._next_correlation

    def _tick(self, by_ns: int = 10) -> int:
        self.time_ns += by_ns
        return self.time_ns
