"""Attribute every kernel of a rank to (request, step, layer, execution, M), graph replays included.

kernel -> launch by (process, correlation id); launch -> ranges on the launching thread at its start -> step, layer.
In a graph replay the replay's launch gives the step and the node's capture-time ranges give the layer. The receipt of
(rank, step) gives the rest. What cannot be attributed is counted by reason, never dropped and never given to the
nearest range (DESIGN 7).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from alphamoe_profiler.attributed_kernels import (
    EARLY_KERNEL_TOLERANCE_NS,
    AttributedKernels,
    add_paths,
    add_times,
    first_reason,
    nullable,
    with_symbols,
)
from alphamoe_profiler.import_attribution import attribute_imported
from alphamoe_profiler.launch_check import launch_shapes_ok
from alphamoe_profiler.launch_rows import LaunchRows, NodeRows
from alphamoe_profiler.submissions import submission_table
from alphamoe_profiler.windows import SENTINEL_PREFIX, window_bounds
from alphamoe_tracers.columns import column

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle


def attribute(bundle: RunBundle, rank: int) -> AttributedKernels:
    """Attribute every kernel of one rank. Reads the rank's files and nothing else; ranks are never joined by ids."""
    if bundle.run.kind == "imported":
        return attribute_imported(bundle, rank)
    read = bundle.read_table("kernels", rank)
    kernels = read.table
    frame = with_symbols(kernels, bundle.table("symbols", rank))
    launches = LaunchRows(bundle.table("launches", rank), bundle.table("ranges", rank))
    nodes = NodeRows(bundle.table("graph_nodes", rank), bundle.table("ranges", rank))
    submissions = submission_table(bundle.receipts(rank).receipts)
    launch = launches.rows(column(kernels, "process"), column(kernels, "correlation_id"))
    node = nodes.rows(column(kernels, "graph_node_id"))
    by_launch, by_node = launches.paths.take(launch), nodes.paths.take(node)

    has_node = frame["graph_node_id"].notna().to_numpy()
    graph = has_node | launches.is_graph(launch)
    bounds = window_bounds(bundle, rank, frame)
    started = np.where(launch >= 0, launches.start(launch), frame["start_ns"].to_numpy())
    receipt = submissions.receipt_rows(by_launch.step)
    layer = np.where(graph, by_node.layer, by_launch.layer)
    judged = submissions.judged(frame["base"])
    match = submissions.match(receipt, layer, frame["base"])

    frame["api"] = launches.api(launch)
    add_paths(frame, graph, by_node, by_launch)
    frame["step"], frame["layer"] = nullable(by_launch.step), nullable(layer)
    submissions.add_receipt_columns(frame, receipt)
    frame["kernel_M"] = nullable(match.M)
    frame["graph"] = graph
    add_times(frame)

    eager_step = submissions.eager(receipt)
    mismatch_in = judged & (receipt >= 0) & ~eager_step & ~graph
    mismatch_out = judged & (receipt >= 0) & eager_step & graph
    frame.loc[mismatch_in | mismatch_out, "execution"] = None
    early = (launch >= 0) & ~frame["untimed"].to_numpy()
    early &= frame["start_ns"].to_numpy() + EARLY_KERNEL_TOLERANCE_NS < launches.start(launch)
    frame["early"] = early
    # An untimed kernel without a launch has no place in time: it is neither before nor after the window.
    placed = (launch >= 0) | ~frame["untimed"].to_numpy()
    before = placed & (started < (bounds.open_ns if bounds.open_ns is not None else np.iinfo(np.int64).min))
    after = placed & (started > (bounds.close_ns if bounds.close_ns is not None else np.iinfo(np.int64).max))
    frame["in_window"] = ~before & ~after
    conditions = {
        "sentinel": _named(frame["base"], SENTINEL_PREFIX),
        "before window": before,
        "after window": after,
        "symbol unknown": frame["base"].isna().to_numpy(),
        "no correlation id": column(kernels, "correlation_id") == 0,
        "no launch record": launch < 0,
        "launch outside any range": ~by_launch.any,
        "launch outside any step": by_launch.step < 0,
        "no receipt for step": receipt < 0,
        "graph node id missing": graph & ~has_node,
        "graph node unknown": has_node & (node < 0),
        "graph node outside any range": has_node & ~by_node.any & judged,
        "launched outside the graph": mismatch_in,
        "graph kernel in an eager step": mismatch_out,
        "outside any layer": judged & (layer < 0),
        "no submission for layer": judged & (match.row < 0),
    }
    frame["reason"] = first_reason(conditions, len(frame))
    frame["shape_ok"] = launch_shapes_ok(bundle, rank, frame, submissions, match.row)
    counts = frame["reason"].value_counts()
    reasons = Counter({str(reason): int(count) for reason, count in counts.items() if count})
    return AttributedKernels(rank, frame, reasons, read.duplicates, bounds, nodes.capture_steps)


def _named(names: pd.Series, prefix: str) -> npt.NDArray[np.bool_]:
    """Say which names begin with a prefix, asking once a distinct name; False where there is none."""
    hit = np.array([str(name).startswith(prefix) for name in names.cat.categories], bool)
    codes = names.cat.codes.to_numpy()
    return np.where(codes >= 0, hit[codes], False) if len(hit) else np.zeros(len(codes), bool)
