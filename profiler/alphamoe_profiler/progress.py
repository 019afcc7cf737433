"""What the ranks are doing, on stderr: one moving line on a terminal, elsewhere a plain line as each phase begins."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

from alphamoe_profiler.rank_messages import RankMessage

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text


_WORDS = {
    "start_up": "starting up",
    "load": "loading the model",
    "warm_up": "warming up",
    "capture": "preparing the cache, and CUDA graphs where they are asked for",
    "prefill": "serving: prefill",
    "decode": "serving: decode",
    "collection": "collecting what was recorded",
}


class TerminalProgress:
    """A context manager that is called with the messages of the ranks. It honours NO_COLOR, as rich does.

    A stderr that is gone is no trouble of the run's.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._phases = dict[int, str]()  # of ranks that spoke
        self._told = set[str]()
        self._status: Status | None = None
        self._began_s = time.monotonic()

    def __enter__(self) -> TerminalProgress:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status(self)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, message: RankMessage) -> None:
        """Take one message of a rank."""
        if message.kind == "phase" and message.phase is not None:
            words = _WORDS.get(message.phase, message.phase.replace("_", " "))
            self._phases[message.rank] = words
            self._begin(words)
        elif message.kind in ("failed", "done"):
            self._phases[message.rank] = message.kind

    def _begin(self, words: str) -> None:
        """Say where there is no terminal that the first rank begins a phase, each phase once."""
        if self._status is None and words not in self._told:
            self._told.add(words)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{words}, {time.monotonic() - self._began_s:.0f} s\n")
                sys.stderr.flush()

    def __rich__(self) -> Text:
        """Return the line as it is now: asked at every refresh, so that the seconds go on while a phase lasts."""
        from rich.text import Text

        return Text(self.line())

    def line(self) -> str:
        """Return the phases with how many ranks are in each: ``decode (4 ranks), 12 s``."""
        counted = Counter({"starting": self._ranks - len(self._phases)}) + Counter(self._phases.values())
        parts = (f"{phase} ({count} rank{'s' if count > 1 else ''})" for phase, count in counted.items())
        return f"{', '.join(parts)}, {time.monotonic() - self._began_s:.0f} s"
