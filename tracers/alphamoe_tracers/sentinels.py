"""Tiny kernels that the collector launches itself: seen among the records, they prove that it was live.

``open`` and ``close`` stand at the window's ends, ``step`` at step boundaries; each carries a number, encoded in its
launch shape (:func:`sentinel_shape`). ``graph_open`` and ``graph_close`` are replayed from a graph of the collector's
own (eager sentinels prove nothing about node-level tracing), and ``graph_step`` becomes a node of the graph being
captured.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from alphamoe_tracers.columns import column
from alphamoe_tracers.records import SentinelCount, SentinelKind
from alphamoe_tracers.source import SourceUnavailableError

SYMBOL_PREFIX = "alphamoe_trace_sentinel_"
SENTINEL_KINDS: tuple[SentinelKind, ...] = get_args(SentinelKind)
NUMBERS = 48 * 1024
"""Numbers wrap here: a sentinel has 48 blocks at most."""
_BLOCK = 1024

_PTX = "\n".join(
    [".version 7.0", ".target sm_70", ".address_size 64"]
    + [f".visible .entry {SYMBOL_PREFIX}{kind}()\n{{\n  ret;\n}}" for kind in SENTINEL_KINDS]
)


def sentinel_symbol(kind: SentinelKind) -> str:
    """Return the kernel symbol of a sentinel."""
    return SYMBOL_PREFIX + kind


def sentinel_shape(number: int) -> tuple[int, int]:
    """Return the blocks and the threads a block that encode a number.

    Dynamic shared memory would hold it too, but a kernel that wants much of it may make an SM change its split between
    cache and shared memory, which the program's own kernels would pay for.
    """
    blocks, threads = divmod(number % NUMBERS, _BLOCK)
    return blocks + 1, threads + 1


def sentinel_numbers(kernels: pa.Table) -> npt.NDArray[np.int64]:
    """Return the numbers of sentinels.

    Args:
        kernels: KERNELS rows of sentinels. Recordings of older versions hold the number as dynamic shared memory.
    """
    blocks, threads = column(kernels, "grid_x").astype(np.int64), column(kernels, "block_x").astype(np.int64)
    return (blocks - 1) * _BLOCK + threads - 1 + column(kernels, "dynamic_smem_bytes").astype(np.int64)


def count_sentinels(
    kernels: pa.Table, symbol_ids: dict[SentinelKind, int], launched: dict[SentinelKind, int]
) -> tuple[SentinelCount, ...]:
    """Count the sentinels that the records show.

    A graph sentinel counts only when its record carries a graph node id. Of ``graph_step`` what was launched are the
    captured nodes, and what is seen are their replays.

    Args:
        kernels: KERNELS rows of one rank, duplicates dropped.
        symbol_ids: by kind, for the sentinels that occur.
        launched: how many the collector launched, by kind.
    """
    symbols = column(kernels, "symbol_id")
    nodes = column(kernels, "graph_node_id")
    counts = []
    for kind in SENTINEL_KINDS:
        if not launched.get(kind):
            continue
        rows = symbols == symbol_ids.get(kind, -1)
        if kind.startswith("graph_"):
            rows &= nodes != 0
        counts.append(SentinelCount(kind, launched[kind], int(np.count_nonzero(rows))))
    return tuple(counts)


class SentinelKernels:
    """The sentinels of one process, loaded into the context that is current at the first launch."""

    def __init__(self) -> None:
        self._functions: dict[SentinelKind, int] = {}
        """Handles, by which a kernel is launched."""
        self._launch: Any = None
        self._graphs: dict[SentinelKind, Any] = {}
        self._alive: list[Any] = []

    def synchronize(self) -> None:
        """Wait until the device is idle; raises SourceUnavailableError when there is no context to wait for."""
        torch = _torch_with_cuda()
        if torch is not None:
            torch.cuda.synchronize()
        else:
            from cuda.bindings import driver

            _check("cuCtxSynchronize", driver.cuCtxSynchronize())

    def launch(self, kind: SentinelKind, number: int) -> None:
        """Launch one sentinel on torch's current stream, or on the default stream of a program without torch.

        Raises:
            SourceUnavailableError: the driver refused, for example because no context is current.
        """
        if not self._functions:
            self._load()
        stream = _current_stream()
        if kind in self._graphs:
            from cuda.bindings import driver

            _check("cuGraphLaunch", driver.cuGraphLaunch(self._graphs[kind], driver.CUstream(stream)))
            return
        # Between steps: through ctypes it costs a fraction of what cuda.bindings takes to convert the same arguments.
        blocks, threads = sentinel_shape(number)
        status = self._launch(self._functions[kind], blocks, 1, 1, threads, 1, 1, 0, stream, None, None)
        if status:
            from cuda.bindings import driver

            raise SourceUnavailableError(f"cuLaunchKernel failed with {driver.CUresult(status).name}")

    def _load(self) -> None:
        from cuda.bindings import driver

        # The first sentinel may be one that a graph captures; loading a module is forbidden then, unless relaxed.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        exchange = driver.cuThreadExchangeStreamCaptureMode
        before = _check("cuThreadExchangeStreamCaptureMode", exchange(relaxed))
        try:
            module = _check("cuModuleLoadData", driver.cuModuleLoadData(_PTX.encode() + b"\0"))
            self._alive.append(module)
            functions: dict[SentinelKind, Any] = {}
            for kind in SENTINEL_KINDS:
                name = sentinel_symbol(kind).encode()
                functions[kind] = _check("cuModuleGetFunction", driver.cuModuleGetFunction(module, name))
            for kind in ("graph_open", "graph_close"):
                self._graphs[kind] = self._graph(functions[kind])
            launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
            launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
            self._launch = launch
            self._functions = {kind: int(function) for kind, function in functions.items()}
        finally:
            exchange(before)

    def _graph(self, function: Any) -> Any:
        from cuda.bindings import driver

        graph = _check("cuGraphCreate", driver.cuGraphCreate(0))
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = function
        node.gridDimX = node.gridDimY = node.gridDimZ = 1
        node.blockDimX = node.blockDimY = node.blockDimZ = 1
        node.sharedMemBytes = 0
        _check("cuGraphAddKernelNode", driver.cuGraphAddKernelNode(graph, None, 0, node))
        self._alive.append(graph)
        return _check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))


def _current_stream() -> int:
    torch = _torch_with_cuda()
    return int(torch.cuda.current_stream().cuda_stream) if torch is not None else 0


def _torch_with_cuda() -> Any:
    """Torch, if the traced program uses it with CUDA already: its call also makes its context current here."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _check(call: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise SourceUnavailableError(f"{call} failed with {status.name}")
    return values[0] if values else None
