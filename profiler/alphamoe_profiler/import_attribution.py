"""Attribution of imported kernels: launch, range path, and the step that an annotation on the launching thread names.

An imported trace has no receipts. A step annotation gives forward mode, real tokens and padded size; the launch says
whether a kernel was replayed from a graph. A kernel of another thread than its annotation stays unattributed, never
given to the nearest range.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from alphamoe_profiler.attributed_kernels import (
    EARLY_KERNEL_TOLERANCE_NS,
    REASONS,
    AttributedKernels,
    add_paths,
    add_times,
    first_reason,
    nullable,
    with_symbols,
)
from alphamoe_profiler.import_records import PART_SHIFT, ImportedStep, ImportInfo
from alphamoe_profiler.launch_rows import LaunchRows, NodeRows
from alphamoe_profiler.range_paths import NONE, Ints, coded
from alphamoe_profiler.windows import WindowBounds
from alphamoe_tracers.columns import column
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.records import EXECUTIONS

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle

_NESTED_STEPS = 4
"""An annotation inside another one: so many starts are looked back through for one that is still open."""
_GRAPH_EXECUTIONS = {"DECODE": "decode_graph_replay", "EXTEND": "prefill_graph_replay"}


def attribute_imported(bundle: RunBundle, rank: int) -> AttributedKernels:
    """Attribute every kernel of one imported rank.

    The frame has the columns of :class:`~alphamoe_profiler.attributed_kernels.AttributedKernels` and ``bucket``.
    ``purpose`` is what the user stated of the traffic, or ``capture`` in a capture's step. ``dispatch_M`` is the padded
    size of the step, or its real tokens where the kernel was launched eagerly (no graph, so no graph padding);
    ``kernel_M`` is that too, because nothing else states it. Each is null where no annotation says it.
    """
    read = bundle.read_table("kernels", rank)
    kernels = read.table
    info = _info(bundle)
    frame = with_symbols(kernels, bundle.table("symbols", rank))
    launch_table, ranges = bundle.table("launches", rank), bundle.table("ranges", rank)
    launches = LaunchRows(launch_table, ranges, None)
    nodes = NodeRows(bundle.table("graph_nodes", rank), ranges)
    steps = StepTable(_steps(bundle, rank))
    launch = launches.rows(column(kernels, "process"), column(kernels, "correlation_id"))
    node = nodes.rows(column(kernels, "graph_node_id"))
    by_launch, by_node = launches.paths.take(launch), nodes.paths.take(node)
    has_node = frame["graph_node_id"].notna().to_numpy()
    graph = has_node | launches.is_graph(launch)
    step = _taken(steps.rows_of(launch_table), launch)

    frame["api"] = launches.api(launch)
    add_paths(frame, graph & by_node.any, by_node, by_launch)
    frame["step"] = nullable(step)
    frame["layer"] = nullable(np.where(graph & (by_node.layer >= 0), by_node.layer, by_launch.layer))
    execution = steps.executions(step, graph, launch >= 0, info)
    frame["execution"] = coded(execution, list(EXECUTIONS))
    steps.add_columns(frame, step, execution, info)
    frame["requests"] = coded(np.full(len(frame), NONE), [])
    frame["kernel_M"] = frame["dispatch_M"]
    frame["graph"] = graph
    frame["bucket"] = _buckets(info, rank, column(kernels, "process"))
    add_times(frame)
    untimed = frame["untimed"].to_numpy()
    began = launches.start(launch)
    frame["early"] = (launch >= 0) & ~untimed & (frame["start_ns"].to_numpy() + EARLY_KERNEL_TOLERANCE_NS < began)
    started = np.where(launch >= 0, began, frame["start_ns"].to_numpy())
    placed = (launch >= 0) | ~untimed
    bounds = WindowBounds(info.window_open_ns, info.window_close_ns)
    nothing = np.zeros(len(frame), bool)
    before = placed & (started < bounds.open_ns) if bounds.open_ns is not None else nothing
    after = placed & (started > bounds.close_ns) if bounds.close_ns is not None else nothing
    frame["in_window"] = ~before & ~after
    none = np.zeros(len(frame), bool)
    conditions = dict.fromkeys(REASONS, none) | {
        "before window": before,
        "after window": after,
        "symbol unknown": frame["base"].isna().to_numpy(),
        "no correlation id": column(kernels, "correlation_id") == 0,
        "no launch record": launch < 0,
        "launch outside any range": ~by_launch.any & (step < 0),
        "launch outside any step": (step < 0) & bool(len(steps)),
    }
    frame["reason"] = first_reason(conditions, len(frame))
    frame["shape_ok"] = pd.arrays.BooleanArray(none.copy(), ~none)
    counts = frame["reason"].value_counts()
    reasons = Counter({str(reason): int(count) for reason, count in counts.items() if count})
    return AttributedKernels(rank, frame, reasons, read.duplicates, bounds, frozenset())


def exercised_executions(bundle: RunBundle, rank: int) -> dict[str, int]:
    """Count the launches of each execution on an imported rank, whether their kernels are visible or not.

    A graph that was traced as one block was exercised all the same. Launches outside the stated window do not count.
    """
    info = _info(bundle)
    table = bundle.table("launches", rank)
    steps = StepTable(_steps(bundle, rank))
    launches = LaunchRows(table, bundle.table("ranges", rank).slice(0, 0), None)
    rows = np.arange(table.num_rows, dtype=np.int64)
    start = column(table, "start_ns")
    inside = np.ones(len(rows), bool)
    if info.window_open_ns is not None and info.window_close_ns is not None:
        inside = (start >= info.window_open_ns) & (start <= info.window_close_ns)
    step = steps.rows_of(table)
    capture = steps.is_capture(step)
    codes = steps.executions(step, launches.is_graph(rows), np.ones(len(rows), bool), info)
    counts = np.bincount(codes[inside & ~capture & (codes >= 0)], minlength=len(EXECUTIONS))
    return {name: int(count) for name, count in zip(EXECUTIONS, counts.tolist(), strict=True) if count}


class StepTable:
    """The step annotations of one rank, looked up by the thread and the time of a launch."""

    def __init__(self, steps: list[ImportedStep]) -> None:
        self.steps = steps
        self._threads: dict[tuple[int, int], tuple[Ints, Ints, Ints]] = {}
        groups: dict[tuple[int, int], list[int]] = {}
        for row, item in enumerate(steps):
            groups.setdefault((item.process, item.thread), []).append(row)
        for key, rows in groups.items():
            rows.sort(key=lambda row: steps[row].start_ns)
            last = int(np.iinfo(np.int64).max)
            start = np.array([steps[row].start_ns for row in rows], np.int64)
            end = np.array([steps[row].end_ns if steps[row].end_ns is not None else last for row in rows], np.int64)
            self._threads[key] = (start, end, np.array(rows, np.int64))

    def __len__(self) -> int:
        return len(self.steps)

    def rows_of(self, launches: pa.Table) -> Ints:
        """Return the step of each launch: the innermost one that is open on its thread, NONE where there is none."""
        process, thread = column(launches, "process"), column(launches, "thread")
        times = column(launches, "start_ns")
        found = np.full(len(times), NONE, np.int64)
        for (pid, tid), (start, end, rows) in self._threads.items():
            own = np.flatnonzero((process == pid) & (thread == tid))
            at = np.searchsorted(start, times[own], side="right") - 1
            for back in range(_NESTED_STEPS):
                candidate = at - back
                valid = (candidate >= 0) & (found[own] < 0)
                valid &= times[own] <= end[np.maximum(candidate, 0)]
                found[own[valid]] = rows[candidate[valid]]
        return found

    def is_capture(self, step: Ints) -> npt.NDArray[np.bool_]:
        """Say which steps only captured a graph; False for NONE."""
        return _looked_up(step, [item.capture for item in self.steps], False).astype(bool)

    def executions(
        self, step: Ints, graph: npt.NDArray[np.bool_], launched: npt.NDArray[np.bool_], info: ImportInfo
    ) -> Ints:
        """Return the execution of each kernel as an index of EXECUTIONS, NONE where nothing says it.

        Args:
            step: [n] rows of steps.
            graph: [n] replayed from a graph.
            launched: [n] its launch is known: without a graph it was launched eagerly.
            info: what the user stated of graph replays that no annotation of this rank places.
        """
        eager = EXECUTIONS.index("eager")
        codes = np.where(launched & ~graph, eager, NONE).astype(np.int64)
        if not self.steps:
            codes[graph] = EXECUTIONS.index(info.graph_execution)
            return codes
        modes = [_GRAPH_EXECUTIONS.get(item.forward_mode or "") for item in self.steps]
        by_step = _looked_up(step, [NONE if mode is None else EXECUTIONS.index(mode) for mode in modes], NONE)
        return np.where(graph, by_step, codes).astype(np.int64)

    def add_columns(self, frame: pd.DataFrame, step: Ints, execution: Ints, info: ImportInfo) -> None:
        """Add purpose, forward_mode, real_tokens and dispatch_M."""
        capture = self.is_capture(step)
        purposes = [info.purpose, "capture"] if info.purpose != "capture" else ["capture"]
        frame["purpose"] = coded(np.where(capture, len(purposes) - 1, 0), purposes)
        modes = pd.Categorical([item.forward_mode for item in self.steps])
        codes = _looked_up(step, modes.codes.tolist(), NONE)
        frame["forward_mode"] = coded(codes, modes.categories)
        real = _looked_up(step, [_known(item.real_tokens) for item in self.steps], NONE)
        padded = _looked_up(step, [_known(item.padded) for item in self.steps], NONE)
        is_eager = execution == EXECUTIONS.index("eager")
        frame["real_tokens"] = nullable(real)
        frame["dispatch_M"] = nullable(np.where(padded >= 0, padded, np.where(is_eager, real, NONE)))


def _info(bundle: RunBundle) -> ImportInfo:
    return bundle.run.imported or ImportInfo(files=())


def _steps(bundle: RunBundle, rank: int) -> list[ImportedStep]:
    try:
        return bundle.steps(rank)
    except EvidenceError:  # told by bundle_check.check(); no step is known then
        return []


def _known(value: int | None) -> int:
    return NONE if value is None else value


def _looked_up(rows: Ints, values: list[int] | list[bool], missing: int) -> Ints:
    """Return ``values[row]`` for each row, ``missing`` for NONE."""
    if not values:
        return np.full(len(rows), missing, np.int64)
    return np.where(rows >= 0, np.array(values, np.int64)[np.maximum(rows, 0)], missing).astype(np.int64)


def _taken(values: Ints, rows: Ints) -> Ints:
    return _looked_up(rows, values.tolist(), NONE)


def _buckets(info: ImportInfo, rank: int, process: Ints) -> pd.Categorical:
    """Return the bucket of each kernel's file."""
    known = {item.part: item.bucket for item in info.files if item.rank == rank and item.used}
    parts = process >> PART_SHIFT
    labels = pd.Categorical([known[part] for part in sorted(known)])
    codes = np.full(len(process), NONE, np.int64)
    for at, part in enumerate(sorted(known)):
        codes[parts == part] = labels.codes[at]
    return coded(codes, labels.categories)
