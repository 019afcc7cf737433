"""The last pass of a recording: one sorted part per table, duplicates dropped, and what the records amount to."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from alphamoe_tracers.columns import column
from alphamoe_tracers.launches import fold_launches
from alphamoe_tracers.parts import sorted_by_start, without_duplicates
from alphamoe_tracers.range_pairing import with_depths
from alphamoe_tracers.sentinels import SENTINEL_KINDS, count_sentinels, sentinel_symbol
from alphamoe_tracers.tables import UNRESOLVED, symbols_table
from alphamoe_tracers.wire import Finish, Outcome
from alphamoe_tracers.writer import RecordWriter

_DUPLICATE_KEYS = {
    "kernels": ("start_ns", "end_ns", "stream", "correlation_id", "graph_node_id"),
    "transfers": ("start_ns", "end_ns", "stream", "correlation_id", "graph_node_id"),
    "launches": ("start_ns", "end_ns", "thread", "correlation_id"),
    "graph_nodes": ("created_ns", "graph_node_id"),
}


def compact(writer: RecordWriter, finish: Finish) -> Outcome:
    """Replace the parts of every table by one sorted part.

    Args:
        writer: closed.
        finish: what the traced process says at the end. Kernels that ended before its ``started_ns`` are left over from
            an earlier session and are dropped.

    Raises:
        OSError: the parts of the tables that were not replaced yet are still there.
    """
    tables = {name: parts.read() for name, parts in writer.parts.items()}
    duplicates = writer.pairer.duplicates
    for name, keys in _DUPLICATE_KEYS.items():
        tables[name], dropped = without_duplicates(tables[name], keys)
        duplicates += dropped
    tables["kernels"], early = _without_earlier_session(tables["kernels"], finish.started_ns)
    tables["launches"] = fold_launches(tables["launches"])
    tables["ranges"] = with_depths(tables["ranges"])
    for name in ("kernels", "transfers", "ranges"):
        tables[name] = sorted_by_start(tables[name])
    names = writer.symbols.strings
    tables["symbols"] = symbols_table(names, 0, writer.modules.module_of())
    for name, table in tables.items():
        writer.parts[name].replace(table)
    start, end = column(tables["kernels"], "start_ns"), column(tables["kernels"], "end_ns")
    untimed = (start == 0) | (end == 0)
    ids = {kind: names.index(sentinel_symbol(kind)) for kind in SENTINEL_KINDS if sentinel_symbol(kind) in names}
    notes = []
    if early:
        notes.append(f"{early} kernels that ended before the collector started were dropped")
    if writer.broken_buffers:
        notes.append(f"{writer.broken_buffers} activity buffers were read record by record")
    return Outcome(
        rows={name: table.num_rows for name, table in tables.items()},
        duplicates=duplicates,
        invalid_times=int(np.count_nonzero((end < start) & ~untimed)),
        untimed=int(np.count_nonzero(untimed)),
        # They carry the symbol <unresolved>.
        unresolved_names=writer.symbols.unresolved if UNRESOLVED in names else 0,
        sentinels=count_sentinels(tables["kernels"], ids, finish.launched),
        range_problems=writer.pairer.problems,
        notes=tuple(notes),
    )


def _without_earlier_session(kernels: pa.Table, started_ns: int) -> tuple[pa.Table, int]:
    end = column(kernels, "end_ns")
    early = (end != 0) & (end < started_ns) & (column(kernels, "start_ns") < started_ns)
    count = int(np.count_nonzero(early))
    return (kernels.filter(pa.array(~early)) if count else kernels), count
