"""Run one command in a session of its own, and leave nothing of it running.

A tool forks the program under test, which may fork again, and a hung GPU process ignores polite signals. So the end of
a run, whatever it is, kills the whole group and every descendant that left the group for a session of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL: time for a tool to write out what it has."""
INTERRUPTED = threading.Event()
"""Set by who was told to stop: Ctrl-C reaches the main thread alone, and commands run in others."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int | None
    """Null when a signal ended it, ours or another's."""
    signal: str | None
    timed_out: bool
    too_large: str | None
    """Name of the file that grew past its bound, for which the command was killed."""
    wall_s: float


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
        grace_s: seconds between the polite signal and the other one.

    Raises:
        OSError: it could not be started, or ``output`` could not be written.
        KeyboardInterrupt: ``INTERRUPTED`` was set; the command is killed.
    """
    begun = time.monotonic()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=dict(env),
            start_new_session=True,
        )  # fmt: skip
    timed_out, too_large = False, None
    try:
        while not _ended(process.pid):
            if INTERRUPTED.is_set():
                raise KeyboardInterrupt
            too_large = next((path.name for path, most in bounds.items() if _size(path) > most), None)
            timed_out = time.monotonic() - begun > timeout_s
            if timed_out or too_large:
                break
            time.sleep(POLL_S)
    finally:  # also for Ctrl-C
        _kill(process.pid, grace_s)
        process.wait()
    code = process.returncode
    return Ended(
        exit_code=code if code >= 0 else None,
        signal=_signal_name(-code) if code < 0 else None,
        timed_out=timed_out,
        too_large=too_large,
        wall_s=time.monotonic() - begun,
    )


def _ended(pid: int) -> bool:
    """Say whether a child ended, without reaping it: until then its group's number belongs to nobody else."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(pid: int, grace_s: float) -> None:
    strays = _descendants(pid)
    if not _ended(pid):
        _signal_group(pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while not _ended(pid) and time.monotonic() < until:
            strays |= _descendants(pid)
            time.sleep(POLL_S)
    strays |= _descendants(pid)
    _signal_group(pid, signal.SIGKILL)
    for stray, started in strays:
        if _started(stray) == started:  # its number was not given to another process meanwhile
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _descendants(pid: int) -> set[tuple[int, str]]:
    """Give the children, and theirs, as (pid, start time); empty where there is no ``/proc``."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[tuple[int, str]] = set()
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            started = _started(child)
            if started is not None and (child, started) not in found:
                found.add((child, started))
                waiting.append(child)
    return found


def _started(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None or len(fields) < 20 else fields[19]


def _stat(pid: int) -> list[str] | None:
    """Give the fields of ``/proc/PID/stat`` from the state on; the name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 1 else None


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
