"""Rows of the bundle's tables, made from the columns of a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from alphamoe_tracers.kineto_arrow import integers, words
from alphamoe_tracers.kineto_chunk import KERNEL_FIELDS, TRANSFER_FIELDS, Rows, text_of
from alphamoe_tracers.kineto_kinds import Identities, int32_of, shape_of, unlabelled
from alphamoe_tracers.kineto_numbers import Int64s
from alphamoe_tracers.kineto_rows import with_rows
from alphamoe_tracers.range_pairing import with_depths
from alphamoe_tracers.records import KERNELS, LAUNCHES, RANGES, TRANSFERS
from alphamoe_tracers.trace_files import BATCH_ROWS, SymbolTable

RANGE_DOMAIN = "kineto"
UNKNOWN_DEVICE = -1
_COPY = re.compile(r"(?:memcpy\s+|copy\s*)?(HtoD|DtoH|DtoD|HtoH|HtoA|AtoH|AtoA|AtoD|DtoA|PtoP)\b", re.IGNORECASE)
_COPY_NAMES = {"hosttodevice": "HtoD", "devicetohost": "DtoH", "devicetodevice": "DtoD", "hosttohost": "HtoH"}
_MOST_API_NAMES = 32_000  # the api column counts them with 16 bits


def kinds_of(rows: Rows) -> list[list[bytes]]:
    """Return the fields of each kind as JSON text."""
    return [kind.split(b"\0") for kind in rows.kinds]


def labels_of(rows: Rows, identities: Identities) -> list[str]:
    """Return the rank label of each kind's process."""
    return [identities.label_of(text_of(fields[0])) for fields in kinds_of(rows)]


def lanes_of(rows: Rows, identities: Identities) -> tuple[Int64s, Int64s]:
    """Return the process and the thread of each kind."""
    texts = [(text_of(fields[0]), text_of(fields[1])) for fields in kinds_of(rows)]
    processes = [identities.lane(process) for process, _ in texts]
    return np.array(processes, np.int64), np.array([identities.lane(thread) for _, thread in texts], np.int64)


def device_and_stream(rows: Rows, fields: tuple[str, ...], identities: Identities) -> tuple[Any, Any]:
    """Return the device and the stream of each kind; a trace without them in the arguments has them as pid and tid."""
    device_at, stream_at = fields.index("device"), fields.index("stream")
    devices, streams = [], []
    for kind in kinds_of(rows):
        from_pid = unlabelled(text_of(kind[0])).encode()
        devices.append(int32_of(kind[device_at] or from_pid, UNKNOWN_DEVICE))
        streams.append(identities.stream(text_of(kind[stream_at] or kind[1])))
    return np.array(devices, np.int32), np.array(streams, np.int32)


def shifted(times: Int64s, rows: Rows, base_ns: int) -> Int64s:
    """Return times on the base clock; those of untimed rows stay 0."""
    timed = (rows.start_ns != 0) | (rows.end_ns != 0)
    return np.where(timed, times + base_ns, times)


def kernel_batches(
    rows: Rows, process: Int64s, symbols: SymbolTable, identities: Identities, base_ns: int
) -> Iterator[pa.Table]:
    """Yield KERNELS rows.

    Kineto gives one number for shared memory, static and dynamic together: it is stored as the dynamic part. Extents
    and counts that a trace does not have are 0, a device or context it does not have is -1.

    Args:
        rows: kernels of one rank.
        process: [n] host process that launched each.
    """
    kinds = [dict(zip(KERNEL_FIELDS, fields, strict=True)) for fields in kinds_of(rows)]
    used = np.zeros(len(kinds), bool)
    used[rows.codes] = True
    device, stream = device_and_stream(rows, KERNEL_FIELDS, identities)
    # Only kinds of this rank get a symbol: another rank of a merged file may have run other kernels.
    ids = [symbols.id_of(text_of(kind["name"])) if use else 0 for kind, use in zip(kinds, used.tolist(), strict=True)]
    by_kind: dict[str, Any] = {
        "device": device,
        "stream": stream,
        "symbol_id": np.array(ids, np.int32),
        "context": np.array([int32_of(kind["context"], -1) for kind in kinds], np.int32),
        "registers": np.array([int32_of(kind["registers"], 0) for kind in kinds], np.int32),
        "dynamic_smem_bytes": np.array([int32_of(kind["shared"], 0) for kind in kinds], np.int32),
        "static_smem_bytes": np.zeros(len(kinds), np.int32),
    }
    for name in ("grid", "block", "cluster"):
        shapes = np.array([shape_of(kind[name]) for kind in kinds], np.int32).reshape(-1, 3)
        by_kind |= {f"{name}_{axis}": shapes[:, at] for at, axis in enumerate("xyz")}
    for batch, part in _batches(rows):
        columns = {name: values[batch.codes] for name, values in by_kind.items()}
        columns |= {
            "process": process[part],
            "start_ns": shifted(batch.start_ns, batch, base_ns),
            "end_ns": shifted(batch.end_ns, batch, base_ns),
            "correlation_id": _nullable(batch.correlation),
            "graph_id": _nullable(_extra(batch, "graph")),
            "graph_node_id": _nullable(_extra(batch, "node")),
        }
        yield _table(columns, KERNELS)


def transfer_batches(rows: Rows, process: Int64s, identities: Identities, base_ns: int) -> Iterator[pa.Table]:
    """Yield TRANSFERS rows."""
    device, stream = device_and_stream(rows, TRANSFER_FIELDS, identities)
    names = [_transfer_kind(fields) for fields in kinds_of(rows)]
    kinds = list(dict.fromkeys(names))
    codes = np.array([kinds.index(name) for name in names], np.int64)
    for batch, part in _batches(rows):
        columns: dict[str, Any] = {
            "process": process[part],
            "kind": words(codes[batch.codes], kinds, TRANSFERS.field("kind").type),
            "bytes": _extra(batch, "bytes"),
            "start_ns": shifted(batch.start_ns, batch, base_ns),
            "end_ns": shifted(batch.end_ns, batch, base_ns),
            "device": device[batch.codes],
            "stream": stream[batch.codes],
            "correlation_id": _nullable(batch.correlation),
            "graph_node_id": _nullable(_extra(batch, "node")),
        }
        yield _table(columns, TRANSFERS)


def launch_batches(rows: Rows, identities: Identities, base_ns: int) -> Iterator[pa.Table]:
    """Yield LAUNCHES rows, not folded; a call that ends before it starts is given no length."""
    process, thread = lanes_of(rows, identities)
    names = [text_of(fields[2]) for fields in kinds_of(rows)]
    apis = list(dict.fromkeys(names))[:_MOST_API_NAMES]
    at = {name: code for code, name in enumerate(apis)}
    codes = np.array([at.get(name, 0) for name in names], np.int64)
    for batch, _ in _batches(rows):
        columns: dict[str, Any] = {
            "process": process[batch.codes],
            "thread": thread[batch.codes],
            "start_ns": shifted(batch.start_ns, batch, base_ns),
            "end_ns": shifted(np.maximum(batch.start_ns, batch.end_ns), batch, base_ns),
            "correlation_id": _nullable(batch.correlation),
            "api": words(codes[batch.codes], apis, LAUNCHES.field("api").type),
        }
        yield _table(columns, LAUNCHES)


def range_batches(annotations: Rows, marks: Rows, identities: Identities, base_ns: int) -> tuple[list[pa.Table], Any]:
    """Return RANGES rows of annotations and of paired begin and end events, and what could not be paired.

    Returns:
        The rows in batches, depths computed over all of them; and one sentence for each thread with an imbalance.
    """
    whole = _range_table(annotations, np.zeros(len(annotations), bool), identities, base_ns)
    opened, is_open, problems = _paired(marks, identities)
    ranges = with_depths(pa.concat_tables([whole, _range_table(opened, is_open, identities, base_ns)]))
    return [ranges.slice(at, BATCH_ROWS) for at in range(0, ranges.num_rows, BATCH_ROWS)], problems


def _range_table(rows: Rows, is_open: npt.NDArray[np.bool_], identities: Identities, base_ns: int) -> pa.Table:
    process, thread = lanes_of(rows, identities)
    names = [text_of(fields[2]) for fields in kinds_of(rows)]
    end_ns = shifted(np.maximum(rows.start_ns, rows.end_ns), rows, base_ns)
    texts = list(dict.fromkeys(names))
    at = {name: code for code, name in enumerate(texts)}
    codes = np.array([at[name] for name in names], np.int64)[rows.codes]
    constant = np.zeros(len(rows), np.int64)
    columns: dict[str, Any] = {
        "process": process[rows.codes],
        "thread": thread[rows.codes],
        "start_ns": shifted(rows.start_ns, rows, base_ns),
        "end_ns": integers(end_ns, is_open),
        "domain": words(constant, [RANGE_DOMAIN], RANGES.field("domain").type),
        "name": words(codes, texts, RANGES.field("name").type),
        "payload": integers(constant, np.ones(len(rows), bool)),
        "depth": constant.astype(np.int16),
        "kind": words(constant, ["push_pop"], RANGES.field("kind").type),
    }
    return _table(columns, RANGES)


def _paired(marks: Rows, identities: Identities) -> tuple[Rows, npt.NDArray[np.bool_], list[str]]:
    """Pair begin and end events by stack, thread by thread: an end closes the innermost open range of its thread."""
    processes, threads = lanes_of(marks, identities)
    is_end = _extra(marks, "is_end")
    stacks: dict[tuple[int, int], list[int]] = {}
    ends: dict[int, int] = {}
    strays: dict[int, int] = {}
    codes, times = marks.codes.tolist(), marks.start_ns.tolist()
    for row in np.argsort(marks.start_ns, kind="stable").tolist():
        lane = (int(processes[codes[row]]), int(threads[codes[row]]))
        stack = stacks.setdefault(lane, [])
        if not is_end[row]:
            stack.append(row)
        elif stack:
            ends[stack.pop()] = times[row]
        else:
            strays[lane[1]] = strays.get(lane[1], 0) + 1
    begins = np.flatnonzero(is_end == 0)
    opened = with_rows(marks, begins)
    opened.end_ns = np.array([ends.get(row, times[row]) for row in begins.tolist()], np.int64)
    is_open = np.array([row not in ends for row in begins.tolist()], bool)
    problems = [f"thread {thread}: {count} range ends without a start" for thread, count in sorted(strays.items())]
    unclosed = {lane[1]: len(stack) for lane, stack in stacks.items() if stack}
    problems += [f"thread {thread}: {count} ranges never closed" for thread, count in sorted(unclosed.items())]
    return opened, is_open, problems


def _batches(rows: Rows) -> Iterator[tuple[Rows, slice]]:
    for at in range(0, len(rows), BATCH_ROWS):
        part = slice(at, at + BATCH_ROWS)
        yield with_rows(rows, part), part


def _table(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    ordered = (columns[name] for name in schema.names)
    arrays = [integers(values) if isinstance(values, np.ndarray) else values for values in ordered]
    return pa.Table.from_arrays(arrays, schema=schema)


def _extra(rows: Rows, name: str) -> Int64s:
    values = rows.extra.get(name)
    return np.zeros(len(rows), np.int64) if values is None else values


def _nullable(values: Int64s) -> Any:
    return integers(values, values == 0)


def _transfer_kind(fields: list[bytes]) -> str:
    name, category = text_of(fields[2]), fields[5].decode("utf-8", "replace")
    if "memset" in category or name.lower().startswith("memset"):
        return "memset"
    found = _COPY.search(name)
    if found is None:
        for long_name, kind in _COPY_NAMES.items():
            if long_name in name.lower():
                return f"memcpy {kind}"
        return "memcpy unknown"
    kind = found[1].upper()
    return f"memcpy {kind[0]}to{kind[-1]}"
