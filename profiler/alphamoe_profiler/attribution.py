"""Attribute every kernel of a rank to (request, step, layer, execution, M), graph replays included.

kernel -> launch by (process, correlation id); launch -> ranges on the launching thread at its start -> step, layer.
In a graph replay the replay's launch gives the step and the node's capture-time ranges give the layer. The receipt of
(rank, step) gives the rest. What cannot be attributed is counted by reason, never dropped and never given to the
nearest range (DESIGN 7).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from alphamoe_profiler.launch_check import launch_shapes_ok
from alphamoe_profiler.range_paths import NONE, Ints, RangePaths, coded, range_paths
from alphamoe_profiler.submissions import SubmissionTable, submission_table
from alphamoe_profiler.windows import SENTINEL_PREFIX, WindowBounds, window_bounds
from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.graph_nodes import one_row_a_node
from alphamoe_tracers.ranges import DOMAIN

if TYPE_CHECKING:
    import pyarrow as pa

    from alphamoe_profiler.bundle import RunBundle

EARLY_KERNEL_TOLERANCE_NS = 10_000
"""Device and host clocks are matched to some microseconds: a kernel may seem to start this much before its launch."""

REASONS = (
    "sentinel",
    "before window",
    "after window",
    "symbol unknown",
    "no correlation id",
    "no launch record",
    "launch outside any range",
    "launch outside any step",
    "no receipt for step",
    "graph node id missing",
    "graph node unknown",
    "graph node outside any range",
    "launched outside the graph",
    "graph kernel in an eager step",
    "outside any layer",
    "no submission for layer",
)
"""Why a kernel is not attributed; the first that applies is the one that is counted."""
_MAX_CLONES = 8


@dataclass(frozen=True)
class AttributedKernels:
    """All kernels of one rank with what is known about each. Unattributed ones are in it too, with their reason."""

    rank: int
    frame: pd.DataFrame
    """The kernels table plus base, full, class, module_sha256, api, path, phase, step, layer, purpose, execution,
    forward_mode, requests, dispatch_M, real_tokens, kernel_M, shape_ok, graph, in_window, duration_ns (null for a
    kernel that ran untimed or ends before it starts), untimed, invalid, early (it seems to start more than
    ``EARLY_KERNEL_TOLERANCE_NS`` before its launch) and reason (null when attributed)."""
    reasons: Counter[str]
    duplicates: int
    """Records delivered twice and kept once."""
    bounds: WindowBounds
    capture_steps: frozenset[int]
    """Steps in which graph nodes were created: their kernels are no executions of a request."""

    @property
    def attributed(self) -> int:
        """Kernels without a reason."""
        return int(self.frame["reason"].isna().sum())

    def check(self) -> None:
        """Hold the invariant: attributed + unattributed = all, and the reasons are the known ones.

        Raises:
            AssertionError: a pass lost or invented a kernel.
        """
        total = self.attributed + sum(self.reasons.values())
        if total != len(self.frame):
            raise AssertionError(f"rank {self.rank}: {total} kernels accounted for, {len(self.frame)} recorded")
        unknown = set(self.reasons) - set(REASONS)
        if unknown:
            raise AssertionError(f"rank {self.rank}: unknown reasons {sorted(unknown)}")


def attribute(bundle: RunBundle, rank: int) -> AttributedKernels:
    """Attribute every kernel of one rank. Reads the rank's files and nothing else; ranks are never joined by ids."""
    if bundle.run.kind == "imported":
        from alphamoe_profiler.import_attribution import attribute_imported

        return attribute_imported(bundle, rank)
    read = bundle.read_table("kernels", rank)
    kernels = read.table
    frame = _with_symbols(kernels, bundle.table("symbols", rank))
    launches = _Launches(bundle.table("launches", rank), bundle.table("ranges", rank))
    nodes = _Nodes(bundle.table("graph_nodes", rank), bundle.table("ranges", rank))
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
    _add_paths(frame, graph, by_node, by_launch)
    frame["step"], frame["layer"] = _nullable(by_launch.step), _nullable(layer)
    submissions.add_receipt_columns(frame, receipt)
    frame["kernel_M"] = _nullable(match.M)
    frame["graph"] = graph
    _add_times(frame)

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
    frame["reason"] = _first_reason(conditions, len(frame))
    frame["shape_ok"] = launch_shapes_ok(bundle, rank, frame, submissions, match.row)
    counts = frame["reason"].value_counts()
    reasons = Counter({str(reason): int(count) for reason, count in counts.items() if count})
    return AttributedKernels(rank, frame, reasons, read.duplicates, bounds, nodes.capture_steps)


def _first_reason(conditions: dict[str, npt.NDArray[np.bool_]], count: int) -> pd.Categorical:
    codes = np.full(count, NONE, np.int64)
    for code, reason in enumerate(REASONS):
        codes[(codes < 0) & conditions[reason]] = code
    return coded(codes, list(REASONS))


def _named(names: pd.Series, prefix: str) -> npt.NDArray[np.bool_]:
    """Say which names begin with a prefix, asking once a distinct name; False where there is none."""
    hit = np.array([str(name).startswith(prefix) for name in names.cat.categories], bool)
    codes = names.cat.codes.to_numpy()
    return np.where(codes >= 0, hit[codes], False) if len(hit) else np.zeros(len(codes), bool)


def _nullable(values: Ints) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(values.astype(np.int64), values < 0)


def _with_symbols(kernels: pa.Table, symbols: pa.Table) -> pd.DataFrame:
    """Return the kernels as a frame with their names; ids with nulls stay exact integers."""
    frame = pd.DataFrame({name: column(kernels, name) for name in kernels.column_names})
    for name in ("correlation_id", "graph_id", "graph_node_id"):
        ids = frame[name].to_numpy()
        # CUPTI's 0 means none, so 0 is never a key even where a writer did not turn it into null.
        frame[name] = pd.arrays.IntegerArray(ids, ids == 0)
    names = pd.DataFrame({name: texts(symbols, name) for name in ("mangled", "full", "base", "class", "module_sha256")})
    names.index = pd.Index(column(symbols, "symbol_id"))
    # A symbol may be written again once its module is known: the last row with a module wins.
    names = names.groupby(level=0).last() if names.index.has_duplicates else names
    row = names.index.get_indexer(pd.Index(frame["symbol_id"]))
    for name in names.columns:
        values = pd.Categorical(names[name])
        codes = np.where(row >= 0, values.codes[row], NONE) if len(values) else np.full(len(row), NONE)
        frame[name] = coded(codes, values.categories)
    return frame


def _add_paths(frame: pd.DataFrame, graph: npt.NDArray[np.bool_], by_node: RangePaths, by_launch: RangePaths) -> None:
    """Take the capture-time path for a graph's kernel and the launch's for any other."""
    for name in ("path", "phase"):
        inner, outer = getattr(by_node, name), getattr(by_launch, name)
        categories = outer.categories.union(inner.categories)
        by_capture, by_call = (values.set_categories(categories).codes for values in (inner, outer))
        frame[name] = coded(np.where(graph, by_capture, by_call), categories)


def _add_times(frame: pd.DataFrame) -> None:
    """Add durations. 0/0 is "ran, untimed" and an end before its start is invalid: both stay out of every duration."""
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    untimed = (start == 0) & (end == 0)
    invalid = end < start
    frame["untimed"], frame["invalid"] = untimed, invalid
    frame["duration_ns"] = pd.arrays.IntegerArray(np.where(untimed | invalid, 0, end - start), untimed | invalid)


class _Launches:
    """Launch rows of one rank by (process, correlation id)."""

    def __init__(self, table: pa.Table, ranges: pa.Table, domain: str | None = DOMAIN) -> None:
        process, correlation = column(table, "process"), column(table, "correlation_id")
        self._start = column(table, "start_ns")
        self._api = pd.Categorical(texts(table, "api"))
        self.paths = range_paths(ranges, process, column(table, "thread"), self._start, domain)
        # Id 0 means "no correlation" and is never a join key. The first launch in time holds an id that occurs twice.
        order = np.argsort(self._start, kind="stable")
        keyed = order[correlation[order] != 0]
        self._index, self._rows = _pair_index(process[keyed], correlation[keyed], keyed)

    def rows(self, process: Ints, correlation: Ints) -> Ints:
        """Return the launch row of each kernel, NONE where there is none."""
        found = _pair_lookup(self._index, process, correlation)
        hit = (found >= 0) & (correlation != 0)
        return np.where(hit, self._rows[found], NONE) if len(self._rows) else np.full(len(process), NONE, np.int64)

    def start(self, rows: Ints) -> Ints:
        """Return the start of each launch, 0 for NONE."""
        return np.where(rows >= 0, self._start[rows], 0) if len(self._start) else np.zeros(len(rows), np.int64)

    def is_graph(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Say which launches are graph launches."""
        graph = np.array(["graphlaunch" in str(api).lower() for api in self._api.categories], dtype=bool)
        codes = self.api(rows).codes
        return np.where(codes >= 0, graph[codes], False) if len(graph) else np.zeros(len(rows), bool)

    def api(self, rows: Ints) -> pd.Categorical:
        """Return the name of each launch's call."""
        codes = np.where(rows >= 0, self._api.codes[rows], NONE) if len(self._api) else np.full(len(rows), NONE)
        return coded(codes, self._api.categories)


class _Nodes:
    """Graph nodes of one rank with the ranges in which the captured node was created."""

    def __init__(self, table: pa.Table, ranges: pa.Table) -> None:
        table = one_row_a_node(table)
        self._ids = pd.Index(column(table, "graph_node_id"))
        created = range_paths(ranges, column(table, "process"), column(table, "thread"), column(table, "created_ns"))
        self.capture_steps = frozenset(int(step) for step in np.unique(created.step) if step >= 0)
        self._origin = self._captured(column(table, "original_node_id"))
        self.paths = created.take(self._origin)

    def _captured(self, original: Ints) -> Ints:
        """Follow each clone to the node that was captured; NONE where the chain leaves the table."""
        row = np.arange(len(original), dtype=np.int64)
        for _ in range(_MAX_CLONES):
            parent = np.where(row >= 0, original[row], 0) if len(row) else row
            cloned = parent != 0
            if not cloned.any():
                break
            row = np.where(cloned, self._ids.get_indexer(pd.Index(parent)), row)
        return row

    def rows(self, node_ids: Ints) -> Ints:
        """Return the row of each node id whose origin is known too, NONE for any other and for 0."""
        if not len(self._ids):
            return np.full(len(node_ids), NONE, np.int64)
        found: Any = self._ids.get_indexer(pd.Index(node_ids))
        known = (node_ids != 0) & (found >= 0)
        return np.where(known & (self._origin[found] >= 0), found, NONE).astype(np.int64)


def _pair_index(process: Ints, key: Ints, rows: Ints) -> tuple[dict[int, tuple[pd.Index, Ints]], Ints]:
    """Index rows by (process, key), the first row of a pair winning; ``_pair_lookup`` gives positions in the rows."""
    index: dict[int, tuple[pd.Index, Ints]] = {}
    for pid in np.unique(process).tolist():
        own = np.flatnonzero(process == pid)
        _, first = np.unique(key[own], return_index=True)
        index[pid] = (pd.Index(key[own][first]), own[first])
    return index, rows


def _pair_lookup(index: dict[int, tuple[pd.Index, Ints]], process: Ints, key: Ints) -> Ints:
    found = np.full(len(process), NONE, np.int64)
    for pid, (keys, positions) in index.items():
        own = np.flatnonzero(process == pid)
        at = keys.get_indexer(pd.Index(key[own]))
        found[own] = np.where(at >= 0, positions[at], NONE)
    return found


__all__ = ["REASONS", "AttributedKernels", "SubmissionTable", "attribute"]
