"""From decoded activity records to rows of the bundle's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from alphamoe_tracers.activity import Kind
from alphamoe_tracers.columns import strings_by_code
from alphamoe_tracers.range_pairing import MARKER_DTYPE, PAYLOAD_DTYPE
from alphamoe_tracers.records import KERNELS, LAUNCHES, SYMBOLS, TRANSFERS
from alphamoe_tracers.symbols import base_name, demangle, symbol_class

UNRESOLVED = "<unresolved>"
_COPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_TRANSFER_KINDS = (*(f"memcpy {name}" for name in _COPY_KINDS), "memset")
_UNSIGNED, _SIGNED = 1, 4
"""CUPTI_METRIC_VALUE_KIND_UINT64 and _INT64; other payload kinds are not integers and are left out."""

Resolve = Callable[[int], bytes]


@dataclass
class StringTable:
    """Strings behind char pointers, numbered in order of appearance.

    A pointer is looked up anew in every batch: after a module is unloaded its address may hold another name.
    """

    resolve: Resolve
    strings: list[str] = field(default_factory=list)
    unresolved: int = 0
    _codes: dict[str, int] = field(default_factory=dict)

    def codes(self, pointers: np.ndarray, missing: str = "") -> npt.NDArray[np.int64]:
        """Return the number of each pointer's string, as an [n] array.

        Args:
            pointers: [n] uint64 addresses.
            missing: what a null or empty name reads; counted as unresolved when it is not empty.
        """
        unique, inverse, counts = np.unique(pointers, return_inverse=True, return_counts=True)
        known = np.empty(len(unique), np.int64)
        for row, (pointer, count) in enumerate(zip(unique.tolist(), counts.tolist(), strict=True)):
            # Names that are not UTF-8 are kept readable; their ASCII part still matches rules.
            text = self.resolve(pointer).decode("utf-8", "replace") if pointer else ""
            if not text and missing:
                text = missing
                self.unresolved += count
            code = self._codes.get(text)
            if code is None:
                code = self._codes[text] = len(self.strings)
                self.strings.append(text)
            known[row] = code
        return np.asarray(known[inverse.reshape(-1)])


def kernels_table(records: np.ndarray, process: int, names: StringTable) -> pa.Table:
    """Return KERNELS rows; ``symbol_id`` is the name's number in ``names``."""
    columns: dict[str, Any] = {
        "process": np.full(len(records), process, np.int64),
        "start_ns": _i64(records["start"]),
        "end_ns": _i64(records["end"]),
        "device": _i32(records["device_id"]),
        "context": _i32(records["context_id"]),
        "stream": _i32(records["stream_id"]),
        "correlation_id": _nullable(records["correlation_id"]),
        "graph_id": _nullable(records["graph_id"]),
        "graph_node_id": _nullable(records["graph_node_id"]),
        "symbol_id": _i32(names.codes(records["name"], missing=UNRESOLVED)),
        "static_smem_bytes": records["static_shared_memory"],
        "dynamic_smem_bytes": records["dynamic_shared_memory"],
        "registers": _i32(records["registers_per_thread"]),
    }
    for axis in "xyz":
        for shape in ("grid", "block", "cluster"):
            columns[f"{shape}_{axis}"] = _i32(records[f"{shape}_{axis}"])
    return _table(columns, KERNELS)


def launches_table(runtime: np.ndarray, driver: np.ndarray, api_names: Mapping[tuple[int, int], str]) -> pa.Table:
    """Return LAUNCHES rows, not yet folded. A call that returned an error submitted nothing and is left out.

    Args:
        runtime: API records of kind RUNTIME.
        driver: API records of kind DRIVER.
        api_names: name by (kind, callback id).
    """
    records = np.concatenate([runtime, driver])
    kinds = np.repeat([int(Kind.RUNTIME), int(Kind.DRIVER)], [len(runtime), len(driver)])
    worked = records["return_value"] == 0
    records, kinds = records[worked], kinds[worked]
    strings: list[str] = []
    calls, inverse = np.unique(kinds << 32 | records["cbid"], return_inverse=True)
    for call in calls.tolist():
        kind, cbid = call >> 32, call & 0xFFFFFFFF
        strings.append(api_names.get((kind, cbid), f"{'cuda' if kind == Kind.RUNTIME else 'cu'}#{cbid}"))
    codes = inverse.reshape(-1).astype(np.int64)
    columns = {
        "process": _i64(records["process_id"]),
        "thread": _i64(records["thread_id"]),
        "start_ns": _i64(records["start"]),
        "end_ns": _i64(records["end"]),
        "correlation_id": _nullable(records["correlation_id"]),
        "api": strings_by_code(codes, strings, LAUNCHES.field("api").type),
    }
    return _table(columns, LAUNCHES)


def transfers_table(copies: np.ndarray, sets: np.ndarray, process: int) -> pa.Table:
    """Return TRANSFERS rows from memcpy and memset records."""
    copy_kind = np.where(copies["copy_kind"] < len(_COPY_KINDS), copies["copy_kind"], 0).astype(np.int64)
    codes = np.concatenate([copy_kind, np.full(len(sets), len(_COPY_KINDS), np.int64)])

    def both(name: str) -> np.ndarray:
        return np.concatenate([copies[name], sets[name]])

    columns = {
        "process": np.full(len(codes), process, np.int64),
        "kind": strings_by_code(codes, _TRANSFER_KINDS, TRANSFERS.field("kind").type),
        "bytes": _i64(both("bytes")),
        "start_ns": _i64(both("start")),
        "end_ns": _i64(both("end")),
        "device": _i32(both("device_id")),
        "stream": _i32(both("stream_id")),
        "correlation_id": _nullable(both("correlation_id")),
        "graph_node_id": _nullable(both("graph_node_id")),
    }
    return _table(columns, TRANSFERS)


def markers(records: np.ndarray, names: StringTable) -> np.ndarray:
    """Return marker records as :data:`~alphamoe_tracers.range_pairing.MARKER_DTYPE`."""
    rows = np.empty(len(records), MARKER_DTYPE)
    rows["flags"] = records["flags"]
    rows["object_kind"] = records["object_kind"]
    rows["time_ns"] = records["timestamp"]
    rows["id"] = records["id"]
    rows["process"] = records["process_id"]
    rows["thread"] = records["thread_id"]
    rows["name"] = names.codes(records["name"])
    rows["domain"] = names.codes(records["domain"])
    return rows


def payloads(records: np.ndarray) -> np.ndarray:
    """Return the integer payloads of marker-data records.

    CUPTI writes a marker-data record for every range of a domain. One that was pushed without a payload reads as an
    unsigned 0, just as an unsigned 0 that was given would, so that this is taken for none. The ``nvtx`` package (and
    with it :class:`~alphamoe_tracers.ranges.RangeDomain`) gives signed payloads, whose 0 is a 0.
    """
    kind, value = records["payload_kind"], records["payload"]
    records = records[(kind == _SIGNED) | ((kind == _UNSIGNED) & (value != 0))]
    rows = np.empty(len(records), PAYLOAD_DTYPE)
    rows["id"] = records["id"]
    rows["value"] = records["payload"]
    return rows


def symbols_table(names: list[str], first: int, module_of: Mapping[str, str | None]) -> pa.Table:
    """Return SYMBOLS rows for the names from number ``first`` on.

    Args:
        names: mangled names; a name's index is its symbol id.
        first: the first name that has not been written yet.
        module_of: hash of the one loaded module that holds a mangled name.
    """
    rows = []
    for symbol_id in range(first, len(names)):
        mangled = names[symbol_id]
        full = demangle(mangled)
        base = base_name(full)
        rows.append(
            {
                "symbol_id": symbol_id,
                "mangled": mangled,
                "full": full,
                "base": base,
                "class": symbol_class(base, full),
                "module_sha256": module_of.get(mangled),
            }
        )
    return pa.Table.from_pylist(rows, schema=SYMBOLS)


def _table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _i64(values: np.ndarray) -> npt.NDArray[np.int64]:
    return values.astype(np.int64)


def _i32(values: np.ndarray) -> npt.NDArray[np.int32]:
    return values.astype(np.int32)


def _nullable(values: np.ndarray) -> Any:
    """An id column in which CUPTI's 0 means that there is none."""
    return pa.array(values.astype(np.int64), mask=values == 0)
