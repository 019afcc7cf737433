"""Folding of launches, parts on disk, and duplicate rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.launches import fold_launches
from alphamoe_tracers.parts import Parts, without_duplicates, write_table
from alphamoe_tracers.records import KERNELS, LAUNCHES
from alphamoe_tracers.replay import Recording


def launches(*rows: tuple[int, int, int, int | None, str]) -> pa.Table:
    """Rows of (thread, start, end, correlation id, api)."""
    names = ("thread", "start_ns", "end_ns", "correlation_id", "api")
    return pa.Table.from_pylist([{"process": 1, **dict(zip(names, row, strict=True))} for row in rows], schema=LAUNCHES)


def plain(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row.values())[1:] for row in table.to_pylist()]


def test_folding_keeps_the_outer_call() -> None:
    """Runtime and driver rows of one submission become one, in whatever order they came."""
    table = launches(
        (5, 30, 40, 8, "cuLaunchKernel"), (5, 12, 18, 7, "cuLaunchKernel"), (5, 10, 20, 7, "cudaLaunchKernel")
    )
    folded = fold_launches(table)
    assert plain(folded) == [(5, 10, 20, 7, "cudaLaunchKernel"), (5, 30, 40, 8, "cuLaunchKernel")]
    assert plain(fold_launches(folded)) == plain(folded)


def test_folding_needs_thread_and_id_to_agree() -> None:
    """Two threads may share an id only by chance, and rows without an id are never joined."""
    rows = [(5, 1, 2, 7, "cudaLaunchKernel"), (6, 3, 4, 7, "cuLaunchKernel")]
    rows += [(5, 5, 6, None, "cudaGraphLaunch"), (5, 5, 6, None, "cuGraphLaunch")]
    assert fold_launches(launches(*rows)).num_rows == 4


def test_runtime_name_wins_a_tie_and_the_span_covers_both() -> None:
    """Equal starts are told apart by the layer of the call."""
    rows = [(5, 10, 25, 7, "cuLaunchKernel"), (5, 10, 20, 7, "cudaLaunchKernel")]
    assert plain(fold_launches(launches(*rows))) == [(5, 10, 25, 7, "cudaLaunchKernel")]


def test_folding_nothing_gives_nothing() -> None:
    """An empty table stays empty."""
    assert fold_launches(LAUNCHES.empty_table()).num_rows == 0


def kernels(starts: list[int], stream: int = 7) -> pa.Table:
    filler = {field.name: None if field.nullable else 0 for field in KERNELS}
    return pa.Table.from_pylist([{**filler, "start_ns": start, "stream": stream} for start in starts], schema=KERNELS)


def test_rows_equal_in_the_keys_only_are_kept() -> None:
    """Agreement in a few columns is a suspicion, not a duplicate."""
    table = pa.concat_tables([kernels([1, 2, 2]), kernels([2], stream=9)])
    unique, dropped = without_duplicates(table, ("start_ns",))
    assert (unique.column("start_ns").to_pylist(), dropped) == ([1, 2, 2], 1)
    assert unique.column("stream").to_pylist() == [7, 7, 9]


def test_parts_become_one_file_with_compact_encodings(tmp_path: Path) -> None:
    """Staged and written rows are read together; the final part replaces the others."""
    parts = Parts(tmp_path, "kernels", 3)
    for start in range(3):
        parts.append(kernels([start]))
        parts.write()
    parts.append(kernels([9]))
    table = parts.read()
    assert table.column("start_ns").to_pylist() == [0, 1, 2, 9]
    parts.replace(table)
    (file,) = (tmp_path / "kernels" / "rank=3").iterdir()
    group = pq.ParquetFile(file).metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    assert "DELTA_BINARY_PACKED" in encodings["start_ns"]
    assert "RLE_DICTIONARY" in encodings["symbol_id"]


def test_large_recording_takes_few_bytes_a_kernel(tmp_path: Path) -> None:
    """Replays of one graph compress to a few bytes a kernel (aim: 20)."""
    rng = np.random.default_rng(1)
    n = 20_000
    start = 1_796_059_514_882_764_240 + np.cumsum(rng.integers(1300, 1700, n))
    columns = {field.name: np.full(n, 1, field.type.to_pandas_dtype()) for field in KERNELS}
    columns["start_ns"], columns["end_ns"] = start, start + rng.integers(900, 1200, n)
    columns["correlation_id"] = np.repeat(np.arange(n // 50), 50)
    columns["graph_node_id"] = np.tile(np.arange(50), n // 50)
    write_table(tmp_path / "k.parquet", pa.table(columns, schema=KERNELS))
    assert (tmp_path / "k.parquet").stat().st_size < 8 * n


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a temporary file nor a half-written part remains."""

    def half_written(table: pa.Table, path: Path, **_: object) -> None:
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", half_written)
    with pytest.raises(OSError, match="No space"):
        write_table(tmp_path / "k.parquet", kernels([1]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"text"])
def test_damaged_recording_is_an_evidence_error(tmp_path: Path, content: bytes) -> None:
    """A recording that cannot be read is one line, not a traceback."""
    path = tmp_path / "raw.npz"
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match=r"raw\.npz"):
        Recording.load(path)
