"""Processes that must not outlive the one that started them, not even when that one is killed.

The kernel ends the direct child. A program under a tool is the tool's child, so it watches for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

LAUNCHER_VARIABLE = "ALPHAMOE_TRACE_REPLAY_LAUNCHER"
"""Process id of the session that started a tool or a replay."""
EXIT_ORPHANED = 75
_POLL_S = 1.0
# A process of its own in between, because code after a fork in a process of many threads may hang. PR_SET_PDEATHSIG
# (1) is kept over exec. The pipe closes at exec; an error goes through it.
_LEASH = f"""
import ctypes, os, signal, sys
launcher, pipe, *argv = sys.argv[1:]
os.set_inheritable(int(pipe), False)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(launcher):
    os._exit({EXIT_ORPHANED})
try:
    os.execvp(argv[0], argv)
except OSError as error:
    os.write(int(pipe), str(error.errno).encode())
    os._exit(1)
"""


def start_on_leash(argv: Sequence[str], *, env: Mapping[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own that the kernel kills when the thread that calls this ends.

    Args:
        argv: the command; no shell.
        env: its environment; who started it is added.
        output: file for its stdout and stderr together.

    Raises:
        OSError: it could not be started.
    """
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(write), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, LAUNCHER_VARIABLE: str(os.getpid())},
            start_new_session=True,
            pass_fds=(write,),
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as stream:
        told = stream.read()
    if told:
        process.wait()
        raise OSError(int(told), os.strerror(int(told)), argv[0])
    return process


def die_with_launcher() -> None:
    """End this process soon after the session that started it, whatever its main thread waits for."""
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    if launcher.isdecimal():
        threading.Thread(target=_watch, args=(int(launcher),), name="alphamoe-leash", daemon=True).start()


def _watch(launcher: int) -> None:
    while _lives(launcher):
        time.sleep(_POLL_S)
    os._exit(EXIT_ORPHANED)


def _lives(pid: int) -> bool:
    """Say whether a process runs; one that ended and that nobody has reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # no /proc here, or it ended just now, which the next look tells
        return True
    # The name of the program, in brackets, may hold anything.
    return stat.rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"])
