"""Look up the launch and the graph node of each kernel of one rank by their ids, with the ranges around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from alphamoe_profiler.range_paths import NONE, Ints, coded, range_paths
from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.graph_nodes import one_row_a_node
from alphamoe_tracers.ranges import DOMAIN

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_CLONES = 8


class LaunchRows:
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


class NodeRows:
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
