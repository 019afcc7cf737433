"""How far a session is, on stderr: one moving line on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from alphamoe_profiler.printable import printable_line

if TYPE_CHECKING:
    from rich.status import Status

QUIET_S = 30.0
"""A log without a word for longer than this looks like a job that hangs."""


class Told(Protocol):
    """Hears how far a session is."""

    def __call__(self, last: str, done: int, total: int) -> None:
        """Hear what was done last, how much is done and how much there is; with 0 done, what is to come."""


def nothing_told(last: str, done: int, total: int) -> None:
    """Hear it and say nothing."""


class SessionProgress:
    """A context manager that is called as :class:`Told`. A stderr that is gone is no trouble of the session's."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        """Prepare; ``quiet_s`` is how long no line may be written where there is no terminal."""
        self._quiet_s = quiet_s
        self._status: Status | None = None
        self._began_s = time.monotonic()
        self._line, self._tenth = "", 0
        self._spoke, self._ended = threading.Event(), threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="sanitize-progress", daemon=True)

    def __enter__(self) -> SessionProgress:
        if sys.stderr.isatty():
            from alphamoe_profiler.printable import printable_console

            self._status = printable_console(file=sys.stderr, markup=False).status("starting")
            self._status.start()
        else:
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._spoke.set()
        if self._status is not None:
            self._status.stop()

    def __call__(self, last: str, done: int, total: int) -> None:
        """Say it, on a terminal always, elsewhere each time that another tenth is done."""
        self._line = f"{done} of {total}: {last}" if done else last
        tenth = done * 10 // max(total, 1)
        if self._status is not None and done:
            self._status.update(self._line)
        elif self._status is not None or not done or tenth != self._tenth:
            self._say(self._line)
        self._tenth = tenth

    def _tick(self) -> None:
        while not self._ended.is_set():
            if not self._spoke.wait(self._quiet_s) and self._line:
                self._say(f"{self._line} ({time.monotonic() - self._began_s:.0f} s)")
            self._spoke.clear()

    def _say(self, line: str) -> None:
        self._spoke.set()
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{printable_line(line)}\n")
            sys.stderr.flush()
