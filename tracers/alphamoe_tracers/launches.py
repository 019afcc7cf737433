"""One row for one submission: the runtime call and the driver call under it share a correlation id."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.records import LAUNCHES


def fold_launches(launches: pa.Table) -> pa.Table:
    """Fold the runtime and driver rows of each submission into one row.

    Rows belong together when process, thread and correlation id agree; a row without a correlation id stands alone.
    The folded row spans all of them and carries the name of the outermost call (a runtime call wins a tie).

    Args:
        launches: a LAUNCHES table, in any order. Folding a folded table changes nothing.

    Returns:
        A LAUNCHES table ordered by start.
    """
    n = launches.num_rows
    if not n:
        return launches
    start, end = column(launches, "start_ns"), column(launches, "end_ns")
    correlation = column(launches, "correlation_id")
    # Rows without an id get keys of their own, below every real id.
    keys = np.where(correlation == 0, -1 - np.arange(n), correlation)
    names, inverse = np.unique(texts(launches, "api").astype(str), return_inverse=True)
    is_driver = np.array([not name.startswith("cuda") for name in names.tolist()])[inverse.reshape(-1)]
    order = np.lexsort((-end, is_driver, start, keys, column(launches, "thread"), column(launches, "process")))
    same = np.ones(n, bool)
    for values in (keys, column(launches, "thread"), column(launches, "process")):
        ordered = values[order]
        same[1:] &= ordered[1:] == ordered[:-1]
    same[0] = False
    first = np.flatnonzero(~same)
    latest_end = np.maximum.reduceat(end[order], first)
    by_start = np.argsort(start[order][first], kind="stable")
    folded = launches.take(pa.array(order[first][by_start]))
    at = folded.schema.get_field_index("end_ns")
    return folded.set_column(at, LAUNCHES.field("end_ns"), pa.array(latest_end[by_start]))
