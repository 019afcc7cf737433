"""Launch the fused kernel on torch's current stream, from handles and argument buffers that are made once."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.kernels import jit
from alphamoe_backend.kernels.launch import (
    MAX_H,
    SOURCE_NAME,
    SYMBOL,
    LaunchShape,
    Variant,
    check_geometry,
    choose_variant,
    shape_for_blocks,
    variants,
)
from alphamoe_tracers.errors import AlphaMoEError

ARCH = "sm_90a"
_MOST_REMEMBERED = 4096
"""Launches whose handles are kept ready."""
_PACKED = struct.Struct("11P6if")
"""The kernel's parameters in one go."""


class _Arguments(ctypes.Structure):
    """The kernel's parameters, in order."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("hidden_scale", ctypes.c_void_p),
        ("gemm1", ctypes.c_void_p),
        ("gemm1_scale", ctypes.c_void_p),
        ("gemm2", ctypes.c_void_p),
        ("gemm2_scale", ctypes.c_void_p),
        ("sorted_token_ids", ctypes.c_void_p),
        ("expert_ids", ctypes.c_void_p),
        ("num_tokens_post_padded", ctypes.c_void_p),
        ("topk_weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("M", ctypes.c_int),
        ("E", ctypes.c_int),
        ("H", ctypes.c_int),
        ("I", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("plan_blocks", ctypes.c_int),
        ("routed_scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class _Ready:
    """What one geometry, M, plan and variant need at every launch."""

    shape: LaunchShape
    function: Any
    config: Any
    launch: Callable[..., tuple[Any, ...]]


class FusedLauncher:
    """Launches the fused kernel on one device. Threads may share it."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._functions: dict[str, Any] = {}
        self._ready: dict[tuple[LocalGeometry, int, int, Variant | None], _Ready] = {}
        self._sm_count = torch.cuda.get_device_properties(device_index).multi_processor_count
        self._streams: dict[int, Any] = {}
        self._arguments = _Arguments()
        start = ctypes.addressof(self._arguments)
        offsets = [getattr(_Arguments, field[0]).offset for field in _Arguments._fields_]
        self._pointers = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        self._pointers_address = ctypes.addressof(self._pointers)

    def prepare(self, only: Variant | None = None) -> None:
        """Load every variant, or one. Loading is not allowed while a graph is being captured, launching is."""
        with self._lock:
            self._enter_device()
            self._load(variants() if only is None else (only,))

    def _enter_device(self) -> None:
        """Make the device's primary context current, which a thread that never called CUDA does not have."""
        if getattr(self._thread, "entered", False) and torch.cuda.current_device() == self._device_index:
            return
        torch.cuda.set_device(self._device_index)
        self._thread.entered = True

    def _load(self, wanted: tuple[Variant, ...]) -> None:
        for variant in wanted:
            most = variant.dynamic_smem_bytes(MAX_H)
            loaded = jit.load(SOURCE_NAME, ARCH, variant.defines(), SYMBOL, most, self._device_index)
            self._functions[variant.name] = loaded.function

    def _function(self, variant: Variant) -> Any:
        if variant.name not in self._functions:
            if torch.cuda.is_current_stream_capturing():
                raise AlphaMoEError(
                    "the fused kernel was first asked for inside a graph capture, where nothing can be loaded",
                    hint="call alphamoe_w8a8.prepare(device) before capturing",
                )
            # All at once, so that a graph captured later for another M finds its variant.
            self._load(variants())
        return self._functions[variant.name]

    def _make_ready(self, geometry: LocalGeometry, M: int, plan_blocks: int, variant: Variant | None) -> _Ready:
        from cuda.bindings import driver

        check_geometry(geometry)
        chosen = variant or choose_variant(geometry, M, self._sm_count)
        shape = shape_for_blocks(geometry, chosen, plan_blocks)
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = shape.cluster
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value = value
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
        config.sharedMemBytes = shape.dynamic_smem_bytes
        config.attrs = [cluster]
        config.numAttrs = 1
        if len(self._ready) >= _MOST_REMEMBERED:
            self._ready.clear()
        ready = self._ready[geometry, M, plan_blocks, variant] = _Ready(
            shape, self._function(chosen), config, driver.cuLaunchKernelEx
        )
        return ready

    def _stream(self, address: int) -> Any:
        stream = self._streams.get(address)
        if stream is None:
            from cuda.bindings import driver

            stream = self._streams[address] = driver.CUstream(address)
        return stream

    def launch(
        self,
        geometry: LocalGeometry,
        tensors: tuple[Tensor, ...],
        *,
        M: int,
        plan_blocks: int,
        routed_scaling_factor: float,
        variant: Variant | None = None,
    ) -> LaunchShape:
        """Launch once, without synchronising or allocating; may be captured.

        Args:
            tensors: the eleven tensors in the order of the kernel's parameters, checked by the caller.
            plan_blocks: entries of ``expert_ids``.
            variant: instead of the one that the launch rule chooses.

        Returns:
            The launch's shape.

        Raises:
            UsageError: the geometry is outside the kernel's limits.
            AlphaMoEError: the driver refused the launch.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        with self._lock:
            self._enter_device()
            ready = self._ready.get((geometry, M, plan_blocks, variant))
            if ready is None:
                ready = self._make_ready(geometry, M, plan_blocks, variant)
            ready.config.hStream = self._stream(stream)
            _PACKED.pack_into(
                self._arguments,
                0,
                *[tensor.data_ptr() for tensor in tensors],
                M,
                geometry.E,
                geometry.H,
                geometry.I_local,
                geometry.top_k,
                plan_blocks,
                routed_scaling_factor,
            )
            jit.checked(ready.launch(ready.config, ready.function, self._pointers_address, 0))
        return ready.shape


_launchers: dict[int, FusedLauncher] = {}
_launchers_lock = threading.Lock()


def launcher(device: torch.device) -> FusedLauncher:
    """Give the launcher of a CUDA device."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    found = _launchers.get(index)
    if found is None:
        with _launchers_lock:
            found = _launchers.setdefault(index, FusedLauncher(index))
    return found
