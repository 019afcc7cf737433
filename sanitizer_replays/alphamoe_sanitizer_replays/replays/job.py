"""One replay from the parent's side: its specification, its command line, and what its result is worth."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from alphamoe_sanitizer_replays.captures.store import CAPTURE_FILE, check_path, check_room
from alphamoe_sanitizer_replays.captures.tensors import bytes_of, save_tensors, tensor_sha256, typed
from alphamoe_sanitizer_replays.plugins.protocol import (
    CompiledAhead,
    CompilesAhead,
    LaunchesOthers,
    ReplayPlugin,
    Validates,
    find_plugin,
)
from alphamoe_sanitizer_replays.replays.spec import ReplaySpec, TensorPlace, child_argv, outputs_file, write_spec
from alphamoe_sanitizer_replays.results import OutputCheck, ReplayResult, Tool, ToolRun
from alphamoe_sanitizer_replays.tool.file_state import FileState, file_state
from alphamoe_sanitizer_replays.tool.sanitizer import ToolPath, run_plain, run_tool
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from alphamoe_sanitizer_replays.captures.records import Capture
    from alphamoe_sanitizer_replays.captures.store import StoredCapture


INPUTS_NAME = re.compile(r"inputs-[0-9a-f]{12}\.safetensors")
"""Of a file that :func:`place_inputs` writes."""
RESULT_FILE = "replay.json"


@dataclass(frozen=True)
class ReplayInputs:
    """A capture whose inputs are proven and lie where a replay process finds them."""

    stored: StoredCapture
    plugin: ReplayPlugin
    tensors: Mapping[str, Tensor]
    """On the CPU."""
    places: tuple[TensorPlace, ...]
    files: Mapping[Path, FileState]
    """Of the capture and of what was written for it, as they were when the inputs were proven."""

    def changed(self) -> str:
        """Name a file that a replay may have found changed since; empty where there is none."""
        return next((str(path) for path, before in self.files.items() if file_state(path) != before), "")

    def variant(self, asked: str | None) -> str | None:
        """Give the variant to launch; raises UsageError for one that there is not."""
        known = self.plugin.variants(self.stored.capture)
        if asked is not None and asked not in known:
            raise UsageError(
                f"{self.plugin.name} has no variant {asked!r} for {self.stored.capture.label}",
                f"one of {', '.join(known)}" if known else "leave the variant out",
            )
        return asked

    def compile_ahead(self, variant: str | None, source: Path | None) -> CompiledAhead:
        """Let the plug-in compile now what the replay will load, where it can."""
        if isinstance(self.plugin, CompilesAhead):
            return self.plugin.compile_ahead(self.stored.capture, variant, source)
        return CompiledAhead()


@dataclass(frozen=True)
class ReplayJob:
    """One replay process that is ready to be started, with or without a tool around it."""

    argv: tuple[str, ...]
    spec: Path
    result: Path


def prepare_inputs(stored: StoredCapture, folder: Path) -> ReplayInputs:
    """Materialise a capture's inputs once for all its replays.

    Args:
        folder: where inputs that no file of the capture holds are written.

    Raises:
        UsageError: its plug-in is not there, or ``folder`` is not UTF-8.
        EvidenceError: what the capture says of itself cannot be, an input is missing or is not what was captured, or
            the plug-in stumbled over the capture.
        OSError: the disk.
    """
    check_path(folder)
    parts = (CAPTURE_FILE, *(info.file for info in stored.capture.tensors if info.file is not None))
    files = {path: file_state(path) for path in map(stored.path.joinpath, dict.fromkeys(parts))}
    if hashlib.sha256((stored.path / CAPTURE_FILE).read_bytes()).hexdigest() != stored.sha256:
        raise EvidenceError(f"{stored.path / CAPTURE_FILE} was changed after it was read", "run the command again")
    try:
        plugin = find_plugin(stored.capture.plugin)
        if isinstance(plugin, Validates):
            plugin.validate(stored)
        tensors = plugin.materialise(stored)
    except (AlphaMoEError, OSError):
        raise
    except Exception as error:  # somebody else's code
        raise EvidenceError(f"the plug-in {stored.capture.plugin}: {stumble(error)}") from error
    places = place_inputs(folder, stored, tensors)
    written = (Path(place.file) for place in places)
    return ReplayInputs(
        stored, plugin, tensors, places, files | {path: file_state(path) for path in written if path not in files}
    )


def place_inputs(folder: Path, stored: StoredCapture, tensors: Mapping[str, Tensor]) -> tuple[TensorPlace, ...]:
    """Say where a replay process finds each input; those that no file of the capture holds are written to ``folder``.

    Weights that several captures share are written once.

    Raises:
        AlphaMoEError: the disk has no room. An ``OSError`` of the writing itself is passed on.
    """
    infos = {info.name: info for info in stored.capture.tensors}
    in_capture = {name: info.file for name, info in infos.items() if info.file is not None}
    made = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in in_capture}
    path = folder
    if made:
        hashes = [
            f"{name}={infos[name].sha256 if name in infos else tensor_sha256(made[name])}" for name in sorted(made)
        ]
        path = folder / f"inputs-{hashlib.sha256(' '.join(hashes).encode()).hexdigest()[:12]}.safetensors"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            check_room(
                folder, bytes_of(made), "what a replay reads", "name another folder with --out, or clear the disk"
            )
            save_tensors(path, made)
    return tuple(
        TensorPlace(
            name=name,
            file=str((stored.path / in_capture[name] if name in in_capture else path).absolute()),
            key=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
        )
        for name, tensor in tensors.items()
    )


def prepare_job(
    inputs: ReplayInputs,
    folder: Path,
    *,
    device: str,
    variant: str | None = None,
    source: Path | None = None,
    repeats: int = 0,
    witness: bool = False,
) -> ReplayJob:
    """Write one replay's specification into ``folder``, which is made where it is missing.

    Raises:
        UsageError: there is no such variant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = (folder / RESULT_FILE).absolute()
    # What an earlier replay said must not pass for this one's.
    result.unlink(missing_ok=True)
    spec = ReplaySpec(
        capture=str(inputs.stored.path.absolute()),
        plugin=inputs.stored.capture.plugin,
        device=device,
        variant=inputs.variant(variant),
        source=str(source.absolute()) if source is not None else None,
        repeats=repeats,
        witness=witness,
        tensors=inputs.places,
        result=str(result),
    )
    path = folder / "replay-spec.json"
    write_spec(path, spec)
    return ReplayJob(child_argv(path), path, result)


def run_replay(
    inputs: ReplayInputs,
    folder: Path,
    *,
    tool: Tool | None,
    tool_path: ToolPath | None,
    device: str,
    variant: str | None,
    source: Path | None,
    repeats: int,
    timeout_s: float,
    relative_to: Path,
) -> tuple[ToolRun, OutputCheck]:
    """Run one replay process in ``folder``, under a tool or under none, and compare its output with the captured one.

    Args:
        tool: null for none.
        tool_path: the compute-sanitizer; needed for a tool.
        repeats: further launches that are timed; none are under a tool.
        relative_to: what the file names of the run are relative to.

    Raises:
        UsageError: there is no such variant or tool, or a symbol cannot be a filter.
        OSError: the folder cannot be written.
    """
    job = prepare_job(inputs, folder, device=device, variant=variant, source=source, repeats=0 if tool else repeats)
    if tool is None:
        run = run_plain(
            job.argv,
            folder=folder,
            timeout_s=timeout_s,
            result_file=job.result,
            relative_to=relative_to,
            variant=variant,
        )
    elif tool_path is None:
        raise UsageError(f"{tool} needs a compute-sanitizer")
    else:
        run = run_tool(
            tool,
            job.argv,
            tool_path=tool_path,
            folder=folder,
            symbols=watched_symbols(tool, inputs.plugin, inputs.stored.capture),
            timeout_s=timeout_s,
            result_file=job.result,
            relative_to=relative_to,
            variant=variant,
        )
    changed = inputs.changed()
    if not changed:
        return run, check_outputs(inputs, job, run.result)
    reason = f"{changed} was changed while it was replayed"
    return msgspec.structs.replace(run, problems=(*run.problems, reason)), _open(reason)


def watched_symbols(tool: Tool, plugin: ReplayPlugin, capture: Capture) -> tuple[str, ...]:
    """Give the kernels that a tool is told to watch; empty: every kernel.

    initcheck takes what a kernel wrote that it does not watch for unwritten, so it watches every kernel of a call that
    launches others.
    """
    return () if tool == "initcheck" and isinstance(plugin, LaunchesOthers) else capture.symbols


def check_file(path: Path | None, option: str) -> None:
    """Refuse what an option names and what is no file.

    Raises:
        UsageError: there is nothing, or something else.
    """
    if path is None or path.is_file():
        return
    if path.exists():
        raise UsageError(f"{option} {path}: this is no regular file")
    raise UsageError(f"{option} {path}: there is no such file")


def check_outputs(inputs: ReplayInputs, job: ReplayJob, result: ReplayResult | None) -> OutputCheck:
    """Judge what a replay left by the capture; a replay that left nothing proves nothing."""
    if result is None:
        return _open("the replay process ended without a result")
    if result.status != "launched":
        return _open("the replay failed")
    file = outputs_file(job.result)
    if result.outputs != file.name:
        return _open(f"the replay does not name {file.name} as its outputs")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        outputs = load_file(file)
        outputs |= {
            info.name: typed(outputs[info.name], info)
            for info in inputs.stored.capture.tensors
            if info.role == "output" and info.name in outputs
        }
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        return _open(f"the replay's outputs cannot be read: {error}")
    try:
        return inputs.plugin.check(inputs.stored, inputs.tensors, outputs)
    except AlphaMoEError as error:
        return _open(str(error))
    except Exception as error:  # what a tool found must not be lost with it
        return _open(f"the check of the plug-in {inputs.plugin.name}: {stumble(error)}")


def stumble(error: BaseException) -> str:
    """Tell an exception that nobody foresaw, with the line that raised it, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"unexpected {type(error).__name__}: {error}{where}".split())


def _open(reason: str) -> OutputCheck:
    return OutputCheck(verdict="INCONCLUSIVE", reason=reason)
