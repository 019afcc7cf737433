"""CUPTI activity buffers as memory: where each record lies, and its fields as numpy structured arrays.

A buffer is a sequence of packed C structs of several kinds, each beginning with its kind (uint32) and padded to eight
bytes. How long the records of a kind are depends on the version of the libcupti that wrote them, so sizes come from the
library itself (:meth:`alphamoe_tracers.libcupti.Libcupti.record_sizes`). Offsets are those of ``cupti_activity.h``
and ``cupti_activity_deprecated.h`` of CUDA 13.0 and 13.5; CUPTI extends a struct by appending, under a new version
number.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


class Kind(enum.IntEnum):
    """The CUpti_ActivityKind values that are recorded."""

    MEMCPY = 1
    MEMSET = 2
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    MARKER = 12
    MARKER_DATA = 13


_Fields = Mapping[str, tuple[str, int]]

KERNEL_FIELDS: _Fields = {
    "registers_per_thread": ("u2", 6),
    "start": ("u8", 16),
    "end": ("u8", 24),
    "device_id": ("u4", 40),
    "context_id": ("u4", 44),
    "stream_id": ("u4", 48),
    "grid_x": ("i4", 52),
    "grid_y": ("i4", 56),
    "grid_z": ("i4", 60),
    "block_x": ("i4", 64),
    "block_y": ("i4", 68),
    "block_z": ("i4", 72),
    "static_shared_memory": ("i4", 76),
    "dynamic_shared_memory": ("i4", 80),
    "correlation_id": ("u4", 92),
    "name": ("u8", 104),
    "graph_node_id": ("u8", 144),
    "graph_id": ("u4", 156),
    "cluster_x": ("u4", 176),
    "cluster_y": ("u4", 180),
    "cluster_z": ("u4", 184),
}
"""Field -> (format, offset) in CUpti_ActivityKernel9 to 13, under the names that cupti-python's dtypes use."""

_KERNEL_SIZES = {
    208: "ActivityKernel9",
    216: "ActivityKernel10",
    224: "ActivityKernel11",
    232: "ActivityKernel12",
    248: "ActivityKernel13",
}

_OTHER_FIELDS: Mapping[Kind, tuple[int, _Fields]] = {
    # CUpti_ActivityAPI
    Kind.RUNTIME: (
        40,
        {
            "cbid": ("u4", 4),
            "start": ("u8", 8),
            "end": ("u8", 16),
            "process_id": ("u4", 24),
            "thread_id": ("u4", 28),
            "correlation_id": ("u4", 32),
            "return_value": ("u4", 36),
        },
    ),
    # CUpti_ActivityMemcpy5 to 7
    Kind.MEMCPY: (
        88,
        {
            "copy_kind": ("u1", 4),
            "bytes": ("u8", 8),
            "start": ("u8", 16),
            "end": ("u8", 24),
            "device_id": ("u4", 32),
            "stream_id": ("u4", 40),
            "correlation_id": ("u4", 44),
            "graph_node_id": ("u8", 64),
        },
    ),
    # CUpti_ActivityMemset4 and 5
    Kind.MEMSET: (
        88,
        {
            "bytes": ("u8", 8),
            "start": ("u8", 16),
            "end": ("u8", 24),
            "device_id": ("u4", 32),
            "stream_id": ("u4", 40),
            "correlation_id": ("u4", 44),
            "graph_node_id": ("u8", 64),
        },
    ),
    # CUpti_ActivityMarker2
    Kind.MARKER: (
        56,
        {
            "flags": ("u4", 4),
            "timestamp": ("u8", 8),
            "id": ("u4", 16),
            "object_kind": ("i4", 20),
            "process_id": ("u4", 24),
            "thread_id": ("u4", 28),
            "name": ("u8", 40),
            "domain": ("u8", 48),
        },
    ),
    # CUpti_ActivityMarkerData (32 bytes) and CUpti_ActivityMarkerData2 (40 bytes) share this prefix
    Kind.MARKER_DATA: (
        32,
        {"id": ("u4", 8), "payload_kind": ("i4", 12), "payload": ("i8", 16)},
    ),
}


class UnknownLayoutError(Exception):
    """The loaded library writes records that this reader has no layout for."""


class BrokenBufferError(Exception):
    """The records of a buffer do not add up to its valid size."""


@dataclass(frozen=True)
class Layouts:
    """How long the records of each kind are, and where the fields of the recorded kinds lie."""

    sizes: Mapping[int, int]
    """Bytes by kind, for every kind that may occur in a buffer."""
    dtypes: Mapping[Kind, np.dtype]
    kernel_record: str
    """For example ``ActivityKernel10``."""

    @classmethod
    def choose(cls, sizes: Mapping[int, int], exposed: Mapping[str, np.dtype] | None = None) -> Layouts:
        """Pick the layouts for a library by the sizes of the records that it writes.

        Args:
            sizes: bytes by kind, from the library.
            exposed: kernel dtypes by struct name from the installed cupti-python, for versions newer than 13.

        Raises:
            UnknownLayoutError: kernel records have a size that no known or exposed layout has, or records of
                another kind are shorter than the fields that are read from them.
        """
        size = sizes.get(Kind.CONCURRENT_KERNEL, 0)
        by_size = {
            dtype.itemsize: (name, _exposed_fields(name, dtype))
            for name, dtype in (exposed or {}).items()
            if dtype.itemsize not in _KERNEL_SIZES
        }
        by_size.update({known: (name, KERNEL_FIELDS) for known, name in _KERNEL_SIZES.items()})
        if size not in by_size:
            known = ", ".join(f"{name} ({length})" for length, (name, _) in sorted(by_size.items()))
            raise UnknownLayoutError(f"kernel records of {size} bytes are unknown; known are {known}")
        name, fields = by_size[size]
        dtypes = {Kind.CONCURRENT_KERNEL: _dtype(fields, size)}
        for kind, (least, other_fields) in {**_OTHER_FIELDS, Kind.DRIVER: _OTHER_FIELDS[Kind.RUNTIME]}.items():
            length = sizes.get(kind, least)
            if length < least:
                raise UnknownLayoutError(
                    f"{kind.name} records of {length} bytes are unknown; at least {least} expected"
                )
            dtypes[kind] = _dtype(other_fields, length)
        return cls({**{kind: dtype.itemsize for kind, dtype in dtypes.items()}, **sizes}, dtypes, name)

    def described(self) -> dict[int, tuple[int, list[tuple[str, str, int]]]]:
        """Return the dtypes as plain data: record length and (field, format, offset) by kind."""
        return {
            int(kind): (dtype.itemsize, [(name, of[0].str, of[1]) for name, of in (dtype.fields or {}).items()])
            for kind, dtype in self.dtypes.items()
        }

    @classmethod
    def restored(
        cls,
        sizes: Mapping[int, int],
        described: Mapping[int, tuple[int, list[tuple[str, str, int]]]],
        kernel_record: str,
    ) -> Layouts:
        """Return the layouts that another process chose and :meth:`described`."""
        dtypes = {
            Kind(kind): _dtype({name: (form, offset) for name, form, offset in fields}, length)
            for kind, (length, fields) in described.items()
        }
        return cls(sizes, dtypes, kernel_record)


def decode_buffer(
    buffer: npt.NDArray[np.uint8], layouts: Layouts, starts: npt.NDArray[np.int64] | None = None
) -> dict[Kind, np.ndarray]:
    """Decode one activity buffer.

    Args:
        buffer: the valid bytes, eight-byte aligned. The result does not refer to it.
        layouts: of the library that wrote it.
        starts: byte offsets of the records where they are known already; found by the sizes when left out.

    Returns:
        A structured array for each recorded kind that occurs; records of other kinds are skipped.

    Raises:
        BrokenBufferError: a record of unknown size, or records that do not end where the buffer ends.
    """
    words = buffer.view(np.uint32)
    offsets = record_offsets(words, layouts.sizes) if starts is None else starts >> 2
    kinds = words[offsets]
    quads = buffer.view(np.uint64)
    decoded = {}
    for kind, dtype in layouts.dtypes.items():
        first = offsets[kinds == kind] >> 1
        if len(first):
            rows = quads[first[:, None] + np.arange(dtype.itemsize // 8)]
            decoded[kind] = rows.view(dtype).reshape(-1)
    return decoded


def record_offsets(words: npt.NDArray[np.uint32], sizes: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """Find where each record begins, as indices of 32-bit words.

    The walk is a loop of some 60 ns a record; runs of records of one size are followed in bulk.

    Raises:
        BrokenBufferError: as for :func:`decode_buffer`.
    """
    longest_kind = max(sizes) + 1
    steps = [0] * (longest_kind + 1)
    for kind, size in sizes.items():
        steps[kind] = size // 4
    step_of = np.array(steps, np.int64)
    view = memoryview(words)  # type: ignore[arg-type]  # numpy arrays have no __buffer__ before 3.12
    end = len(words)
    found: list[npt.NDArray[np.int64]] = []
    singles: list[int] = []
    at, last_step, run = 0, 0, 0
    while at < end:
        kind = view[at]
        step = steps[kind] if kind < longest_kind else 0
        if not step:
            raise BrokenBufferError(f"record of unknown kind {kind} at byte {at * 4} of {end * 4}")
        singles.append(at)
        at += step
        run = run + 1 if step == last_step else 0
        last_step = step
        if run >= 32:
            run = 0
            found.append(np.array(singles, np.int64))
            singles = []
            ahead = 256
            while True:
                kinds = words[at : at + ahead * step : step]
                same = step_of[np.minimum(kinds, longest_kind)] == step
                length = len(kinds) if same.all() else int(same.argmin())
                found.append(at + np.arange(length, dtype=np.int64) * step)
                at += length * step
                if length < ahead:
                    break
                ahead *= 4
    if at != end:
        raise BrokenBufferError(f"the last record ends at byte {at * 4} of {end * 4}")
    found.append(np.array(singles, np.int64))
    return np.concatenate(found)


def _dtype(fields: _Fields, size: int) -> np.dtype:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind for kind, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": size,
        }
    )


def _exposed_fields(name: str, dtype: np.dtype) -> _Fields:
    """Where the fields that are read lie in a dtype that cupti-python exposes."""
    offsets: Mapping[str, Any] = dtype.fields or {}
    missing = [field for field in KERNEL_FIELDS if field not in offsets]
    if missing:
        raise UnknownLayoutError(f"{name} of the installed cupti-python has no field {missing[0]}")
    return {field: (kind, offsets[field][1]) for field, (kind, _) in KERNEL_FIELDS.items()}
