"""The attributed kernels of one rank: the record, the reasons, and the columns that every attribution fills alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from alphamoe_profiler.range_paths import NONE, Ints, RangePaths, coded
from alphamoe_profiler.windows import WindowBounds
from alphamoe_tracers.columns import column, texts

if TYPE_CHECKING:
    import pyarrow as pa

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


def first_reason(conditions: dict[str, npt.NDArray[np.bool_]], count: int) -> pd.Categorical:
    """Return [n] the first reason of REASONS whose condition a kernel meets, null where it meets none."""
    codes = np.full(count, NONE, np.int64)
    for code, reason in enumerate(REASONS):
        codes[(codes < 0) & conditions[reason]] = code
    return coded(codes, list(REASONS))


def nullable(values: Ints) -> pd.arrays.IntegerArray:
    """Return [n] integers, null where they are below 0."""
    return pd.arrays.IntegerArray(values.astype(np.int64), values < 0)


def with_symbols(kernels: pa.Table, symbols: pa.Table) -> pd.DataFrame:
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


def add_paths(frame: pd.DataFrame, graph: npt.NDArray[np.bool_], by_node: RangePaths, by_launch: RangePaths) -> None:
    """Take the capture-time path for a graph's kernel and the launch's for any other."""
    for name in ("path", "phase"):
        inner, outer = getattr(by_node, name), getattr(by_launch, name)
        categories = outer.categories.union(inner.categories)
        by_capture, by_call = (values.set_categories(categories).codes for values in (inner, outer))
        frame[name] = coded(np.where(graph, by_capture, by_call), categories)


def add_times(frame: pd.DataFrame) -> None:
    """Add durations. 0/0 is "ran, untimed" and an end before its start is invalid: both stay out of every duration."""
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    untimed = (start == 0) & (end == 0)
    invalid = end < start
    frame["untimed"], frame["invalid"] = untimed, invalid
    frame["duration_ns"] = pd.arrays.IntegerArray(np.where(untimed | invalid, 0, end - start), untimed | invalid)
