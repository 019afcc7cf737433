"""Activity records of this process from CUPTI: what is enabled, in which order, and how it ends."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from alphamoe_tracers import libcupti
from alphamoe_tracers.activity import Kind, Layouts, UnknownLayoutError
from alphamoe_tracers.callbacks import GRAPHNODE_CLONED, GRAPHNODE_CREATED, MODULE_LOADED, process_callbacks
from alphamoe_tracers.libcupti import CuptiError, Libcupti
from alphamoe_tracers.records import SentinelKind
from alphamoe_tracers.sentinels import SentinelKernels
from alphamoe_tracers.source import Sink, SourceUnavailableError

_ENABLED = (Kind.CONCURRENT_KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.MARKER, Kind.MARKER_DATA)
_API_DOMAINS = ((Kind.DRIVER, 1, "cuptiActivityEnableDriverApi"), (Kind.RUNTIME, 2, "cuptiActivityEnableRuntimeApi"))
_RESOURCE_DOMAIN = 3
_THREAD_ID_SYSTEM = 1
_FLUSH_FORCED = 1


class CuptiSource:
    """The real source; one at a time in a process, since CUPTI has one subscriber."""

    def __init__(self, *, kernels_only: bool = False) -> None:
        """Prepare.

        Args:
            kernels_only: record kernels and nothing else, to measure what the rest costs.
        """
        self._kinds = (Kind.CONCURRENT_KERNEL,) if kernels_only else _ENABLED
        self._api_domains = () if kernels_only else _API_DOMAINS
        self.layouts = Layouts({}, {}, "")
        self.process = os.getpid()
        self.library: str | None = None
        self.version: int | None = None
        self.python_version = libcupti.python_version()
        self.skipped_api_ids: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._api_names: dict[tuple[int, int], str] = {}
        self._enabled_kinds: list[Kind] = []
        self._enabled_apis: list[tuple[str, int]] = []
        self._dropped = 0
        self._declined_before = process_callbacks().declined
        self._sentinels = SentinelKernels()
        self._subscriber = ctypes.c_void_p()
        self._lib: Libcupti | None = None
        self._walker: Libcupti | None = None
        self._stopping = threading.Lock()

    def start(self, sink: Sink) -> None:
        """Subscribe, register buffers and enable what is recorded."""
        _require_device()
        lib = libcupti.load()
        try:
            self.library = lib.path
            # Subscribing comes first: it is what another tool makes impossible, and it initialises the library.
            lib.call("cuptiSubscribe", ctypes.byref(self._subscriber), process_callbacks().resource, None)
            self.version = lib.version()
            self.layouts = Layouts.choose(lib.record_sizes(), libcupti.exposed_kernel_dtypes())
            self._enable(lib, sink)
            self._lib = self._walker = lib
            if os.environ.get(libcupti.NVTX_INJECTION) != lib.path:
                self.notes += ("NVTX ranges are not recorded: call prepare_environment() before CUDA and NVTX start",)
        except CuptiError as error:
            self._withdraw(lib)
            raise SourceUnavailableError(str(error)) from error
        except UnknownLayoutError as error:
            self._withdraw(lib)
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
        """Walk a buffer with cuptiActivityGetNextRecord; works after a stop too."""
        if self._walker is None:
            raise SourceUnavailableError("the collector is not recording")
        return self._walker.record_starts(data)

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
        """Have CUPTI hand over its buffers; completed ones arrive through the sink before this returns.

        After a stop there is nothing left to hand over.
        """
        lib = self._lib
        if lib is not None:
            lib.call("cuptiActivityFlushAll", _FLUSH_FORCED if forced else 0)

    def dropped(self) -> int:
        """Return the records dropped since the start; after a stop, those of the whole recording."""
        if self._lib is not None:
            self._dropped += self._lib.dropped()
        return self._dropped

    def stop(self) -> None:
        """Disable everything, have the rest handed over, and give up the subscription."""
        with self._stopping:  # a failed recording is stopped by another thread than the program's
            lib = self._lib
            if lib is None:
                return
            self._withdraw(lib)
            self._dropped += lib.dropped()
        declined = process_callbacks().declined - self._declined_before
        if declined:
            self.notes += (f"{declined} buffer requests were declined: the scribe fell a GiB behind",)

    def _enable(self, lib: Libcupti, sink: Sink) -> None:
        callbacks = process_callbacks()
        callbacks.connect(sink, lib)
        # Thread ids of records must be those that graph-node callbacks see; the default is pthread_self.
        lib.call("cuptiSetThreadIdType", _THREAD_ID_SYSTEM)
        lib.call("cuptiActivityRegisterCallbacks", callbacks.requested, callbacks.completed)
        for cbid in (MODULE_LOADED, GRAPHNODE_CREATED, GRAPHNODE_CLONED):
            lib.call("cuptiEnableCallback", 1, self._subscriber, _RESOURCE_DOMAIN, cbid)
        for kind in self._kinds:
            lib.call("cuptiActivityEnable", int(kind))
            self._enabled_kinds.append(kind)
        skipped = []
        for kind, domain, enable in self._api_domains:
            for cbid, name in lib.callback_names(domain).items():
                if "aunch" not in name or "HostFunc" in name:  # a host function runs no kernel
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
        """Undo what start did, and only that: what was not enabled here may belong to another tool."""
        self._lib = None
        for enable, cbid in self._enabled_apis:
            lib.function(enable)(cbid, 0)
        self._enabled_apis.clear()
        if self._enabled_kinds:
            for kind in self._enabled_kinds:
                lib.function("cuptiActivityDisable")(int(kind))
            lib.function("cuptiActivityFlushAll")(_FLUSH_FORCED)
        self._enabled_kinds.clear()
        if self._subscriber.value:  # otherwise the callbacks may serve a collector that was here first
            process_callbacks().disconnect()
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
