"""The libcupti that cupti-python works with, called through ctypes.

cupti-python knows the record layouts, and finds the library where no wheel holds it. The calls go through the C
interface: it is the same in every version, it never holds the interpreter lock, and no Python object per record comes
into being.
"""

from __future__ import annotations

import ctypes
import re
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from alphamoe_tracers.source import SourceUnavailableError

NVTX_INJECTION = "NVTX_INJECTION64_PATH"
"""Where NVTX looks, once, for the library that takes its ranges."""

MULTIPLE_SUBSCRIBERS = 39
INSUFFICIENT_PRIVILEGES = (35, 40)
_MAX_LIMIT_REACHED = 12
_KINDS = 64
_LAST_CBID = 4096
_LONGEST_GAP = 64

_REMEDIES = {
    MULTIPLE_SUBSCRIBERS: "another tool (nsys, torch.profiler, compute-sanitizer) already uses CUPTI: run without it",
    35: "the driver keeps profiling to administrators: set NVreg_RestrictProfilingToAdminUsers=0 or run as root",
    40: "profiling is not enabled for this virtual GPU: ask the host's administrator",
}

BufferRequested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
BufferCompleted = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class CuptiError(Exception):
    """A call of libcupti failed."""

    def __init__(self, call: str, status: int, name: str) -> None:
        remedy = _REMEDIES.get(status)
        super().__init__(f"{call} failed with {name} ({status})" + (f": {remedy}" if remedy else ""))
        self.status = status


def mapped_libraries(maps: str | None = None) -> tuple[str, ...]:
    """Return the paths of every libcupti that is mapped into this process.

    Args:
        maps: text in the format of ``/proc/self/maps``, read from there when left out.
    """
    if maps is None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = re.findall(r"(/\S*libcupti\.so\S*)", maps)
    return tuple(dict.fromkeys(paths))


def load() -> Libcupti:
    """Return the one libcupti of this process, loading it if need be.

    A library that is mapped already is used. Otherwise the one in the environment's wheels is loaded, because torch
    preloads that file by its path: a toolkit's copy found through the loader's search path would make two.

    Raises:
        SourceUnavailableError: cupti-python, the CUDA driver or libcupti is missing, or two libcupti are mapped.
    """
    try:
        from cupti import cupti
    except ImportError as error:
        raise SourceUnavailableError(
            f"cupti-python cannot be imported ({error}): pip install 'cupti-python>=13,<14'"
        ) from error
    if not _driver_present():
        raise SourceUnavailableError("no CUDA device: the driver's library libcuda.so.1 cannot be loaded")
    if not mapped_libraries():
        packaged = packaged_library()
        try:
            if packaged is not None:
                ctypes.CDLL(str(packaged), mode=ctypes.RTLD_GLOBAL)
            else:
                cupti.get_thread_id_type()  # the first call loads the library; what it answers does not matter
        except Exception as error:  # cupti-python raises types of its own private modules here
            if not mapped_libraries():
                raise SourceUnavailableError(
                    f"libcupti cannot be loaded ({error}): install nvidia-cuda-cupti>=13,<14"
                ) from error
    return Libcupti(_only_one(mapped_libraries()))


def _driver_present() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def packaged_library() -> Path | None:
    """Return the libcupti of the ``nvidia-cuda-cupti`` wheel, looked for beside torch first, or None."""
    roots = [
        Path(place) if name == "nvidia" else Path(place).parent / "nvidia"
        for name in ("torch", "nvidia")
        if (spec := util.find_spec(name)) is not None
        for place in spec.submodule_search_locations or ()
    ]
    found = (path for root in roots for path in sorted(root.glob("*/lib/libcupti.so.1[3-9]")))
    return next(found, None)


def _only_one(paths: tuple[str, ...]) -> str:
    if not paths:
        raise SourceUnavailableError("no libcupti is mapped although cupti-python was loaded: reinstall cupti-python")
    if len({str(Path(path).resolve()) for path in paths}) > 1:
        raise SourceUnavailableError(
            f"two libcupti are mapped ({', '.join(map(_with_version, paths))}): "
            "remove toolkit folders from LD_LIBRARY_PATH"
        )
    return paths[0]


def python_version() -> str | None:
    """Return the version of the installed cupti-python, or None."""
    try:
        return metadata.version("cupti-python")
    except metadata.PackageNotFoundError:
        return None


def exposed_kernel_dtypes() -> dict[str, np.dtype]:
    """Return the kernel layouts that the installed cupti-python knows, by struct name (``ActivityKernel10``)."""
    from cupti import cupti

    found: dict[str, np.dtype] = {}
    for name in dir(cupti):
        match = re.fullmatch(r"activity_kernel(\d+)_dtype", name)
        if match:
            found[f"ActivityKernel{match.group(1)}"] = getattr(cupti, name)
    return found


class Libcupti:
    """Calls of one libcupti; every failure raises :class:`CuptiError`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        u32, size, address = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        self._declare("cuptiActivityGetNextRecord", address, size, ctypes.POINTER(address))
        self._declare("cuptiActivityGetNumDroppedRecords", address, u32, ctypes.POINTER(size))
        self._declare("cuptiGetTimestamp", ctypes.POINTER(ctypes.c_uint64))
        self._declare("cuptiGetGraphNodeId", address, ctypes.POINTER(ctypes.c_uint64))
        self._declare("cuptiActivityRegisterCallbacks", BufferRequested, BufferCompleted)
        self._declare("cuptiSubscribe", ctypes.POINTER(address), Callback, address)
        self._declare("cuptiUnsubscribe", address)
        self._declare("cuptiEnableCallback", u32, address, ctypes.c_int, u32)
        for name in ("cuptiActivityEnableRuntimeApi", "cuptiActivityEnableDriverApi"):
            self._declare(name, u32, ctypes.c_uint8)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by name and raise CuptiError unless it succeeds."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CuptiError(name, status, self.result_name(status))

    def function(self, name: str) -> Any:
        """Return the bare C function, for callbacks that must not raise."""
        return getattr(self._library, name)

    def result_name(self, status: int) -> str:
        """Return the name of a status, for example ``CUPTI_ERROR_NOT_INITIALIZED``."""
        text = ctypes.c_char_p()
        if self._library.cuptiGetResultString(status, ctypes.byref(text)) or text.value is None:
            return "an unknown status"
        return text.value.decode()

    def version(self) -> int:
        """Return CUPTI_API_VERSION, for example 130001."""
        value = ctypes.c_uint32()
        self.call("cuptiGetVersion", ctypes.byref(value))
        return value.value

    def now_ns(self) -> int:
        """Return the time that records are stamped with."""
        value = ctypes.c_uint64()
        self.call("cuptiGetTimestamp", ctypes.byref(value))
        return value.value

    def dropped(self) -> int:
        """Return the records dropped since the last call of this; the library resets its count."""
        value = ctypes.c_size_t()
        self.call("cuptiActivityGetNumDroppedRecords", None, 0, ctypes.byref(value))
        return value.value

    def record_sizes(self) -> dict[int, int]:
        """Return how many bytes a record of each kind takes, by asking the library to step over made-up records."""
        sizes = {}
        words = np.empty(1024, np.uint64)
        for kind in range(1, _KINDS):
            words[:] = kind | kind << 32
            record = ctypes.c_void_p()
            start = words.ctypes.data
            for _ in range(2):
                status = self._library.cuptiActivityGetNextRecord(start, words.nbytes, ctypes.byref(record))
                if status:
                    break
            else:
                sizes[kind] = (record.value or 0) - start
        return sizes

    def record_starts(self, data: np.ndarray) -> np.ndarray:
        """Return the byte offset of each record by the library's own walk: slow, for buffers that surprise."""
        record = ctypes.c_void_p()
        start = data.ctypes.data
        offsets = []
        while not self._library.cuptiActivityGetNextRecord(start, data.nbytes, ctypes.byref(record)):
            offsets.append((record.value or 0) - start)
        return np.array(offsets, np.int64)

    def callback_names(self, domain: int) -> dict[int, str]:
        """Return the names of all callbacks of a domain by id, as this library numbers them."""
        names: dict[int, str] = {}
        text = ctypes.c_char_p()
        misses = 0
        for cbid in range(1, _LAST_CBID):
            missing = self._library.cuptiGetCallbackName(domain, cbid, ctypes.byref(text)) or text.value is None
            misses = misses + 1 if missing else 0
            if misses > _LONGEST_GAP:
                break
            if not missing and text.value is not None:
                names[cbid] = text.value.decode()
        return names

    def _declare(self, name: str, *arguments: Any) -> None:
        getattr(self._library, name).argtypes = arguments


def _with_version(path: str) -> str:
    value = ctypes.c_uint32()
    try:
        status = ctypes.CDLL(path).cuptiGetVersion(ctypes.byref(value))
    except (OSError, AttributeError):
        return path
    return path if status else f"{path} version {value.value}"
