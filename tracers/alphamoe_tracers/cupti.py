"""The collector: GPU witnesses of one rank, recorded while the program runs."""

from __future__ import annotations

import atexit
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from alphamoe_tracers import libcupti
from alphamoe_tracers.libcupti import NVTX_INJECTION, CuptiError
from alphamoe_tracers.parts import rows_on_disk
from alphamoe_tracers.pump import Pump
from alphamoe_tracers.records import TABLES, CollectorSummary, SentinelKind
from alphamoe_tracers.scribe_process import ScribeProcess
from alphamoe_tracers.source import ActivitySource, SourceUnavailableError
from alphamoe_tracers.wire import Begin, Finish, Outcome


def prepare_environment() -> str | None:
    """Have NVTX hand its ranges to the libcupti that cupti-python loads.

    Call it before CUDA and before the first NVTX call of the process: NVTX looks at the environment once. An injection
    that somebody else asked for is left alone.

    Returns:
        The path that ``NVTX_INJECTION64_PATH`` names now, or None where there is no CUPTI.
    """
    if NVTX_INJECTION not in os.environ:
        try:
            os.environ[NVTX_INJECTION] = libcupti.load().path
        except (SourceUnavailableError, OSError):
            return None
    return os.environ[NVTX_INJECTION]


class Collector:
    """Records kernels, transfers, launches, NVTX ranges, graph nodes and modules of this process into a bundle.

    No method raises for trouble of the environment (no CUPTI, another tool, a full disk): the collector is then off, or
    goes off, and its summary says why. Methods are called from the rank's main thread.

    The records are decoded and written by a process beside this one (:mod:`alphamoe_tracers.scribe`).
    """

    def __init__(
        self,
        out: Path,
        rank: int,
        *,
        flush_period_s: float = 1.0,
        step_sentinel_period_s: float = 0.02,
        source: ActivitySource | None = None,
        keep_raw: Path | None = None,
        in_process: bool = False,
    ) -> None:
        """Prepare a collector; nothing is recorded before :meth:`start`.

        Args:
            out: the run bundle's directory.
            rank: the tensor-parallel rank, which names the files.
            flush_period_s: how often completed records become parts on disk.
            step_sentinel_period_s: least time between two step sentinels, see :meth:`step_boundary`.
            source: where records come from; CUPTI when left out.
            keep_raw: also store the raw buffers there, to be played by :class:`alphamoe_tracers.replay.ReplaySource`.
            in_process: let the scribe be a thread, for tests of what it does.
        """
        self._out, self._rank, self._period_s = out, rank, flush_period_s
        self._step_period_s, self._next_step_sentinel_s = step_sentinel_period_s, 0.0
        self._process = os.getpid()
        self._source = source
        self._keep_raw = keep_raw
        self._in_process = in_process
        self._clock: list[int] = []
        """What the clock said each time that it was asked, for a recording to be played."""
        self._pump: Pump | None = None
        self._reason: str | None = "the collector was not started"
        self._notes: list[str] = []
        self._launched: Counter[SentinelKind] = Counter()
        self._started_ns = 0
        self._window_open_ns: int | None = None
        self._window_close_ns: int | None = None
        self._summary: CollectorSummary | None = None

    @property
    def recording(self) -> bool:
        """Whether records are being taken."""
        return self._pump is not None and self._pump.failure is None and self._summary is None

    @property
    def reason(self) -> str | None:
        """Why nothing is recorded, or None."""
        return self._reason if self._pump is None else self._pump.failure

    def start(self) -> None:
        """Begin to record, or go off with a reason."""
        try:
            if self._source is None:
                from alphamoe_tracers.cupti_source import CuptiSource

                self._source = CuptiSource()
            pump = Pump(self._source, self._period_s)
            self._source.start(pump)
            self._started_ns = self._now_ns()
            begin = self._begin(self._source)
        except SourceUnavailableError as error:
            self._give_up(str(error))
            return
        except Exception as error:  # a broken installation must not end the traced program
            self._give_up(f"CUPTI could not be started, {type(error).__name__}: {error}")
            return
        try:
            scribe = ScribeProcess(self._out, in_process=self._in_process)
        except OSError as error:
            self._give_up(f"the process that writes the records cannot be started: {error}")
            return
        self._pump, self._reason = pump, None
        pump.start(scribe, begin)
        # CUPTI would call back into a dead interpreter.
        atexit.register(self._abandon)

    def _begin(self, source: ActivitySource) -> Begin:
        return Begin(
            out=str(self._out.absolute()),
            rank=self._rank,
            process=source.process,
            version=source.version,
            sizes=dict(source.layouts.sizes),
            fields=source.layouts.described(),
            kernel_record=source.layouts.kernel_record,
            api_names=[(kind, cbid, name) for (kind, cbid), name in source.api_names().items()],
            keep_raw=str(self._keep_raw.absolute()) if self._keep_raw is not None else None,
        )

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        try:
            if self._source is not None:
                self._source.stop()
        except Exception as error:  # as above
            self._notes.append(f"stop: {error}")

    def open_window(self) -> None:
        """Open the window in which absence is to be provable: idle device, time, sentinels.

        Waits until the scribe is up, so that the window does not run beside its start; one that is not up after 30
        seconds ends the recording.
        """
        if self._pump is not None:
            self._pump.wait_until_ready()
        self._next_step_sentinel_s = 0.0
        self._attempt("synchronize", self._synchronize)
        self._window_open_ns = self._timestamp()
        self._sentinel("open", 0)
        self._sentinel("graph_open", 0)

    def step_boundary(self, step: int) -> None:
        """Launch a sentinel with the number of the step that follows, now and then.

        The first boundary of the window gets one, later ones when 20 ms passed since the last: that bounds how long a
        collector that went silent stays unseen, and a launch at each step would cost short steps some percent.
        """
        now_s = time.monotonic()
        if now_s >= self._next_step_sentinel_s:
            self._next_step_sentinel_s = now_s + self._step_period_s
            self._sentinel("step", step)

    def graph_sentinel(self) -> None:
        """Launch a sentinel on the current stream, which may be capturing: it becomes a node of that graph."""
        self._sentinel("graph_step", 0)

    def close_window(self) -> None:
        """Close the window: sentinels, idle device, time."""
        self._sentinel("graph_close", 0)
        self._sentinel("close", 0)
        self._attempt("synchronize", self._synchronize)
        self._window_close_ns = self._timestamp()

    def flush(self) -> None:
        """Make every record of completed work durable before returning."""
        if self.recording and self._pump is not None:
            self._attempt("flush", lambda: self._required_source().flush(forced=True))
            self._pump.barrier()

    def stop(self, known_sources: Mapping[str, str] | None = None) -> CollectorSummary:
        """Stop, compact each table into one part and say what was recorded. A second call returns the first summary.

        Args:
            known_sources: sha256 of the CUDA source by sha256 of the cubin, of what this process compiled.
        """
        if self._summary is None:
            outcome = None
            if self._pump is not None:
                atexit.unregister(self._abandon)
                outcome = self._finish(self._pump, known_sources or {})
            self._summary = self._summarise(outcome)
        return self._summary

    def _finish(self, pump: Pump, known_sources: Mapping[str, str]) -> Outcome:
        source = self._required_source()
        if pump.failure is None:
            self._attempt("synchronize", self._synchronize)
            self._attempt("flush", lambda: source.flush(forced=True))
        self._attempt("stop", source.stop)
        finish = Finish(
            launched=dict(self._launched),
            started_ns=self._started_ns,
            known_sources=dict(known_sources),
            clock=self._clock if self._keep_raw is not None else [],
        )
        return pump.finish(finish)

    def _summarise(self, outcome: Outcome | None) -> CollectorSummary:
        source, pump = self._source, self._pump
        found = outcome or Outcome()
        notes = [*self._notes, *(source.notes if source else ()), *(pump.notes if pump else ()), *found.notes]
        off = outcome is None or self.reason is not None
        return CollectorSummary(
            state="off" if off else "on",
            reason=self.reason,
            cupti_library=source.library if source else None,
            cupti_version=source.version if source else None,
            cupti_python_version=source.python_version if source else libcupti.python_version(),
            kernel_record=(source.layouts.kernel_record or None) if source and pump else None,
            window_open_ns=self._window_open_ns,
            window_close_ns=self._window_close_ns,
            rows=self._rows_kept() if off else found.rows,
            dropped=source.dropped() + pump.lost_records if source and pump else 0,
            duplicates=found.duplicates,
            invalid_times=found.invalid_times,
            untimed=found.untimed,
            unresolved_names=found.unresolved_names,
            sentinels=() if off else found.sentinels,
            skipped_api_ids=source.skipped_api_ids if source else (),
            range_problems=found.range_problems,
            notes=tuple(notes),
        )

    def _rows_kept(self) -> dict[str, int]:
        try:
            return rows_on_disk(self._out, self._rank) if self._pump is not None else dict.fromkeys(TABLES, 0)
        except (OSError, ValueError) as error:
            self._notes.append(f"what was kept could not be counted: {error}")
            return dict.fromkeys(TABLES, 0)

    def _sentinel(self, kind: SentinelKind, number: int) -> None:
        if self.recording and self._attempt(
            f"sentinel {kind}", lambda: self._required_source().launch_sentinel(kind, number)
        ):
            self._launched[kind] += 1

    def _synchronize(self) -> None:
        self._required_source().synchronize()

    def _timestamp(self) -> int | None:
        return self._now_ns() if self.recording else None

    def _now_ns(self) -> int:
        now = self._required_source().now_ns()
        if self._keep_raw is not None:
            self._clock.append(now)
        return now

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Do something that the environment may refuse; a refusal becomes a note, once for each kind of it."""
        if self._pump is None:
            return False
        try:
            action()
        except (SourceUnavailableError, CuptiError, RuntimeError, ImportError) as error:
            note = f"{what}: {error}"
            if note not in self._notes:
                self._notes.append(note)
            return False
        return True

    def _required_source(self) -> ActivitySource:
        if self._source is None:
            raise SourceUnavailableError("the collector was not started")
        return self._source

    def _abandon(self) -> None:
        if os.getpid() == self._process:  # a forked child inherits the handler, not the recording
            self.stop()
