"""Ends a rank whose launcher died or told it to stop, whatever its main thread is waiting for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from alphamoe_profiler.rank_messages import EXIT_ORPHANED, EXIT_STOPPED, STOP

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0
STOP_GRACE_S = 2.0
"""How long a rank that was told to stop may take to reach the end of its step."""
_SAVE_TIMEOUT_S = 2.0


def die_with_launcher(launcher_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Linux only; elsewhere the watchdog alone does it. A launcher that died before this call is noticed here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher_pid:
        os._exit(EXIT_ORPHANED)


class Watchdog(threading.Thread):
    """Listens to the launcher beside the rank's main thread.

    Told to stop, it sets :attr:`stop_requested` and lets the main thread end in order for ``STOP_GRACE_S`` seconds.
    A main thread that hangs in a collective (its peer is dead) cannot: then ``save`` is called, and the process ends.
    """

    def __init__(self, connection: Connection, launcher_pid: int, leave: Callable[[int], None] = os._exit) -> None:
        """Prepare; ``leave`` ends the process with an exit code and is replaced in tests only."""
        super().__init__(name="alphamoe-watchdog", daemon=True)
        self.stop_requested = threading.Event()
        self.ending = threading.Event()
        """Set by the main thread when it ends by itself: from then on only the launcher's kill can cut it short."""
        self.save: Callable[[], None] = lambda: None
        """Writes out what the collector holds."""
        self._connection = connection
        self._launcher_pid = launcher_pid
        self._leave = leave

    def run(self) -> None:
        """Listen until the launcher says stop or is gone."""
        while True:
            try:
                if not wait([self._connection], timeout=_POLL_S):
                    if os.getppid() != self._launcher_pid:
                        return self._leave(EXIT_ORPHANED)
                    continue
                word = self._connection.recv_bytes()
            except (EOFError, OSError):
                return self._leave(EXIT_ORPHANED)
            if word == STOP:
                self.stop_requested.set()
                if self.ending.wait(STOP_GRACE_S):
                    continue
                # save() may hang too (a lock that the main thread holds, a dead device): it gets a thread and a limit.
                saver = threading.Thread(target=self.save, name="alphamoe-save", daemon=True)
                saver.start()
                saver.join(_SAVE_TIMEOUT_S)
                return self._leave(EXIT_STOPPED)
