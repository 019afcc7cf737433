"""What the parent tells a replay process: a JSON file and a command line. No torch here."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from alphamoe_tracers.errors import EvidenceError

REPLAY_SCHEMA = "alphamoe-trace-replay-v1"


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


def outputs_file(result: Path) -> Path:
    """Give the file that a replay process leaves its outputs in: beside its result, whatever that says."""
    return result.with_name(f"{result.stem}.outputs.safetensors")


def child_argv(spec_path: Path) -> tuple[str, ...]:
    """Give the command line of the replay process."""
    # -P: no module of the working directory may stand in for one of ours.
    return (sys.executable, "-P", "-m", "alphamoe_sanitizer_replays.replays.process", str(spec_path))
