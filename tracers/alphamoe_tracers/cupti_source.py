"""Activity records of this process from CUPTI: what is enabled, the buffers, and the resource callbacks.

Callbacks come from CUDA calls of the traced program and from CUPTI's own thread. They hand over and return: they decode
nothing, take no lock of ours, call nothing of CUDA, and let no exception out (ctypes would print it and go on).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from collections.abc import Mapping
from threading import get_native_id
from typing import Any

import numpy as np
import numpy.typing as npt

from alphamoe_tracers import libcupti
from alphamoe_tracers.activity import Kind, Layouts, UnknownLayoutError
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.libcupti import CuptiError, Libcupti
from alphamoe_tracers.records import SentinelKind
from alphamoe_tracers.sentinels import SentinelKernels
from alphamoe_tracers.source import LoadedModule, RawBuffer, Sink, SourceUnavailableError

BUFFER_BYTES = 2 << 20
MOST_BUFFERS = 512
"""Above a GiB of undecoded records a request is declined: CUPTI then drops records and counts them."""

_ENABLED = (Kind.CONCURRENT_KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.MARKER, Kind.MARKER_DATA)
_API_DOMAINS = ((Kind.DRIVER, 1, "cuptiActivityEnableDriverApi"), (Kind.RUNTIME, 2, "cuptiActivityEnableRuntimeApi"))
_RESOURCE_DOMAIN = 3
_MODULE_LOADED = 6
_GRAPHNODE_CREATED = 13
_GRAPHNODE_CLONED = 20
_THREAD_ID_SYSTEM = 1
_FLUSH_FORCED = 1


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
        """Return the address of a free buffer, eight-byte aligned, or 0 when all are waiting to be decoded."""
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


class CuptiSource:
    """The real source; one at a time in a process, since CUPTI has one subscriber."""

    def __init__(self) -> None:
        self.layouts = Layouts({}, {}, "")
        self.process = os.getpid()
        self.library: str | None = None
        self.version: int | None = None
        self.python_version = libcupti.python_version()
        self.skipped_api_ids: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._api_names: dict[tuple[int, int], str] = {}
        self._enabled_apis: list[tuple[str, int]] = []
        self._pool = BufferPool()
        self._dropped = 0
        self._declined = 0
        self._sentinels = SentinelKernels()
        self._callbacks: list[Any] = []  # ctypes frees a callback that nothing refers to, even while C code holds it
        self._subscriber = ctypes.c_void_p()
        self._lib: Libcupti | None = None

    def start(self, sink: Sink) -> None:
        """Subscribe, register buffers and enable what is recorded."""
        _require_device()
        lib = libcupti.load()
        try:
            self.library, self.version = lib.path, lib.version()
            self.layouts = Layouts.choose(lib.record_sizes(), libcupti.exposed_kernel_dtypes())
            self._subscribe(lib, sink)
            self._lib = lib
            self._enable(lib, sink)
        except CuptiError as error:
            self._withdraw(lib)
            raise SourceUnavailableError(str(error)) from error
        except UnknownLayoutError as error:
            raise SourceUnavailableError(
                f"libcupti {self.version} writes records that this version cannot read ({error}): update alphamoe-trace"
            ) from error

    def api_names(self) -> Mapping[tuple[int, int], str]:
        """Return the launch calls that are recorded, version suffixes removed (``cudaLaunchKernel``)."""
        return self._api_names

    def resolve(self, pointer: int) -> bytes:
        """Read a C string of this process."""
        return ctypes.string_at(pointer)

    def record_starts(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Walk a buffer with cuptiActivityGetNextRecord."""
        return self._library().record_starts(data)

    def now_ns(self) -> int:
        """Return cuptiGetTimestamp."""
        return self._library().now_ns()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._sentinels.synchronize()

    def launch_sentinel(self, kind: SentinelKind, number: int) -> None:
        """Launch a sentinel on the current stream."""
        self._sentinels.launch(kind, number)

    def flush(self, forced: bool) -> None:
        """Have CUPTI hand over its buffers; completed ones arrive through the sink before this returns."""
        self._library().call("cuptiActivityFlushAll", _FLUSH_FORCED if forced else 0)

    def dropped(self) -> int:
        """Return the records dropped since the start; after a stop, those of the whole recording."""
        if self._lib is not None:
            self._dropped += self._lib.dropped()
        return self._dropped

    def stop(self) -> None:
        """Disable everything, have the rest handed over, and give up the subscription."""
        lib = self._lib
        if lib is None:
            return
        self._withdraw(lib)
        self._dropped += lib.dropped()
        if self._declined:
            self.notes += (f"{self._declined} buffer requests were declined: decoding fell a GiB behind",)

    def _subscribe(self, lib: Libcupti, sink: Sink) -> None:
        get_node_id, timestamp = lib.function("cuptiGetGraphNodeId"), lib.function("cuptiGetTimestamp")

        def on_resource(_userdata: int | None, _domain: int, cbid: int, data: int) -> None:
            descriptor = _ResourceData.from_address(data).descriptor
            if not descriptor:
                return
            now = ctypes.c_uint64()
            timestamp(ctypes.byref(now))
            if cbid == _MODULE_LOADED:
                module = _ModuleData.from_address(descriptor)
                if module.cubin and module.cubin_size:
                    sink.put_module(LoadedModule(ctypes.string_at(module.cubin, module.cubin_size), now.value))
                return
            graph = _GraphData.from_address(descriptor)
            node, original = ctypes.c_uint64(), ctypes.c_uint64()
            if get_node_id(graph.node, ctypes.byref(node)):
                return
            if cbid == _GRAPHNODE_CLONED and graph.original_node:
                get_node_id(graph.original_node, ctypes.byref(original))
            sink.put_node(GraphNode(node.value, original.value, get_native_id(), now.value))

        callback = libcupti.Callback(on_resource)
        self._callbacks.append(callback)
        lib.call("cuptiSubscribe", ctypes.byref(self._subscriber), callback, None)

    def _enable(self, lib: Libcupti, sink: Sink) -> None:
        pool = self._pool

        def on_requested(buffer: Any, size: Any, most_records: Any) -> None:
            address = pool.take()
            if not address:
                self._declined += 1
            buffer[0] = address or None
            size[0] = pool.buffer_bytes if address else 0
            most_records[0] = 0

        def on_completed(_context: int | None, _stream: int, address: int, _size: int, valid_bytes: int) -> None:
            if valid_bytes:
                sink.put_buffer(RawBuffer(pool.view(address, valid_bytes), lambda: pool.give_back(address)))
            else:
                pool.give_back(address)

        requested, completed = libcupti.BufferRequested(on_requested), libcupti.BufferCompleted(on_completed)
        self._callbacks += [requested, completed]
        # Thread ids of records must be those that graph-node callbacks see; the default is pthread_self.
        lib.call("cuptiSetThreadIdType", _THREAD_ID_SYSTEM)
        lib.call("cuptiActivityRegisterCallbacks", requested, completed)
        for cbid in (_MODULE_LOADED, _GRAPHNODE_CREATED, _GRAPHNODE_CLONED):
            lib.call("cuptiEnableCallback", 1, self._subscriber, _RESOURCE_DOMAIN, cbid)
        for kind in _ENABLED:
            lib.call("cuptiActivityEnable", int(kind))
        skipped = []
        for kind, domain, enable in _API_DOMAINS:
            for cbid, name in lib.callback_names(domain).items():
                if "aunch" not in name:
                    continue
                try:
                    lib.call(enable, cbid, 1)
                except CuptiError:
                    skipped.append(name)
                    continue
                self._enabled_apis.append((enable, cbid))
                self._api_names[kind, cbid] = re.sub(r"(_ptsz)?(_v\d+)?$", "", name).lstrip("_")
        self.skipped_api_ids = tuple(skipped)

    def _withdraw(self, lib: Libcupti) -> None:
        """Undo what start did, as far as it got; what fails here cannot be mended by anyone."""
        self._lib = None
        for enable, cbid in self._enabled_apis:
            lib.function(enable)(cbid, 0)
        self._enabled_apis.clear()
        for kind in _ENABLED:
            lib.function("cuptiActivityDisable")(int(kind))
        lib.function("cuptiActivityFlushAll")(_FLUSH_FORCED)
        if self._subscriber.value:
            lib.function("cuptiUnsubscribe")(self._subscriber)
            self._subscriber = ctypes.c_void_p()

    def _library(self) -> Libcupti:
        if self._lib is None:
            raise SourceUnavailableError("the collector is not recording")
        return self._lib


def _require_device() -> None:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise SourceUnavailableError(
            f"cuda-bindings cannot be imported ({error}): pip install cuda-bindings"
        ) from error
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:
        raise SourceUnavailableError(f"no CUDA device: {error}") from error
    count = driver.cuDeviceGetCount()[1] if int(status) == 0 else 0
    if not count:
        raise SourceUnavailableError(f"no CUDA device: cuInit says {status.name}")
