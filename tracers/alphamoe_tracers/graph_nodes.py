"""CUDA graph nodes as they are created: who made them and when, which gives their capture-time ranges.

A replayed kernel names a node of the executable graph. That node was cloned from a captured one, whose creation lies
inside the ranges that were open on the capturing thread: clone -> original -> ranges at creation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from alphamoe_tracers.columns import column
from alphamoe_tracers.records import GRAPH_NODES


class GraphNode(NamedTuple):
    """One creation callback. ``original_node_id`` is 0 for a node that is not a clone."""

    graph_node_id: int
    original_node_id: int
    thread: int
    created_ns: int


def graph_nodes_table(nodes: list[GraphNode], process: int) -> pa.Table:
    """Return GRAPH_NODES rows for one batch of callbacks."""
    ids, originals, threads, times = zip(*nodes, strict=True) if nodes else ((), (), (), ())
    return pa.table(
        [
            pa.array(ids, pa.int64()),
            pa.array([original or None for original in originals], pa.int64()),
            pa.array([process] * len(nodes), pa.int64()),
            pa.array(threads, pa.int64()),
            pa.array(times, pa.int64()),
        ],
        schema=GRAPH_NODES,
    )


def one_row_a_node(table: pa.Table) -> pa.Table:
    """Keep one row for each node: the one that names the original, where there is one.

    CUPTI announces a clone twice, as created and then as cloned. Its own creation lies in the instantiation of the
    graph, which says nothing about the layer that it was captured in.

    Args:
        table: GRAPH_NODES rows of one rank, in any order.
    """
    ids, original = column(table, "graph_node_id"), column(table, "original_node_id")
    order = np.lexsort((column(table, "created_ns"), original == 0, ids))
    first = np.ones(len(order), dtype=bool)
    first[1:] = ids[order][1:] != ids[order][:-1]
    return table.take(pa.array(order[first]))
