"""Reading of the files of an import, each in a process of its own kind: one bad file ends one file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from alphamoe_profiler.bundle_files import encode_json, read_json
from alphamoe_profiler.import_plan import PlannedFile
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError
from alphamoe_tracers.sglang_log import SglangLog
from alphamoe_tracers.trace_files import TraceSummary

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

IN_PROCESS_BYTES = 8 << 20
"""Less than this in all is read in the calling process: starting others would take longer."""
_RESULT = "result.json"

Progress = Callable[[int, int, int], None]
"""Called as (index of the file, bytes read, size of the file)."""


class ReadKey(msgspec.Struct, frozen=True):
    """One rank (or process) of one file."""

    summary: TraceSummary
    folder: str
    """Where its rows were staged."""


class FileResult(msgspec.Struct, frozen=True):
    """What reading one file came to."""

    index: int
    keys: tuple[ReadKey, ...] = ()
    error: str | None = None
    """Why it could not be read; then nothing of it is used."""
    hint: str = ""


def read_files(
    files: tuple[PlannedFile, ...], staging: Path, jobs: int, progress: Progress | None = None
) -> list[FileResult]:
    """Read every file into ``staging``.

    Args:
        files: what to read.
        staging: an empty folder.
        jobs: processes at most.
        progress: called while files are read.

    Returns:
        One result for each file, in their order. A file that cannot be read, or whose reader was killed, is told in
        its result; the others are read all the same.
    """
    total = sum(item.size_bytes for item in files)
    if len(files) == 1 or jobs <= 1 or total <= IN_PROCESS_BYTES:
        spare = max(jobs, 1)
        return [read_one(item, staging / str(item.index), spare if len(files) == 1 else 1, progress) for item in files]
    return _Readers(files, staging, min(jobs, len(files)), progress).run()


def read_one(item: PlannedFile, folder: Path, jobs: int = 1, progress: Progress | None = None) -> FileResult:
    """Read one file into a folder and leave its result beside the rows.

    Args:
        item: the file.
        folder: where its rows go.
        jobs: processes that this one file may use.
        progress: called while it is read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = None if progress is None else lambda done, size: progress(item.index, done, size)
    try:
        keys = _read(item, folder, jobs, told)
        result = FileResult(item.index, keys)
    except AlphaMoEError as error:
        result = FileResult(item.index, error=str(error), hint=error.hint)
    except MemoryError:
        result = FileResult(item.index, error=f"{item.path}: not enough memory to read it", hint="use fewer --jobs")
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(item.path)):
            raise  # the machine's own trouble (a full disk) ends the import, not the file
        result = FileResult(item.index, error=f"{item.path}: {error.strerror}")
    (folder / _RESULT).write_bytes(encode_json(result, str(item.path)))
    return result


def _read(item: PlannedFile, folder: Path, jobs: int, told: Callable[[int, int], None] | None) -> tuple[ReadKey, ...]:
    if item.format == "sglang-log":
        from alphamoe_tracers.sglang_log import read_sglang_log

        return _stage_log(read_sglang_log(item.path, told), item, folder)
    from alphamoe_profiler.import_sink import StagingSink

    sink = StagingSink(folder)
    summaries = _reader(item.format)(item.path, sink, progress=told, **_options(item.format, jobs))
    sink.close()
    return tuple(ReadKey(summary, str(sink.folder_of(summary.key))) for summary in summaries)


def _reader(kind: str) -> Callable[..., list[TraceSummary]]:
    if kind == "nsys-sqlite":
        from alphamoe_tracers.nsys import read_nsys

        return read_nsys
    from alphamoe_tracers.kineto import read_kineto

    return read_kineto


def _options(kind: str, jobs: int) -> dict[str, Any]:
    """Return the options of a reader that can use several processes for one file."""
    return {"workers": jobs} if kind == "kineto" else {}


def _stage_log(log: SglangLog, item: PlannedFile, folder: Path) -> tuple[ReadKey, ...]:
    """Write the records of each rank as JSON lines and return a summary for each."""
    from alphamoe_tracers.trace_files import sha256_of

    if not log.records and log.problems:
        raise EvidenceError(f"{item.path}: {log.problems[0]}", "no line of it could be used")
    digest = sha256_of(item.path)
    keys = []
    for number, rank in enumerate(log.ranks or (None,)):
        own = [entry for entry in log.records if entry.rank == rank]
        target = folder / str(number)
        target.mkdir(parents=True, exist_ok=True)
        lines = [encode_json(entry, f"{item.path}:{entry.line}") for entry in own]
        (target / "dispatch_log.jsonl").write_bytes(b"".join(lines))
        notes = [*log.problems, *(["no AlphaMoE line is in this log"] if not own else [])]
        summary = TraceSummary(
            key=str(number),
            path=str(item.path),
            sha256=digest,
            size_bytes=item.size_bytes,
            format="sglang-log",
            rank=rank,
            rank_source=None if rank is None else "label",
            whole=not log.cut,
            cut="the file ends inside a line" if log.cut else None,
            duplicates=log.duplicates,
            events={"records": len(own), "lines": log.lines},
            notes=tuple(notes),
        )
        keys.append(ReadKey(summary, str(target)))
    return tuple(keys)


class _Readers:
    """A few processes that read one file after another. A process that dies fails its file and is replaced."""

    def __init__(self, files: tuple[PlannedFile, ...], staging: Path, count: int, progress: Progress | None) -> None:
        # The longest first: the last one to end decides how long the whole takes.
        self._waiting = sorted(files, key=lambda item: item.size_bytes)
        self._files = files
        self._staging = staging
        self._count = count
        self._progress = progress
        self._context = multiprocessing.get_context("spawn")
        self._at_work: dict[Connection, tuple[BaseProcess, PlannedFile | None]] = {}
        self._results: dict[int, FileResult] = {}

    def run(self) -> list[FileResult]:
        """Read all files."""
        try:
            for _ in range(self._count):
                self._start()
            while len(self._results) < len(self._files):
                for connection in wait(list(self._at_work)):
                    self._hear(connection)  # type: ignore[arg-type]
        finally:
            for process, _ in self._at_work.values():
                process.kill()
            for connection, (process, _) in self._at_work.items():
                process.join()
                connection.close()
        return [self._results[item.index] for item in self._files]

    def _start(self) -> None:
        if not self._waiting:
            return
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, str(self._staging), os.getpid()))
        process.start()
        theirs.close()
        self._at_work[ours] = (process, None)
        self._give(ours)

    def _give(self, connection: Connection) -> None:
        process, _ = self._at_work[connection]
        item = self._waiting.pop() if self._waiting else None
        self._at_work[connection] = (process, item)
        with contextlib.suppress(BrokenPipeError):  # it died: _hear will say of which file
            connection.send(item)

    def _hear(self, connection: Connection) -> None:
        process, item = self._at_work[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = None
        if isinstance(message, tuple):
            if self._progress is not None:
                self._progress(*message)
            return
        if message == "done" and item is not None:
            self._results[item.index] = read_json(self._staging / str(item.index) / _RESULT, FileResult)
            self._give(connection)
            return
        process.join()
        del self._at_work[connection]
        connection.close()
        if isinstance(message, Exception):
            raise message
        if item is not None:
            self._results[item.index] = FileResult(item.index, error=f"{item.path}: its reader {_end(process)}")
            self._start()


def _end(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name} (out of memory?)"
    return f"ended with exit code {code}"


def _work(connection: Connection, staging: str, parent: int) -> None:
    """Read files until there is none left; the parent's end is this process's end."""
    from alphamoe_profiler.watchdog import die_with_launcher

    die_with_launcher(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (item := connection.recv()) is not None:
        try:
            read_one(item, Path(staging) / str(item.index), 1, lambda *told: connection.send(told))
        except OSError as error:
            connection.send(OSError(error.errno, error.strerror, error.filename))
            return
        connection.send("done")
