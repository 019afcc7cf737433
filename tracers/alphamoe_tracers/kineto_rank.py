"""One rank of a trace: its rows go to the sink, and what they amount to is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alphamoe_tracers.kineto_chunk import KERNEL_FIELDS, Rows, text_of
from alphamoe_tracers.kineto_kinds import Identities
from alphamoe_tracers.kineto_numbers import Int64s
from alphamoe_tracers.kineto_rows import distinct, exact_duplicates, overlaps, with_rows
from alphamoe_tracers.kineto_tables import (
    device_and_stream,
    kernel_batches,
    kinds_of,
    lanes_of,
    launch_batches,
    range_batches,
    transfer_batches,
)
from alphamoe_tracers.symbols import is_truncated
from alphamoe_tracers.trace_files import TraceSink

UNKNOWN_PROCESS = -1
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Mask = npt.NDArray[np.bool_]


@dataclass
class RankRows:
    """The rows of one rank, duplicates included."""

    kernels: Rows
    transfers: Rows
    calls: Rows
    annotations: Rows
    marks: Rows


def is_launch(api: str) -> bool:
    """Say whether a host API submits kernels or graphs; a host function that it launches runs no kernel."""
    return "aunch" in api and "HostFunc" not in api


def put_rank(rows: RankRows, key: str, sink: TraceSink, identities: Identities, base_ns: int) -> dict[str, Any]:
    """Put one rank's rows into the sink and return the counts of its :class:`TraceSummary`."""
    repeated = exact_duplicates(rows.kernels)
    kernels = with_rows(rows.kernels, ~repeated) if repeated.any() else rows.kernels
    calls, notes = rows.calls, list[str]()
    apis = [text_of(fields[2]) for fields in kinds_of(calls)]
    launching = np.array([is_launch(api) for api in apis], bool)[calls.codes]
    # Whatever a call is named, a kernel with its correlation id shows that it launched one.
    launching |= _among(calls.correlation, distinct(kernels.correlation[kernels.correlation > 0]))
    counts = _joined(kernels, rows.transfers, calls, apis, launching, identities)
    hosts = _hosts(calls, rows.annotations, identities)
    for batch in kernel_batches(kernels, _process(kernels, hosts), sink.symbols(key), identities, base_ns):
        sink.put(key, "kernels", batch)
    for batch in transfer_batches(rows.transfers, _process(rows.transfers, hosts), identities, base_ns):
        sink.put(key, "transfers", batch)
    launches = with_rows(calls, launching)
    for batch in launch_batches(launches, identities, base_ns):
        sink.put(key, "launches", batch)
    ranges, problems = range_batches(rows.annotations, rows.marks, identities, base_ns)
    for batch in ranges:
        sink.put(key, "ranges", batch)
    notes += problems
    if len(hosts.processes) > 1:
        notes.append(
            f"{len(hosts.processes)} processes launched kernels; each kernel went to its own by correlation id"
        )
    names = {text_of(fields[KERNEL_FIELDS.index("name")]) for fields in _used_kinds(kernels)}
    damaged = sum(_REPLACEMENT in name for name in names)
    if damaged:
        notes.append(f"{damaged} kernel names hold bytes that are not UTF-8; they read as {_REPLACEMENT}")
    if "" in names:
        notes.append("kernels without a name")
    return (
        counts
        | _times(kernels, identities, base_ns)
        | {
            "kernels": len(kernels),
            "transfers": len(rows.transfers),
            "duplicates": int(repeated.sum()),
            "ranges": sum(batch.num_rows for batch in ranges),
            "truncated_names": sum(map(is_truncated, names)),
            "notes": tuple(notes),
        }
    )


def _joined(
    kernels: Rows, transfers: Rows, calls: Rows, apis: Sequence[str], launching: Mask, identities: Identities
) -> dict[str, Any]:
    """Count launches against kernels, both ways, by correlation id."""
    is_graph = np.array(["GraphLaunch" in api for api in apis], bool)[calls.codes] & launching
    captured = _while_capturing(calls, apis, identities) & launching
    ids = calls.correlation
    launch_ids = distinct(ids[launching & (ids > 0)])
    graph_ids = distinct(ids[is_graph & (ids > 0)])
    captured_ids = distinct(ids[captured & (ids > 0)])
    worked = distinct(np.concatenate([kernels.correlation, transfers.correlation, captured_ids]))
    idle = int((~_among(launch_ids, worked)).sum())
    without_id = int((launching & (ids == 0) & ~captured).sum())
    alone = ~_among(kernels.correlation, launch_ids)
    before = alone & (kernels.correlation > 0) & bool(len(launch_ids))
    if len(launch_ids):
        before &= kernels.correlation < launch_ids[0]
    nodes = kernels.extra.get("node", np.zeros(len(kernels), np.int64))
    of_graph = _among(kernels.correlation, graph_ids) | (nodes > 0)
    return {
        "launches": len(launch_ids) + int((launching & (ids == 0)).sum()),
        "graph_launches": len(graph_ids) + int((is_graph & (ids == 0)).sum()),
        # A launch without an id can be tied to no kernel, so nothing shows that it had one.
        "launches_without_kernel": idle + without_id,
        "launches_while_capturing": len(captured_ids) + int((captured & (ids == 0)).sum()),
        "kernels_without_launch": int(alone.sum()),
        "submitted_before_window": int(before.sum()),
        "graph_kernels": int(of_graph.sum()),
        "node_ids": bool((nodes[of_graph] > 0).all()),
    }


def _among(values: Int64s, ordered: Int64s) -> Mask:
    """Say which values occur in an array that :func:`distinct` returned."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    at = np.searchsorted(ordered, values).clip(max=len(ordered) - 1)
    return np.asarray(ordered[at] == values)


def _while_capturing(calls: Rows, apis: Sequence[str], identities: Identities) -> Mask:
    """Say which calls were made between the begin and the end of a stream capture on their own thread."""
    begins = np.array(["StreamBeginCapture" in api for api in apis], bool)[calls.codes]
    ends = np.array(["StreamEndCapture" in api for api in apis], bool)[calls.codes]
    inside = np.zeros(len(calls), bool)
    if not begins.any():
        return inside
    processes, threads = lanes_of(calls, identities)
    for process, thread in {(processes[code], threads[code]) for code in np.unique(calls.codes[begins]).tolist()}:
        rows = np.flatnonzero(((processes == process) & (threads == thread))[calls.codes])
        rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
        inside[rows] = np.cumsum(begins[rows].astype(int) - ends[rows].astype(int)) > 0
    return inside


def _times(kernels: Rows, identities: Identities, base_ns: int) -> dict[str, Any]:
    """Count untimed, impossible and overlapping kernels; only timed, possible ones enter sums and ends."""
    untimed = (kernels.start_ns == 0) & (kernels.end_ns == 0)
    invalid = kernels.end_ns < kernels.start_ns
    good = ~untimed & ~invalid
    device, stream = device_and_stream(kernels, KERNEL_FIELDS, identities)
    lanes = (device.astype(np.int64) << 32) + stream
    overlapping, summed, busy = overlaps(kernels, lanes, good)
    times = {
        "untimed": int(untimed.sum()),
        "invalid_times": int(invalid.sum()),
        "overlapping": overlapping,
        "summed_ns": summed,
        "busy_ns": busy,
    }
    if not good.any():
        return times
    first, last = kernels.start_ns[good].min(), kernels.end_ns[good].max()
    return times | {"first_kernel_ns": int(first) + base_ns, "last_kernel_ns": int(last) + base_ns}


@dataclass
class _Hosts:
    """Which process submitted what."""

    processes: list[int]
    """Most launches first."""
    ids: Int64s
    owners: Int64s
    """Process by correlation id, where one process alone used the id."""


def _hosts(calls: Rows, annotations: Rows, identities: Identities) -> _Hosts:
    process = lanes_of(calls, identities)[0][calls.codes]
    if not len(process):
        process = lanes_of(annotations, identities)[0][annotations.codes]
        found = np.unique(process).tolist()
        return _Hosts(found[:1], np.empty(0, np.int64), np.empty(0, np.int64))
    unique, counts = np.unique(process, return_counts=True)
    processes = [int(unique[at]) for at in np.argsort(-counts, kind="stable")]
    if len(processes) == 1:
        return _Hosts(processes, np.empty(0, np.int64), np.empty(0, np.int64))
    pairs = np.unique(np.stack([calls.correlation, process], 1), axis=0)
    ids, first, uses = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    alone = (uses == 1) & (ids > 0)
    return _Hosts(processes, ids[alone], pairs[first[alone], 1])


def _process(rows: Rows, hosts: _Hosts) -> Int64s:
    """Return the process of each row: the one that launched it, or the one that launched most."""
    process = np.full(len(rows), hosts.processes[0] if hosts.processes else UNKNOWN_PROCESS, np.int64)
    if len(hosts.ids):
        at = np.searchsorted(hosts.ids, rows.correlation).clip(max=len(hosts.ids) - 1)
        known = hosts.ids[at] == rows.correlation
        process[known] = hosts.owners[at[known]]
    return process


def _used_kinds(rows: Rows) -> list[list[bytes]]:
    kinds = kinds_of(rows)
    return [kinds[code] for code in np.unique(rows.codes).tolist()]
