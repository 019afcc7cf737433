"""One way to be stopped: Ctrl-C, SIGTERM (a cancelled job) and SIGHUP (a lost terminal) end what runs, once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from alphamoe_sanitizer_replays.tool.process_group import KILL_NOW

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While it is entered, the first of the signals raises KeyboardInterrupt in the main thread.

    Later ones, and all after :meth:`hold`, raise nothing: what is ending must not be torn out of its cleaning up, which
    would leave tools running. They take from tools the time to end by themselves. A signal that was ignored before
    (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        """Prepare; nothing is changed before it is entered."""
        self._armed = True
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        KILL_NOW.clear()

    def hold(self) -> None:
        """Let no signal raise from here on."""
        self._armed = False

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
        KILL_NOW.set()
