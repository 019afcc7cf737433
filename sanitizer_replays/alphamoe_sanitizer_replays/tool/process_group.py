"""Run one command in a process group of its own, and leave nothing of it running.

A tool forks the program under test, which may fork again, and a hung GPU process ignores polite signals. So the end of
a run, whatever it is, kills the whole group and every process that left it: all descendants, daemons among them, which
the process over the command takes in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alphamoe_sanitizer_replays.tool.leash import Leash

POLL_S = 0.02
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL: time for a tool to write out what it has."""
KILL_S = 5.0
"""For killed processes to be gone; one that a driver holds may never be."""
KILL_NOW = threading.Event()
"""Set by who was told to stop once more: whatever is being ended gets no more time for it."""
INTERRUPTED = threading.Event()
"""Set by who was told to stop: Ctrl-C reaches the main thread alone, and commands run in others."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int | None
    """Null when a signal ended it, ours or another's."""
    signal: str | None
    """The signal that ended it, where it was not ours."""
    timed_out: bool
    too_large: str | None
    """Name of the file that grew past its bound, for which the command was killed."""
    wall_s: float
    outlived: int = 0
    """Processes that were still there a grace after the program had ended by itself. They were killed."""
    alive: int = 0
    """Processes that could not be killed."""


def run_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    output: Path,
    timeout_s: float,
    bounds: Mapping[Path, int],
    grace_s: float = GRACE_S,
) -> Ended:
    """Run a command to its end, its timeout, or the moment that one of its files grows too large.

    Args:
        argv: the command; no shell.
        env: its whole environment.
        output: file for its stdout and stderr together. There is no pipe that an orphan could hold open.
        timeout_s: seconds until it is killed.
        bounds: files that it writes, with the bytes that each may have.
        grace_s: seconds between the polite signal, or the program's own end, and the other signal.

    Raises:
        OSError: it could not be started, or ``output`` could not be written.
        KeyboardInterrupt: ``INTERRUPTED`` was set; the command is killed.
    """
    begun = time.monotonic()
    with output.open("wb") as stream:
        leash = Leash(argv, env=env, output=stream)
    timed_out, too_large, outlived, alive = False, None, 0, 0
    try:
        while not leash.ended():
            if INTERRUPTED.is_set():
                raise KeyboardInterrupt
            too_large = next((path.name for path, most in bounds.items() if _size(path) > most), None)
            timed_out = time.monotonic() - begun > timeout_s
            if timed_out or too_large:
                break
            time.sleep(POLL_S)
    finally:  # also for Ctrl-C
        try:
            outlived, alive = _end(leash, grace_s)
            code = leash.exit_code  # null where it could not be killed
        finally:
            leash.let_go()
    return Ended(
        exit_code=code if code is not None and code >= 0 else None,
        signal=_signal_name(-code) if code is not None and code < 0 and not (timed_out or too_large) else None,
        timed_out=timed_out,
        too_large=too_large,
        wall_s=time.monotonic() - begun,
        outlived=outlived,
        alive=alive,
    )


def _end(leash: Leash, grace_s: float) -> tuple[int, int]:
    """End a run; gives how many processes outlived a program that ended by itself, and how many cannot be killed."""
    by_itself = leash.ended()
    known: set[tuple[int, str]] = set()
    try:
        known = _family(leash.holder)
        if not by_itself:
            _signal_group(leash.pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while known if by_itself else not leash.ended():
            if KILL_NOW.is_set() or time.monotonic() > until:
                break
            time.sleep(POLL_S)
            known = _family(leash.holder)
        outlived = len(known) if by_itself else 0
    finally:  # also where Ctrl-C comes a second time
        alive = _kill(leash)
    return outlived, alive


def _kill(leash: Leash) -> int:
    """Kill a run's processes until none is left; gives how many are there all the same: a driver may hold one."""
    until = time.monotonic() + KILL_S
    while True:
        _signal_group(leash.pid, signal.SIGKILL)
        family = _family(leash.holder)
        for stray, started in family:
            if _started(stray) == started:  # its number was not given to another process meanwhile
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(stray, signal.SIGKILL)
        alive = len(family) or int(not leash.ended())
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(POLL_S)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _family(holder: int) -> set[tuple[int, str]]:
    """Give every descendant of a process that runs, as (pid, start time); empty where there is no ``/proc``."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [holder]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += children
    starts = ((own, _started(own)) for own in found)
    return {(own, started) for own, started in starts if started is not None and _lives(own, started)}


def _lives(pid: int, started: str) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX" and _started(pid) == started


def _started(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None else fields[19]


def _stat(pid: int) -> list[str] | None:
    """Give the fields of ``/proc/PID/stat`` from the state on; the name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
