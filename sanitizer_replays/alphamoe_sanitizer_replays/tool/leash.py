"""Processes that must not outlive the one that started them, not even when that one is killed.

The kernel ends the direct child and the command under it. A program under a tool is the tool's child, so it watches for
itself.
"""

from __future__ import annotations

import errno
import os
import select
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
# A process of its own stands over the command: code after a fork in a process of many threads may hang, and it takes in
# what the command leaves behind (PR_SET_CHILD_SUBREAPER, 36), in whatever session or environment. PR_SET_PDEATHSIG (1)
# is kept over exec. The command is not reaped, so that the number of its group is nobody else's while this process is.
_LEASH = f"""
import ctypes, os, signal, subprocess, sys
launcher, pipe, *argv = sys.argv[1:]
pipe, own = int(pipe), os.getpid()
def die_with(parent):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit({EXIT_ORPHANED})
die_with(int(launcher))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
try:
    child = subprocess.Popen(argv, process_group=0, preexec_fn=lambda: die_with(own))
except OSError as error:
    os.write(pipe, b"%d failed\\n" % error.errno)
    os._exit(1)
os.write(pipe, b"%d started\\n" % child.pid)
while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)).si_pid != child.pid:
    os.waitpid(ended.si_pid, 0)
os.write(pipe, b"%d ended\\n" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
while True:
    signal.pause()
"""


class Leash:
    """A command in a process group of its own, with a process over it that keeps hold of all its descendants."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], output: BinaryIO) -> None:
        """Start a command, which the kernel kills when the thread that calls this ends.

        Args:
            argv: the command; no shell.
            env: its environment; who started it is added.
            output: file for its stdout and stderr together.

        Raises:
            OSError: it could not be started.
        """
        read, write = os.pipe()
        self._told = os.fdopen(read, "rb", buffering=0)  # select sees no buffer
        try:
            self._holder = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(write), *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, LAUNCHER_VARIABLE: str(os.getpid())},
                start_new_session=True,
                pass_fds=(write,),
            )
        except BaseException:
            self._told.close()
            raise
        finally:
            os.close(write)
        try:
            number, _, word = self._told.readline().decode().strip().partition(" ")
        except BaseException:  # Ctrl-C
            self.let_go()
            raise
        if word != "started":
            self.let_go()
            code = int(number) if number else errno.ECHILD
            raise OSError(code, os.strerror(code), argv[0])
        self.pid = int(number)
        """Of the command, and of its group. It belongs to nobody else until :meth:`let_go`."""
        self.exit_code: int | None = None
        """Negative for the signal that ended it. Null while it runs, and where only the process over it was killed."""
        self._ended = False

    @property
    def holder(self) -> int:
        """The process over it: its parent, and that of whatever its descendants leave behind."""
        return self._holder.pid

    def ended(self) -> bool:
        """Say whether the command ended; its descendants may live on."""
        if not self._ended and select.select([self._told], [], [], 0)[0]:
            number = self._told.readline().decode().partition(" ")[0]
            self.exit_code = int(number) if number else None
            self._ended = True
        return self._ended

    def let_go(self) -> None:
        """End the process over it, at last: what is still alive is nobody's from here on."""
        self._holder.kill()
        self._holder.wait()
        self._told.close()


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
