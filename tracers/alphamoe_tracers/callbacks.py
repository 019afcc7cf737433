"""What CUPTI calls: activity buffers asked for and completed, graph nodes made, modules loaded.

Callbacks come from CUDA calls of the traced program and from CUPTI's own thread. They hand over and return: they decode
nothing, take no lock of ours, call nothing of CUDA, and let no exception out (ctypes would print it and go on).
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from threading import get_native_id
from typing import Any

import numpy as np
import numpy.typing as npt

from alphamoe_tracers import libcupti
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.libcupti import Libcupti
from alphamoe_tracers.source import LoadedModule, RawBuffer, Sink

BUFFER_BYTES = 4 << 20
MOST_BUFFERS = 256
"""Above a GiB of records that are not sent yet a request is declined: CUPTI then drops records and counts them."""

MODULE_LOADED = 6
GRAPHNODE_CREATED = 13
GRAPHNODE_CLONED = 20


class _ResourceData(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("descriptor", ctypes.c_void_p))


class _ModuleData(ctypes.Structure):
    _fields_ = (("module_id", ctypes.c_uint32), ("cubin_size", ctypes.c_size_t), ("cubin", ctypes.c_void_p))


class _GraphData(ctypes.Structure):
    _fields_ = (
        ("graph", ctypes.c_void_p),
        ("original_graph", ctypes.c_void_p),
        ("node", ctypes.c_void_p),
        ("original_node", ctypes.c_void_p),
        ("node_type", ctypes.c_int),
        ("dependency", ctypes.c_void_p),
        ("graph_exec", ctypes.c_void_p),
    )


class BufferPool:
    """Reused memory for activity buffers. Its methods may be called from any thread."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES, most: int = MOST_BUFFERS) -> None:
        self.buffer_bytes = buffer_bytes
        self._most = most
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._free: deque[int] = deque()

    def take(self) -> int:
        """Return the address of a free buffer, eight-byte aligned, or 0 when all are waiting to be sent."""
        try:
            return self._free.pop()
        except IndexError:
            if len(self._memory) >= self._most:
                return 0
        memory = np.empty(self.buffer_bytes, np.uint8)
        address = int(memory.ctypes.data)
        self._memory[address] = memory
        return address

    def view(self, address: int, valid_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the valid bytes of a buffer that was taken."""
        return self._memory[address][:valid_bytes]

    def give_back(self, address: int) -> None:
        """Make a buffer free again."""
        self._free.append(address)


class ProcessCallbacks:
    """The C callbacks of this process and the memory behind them; see :func:`process_callbacks`."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.declined = 0
        """Requests for a buffer that were declined."""
        self._sink: Sink | None = None
        self._get_node_id: Any = None
        self._timestamp: Any = None
        self.requested = libcupti.BufferRequested(self._on_requested)
        self.completed = libcupti.BufferCompleted(self._on_completed)
        self.resource = libcupti.Callback(self._on_resource)

    def connect(self, sink: Sink, lib: Libcupti) -> None:
        """Hand over to ``sink`` from now on."""
        self._get_node_id, self._timestamp = lib.function("cuptiGetGraphNodeId"), lib.function("cuptiGetTimestamp")
        self._sink = sink

    def disconnect(self) -> None:
        """Hand over to nobody; what still comes is dropped."""
        self._sink = None

    def _on_requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        address = self.pool.take()
        if not address:
            self.declined += 1
        buffer[0] = address or None
        size[0] = self.pool.buffer_bytes if address else 0
        most_records[0] = 0

    def _on_completed(self, _context: int | None, _stream: int, address: int, _size: int, valid_bytes: int) -> None:
        sink = self._sink
        if valid_bytes and sink is not None:
            sink.put_buffer(RawBuffer(self.pool.view(address, valid_bytes), lambda: self.pool.give_back(address)))
        elif address:
            self.pool.give_back(address)

    def _on_resource(self, _userdata: int | None, _domain: int, cbid: int, data: int) -> None:
        sink = self._sink
        descriptor = _ResourceData.from_address(data).descriptor
        if sink is None or not descriptor:
            return
        now = ctypes.c_uint64()
        self._timestamp(ctypes.byref(now))
        if cbid == MODULE_LOADED:
            module = _ModuleData.from_address(descriptor)
            if module.cubin and module.cubin_size:
                # The image is only valid inside this call; hashing it can wait.
                sink.put_module(LoadedModule(ctypes.string_at(module.cubin, module.cubin_size), now.value))
            return
        graph = _GraphData.from_address(descriptor)
        node, original = ctypes.c_uint64(), ctypes.c_uint64()
        if self._get_node_id(graph.node, ctypes.byref(node)):
            return
        if cbid == GRAPHNODE_CLONED and graph.original_node:
            self._get_node_id(graph.original_node, ctypes.byref(original))
        sink.put_node(GraphNode(node.value, original.value, get_native_id(), now.value))


@cache
def process_callbacks() -> ProcessCallbacks:
    """Return the callbacks of this process, which live as long as it does.

    CUPTI may keep a buffer, or call back, after a recording has ended: memory and callbacks are never freed.
    """
    return ProcessCallbacks()
