"""When an imported trace proves absence: the conditions of a complete window, each failed one named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from alphamoe_profiler.windows import WindowProof
from alphamoe_tracers.trace_files import TraceSummary

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.run_records import RankFile

AS_NODES = "record again with --cuda-graph-trace=node"


def prove_imported(bundle: RunBundle, rank: int, record: RankFile | None) -> WindowProof:
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
    eager = [f"{_name(item)}: {text}" for item in traces for text in _eager(item)]
    graph = [f"{_name(item)}: {text}" for item in traces for text in _graph(item)]
    return WindowProof(None, None, (*eager, *bundle.rank_problems(rank)), tuple(graph))


def _eager(item: TraceSummary) -> Iterator[str]:
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


def _graph(item: TraceSummary) -> Iterator[str]:
    blocks = item.events.get("graph_traces", 0)
    if blocks:
        yield f"{blocks} graph replays were traced as one block, their kernels are invisible; {AS_NODES}"
    elif item.graph_launches and not item.graph_kernels:
        yield f"{item.graph_launches} graph launches show no kernel; {AS_NODES}"


def _name(item: TraceSummary) -> str:
    return PurePath(item.path).name
