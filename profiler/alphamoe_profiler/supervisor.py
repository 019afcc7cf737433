"""Starts one process a rank, watches all of them, and ends the run when one of them fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from alphamoe_profiler.rank_messages import STOP, RankMessage, RankTask, ServedRequest, receive
from alphamoe_profiler.run_records import RankEnd

SETTLE_S = 1.0
"""After a first failure: how long to wait for the one that caused it. Peers of a dead rank may report first."""
GRACE_S = 6.0
"""How long ranks that were told to stop may take before they are killed."""
_PEER_LOSS = (
    "connection to another rank was lost",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket",
    "nccl",
    "timed out",
    "timeout",
)


@dataclass
class _Rank:
    task: RankTask
    process: SpawnProcess
    connection: Connection | None
    phase: str = "start_up"
    error: str | None = None
    failed_ns: int | None = None
    told: bool = False
    done: bool = False
    ended: bool = False
    end: RankEnd | None = None

    @property
    def by_signal(self) -> str | None:
        return self.end.signal if self.end else None


@dataclass(frozen=True)
class Supervision:
    """How a run ended."""

    ends: tuple[RankEnd, ...]
    error: str | None
    """Null when every rank finished; otherwise one line that names the rank and what happened to it."""
    interrupted_by: str | None
    served: tuple[ServedRequest, ...]
    notes: tuple[str, ...] = ()
    phase_ns: dict[str, int] = field(default_factory=dict)
    """When the first rank announced each phase, ``time.monotonic_ns()``."""


Target = Callable[[RankTask, Connection], None]


class Supervisor:
    """Runs the ranks of one session. Use :meth:`run` once."""

    def __init__(
        self, target: Target, tasks: Sequence[RankTask], timeout_s: float, on_message: Callable[[RankMessage], None]
    ) -> None:
        """Prepare.

        Args:
            target: what each process runs: an importable function of the task and the connection to the launcher.
            tasks: one a rank, in order.
            timeout_s: the run is stopped after this.
            on_message: called in the launcher with each message of a rank, for progress.
        """
        self._target = target
        self._tasks = tasks
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._ranks: list[_Rank] = []
        self._served: list[ServedRequest] = []
        self._notes: list[str] = []
        self._signal: int | None = None
        self._phase_ns: dict[str, int] = {}

    def run(self) -> Supervision:
        """Start the ranks, watch them to their end, and return how they ended. No rank is left running."""
        with self._signals() as wake:
            try:
                reason = self._start() or self._watch(wake)
                if reason is not None:
                    self._stop(wake)
            finally:
                self._kill()
        error = reason if reason is not None else self._cause()
        ends = tuple(rank.end for rank in self._ranks if rank.end is not None)
        interrupted = signal.Signals(self._signal).name if self._signal is not None else None
        return Supervision(ends, error, interrupted, tuple(self._served), tuple(self._notes), self._phase_ns)

    def _start(self) -> str | None:
        """Start every rank; returns why one could not be started (too many open files or processes), or null."""
        for task in self._tasks:
            try:
                self._start_rank(task)
            except OSError as error:
                return f"rank {task.rank} could not be started: {error.strerror or error}"
        return None

    def _start_rank(self, task: RankTask) -> None:
        context = multiprocessing.get_context("spawn")
        # The tracker unblocks SIGINT when it starts; started now, the mask below holds for the ranks.
        multiprocessing.resource_tracker.ensure_running()
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=self._target, args=(task, theirs), name=f"alphamoe-rank-{task.rank}", daemon=True
        )
        # Ctrl-C reaches the whole process group, but the launcher decides how the ranks end: they inherit the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._ranks.append(_Rank(task, process, ours))

    def _watch(self, wake: int) -> str | None:
        """Watch until all ranks finished (null) or the run must end (why)."""
        settle_until: float | None = None
        while any(not rank.ended for rank in self._ranks):
            now = time.monotonic()
            if self._signal is not None:
                return f"interrupted by {signal.Signals(self._signal).name}"
            if settle_until is not None and now >= settle_until:
                return self._cause()
            if now >= self._deadline_s:
                phases = ", ".join(f"rank {rank.task.rank} in {rank.phase}" for rank in self._ranks if not rank.ended)
                return f"not finished after {self._timeout_s:g} s ({phases})"
            self._wait(wake, min(settle_until or self._deadline_s, self._deadline_s) - now)
            if settle_until is None and any(rank.failed_ns is not None for rank in self._ranks):
                settle_until = time.monotonic() + SETTLE_S
        return self._cause()

    def _wait(self, wake: int, timeout_s: float) -> None:
        sources: list[Connection | int] = [wake]
        for rank in self._ranks:
            if rank.connection is not None:
                sources.append(rank.connection)
            if not rank.ended:
                sources.append(rank.process.sentinel)
        ready = wait(sources, timeout=max(timeout_s, 0.0))
        if wake in ready:
            os.read(wake, 64)
        for rank in self._ranks:
            if rank.connection is not None and rank.connection in ready:
                self._read(rank, rank.connection)
            if not rank.ended and rank.process.sentinel in ready:
                self._note_end(rank)

    def _read(self, rank: _Rank, connection: Connection) -> None:
        try:
            while connection.poll():
                self._take(rank, receive(connection))
        except (EOFError, OSError):
            connection.close()
            rank.connection = None

    def _take(self, rank: _Rank, message: RankMessage) -> None:
        if message.kind == "phase" and message.phase is not None:
            rank.phase = message.phase
            self._phase_ns.setdefault(message.phase, message.at_ns)
        elif message.kind == "served":
            self._served.extend(message.served)
            self._notes.extend(message.notes)
        elif message.kind == "failed":
            rank.error, rank.failed_ns = message.error or "no reason given", message.at_ns
        elif message.kind == "done":
            rank.done = True
        self._on_message(message)

    def _note_end(self, rank: _Rank) -> None:
        rank.process.join()
        if rank.connection is not None:
            self._read(rank, rank.connection)
        code = rank.process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else None
        rank.ended = True
        rank.end = RankEnd(rank=rank.task.rank, exit_code=code, signal=name, phase=rank.phase)
        if (not rank.done or code != 0) and rank.failed_ns is None:
            rank.failed_ns = time.monotonic_ns()

    def _stop(self, wake: int) -> None:
        """Tell the ranks to stop, and wait for them as long as they may take; a second signal cuts that short."""
        first_signal, self._signal = self._signal, None
        until = time.monotonic() + GRACE_S
        for rank in self._ranks:
            rank.told = not rank.ended
            if rank.told and rank.connection is not None:
                with contextlib.suppress(OSError):
                    rank.connection.send_bytes(STOP)
        while any(not rank.ended for rank in self._ranks) and time.monotonic() < until and self._signal is None:
            self._wait(wake, until - time.monotonic())
        self._signal = first_signal if first_signal is not None else self._signal

    def _kill(self) -> None:
        for rank in self._ranks:
            if not rank.ended:
                rank.told = True
                rank.process.kill()
        for rank in self._ranks:
            if not rank.ended:
                self._note_end(rank)
            if rank.connection is not None:
                rank.connection.close()

    def _cause(self) -> str | None:
        """Name the rank whose failure ended the run: killed before raised, raised before merely lost its peer."""
        failed = [rank for rank in self._ranks if rank.failed_ns is not None and not rank.told]
        if not failed:
            return None
        first = min(failed, key=lambda rank: (_rank_of_cause(rank), rank.failed_ns or 0))
        where = f"rank {first.task.rank}"
        if first.error is not None:
            return f"{where} failed in {first.phase}: {first.error}"
        if first.by_signal is not None:
            return f"{where} was killed by {first.by_signal} in {first.phase}"
        return f"{where} exited with code {first.process.exitcode} in {first.phase}"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """Turn SIGINT, SIGTERM and SIGHUP into a wake-up while ranks run. Yields the file descriptor that wakes."""
        reader, writer = os.pipe()

        def note(number: int, frame: object) -> None:
            self._signal = number
            with contextlib.suppress(OSError):
                os.write(writer, b"!")

        before: dict[signal.Signals, object] = {}
        try:
            # ValueError: not the main thread, whose owner then answers for signals.
            with contextlib.suppress(ValueError):
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in the background
                        before[number] = signal.signal(number, note)
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal returned it
            os.close(reader)
            os.close(writer)


def _rank_of_cause(rank: _Rank) -> int:
    if rank.error is None:
        return 0
    return 2 if any(word in rank.error.lower() for word in _PEER_LOSS) else 1
