"""The program of positive controls: launches planted faults, or their sound twins, one after the other.

It runs under a tool: ``python -m alphamoe_sanitizer_replays.controls.process RESULT.json SYMBOL:CANARY|- KERNEL...``.
No torch here. Nothing but the named kernels is launched, inputs come by host-to-device copies, and every kernel has
buffers of its own, which are never freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from alphamoe_backend.kernels.jit import Cubin, checked, compile_source
from alphamoe_profiler.bundle_files import replacing
from alphamoe_sanitizer_replays.controls.table import BUFFER_FLOATS, BY_NAME, CANARIES, PLANTED, SOUND, THREADS, Control
from alphamoe_sanitizer_replays.tool.leash import die_with_launcher
from alphamoe_tracers.errors import AlphaMoEError

SOURCE = "planted_faults"
_BYTES = BUFFER_FLOATS * 4


class ControlResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a control process says itself. Absent when it died."""

    launched: tuple[str, ...] = ()
    """Kernels that ended without an error."""
    absent: tuple[str, ...] = ()
    """Kernels that cannot be compiled for this GPU: it has not their instructions."""
    trouble: str = ""
    """The first error, one line; nothing was launched after it."""
    device: str | None = None
    cubin_sha256: str | None = None


def read_control_result(path: Path) -> ControlResult:
    """Read what a control process said; one that died or wrote nonsense launched nothing that is known."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ControlResult)
    except (OSError, msgspec.DecodeError):
        return ControlResult(trouble="the control process died before it could say what it launched")


def compile_controls(arch: str, symbol: str | None = None, canary: int = 0) -> Cubin:
    """Compile the planted faults, with the canary under a symbol where one is given; cached. Needs no GPU.

    Args:
        arch: such as ``sm_90a``. Older ones than Hopper get the kernels that they can run.
        symbol: a C identifier.
        canary: place of the tool in ``CANARIES``.

    Raises:
        AlphaMoEError: there is no compiler, or the source does not compile.
    """
    source = (resources.files(__package__) / f"{SOURCE}.cu").read_bytes()
    if symbol is not None:
        source = f'#define CANARY_SYMBOL {symbol}\n#line 1 "{SOURCE}.cu"\n'.encode() + source
    return compile_source(SOURCE, source, arch, {"CANARY": canary})


def arch_of(major: int, minor: int) -> str:
    """Give the architecture to compile for; wgmma and its like are in the ``a`` forms alone."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def device_name(raw: bytes) -> str:
    """Read what the driver wrote into a buffer of its own size: a C string, and whatever lies behind it."""
    return raw.partition(b"\0")[0].decode(errors="replace")


def main(argv: list[str]) -> int:
    """Launch the kernels; 0 when each ended without an error. The result is written after every kernel."""
    path, canary, *kernels = argv
    die_with_launcher()
    result, at = ControlResult(), ""
    try:
        driver, device, cubin = _start(canary)
        result = msgspec.structs.replace(result, device=device, cubin_sha256=cubin.sha256)
        module = checked(driver.cuModuleLoadData(cubin.code))
        for kernel in kernels:
            error, function = driver.cuModuleGetFunction(module, kernel.encode())
            if int(error) != 0:
                result = msgspec.structs.replace(result, absent=(*result.absent, kernel))
                continue
            at = f"{kernel}: "
            _launch(driver, function, _control(kernel, canary))
            result = msgspec.structs.replace(result, launched=(*result.launched, kernel))
            _write(Path(path), result)
    except (AlphaMoEError, ImportError, RuntimeError, OSError) as error:
        result = msgspec.structs.replace(result, trouble=(at + " ".join(str(error).split()))[:500])
    _write(Path(path), result)
    return 1 if result.trouble else 0


def _control(kernel: str, canary: str) -> Control:
    if kernel.startswith((PLANTED, SOUND)):
        return BY_NAME[kernel.split("_", 1)[1]]
    fault, _ = list(CANARIES.values())[int(canary.rpartition(":")[2])]
    return BY_NAME[fault]


def _start(canary: str) -> tuple[Any, str, Cubin]:
    from cuda.bindings import driver

    checked(driver.cuInit(0))
    device = checked(driver.cuDeviceGet(0))
    attributes = driver.CUdevice_attribute
    major, minor = (
        checked(driver.cuDeviceGetAttribute(attribute, device))
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    symbol, _, number = canary.rpartition(":")
    cubin = compile_controls(arch_of(major, minor), symbol or None, int(number) if symbol else 0)
    name = device_name(checked(driver.cuDeviceGetName(100, device)))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    return driver, name, cubin


def _launch(driver: Any, function: Any, control: Control) -> None:
    """Launch one kernel on buffers of its own and wait for its end.

    Raises:
        AlphaMoEError: the driver reported an error.
    """
    out, given, unwritten = (checked(driver.cuMemAlloc(_BYTES)) for _ in range(3))
    for buffer in (out, given):
        checked(driver.cuMemcpyHtoD(buffer, bytes(_BYTES), _BYTES))
    values = (*(ctypes.c_void_p(int(buffer)) for buffer in (out, given, unwritten)), ctypes.c_int(BUFFER_FLOATS))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = control.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = control.dynamic_smem_bytes
    config.hStream = driver.CUstream(0)
    if control.cluster > 1:
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = control.cluster, 1, 1
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
    checked(driver.cuCtxSynchronize())


def _write(path: Path, result: ControlResult) -> None:
    with contextlib.suppress(OSError), replacing(path) as stream:
        stream.write(msgspec.json.encode(result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
