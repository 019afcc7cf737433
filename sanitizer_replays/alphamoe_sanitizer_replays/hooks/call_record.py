"""One call on its way into a capture: its tensors copied to the host before it, what it changed and gave after it.

A kernel may write into any argument, whatever its schema says. So every argument is copied before the call and
compared, byte for byte, with what it is afterwards; those that differ are outputs of the capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphamoe_profiler.run_identity import utc_now
from alphamoe_sanitizer_replays.captures.call_tree import CallTree, encode_call, encode_result, refuse_unreadable
from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.captures.store import check_room, write_capture
from alphamoe_sanitizer_replays.captures.tensors import bytes_of, raw_bytes
from alphamoe_tracers.errors import AlphaMoEError

if TYPE_CHECKING:
    from torch import Tensor

    from alphamoe_sanitizer_replays.captures.records import TensorRole

AFTER = "after."
"""Before the name of an argument that the call changed: its bytes after the call."""
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@dataclass(frozen=True)
class OpenCall:
    """A call between its begin and its end."""

    M: int
    number: int
    positional: CallTree
    by_name: CallTree
    """Shares its dictionary of tensors with :attr:`positional`."""
    before: dict[str, Tensor]
    """Copies on the host of all tensors, as they were."""
    weights: frozenset[str]
    copy_s: float


def begin(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, M: int, number: int, room_bytes: int, out: Path
) -> OpenCall:
    """Take a call's arguments apart and copy its tensors to the host.

    Raises:
        RefusedValueError: an argument is of a type that no capture holds.
        AlphaMoEError: it would not fit on the disk, or into what is left of the bytes that were allowed.
    """
    import torch

    started_s = time.monotonic()
    positional, by_name = encode_call(args, kwargs)
    needed = bytes_of(positional.tensors)
    # What the call gives back is as yet unknown: changed arguments at most double it.
    if needed > room_bytes:
        raise AlphaMoEError(f"a call of {needed} bytes does not fit into what --max-bytes leaves ({room_bytes} bytes)")
    check_room(out, needed)
    with _unseen():
        before = {name: _to_host(tensor) for name, tensor in positional.tensors.items()}
    weights = frozenset(name for name, tensor in positional.tensors.items() if isinstance(tensor, torch.nn.Parameter))
    return OpenCall(M, number, positional, by_name, before, weights, time.monotonic() - started_s)


def finish(
    call: OpenCall,
    result: Any,
    *,
    target: str,
    plugin: str,
    symbols: tuple[str, ...],
    imports: tuple[str, ...],
    rank: tuple[int, str, int | None],
    out: Path,
) -> tuple[Path, int]:
    """Find what the call changed, and write the capture.

    Returns:
        Its directory, and the bytes that it takes.

    Raises:
        RefusedValueError: the result is of a type that no capture holds.
        AlphaMoEError, OSError: it could not be written.
    """
    started_s = time.monotonic()
    inputs = call.positional.tensors
    given = encode_result(result, inputs)
    with _unseen():
        changed = {}
        for name, tensor in inputs.items():
            # The call may have freed it, or put other memory into its place.
            refuse_unreadable(tensor, f"{name}, after the call,")
            now = _to_host(tensor)
            if not _same_bytes(now, call.before[name]):
                changed[name] = now
        results = {name: _to_host(tensor) for name, tensor in given.tensors.items()}
    tensors: dict[str, tuple[TensorRole, Tensor]] = {
        name: ("input", tensor) for name, tensor in call.before.items() if name not in call.weights
    }
    tensors |= {f"{AFTER}{name}": ("output", tensor) for name, tensor in changed.items()}
    tensors |= {name: ("output", tensor) for name, tensor in results.items()}
    weights = {name: call.before[name] for name in call.weights}
    gpu = _gpu([*inputs.values(), *given.tensors.values()])
    number, source, world_size = rank
    capture = Capture(
        plugin=plugin,
        symbols=symbols,
        run_id=None,
        rank=number,
        rank_source=source,
        world_size=world_size,
        layer=None,
        M=call.M,
        callable=target,
        call=call.number,
        arguments={
            "args": call.positional.tree,
            "kwargs": call.by_name.tree,
            "result": given.tree,
            "changed": sorted(changed),
            "imports": list(imports),
        },
        tensors=(),
        gpu_name=gpu[0],
        compute_capability=gpu[1],
        sm_count=gpu[2],
        versions=_versions(target),
        created=utc_now(),
        bytes=0,
        wall_s={"copy": call.copy_s + time.monotonic() - started_s},
        notes=_notes(call, bool(changed or results)),
    )
    folder = out / f"rank={number}"
    # The process id keeps a restarted server, or ranks that do not know their number, from each other's names.
    name = f"{re.sub(r'[^A-Za-z0-9_.]+', '.', target)}-M={call.M}-call={call.number}-pid={os.getpid()}"
    written = write_capture(folder / name, capture, tensors, weights=weights, weights_directory=folder)
    return folder / name, written.bytes


def _notes(call: OpenCall, has_outputs: bool) -> tuple[str, ...]:
    notes = [
        f"{second} shares memory with {first}; a replay gives each its own"
        for first, second in call.positional.shared()
    ]
    if not has_outputs:
        notes.append("the call gave and changed no tensor: there is no output to compare")
    return tuple(notes)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Copy without gradients, modes, subclasses or complaints, and without spoiling a graph that a thread captures."""
    import torch

    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        _relaxed_capture(),
        _sync_allowed(),
    ):
        yield


@contextlib.contextmanager
def _sync_allowed() -> Iterator[None]:
    import torch

    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Exempt this thread from the global capture mode: otherwise its copies would invalidate another thread's graph."""
    import torch

    driver = None
    mode = ctypes.c_int(_RELAXED)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    if driver is not None and driver(ctypes.byref(mode)) != 0:
        driver = None
    try:
        yield
    finally:
        if driver is not None:
            driver(ctypes.byref(mode))


def _to_host(tensor: Tensor) -> Tensor:
    import torch

    return tensor.detach().as_subclass(torch.Tensor).to("cpu", copy=True)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(raw_bytes(one.contiguous()), raw_bytes(other.contiguous()))


def _gpu(tensors: list[Tensor]) -> tuple[str | None, str | None, int | None]:
    import torch

    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None:
        return None, None, None
    properties = torch.cuda.get_device_properties(device)
    return properties.name, f"{properties.major}.{properties.minor}", int(properties.multi_processor_count)


def _versions(target: str) -> dict[str, str]:
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    for name in (re.split(r"[.:]", target)[0], "sglang", "vllm", "flashinfer", "triton"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return versions
