"""The recording window of one rank: its bounds, and whether absence inside it is proven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.bundle_check import rank_problems
from alphamoe_tracers.errors import EvidenceError

if TYPE_CHECKING:
    import pandas as pd

    from alphamoe_profiler.run_records import RankFile
    from alphamoe_tracers.records import CollectorSummary
    from alphamoe_tracers.trace_files import TraceSummary

SENTINEL_PREFIX = "alphamoe_trace_sentinel_"
SENTINEL_KINDS = ("open", "close", "step", "graph_open", "graph_close", "graph_step")
_AS_NODES = "record again with --cuda-graph-trace=node"


@dataclass(frozen=True)
class WindowBounds:
    """Host times between which launches belong to the run's requests. Null where nothing says."""

    open_ns: int | None
    close_ns: int | None


@dataclass(frozen=True)
class WindowProof:
    """Which conditions of a complete window failed on one rank; none means that absence is proven."""

    cut: str | None
    """Why the rank counts as cut short: no ranks/N.json, an exception, a signal. None where it ended by itself."""
    collector_off: str | None
    """The collector's reason when it recorded nothing."""
    eager: tuple[str, ...]
    """Failed conditions that matter to every execution."""
    graph: tuple[str, ...]
    """Failed conditions that matter to graph replays only."""

    def failures(self, execution: str) -> tuple[str, ...]:
        """Return the failed conditions for one execution, worst first."""
        return self.eager if execution == "eager" else (*self.eager, *self.graph)

    def complete(self, execution: str) -> bool:
        """Say whether absence of a symbol in this execution is proven on this rank."""
        return self.cut is None and self.collector_off is None and not self.failures(execution)


def window_bounds(bundle: RunBundle, rank: int, frame: pd.DataFrame) -> WindowBounds:
    """Return the window of one rank from its rank file, or from its sentinels where it was cut short.

    Args:
        bundle: the run.
        rank: which rank.
        frame: its kernels with ``base`` and ``start_ns``.
    """
    record = readable_rank_file(bundle, rank)
    if record is not None and record.collector is not None and record.collector.window_open_ns is not None:
        return WindowBounds(record.collector.window_open_ns, record.collector.window_close_ns)
    opened = frame.loc[frame["base"] == f"{SENTINEL_PREFIX}open", "start_ns"]
    return WindowBounds(int(opened.min()) if len(opened) else None, None)


def prove_window(bundle: RunBundle, rank: int, frame: pd.DataFrame) -> WindowProof:
    """Check every condition under which a symbol that was not recorded did not run.

    Sentinels are counted again from the kernel records; only how many were launched is taken from the rank file.
    """
    record = readable_rank_file(bundle, rank)
    if bundle.run.kind == "imported":
        return _prove_imported(bundle, rank, record)
    if record is None:
        return WindowProof(f"no readable ranks/{rank}.json, the rank was cut short", None, (), ())
    collector = record.collector
    if collector is None:
        return WindowProof(f"ranks/{rank}.json of a recorded run says nothing of its collector", None, (), ())
    off = (collector.reason or "the collector was off") if collector.state == "off" else None
    seen = _sentinels_seen(frame)
    launched: dict[str, int] = {count.kind: count.launched for count in collector.sentinels}
    eager: list[str] = []
    graph: list[str] = []
    if collector.dropped:
        eager.append(f"{collector.dropped} records were dropped, so counts are lower bounds")
    eager += [f"no {kind} sentinel was launched" for kind in ("open", "close") if not launched.get(kind)]
    for kind in SENTINEL_KINDS:
        target = graph if kind.startswith("graph") else eager
        if kind != "graph_step" and seen[kind] < launched.get(kind, 0):
            target.append(f"{kind} sentinel seen {seen[kind]} times of {launched[kind]}")
    graph += [
        f"no {kind} sentinel was replayed, so node-level tracing is not proven"
        for kind in ("graph_open", "graph_close")
        if not launched.get(kind)
    ]
    if off is None:
        eager += _bounds_failures(collector, frame)
    eager += rank_problems(bundle, rank)
    return WindowProof(_cut_short(bundle, record), off, tuple(eager), tuple(graph))


def _bounds_failures(collector: CollectorSummary, frame: pd.DataFrame) -> list[str]:
    """Say how the recorded window contradicts its own sentinels: the first and the last thing launched inside it."""
    opened, closed = collector.window_open_ns, collector.window_close_ns
    if opened is None or closed is None:
        return ["the rank file does not say when the window opened and closed"]
    if closed < opened:
        return ["the window closes before it opens"]
    bases = frame["base"].astype("object")
    found = []
    for kind in ("open", "close"):
        outside = int(((bases == f"{SENTINEL_PREFIX}{kind}") & ~frame["in_window"]).sum())
        if outside:
            found.append(f"{outside} {kind} sentinels lie outside the recorded window")
    return found


def _cut_short(bundle: RunBundle, record: RankFile) -> str | None:
    """Say why a rank with a file counts as cut short: one killed by a signal does, even if its file parses."""
    if record.ended != "complete":
        return f"the rank ended by {record.ended}: {record.error or 'no reason recorded'}"
    try:
        outcome = bundle.outcome()
    except EvidenceError as error:
        return str(error)
    for end in outcome.ranks if outcome else ():
        if end.rank == record.rank and (end.exit_code != 0 or end.signal):
            return f"its process ended with {end.signal or f'exit code {end.exit_code}'}"
    return None


def _sentinels_seen(frame: pd.DataFrame) -> Counter[str]:
    """Count sentinel kernels by kind; one inside a graph counts only with its node id."""
    seen: Counter[str] = Counter()
    bases = frame["base"].astype("object")
    with_node = frame["graph_node_id"].notna()
    for kind in SENTINEL_KINDS:
        mask = bases == f"{SENTINEL_PREFIX}{kind}"
        seen[kind] = int((mask & with_node).sum() if kind.startswith("graph") else mask.sum())
    return seen


def _prove_imported(bundle: RunBundle, rank: int, record: RankFile | None) -> WindowProof:
    """Check whether a symbol that an imported rank does not show did not run.

    The file must be whole and record kernels and launches, every launch must have its kernels (those made while a
    stream was capturing make none), and every graph launch must show the kernels that it replayed.
    """
    if record is None:
        return WindowProof(f"no trace was imported for rank {rank}", None, (), ())
    if record.ended != "complete":
        return WindowProof(record.error or "its trace could not be read", None, (), ())
    traces = [item for item in record.imported if item.format != "sglang-log"]
    if not traces:
        return WindowProof(None, "no GPU trace was imported, and a server log is no witness", (), ())
    eager = [f"{_trace_name(item)}: {text}" for item in traces for text in _trace_failures(item)]
    graph = [f"{_trace_name(item)}: {text}" for item in traces for text in _graph_trace_failures(item)]
    return WindowProof(None, None, (*eager, *rank_problems(bundle, rank)), tuple(graph))


def _trace_failures(item: TraceSummary) -> Iterator[str]:
    if not item.whole:
        yield item.cut or "the file is not whole"
    if not item.kernels:
        yield "0 kernels, so it is not known to record any"
    if not item.launches:
        yield "it records no launches, so what is missing cannot be known; record CPU activities too"
    if item.launches_without_kernel:
        yield f"{item.launches_without_kernel} of {item.launches} launches show no kernel"
    if item.truncated_names:
        yield f"{item.truncated_names} kernel names were cut by a tool and could be any"


def _graph_trace_failures(item: TraceSummary) -> Iterator[str]:
    blocks = item.events.get("graph_traces", 0)
    if blocks:
        yield f"{blocks} graph replays were traced as one block, their kernels are invisible; {_AS_NODES}"
    elif item.graph_launches and not item.graph_kernels:
        yield f"{item.graph_launches} graph launches show no kernel; {_AS_NODES}"


def _trace_name(item: TraceSummary) -> str:
    return PurePath(item.path).name
