"""The replay process: ``python -m alphamoe_sanitizer_replays.replays.process SPEC.json`` launches a captured call once.

It may run under a tool that watches every kernel and every allocation. So inputs come by copies from the host, no
kernel but the target's is launched, nothing is imported that is not needed, and results are judged by the parent. It
writes a :class:`ReplayResult` whatever happens short of its death; exit code 0 means launched, 1 failed.
"""

from __future__ import annotations

# ruff: noqa: E402 -- the clock must be read before anything else is imported
import time

_FIRST_LINE_NS = time.time_ns()

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from alphamoe_profiler.bundle_files import replacing
from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.captures.tensors import save_tensors
from alphamoe_sanitizer_replays.plugins.protocol import PreparedReplay, find_plugin
from alphamoe_sanitizer_replays.replays.spec import ReplaySpec, TensorPlace, outputs_file, read_spec
from alphamoe_sanitizer_replays.results import ReplayResult
from alphamoe_sanitizer_replays.tool.environment import SPAWNED_VARIABLE
from alphamoe_sanitizer_replays.tool.leash import die_with_launcher
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_COLLECTOR_MODULES = ("cupti", "alphamoe_tracers.cupti", "alphamoe_tracers.cupti_source")
# Set by profilers for the processes they watch; any value counts as on.
_COLLECTOR_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_PORT_BASE", "KINETO_USE_DAEMON")
_NO_KERNELS = ("Memcpy ", "Memset ")
"""What the profiler calls its other activities of the device."""
_SPIN_CYCLES = 400_000
"""How long the device is kept busy while a timed launch is queued behind: about 0.2 ms."""


def refuse_collectors(modules: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse to go on beside a CUPTI collector: the tool is itself a subscriber, and only one may be.

    Raises:
        UsageError: naming what was found.
    """
    for module in _COLLECTOR_MODULES:
        if module in modules:
            raise UsageError(f"a replay must not load a collector, and {module} is loaded", "see the plug-in's imports")
    for variable in _COLLECTOR_VARIABLES:
        if variable in environment:
            raise UsageError(f"a replay must not run under another profiler ({variable} is set)", f"unset {variable}")


def refuse_tools(environment: Mapping[str, str]) -> None:
    """Refuse to profile under a tool: two CUPTI subscribers make either of them blind.

    Raises:
        UsageError: naming the variable that gives the tool away.
    """
    for variable, value in environment.items():
        if variable.startswith(("NV_SANITIZER", "CUDA_INJECTION")) or (
            variable == "LD_PRELOAD" and "sanitizer" in value.lower()
        ):
            raise UsageError(f"a witness run must not be under a tool ({variable} is set)", "run it without one")


def main(argv: list[str]) -> int:
    """Replay what the specification says and write the result beside it."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m alphamoe_sanitizer_replays.replays.process SPEC.json\n")
        return 2
    try:
        spec = read_spec(Path(argv[0]))
    except AlphaMoEError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    die_with_launcher()
    timings_s: dict[str, float] = {}
    spawned = os.environ.get(SPAWNED_VARIABLE, "")
    if spawned.isdecimal():
        timings_s["process_start"] = max(_FIRST_LINE_NS - int(spawned), 0) / 1e9
    try:
        result = _replay(spec, timings_s)
    except Exception as error:  # whatever it was, the parent must read it
        text = _told(error)
        sys.stderr.write(f"replay: {text}\n")
        result = ReplayResult(
            status="failed", error=text[:2000], caching_allocator=_caching_allocator(None), timings_s=timings_s
        )
    with replacing(Path(spec.result)) as stream:
        stream.write(msgspec.json.encode(result))
    return 0 if result.status == "launched" else 1


def _told(error: Exception) -> str:
    """Tell an error in one line: one of ours as the command line tells it, with its hint, another one by its kind."""
    hint = f" ({error.hint.strip().rstrip('.')})" if isinstance(error, AlphaMoEError) and error.hint else ""
    name = "" if isinstance(error, AlphaMoEError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}{hint}".split())


def _replay(spec: ReplaySpec, timings_s: dict[str, float]) -> ReplayResult:
    refuse_collectors(sys.modules, os.environ)
    capture = msgspec.json.decode(Path(spec.capture, "capture.json").read_bytes(), type=Capture)
    plugin = find_plugin(spec.plugin)
    import torch

    device = torch.device(spec.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("there is no CUDA device here", "run alphamoe-trace doctor, or name --device cpu")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    timings_s["imports"] = (time.time_ns() - _FIRST_LINE_NS) / 1e9
    tensors = mapped_tensors(spec.tensors)
    source = Path(spec.source) if spec.source is not None else None
    prepared = plugin.prepare(capture, tensors, device, spec.variant, source)
    timings_s.update(prepared.timings_s)
    started = time.perf_counter()
    prepared.renew()
    timings_s["upload"] = timings_s.get("upload", 0.0) + time.perf_counter() - started
    # Once more: a plug-in's imports may have brought one.
    refuse_collectors(sys.modules, os.environ)
    if spec.witness:
        refuse_tools(os.environ)
    started = time.perf_counter()
    with triton_launches(load=prepared.launches is None) as seen:
        witnessed = _witnessed(prepared, device) if spec.witness else None
        if not spec.witness:
            _launch(prepared, device)
    launched = time.perf_counter()
    outputs = prepared.outputs()
    timings_s["launch"], timings_s["download"] = launched - started, time.perf_counter() - launched
    saved = outputs_file(Path(spec.result))
    save_tensors(saved, outputs)
    times = _timed(prepared, spec.repeats, device)
    return ReplayResult(
        status="launched",
        symbols=prepared.symbols,
        launches=prepared.launches,
        variant=prepared.variant,
        source_sha256=prepared.source_sha256,
        cubin_sha256=prepared.cubin_sha256,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        caching_allocator=_caching_allocator(device),
        collector="torch.profiler" if spec.witness else "off",
        witnessed=witnessed,
        seen=seen,
        timings_s=timings_s,
        kernel_us=times if device.type == "cuda" else (),
        cpu_us=times if device.type != "cuda" else (),
        outputs=saved.name,
    )


@contextlib.contextmanager
def triton_launches(load: bool) -> Iterator[dict[str, int] | None]:
    """Count the launches that Triton itself tells of, by kernel: no collector, so it may look under a tool.

    Gives null where Triton is not loaded, or has no such hook.

    Args:
        load: load it, where it is installed: a call may do so only when it is launched.
    """
    if load:
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.knobs")
    runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    hooks: Any = getattr(runtime, "launch_exit_hook", None)
    if not hasattr(hooks, "add") or not hasattr(hooks, "remove"):
        yield None
        return
    seen: dict[str, int] = {}

    def launched(metadata: Any) -> None:
        # ``get`` would work out what a kernel's author wants told of each launch, perhaps by launches of its own.
        name = getattr(metadata, "data", {}).get("name")
        if isinstance(name, str):
            seen[name] = seen.get(name, 0) + 1

    hooks.add(launched)
    try:
        yield seen
    finally:
        hooks.remove(launched)


def _launch(prepared: PreparedReplay, device: Any) -> None:
    prepared.launch()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _witnessed(prepared: PreparedReplay, device: Any) -> dict[str, int]:
    """Launch once and count the kernels that it started, by their full names; none on a CPU."""
    if device.type != "cuda":
        _launch(prepared, device)
        return {}
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _launch(prepared, device)
    found: dict[str, int] = {}
    for event in profiler.events() or ():
        on_device = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        if on_device and not event.name.startswith(_NO_KERNELS):
            found[event.name] = found.get(event.name, 0) + 1
    return found


def mapped_tensors(places: tuple[TensorPlace, ...]) -> dict[str, Tensor]:
    """Map tensors from safetensors files; pages are read when they are touched.

    Raises:
        EvidenceError: a file is gone or cut, or a tensor is not of the shape that the parent found.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(place.file for place in places):
        try:
            with safe_open(file, framework="pt") as opened:
                for place in (place for place in places if place.file == file):
                    tensor = opened.get_tensor(place.key)
                    dtype = getattr(torch, place.dtype)
                    if tensor.dtype != dtype:  # plain bytes, at any address
                        tensor = tensor.clone().view(dtype)
                    tensors[place.name] = tensor.reshape(place.shape)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise EvidenceError(f"{file}: the inputs of the replay cannot be read: {error}") from error
    return tensors


def _timed(prepared: PreparedReplay, repeats: int, device: Any) -> tuple[float, ...]:
    """Time further launches: device time by CUDA events, with inputs that the launch before left in the cache."""
    import torch

    times: list[float] = []
    launch = prepared.again or prepared.launch
    for _ in range(repeats):
        prepared.renew()
        if device.type != "cuda":
            started = time.perf_counter()
            launch()
            times.append((time.perf_counter() - started) * 1e6)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # Everything is queued while the device spins, so that no gap of the host's is timed.
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) * 1e3)
    return tuple(times)


def _caching_allocator(device: Any) -> bool:
    """Say whether torch's caching allocator is on: the variable is not set, or memory was reserved all the same."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ:
        return True
    if device is None or device.type != "cuda":
        return False
    import torch

    return torch.cuda.memory_reserved(device) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
