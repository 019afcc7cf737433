"""Activity buffers: walking, layouts by version, and fields read where the C headers put them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from alphamoe_tracers.activity import (
    KERNEL_FIELDS,
    BrokenBufferError,
    Kind,
    Layouts,
    UnknownLayoutError,
    decode_buffer,
    record_offsets,
)
from alphamoe_tracers.libcupti import exposed_kernel_dtypes
from alphamoe_tracers.synthetic import RECORD_SIZES


def buffer_of(kinds: list[int]) -> np.ndarray:
    records = [struct.pack("<I", kind) + bytes(RECORD_SIZES[kind] - 4) for kind in kinds]
    return np.frombuffer(b"".join(records), np.uint8).copy()


def test_walk_finds_every_record_of_a_mixed_buffer() -> None:
    """Long runs of one size are followed in bulk, and the walk is the same as one record at a time."""
    rng = np.random.default_rng(3)
    kinds: list[int] = []
    for _ in range(60):
        kinds += [int(rng.choice(list(RECORD_SIZES)))] * int(rng.choice([1, 2, 31, 33, 34, 400, 1500]))
    sizes = np.array([RECORD_SIZES[kind] for kind in kinds])
    expected = (np.cumsum(sizes) - sizes) // 4
    np.testing.assert_array_equal(record_offsets(buffer_of(kinds).view(np.uint32), RECORD_SIZES), expected)


def test_runs_of_one_size_may_mix_kinds() -> None:
    """Runtime and driver records are equally long and alternate; both are found."""
    decoded = decode_buffer(buffer_of([Kind.DRIVER, Kind.RUNTIME] * 500), Layouts.choose(RECORD_SIZES))
    assert {kind: len(rows) for kind, rows in decoded.items()} == {Kind.DRIVER: 500, Kind.RUNTIME: 500}


def test_empty_buffer_has_no_records() -> None:
    """A buffer with no valid bytes decodes to nothing."""
    assert decode_buffer(np.empty(0, np.uint8), Layouts.choose(RECORD_SIZES)) == {}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-8], "last record ends"),
        (lambda data: np.concatenate([data, np.zeros(8, np.uint8)]), "unknown kind 0"),
        (lambda data: np.concatenate([data, np.full(8, 255, np.uint8)]), "unknown kind 4294967295"),
    ],
)
@pytest.mark.parametrize("count", [3, 300])
def test_records_that_do_not_add_up_are_refused(damage, message: str, count: int) -> None:  # type: ignore[no-untyped-def]
    """A cut, padded or garbled buffer is an error and not a guess."""
    with pytest.raises(BrokenBufferError, match=message):
        record_offsets(damage(buffer_of([Kind.CONCURRENT_KERNEL] * count)).view(np.uint32), RECORD_SIZES)


def test_known_starts_replace_the_walk() -> None:
    """A buffer whose starts the library gave is decoded without the size table."""
    data = buffer_of([Kind.MEMSET, Kind.RUNTIME, Kind.MEMSET])
    decoded = decode_buffer(data, Layouts.choose(RECORD_SIZES), np.array([0, 88, 128]))
    assert len(decoded[Kind.MEMSET]) == 2


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (208, "ActivityKernel9"),
        (216, "ActivityKernel10"),
        (224, "ActivityKernel11"),
        (232, "ActivityKernel12"),
        (248, "ActivityKernel13"),
    ],
)
def test_kernel_layout_follows_the_record_size(size: int, name: str) -> None:
    """The version of the loaded library shows in the size of its kernel records."""
    layouts = Layouts.choose({**RECORD_SIZES, Kind.CONCURRENT_KERNEL: size})
    assert layouts.kernel_record == name
    assert layouts.dtypes[Kind.CONCURRENT_KERNEL].itemsize == size


def newer_kernel_dtype() -> np.dtype:
    """A made-up future version: longer, and with one field moved."""
    offsets = {name: offset for name, (_, offset) in KERNEL_FIELDS.items()}
    offsets["cluster_x"] = 256
    formats = [kind for kind, _ in KERNEL_FIELDS.values()]
    return np.dtype(
        {"names": list(KERNEL_FIELDS), "formats": formats, "offsets": list(offsets.values()), "itemsize": 264}
    )


def test_newer_kernel_layout_comes_from_cupti_python() -> None:
    """Above version 13 the fields lie where the installed cupti-python says."""
    sizes = {**RECORD_SIZES, Kind.CONCURRENT_KERNEL: 264}
    layouts = Layouts.choose(sizes, {"ActivityKernel14": newer_kernel_dtype()})
    assert layouts.kernel_record == "ActivityKernel14"
    record = np.zeros(264, np.uint8)
    record[:4] = np.frombuffer(struct.pack("<I", Kind.CONCURRENT_KERNEL), np.uint8)
    record[256] = 9
    assert decode_buffer(record, layouts)[Kind.CONCURRENT_KERNEL]["cluster_x"].tolist() == [9]


def test_unknown_kernel_size_is_refused_with_what_is_known() -> None:
    """No layout is guessed for a record that nobody described."""
    with pytest.raises(UnknownLayoutError, match=r"300 bytes.*ActivityKernel10 \(216\)"):
        Layouts.choose({**RECORD_SIZES, Kind.CONCURRENT_KERNEL: 300})


def test_kernel_prefix_is_the_same_in_every_exposed_version() -> None:
    """Each kernel dtype of the installed cupti-python has the fields that are read where the table has them."""
    pytest.importorskip("cupti.cupti")
    for name, dtype in exposed_kernel_dtypes().items():
        found = {field: dtype.fields[field][1] for field in KERNEL_FIELDS}
        assert found == {field: offset for field, (_, offset) in KERNEL_FIELDS.items()}, name


def test_offsets_agree_with_cupti_python() -> None:
    """Every field is read where the installed cupti-python's own dtypes have it."""
    cupti = pytest.importorskip("cupti.cupti")
    layouts = Layouts.choose(RECORD_SIZES)
    theirs = {
        Kind.CONCURRENT_KERNEL: cupti.activity_kernel10_dtype,
        Kind.RUNTIME: cupti.activity_api_dtype,
        Kind.MEMCPY: cupti.activity_memcpy6_dtype,
        Kind.MEMSET: cupti.activity_memset4_dtype,
        Kind.MARKER: cupti.activity_marker2_dtype,
        Kind.MARKER_DATA: cupti.activity_marker_data_dtype,
    }
    nested = {"process_id": "object_id", "thread_id": "object_id"}
    for kind, their in theirs.items():
        for name, (_, offset) in (layouts.dtypes[kind].fields or {}).items():
            field = name if name in their.fields else nested.get(name, f"{name}_")
            expected = their.fields[field][1] + (4 if name == "thread_id" and field == "object_id" else 0)
            assert offset == expected, (kind, name)
