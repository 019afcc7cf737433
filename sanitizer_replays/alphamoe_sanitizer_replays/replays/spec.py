"""What the parent tells a replay process, and what it reads back: two JSON files. No torch here."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from alphamoe_sanitizer_replays.results import ReplayResult
from alphamoe_tracers.errors import EvidenceError

REPLAY_SCHEMA = "alphamoe-trace-replay-v1"
SPAWNED_VARIABLE = "ALPHAMOE_TRACE_REPLAY_SPAWNED_NS"
"""``time.time_ns()`` of the moment that the process, or the tool around it, was started."""
REPLAY_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ALPHAMOE_TRACE_NVTX": "0"}
"""What every replay process runs with."""
_PACKAGES = ("alphamoe_sanitizer_replays", "alphamoe_backend", "alphamoe_tracers", "alphamoe_profiler")
_NOT_FOR_A_REPLAY = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "KINETO_USE_DAEMON",
)


class TensorPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the replay process finds one input; its hash was checked by the parent."""

    name: str
    file: str
    """Absolute path of a safetensors file."""
    key: str
    dtype: str
    """torch's name without the module; what the file holds as plain bytes is made this again."""
    shape: tuple[int, ...]


class ReplaySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One replay."""

    schema: str = REPLAY_SCHEMA
    capture: str
    """Absolute path of the capture's directory."""
    plugin: str
    device: str
    """torch's name: ``cuda``, ``cuda:1``, ``cpu``."""
    variant: str | None = None
    """Null for the captured process's own."""
    source: str | None = None
    """Absolute path of a source to compile instead of the kernel's own."""
    repeats: int = 0
    """Further launches that are timed, each with fresh outputs. Never under a tool."""
    witness: bool = False
    """Watch the launch with torch's profiler and say which kernels it started. Never under a tool."""
    tensors: tuple[TensorPlace, ...]
    result: str
    """Absolute path that the process writes its :class:`ReplayResult` to; the outputs go beside it."""


def write_spec(path: Path, spec: ReplaySpec) -> None:
    """Write what a replay process is to do."""
    path.write_bytes(msgspec.json.encode(spec))


def read_spec(path: Path) -> ReplaySpec:
    """Read what a replay process is to do.

    Raises:
        EvidenceError: the file is missing, cut or of another schema.
    """
    try:
        spec = msgspec.json.decode(path.read_bytes(), type=ReplaySpec)
    except (OSError, msgspec.DecodeError) as error:
        raise EvidenceError(f"{path}: this is no replay specification: {error}") from error
    if spec.schema != REPLAY_SCHEMA:
        raise EvidenceError(f"{path}: its schema is {spec.schema!r}, not {REPLAY_SCHEMA!r}")
    return spec


def read_result(path: Path) -> ReplayResult | None:
    """Read what a replay process said when it ended; null where it died before that.

    Raises:
        EvidenceError: the file is there and cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise EvidenceError(f"{path}: the replay's result cannot be read: {error}") from error


def child_argv(spec_path: Path) -> tuple[str, ...]:
    """Give the command line of the replay process."""
    # -P: no module of the working directory may stand in for one of ours.
    return (sys.executable, "-P", "-m", "alphamoe_sanitizer_replays.replays.process", str(spec_path))


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give the environment of a replay process: no caching allocator, nothing that is injected, no ranges.

    Args:
        base: the environment to start from; the parent's own when null.
    """
    environment = {name: value for name, value in (base or os.environ).items() if name not in _NOT_FOR_A_REPLAY}
    # The parent may run from a source folder that only its own sys.path knows.
    found = [importlib.util.find_spec(package) for package in _PACKAGES]
    roots = [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin]
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, known), *roots]))
    return environment | REPLAY_ENVIRONMENT
