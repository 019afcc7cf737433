"""The collector: GPU witnesses of one rank, recorded while the program runs."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from alphamoe_tracers import libcupti
from alphamoe_tracers.compaction import Compacted, compact, unresolved_names
from alphamoe_tracers.libcupti import NVTX_INJECTION, CuptiError
from alphamoe_tracers.records import TABLES, CollectorSummary, SentinelKind
from alphamoe_tracers.replay import RawKeeper
from alphamoe_tracers.source import ActivitySource, SourceUnavailableError
from alphamoe_tracers.writer import RecordWriter


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
    """

    def __init__(
        self,
        out: Path,
        rank: int,
        *,
        flush_period_s: float = 1.0,
        source: ActivitySource | None = None,
        keep_raw: Path | None = None,
    ) -> None:
        """Prepare a collector; nothing is recorded before :meth:`start`.

        Args:
            out: the run bundle's directory.
            rank: the tensor-parallel rank, which names the files.
            flush_period_s: how often completed records become parts on disk.
            source: where records come from; CUPTI when left out.
            keep_raw: also store the raw buffers there, to be played by :class:`alphamoe_tracers.replay.ReplaySource`.
        """
        self._out, self._rank, self._period_s = out, rank, flush_period_s
        self._process = os.getpid()
        self._source = source
        self._keep_raw = keep_raw
        self._keeper = RawKeeper() if keep_raw is not None else None
        self._writer: RecordWriter | None = None
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
        return self._writer is not None and self._writer.failure is None and self._summary is None

    @property
    def reason(self) -> str | None:
        """Why nothing is recorded, or None."""
        return self._reason if self._writer is None else self._writer.failure

    def start(self) -> None:
        """Begin to record, or go off with a reason."""
        try:
            if self._source is None:
                from alphamoe_tracers.cupti_source import CuptiSource

                self._source = CuptiSource()
            writer = RecordWriter(self._out, self._rank, self._source, self._period_s, self._keeper)
            self._source.start(writer)
            self._started_ns = self._now_ns()
        except SourceUnavailableError as error:
            self._give_up(str(error))
            return
        except Exception as error:  # a broken installation must not end the traced program
            self._give_up(f"CUPTI could not be started, {type(error).__name__}: {error}")
            return
        self._writer, self._reason = writer, None
        writer.start()
        # CUPTI would call back into a dead interpreter.
        atexit.register(self._abandon)

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        try:
            if self._source is not None:
                self._source.stop()
        except Exception as error:  # as above
            self._notes.append(f"stop: {error}")

    def open_window(self) -> None:
        """Open the window in which absence is to be provable: idle device, time, sentinels."""
        self._attempt("synchronize", self._synchronize)
        self._window_open_ns = self._timestamp()
        self._sentinel("open", 0)
        self._sentinel("graph_open", 0)

    def step_boundary(self, step: int) -> None:
        """Launch a numbered sentinel between two steps."""
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
        if self.recording and self._writer is not None:
            self._attempt("flush", lambda: self._required_source().flush(forced=True))
            self._writer.barrier()

    def stop(self, known_sources: Mapping[str, str] | None = None) -> CollectorSummary:
        """Stop, compact each table into one part and say what was recorded. A second call returns the first summary.

        Args:
            known_sources: sha256 of the CUDA source by sha256 of the cubin, of what this process compiled.
        """
        if self._summary is None:
            compacted = None
            if self._writer is not None:
                atexit.unregister(self._abandon)
                compacted = self._finish(self._writer, known_sources or {})
            self._summary = self._summarise(compacted)
        return self._summary

    def _finish(self, writer: RecordWriter, known_sources: Mapping[str, str]) -> Compacted | None:
        source = self._required_source()
        if writer.failure is None:
            self._attempt("synchronize", self._synchronize)
            self._attempt("flush", lambda: source.flush(forced=True))
        self._attempt("stop", source.stop)
        writer.finish()
        if writer.failure is not None:
            return None
        try:
            if self._keeper is not None and self._keep_raw is not None:
                self._keeper.save(self._keep_raw, source)
            writer.modules.finish(known_sources, set(writer.symbols.strings))
            return compact(writer, self._launched, self._started_ns)
        except OSError as error:
            text = error.strerror or str(error)
            writer.failure = f"the last rows could not be written, {text}: rows up to the last closed part are kept"
            return None

    def _summarise(self, compacted: Compacted | None) -> CollectorSummary:
        source, writer = self._source, self._writer
        off = compacted is None or writer is None
        notes = [*self._notes, *(source.notes if source else ()), *(compacted.notes if compacted else ())]
        return CollectorSummary(
            state="off" if off else "on",
            reason=self.reason,
            cupti_library=source.library if source else None,
            cupti_version=source.version if source else None,
            cupti_python_version=source.python_version if source else libcupti.python_version(),
            kernel_record=(source.layouts.kernel_record or None) if source and writer else None,
            window_open_ns=self._window_open_ns,
            window_close_ns=self._window_close_ns,
            rows=compacted.rows if compacted else self._rows_kept(),
            dropped=source.dropped() if source and writer else 0,
            duplicates=compacted.duplicates if compacted else 0,
            invalid_times=compacted.invalid_times if compacted else 0,
            untimed=compacted.untimed if compacted else 0,
            unresolved_names=unresolved_names(writer) if writer else 0,
            sentinels=compacted.sentinels if compacted else (),
            skipped_api_ids=source.skipped_api_ids if source else (),
            range_problems=writer.pairer.problems if writer else (),
            notes=tuple(notes),
        )

    def _rows_kept(self) -> dict[str, int]:
        if self._writer is None:
            return dict.fromkeys(TABLES, 0)
        return {name: parts.written_rows for name, parts in self._writer.parts.items()}

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
        if self._keeper is not None:
            self._keeper.clock.append(now)
        return now

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Do something that the environment may refuse; a refusal becomes a note, once for each kind of it."""
        if self._writer is None:
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
