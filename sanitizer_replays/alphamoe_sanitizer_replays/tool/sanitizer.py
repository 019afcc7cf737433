"""Find compute-sanitizer, run one program under one of its tools, and record all that came of it.

Nothing here judges. A run that could not be made, was killed, or left no log is still a :class:`ToolRun`, with its
problems; :mod:`alphamoe_sanitizer_replays.verdicts.judge` decides what it proves.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alphamoe_profiler.redact import redact_argv
from alphamoe_sanitizer_replays.results import Finding, ReplayResult, Tool, ToolLog, ToolRun, read_result
from alphamoe_sanitizer_replays.tool.environment import SPAWNED_VARIABLE, child_environment
from alphamoe_sanitizer_replays.tool.file_state import FileState, file_state
from alphamoe_sanitizer_replays.tool.log import MAX_LOG_BYTES, parse_log
from alphamoe_sanitizer_replays.tool.process_group import GRACE_S, Ended, run_group
from alphamoe_sanitizer_replays.tool.xml_records import MAX_XML_BYTES, parse_xml
from alphamoe_tracers.errors import EvidenceError, UsageError

EXECUTABLE = "compute-sanitizer"
PATH_VARIABLE = "ALPHAMOE_COMPUTE_SANITIZER"
ERROR_EXITCODE = 86
"""What the tool exits with when it found something. The program's own exit code passes through when it did not."""
PRINT_LIMIT = 1000
PADDING_BYTES = 4096
"""memcheck takes an access behind one buffer for one inside the next, unless something lies between them."""
MAX_OUTPUT_BYTES = 64 << 20
MAX_VERSION_BYTES = 1 << 20
VERSION_TIMEOUT_S = 30.0
_VERSION = re.compile(r"Version (\d+(?:\.\d+)+)")
_SYMBOL = re.compile(r"[A-Za-z_$][\w$.]*")
_REFUSED = re.compile(r"(?m)^(?:.*unrecogni[sz]ed option.*|.*the argument .* for option .*|Usage: .*sanitizer.*)$")
_TOOL_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # A driver that is probed for entry points fails by design; a replay checks the result of each call it makes.
    "memcheck": ("--report-api-errors", "no", "--padding", str(PADDING_BYTES), "--leak-check", "no"),
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}


@dataclass(frozen=True)
class ToolPath:
    """One compute-sanitizer of this machine."""

    path: Path
    version: str | None
    """``2025.3.1.0``; null where it does not say, and then nothing that it finds clean counts."""
    file: FileState
    """Of the program, when it was asked."""

    def changed(self) -> str:
        """Say how it is no longer the tool that was found; empty where it is."""
        told = f"{self.path} was changed during the session"
        if file_state(self.path) != self.file:
            return told
        try:
            version = tool_version(self.path)
        except EvidenceError as error:
            return f"{told}: {error}"
        return "" if version == self.version else f"{told}: it was {self.version} and is {version or 'of no version'}"


@dataclass(frozen=True)
class _Files:
    """What a run leaves in its folder."""

    folder: Path

    @property
    def output(self) -> Path:
        """The program's stdout and stderr, and what the tool prints before it has a log."""
        return self.folder / "program.out"

    @property
    def log(self) -> Path:
        """The tool's text log."""
        return self.folder / "tool.log"

    @property
    def xml(self) -> Path:
        """The tool's records."""
        return self.folder / "tool.xml"

    def remove(self) -> None:
        """Remove what an earlier run left: its clean log must not stand in for one that this run never wrote."""
        for path in (self.output, self.log, self.xml):
            path.unlink(missing_ok=True)


def find_tool(explicit: str | None = None) -> ToolPath:
    """Find compute-sanitizer: the option, ``$ALPHAMOE_COMPUTE_SANITIZER``, ``PATH``, ``$CUDA_HOME/bin``, the default.

    Raises:
        UsageError: the one that was named is not there.
        EvidenceError: there is none on this machine, or it does not answer.
    """
    for named, where in ((explicit, "--sanitizer"), (os.environ.get(PATH_VARIABLE), f"${PATH_VARIABLE}")):
        if named:
            found = shutil.which(named)
            if found is None:
                raise UsageError(f"{where} {named}: no such program", f"name the file {EXECUTABLE} of a CUDA toolkit")
            return _asked(Path(found))
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else []
    for folder in (None, *folders, "/usr/local/cuda/bin"):
        found = shutil.which(EXECUTABLE, path=folder)
        if found is not None:
            return _asked(Path(found))
    raise EvidenceError(
        f"{EXECUTABLE} was not found",
        f"install the CUDA toolkit, or name the program with --sanitizer or ${PATH_VARIABLE}",
    )


def _asked(path: Path) -> ToolPath:
    file = file_state(path)
    return ToolPath(path, tool_version(path), file)


def tool_version(path: Path) -> str | None:
    """Ask a tool for its version; null where its answer holds none.

    Raises:
        EvidenceError: it gives no answer of a sensible length within half a minute, or cannot be started.
    """
    hint = "name the compute-sanitizer of a CUDA toolkit with --sanitizer"
    with tempfile.TemporaryDirectory(prefix="alphamoe-version-") as folder:
        answer = Path(folder) / "answer"
        try:
            ended = run_group(
                [str(path), "--version"],
                env=os.environ,
                output=answer,
                timeout_s=VERSION_TIMEOUT_S,
                bounds={answer: MAX_VERSION_BYTES},
                grace_s=0.2,
            )
        except OSError as error:
            raise EvidenceError(f"{path} cannot be started: {error.strerror or error}", hint) from error
        if ended.timed_out or ended.too_large:
            told = f"printed more than {MAX_VERSION_BYTES >> 20} MiB" if ended.too_large else "did not end"
            raise EvidenceError(f"{path} --version {told} within {VERSION_TIMEOUT_S:g} s and was killed", hint)
        with answer.open("rb") as stream:
            match = _VERSION.search(stream.read(10_000).decode(errors="replace"))
    return match[1] if match else None


def tool_argv(
    tool: Tool, tool_path: Path, program_argv: Sequence[str], *, log: Path, xml: Path, symbols: Sequence[str]
) -> tuple[str, ...]:
    """Give the command line of a program under a tool.

    Raises:
        UsageError: a symbol cannot be a filter's substring of a mangled name.
    """
    argv = [str(tool_path), "--tool", tool, "--error-exitcode", str(ERROR_EXITCODE), "--print-limit", str(PRINT_LIMIT)]
    argv += ["--show-backtrace", "device", "--target-processes", "all", *_TOOL_OPTIONS[tool]]
    for symbol in symbols:
        if not _SYMBOL.fullmatch(symbol):  # a comma would begin another key of the filter
            raise UsageError(f"{symbol!r} is no kernel's base name", "leave out namespace, arguments and return type")
        argv += ["--kernel-name", f"kernel_substring={symbol}"]
    argv += ["--log-file", _tool_file(log), "--xml", "--save", _tool_file(xml)]
    return (*argv, *program_argv)


def run_tool(
    tool: Tool,
    program_argv: Sequence[str],
    *,
    tool_path: ToolPath,
    folder: Path,
    symbols: Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    result_file: Path | None = None,
    relative_to: Path | None = None,
    variant: str | None = None,
) -> ToolRun:
    """Run a program under one tool, to its end or its timeout.

    The kernels under test are those that it watches, and where that is every kernel, those that the program names.

    Args:
        tool: which tool.
        program_argv: the program and its arguments.
        tool_path: the compute-sanitizer.
        folder: made if need be; ``tool.log``, ``tool.xml`` and ``program.out`` of an earlier run in it are replaced.
        symbols: base names of the kernels to watch; empty to watch every kernel.
        timeout_s: seconds until the whole process group is killed. What was logged until then is kept and read.
        env: what :func:`tool.environment.child_environment` starts from; this process's own environment when null.
        result_file: where the program writes its :class:`ReplayResult`; one that lies there already is removed.
        relative_to: what the file names of the record are relative to; ``folder`` when null.
        variant: that the program was asked to launch.

    Raises:
        UsageError: a symbol cannot be a filter.
        OSError: the folder cannot be written.
    """
    files = _Files(folder.resolve())
    argv = tool_argv(tool, tool_path.path, program_argv, log=files.log, xml=files.xml, symbols=symbols)
    problems: list[str] = []
    bounds = {files.log: MAX_LOG_BYTES, files.xml: MAX_XML_BYTES, files.output: MAX_OUTPUT_BYTES}
    ended = _run(argv, files, env, timeout_s, result_file, bounds, problems)
    result = _read_result(result_file, problems)
    under_test = tuple(symbols) or (() if result is None else result.symbols)
    log = _read_log(files, tool, under_test, bool(symbols), problems) if ended else None
    records, findings = _read_xml(files, tool, under_test, bool(symbols), problems) if ended else (None, ())
    if log is not None and records == log.shown:
        findings = ()
    return ToolRun(
        tool=tool,
        tool_path=str(tool_path.path),
        tool_version=tool_path.version,
        argv=redact_argv(argv),
        error_exitcode=ERROR_EXITCODE,
        exit_code=ended.exit_code if ended else None,
        signal=ended.signal if ended else None,
        timed_out=bool(ended and ended.timed_out),
        timeout_s=timeout_s,
        wall_s=ended.wall_s if ended else 0.0,
        log_file=_name(files.log, relative_to or folder),
        xml_file=_name(files.xml, relative_to or folder),
        log=log,
        xml_records=records,
        xml_findings=findings,
        symbols=tuple(symbols),
        variant=variant,
        result=result,
        problems=tuple(problems),
    )


def run_plain(
    program_argv: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    result_file: Path | None = None,
    relative_to: Path | None = None,
    variant: str | None = None,
) -> ToolRun:
    """Run a program without a tool (``--tool none``); the arguments are those of :func:`run_tool`."""
    files = _Files(folder.resolve())
    problems: list[str] = []
    ended = _run(program_argv, files, env, timeout_s, result_file, {files.output: MAX_OUTPUT_BYTES}, problems)
    return ToolRun(
        tool="none",
        tool_path=None,
        tool_version=None,
        argv=redact_argv(program_argv),
        error_exitcode=None,
        exit_code=ended.exit_code if ended else None,
        signal=ended.signal if ended else None,
        timed_out=bool(ended and ended.timed_out),
        timeout_s=timeout_s,
        wall_s=ended.wall_s if ended else 0.0,
        log_file=_name(files.output, relative_to or folder),
        log=None,
        variant=variant,
        result=_read_result(result_file, problems),
        problems=tuple(problems),
    )


def _run(
    argv: Sequence[str],
    files: _Files,
    env: Mapping[str, str] | None,
    timeout_s: float,
    result_file: Path | None,
    bounds: Mapping[Path, int],
    problems: list[str],
) -> Ended | None:
    files.folder.mkdir(parents=True, exist_ok=True)
    files.remove()
    if result_file is not None:
        result_file.unlink(missing_ok=True)
    environment = child_environment(env)
    environment[SPAWNED_VARIABLE] = str(time.time_ns())
    try:
        ended = run_group(
            argv, env=environment, output=files.output, timeout_s=timeout_s, bounds=bounds, grace_s=GRACE_S
        )
    except OSError as error:
        problems.append(f"{Path(argv[0]).name} could not be started: {error.strerror or error}")
        return None
    if ended.alive:
        problems.append(f"{ended.alive} of its processes cannot be killed")
    if ended.outlived:
        problems.append(f"{ended.outlived} of its processes outlived it and were killed: what they did was not logged")
    if ended.too_large:
        problems.append(f"{ended.too_large} grew past {bounds[files.folder / ended.too_large] >> 20} MiB; killed")
    return ended


def _read_log(
    files: _Files, tool: Tool, target: tuple[str, ...], filtered: bool, problems: list[str]
) -> ToolLog | None:
    try:
        log = parse_log(files.log, tool, target, filtered)
    except FileNotFoundError:
        problems.append("the tool wrote no log" + _refusal(files))
        return None
    except OSError as error:
        problems.append(f"the log cannot be read: {error.strerror or error}")
        return None
    if not log.banner:
        problems.append("the log does not begin with the tool's first line" + _refusal(files))
    return log


def _refusal(files: _Files) -> str:
    """Give the line in which the tool refused its command line, where it did."""
    try:
        with files.output.open("rb") as stream:
            text = stream.read(20_000).decode(errors="replace")
    except OSError:
        return ""
    match = _REFUSED.search(text)
    return f"; it refused its command line: {match[0].strip()[:200]}" if match else ""


def _read_xml(
    files: _Files, tool: Tool, target: tuple[str, ...], filtered: bool, problems: list[str]
) -> tuple[int | None, tuple[Finding, ...]]:
    try:
        records = parse_xml(files.xml, tool, target, filtered)
    except EvidenceError as error:
        problems.append(f"the tool's XML cannot be read: {str(error).replace(f'{files.folder}/', '')}")
        return None, ()
    if records.cut:
        problems.append("the tool's XML is cut")
    return records.records, records.findings


def _read_result(path: Path | None, problems: list[str]) -> ReplayResult | None:
    if path is None:
        return None
    try:
        return read_result(path)
    except EvidenceError as error:
        problems.append(str(error).replace(f"{path.parent}/", ""))
        return None


def _tool_file(path: Path) -> str:
    """Escape what the tool would replace in a file name."""
    return str(path).replace("%", "%%")


def _name(path: Path, relative_to: Path) -> str | None:
    return os.path.relpath(path, relative_to.resolve()) if path.exists() else None
