"""Run one mutant as a user would, inside this process: no traceback, not too long, not too much memory."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

import pyarrow as pa

from alphamoe_profiler.cli import main
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.trace_files import SymbolTable

LIMIT_S = 10.0
LIMIT_BYTES = 1 << 30
VERDICTS = {0: "PASS", 1: "FAIL", 2: "refused", 3: "INCONCLUSIVE"}


@dataclass(frozen=True)
class Mutant:
    """A damaged input on disk, and what is done with it."""

    kind: str
    words: tuple[str, ...] = ()
    """The command; empty where a reader is called alone."""
    read: Callable[[], object] | None = None
    removed: bool = False
    """Evidence was taken away knowingly: PASS is wrong."""


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant."""

    verdict: str
    fault: str | None
    seconds: float


class _TooLong(BaseException):
    """Not an Exception: nothing under test may catch it."""


def judged(mutant: Mutant) -> Outcome:
    """Run one mutant and say what came of it, and what is wrong with that."""
    begin_peak()
    held = peak_bytes()
    before = time.perf_counter()
    fault: str | None = None
    verdict = "none"
    try:
        with _alarm():
            verdict, fault = _command(mutant) if mutant.words else _reader(mutant)
    except _TooLong:
        fault = f"took longer than {LIMIT_S:.0f} s"
    except BaseException as error:  # any other end is what is looked for
        fault = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - before
    if fault is None and mutant.removed and verdict == "PASS":
        fault = "PASS although its evidence was removed"
    taken = peak_bytes() - held
    if fault is None and taken > LIMIT_BYTES:
        fault = f"{taken >> 20} MiB of memory"
    return Outcome(verdict, fault, seconds)


def begin_peak() -> None:
    """Begin the mark of ``peak_bytes`` anew, at what this process holds now; under pytest other tests ran in it."""
    with contextlib.suppress(OSError):  # where /proc is read-only the old mark stays, and only growth beyond it counts
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most memory that this process held since ``begin_peak``."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _command(mutant: Mutant) -> tuple[str, str | None]:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), mock.patch("os.fsync"):
        code = main(list(mutant.words))
    told = errors.getvalue()
    if "the traceback is in" in told or "Traceback (most recent" in told + out.getvalue():
        return "crash", told.strip()[:600]
    if code not in VERDICTS:
        return str(code), f"exit code {code}: {told.strip()[:300]}"
    if code == 2 and not told.strip() and "CONFIG_ERROR" not in out.getvalue():
        return "refused", "refused without a word"
    return VERDICTS[code], None


def _reader(mutant: Mutant) -> tuple[str, str | None]:
    assert mutant.read is not None
    try:
        mutant.read()
    except AlphaMoEError as error:
        return "refused", None if str(error).strip() else "refused without a word"
    return "read", None


class CountingSink:
    """Takes what a reader gives and keeps nothing."""

    def __init__(self) -> None:
        self.names: dict[str, SymbolTable] = {}

    def put(self, rank_key: str, table: str, rows: pa.Table) -> None:
        """Count nothing, hold nothing."""

    def symbols(self, rank_key: str) -> SymbolTable:
        """Return the names of a rank."""
        return self.names.setdefault(rank_key, SymbolTable())


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def emptied(folder: Path) -> Path:
    """Return the folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
