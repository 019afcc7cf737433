"""Nsight Systems exports of every schema: joined by (process, correlation id), folded, probed, and never trusted."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import nsys_files
import pytest
from nsys_files import KERNEL, RUNTIME, Sink, gid

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.nsys import read_nsys
from alphamoe_tracers.trace_files import TraceSummary

STRINGS = ("id,value", [(1, "cudaGraphLaunch_v10000"), (2, "moe_gemm"), (3, "cudaLaunchKernel_v7000")])


def one(path: Path) -> tuple[TraceSummary, Sink]:
    sink = Sink()
    (summary,) = read_nsys(path, sink)
    return summary, sink


def joined(sink: Sink, key: str) -> int:
    launches = {(row["process"], row["correlation_id"]) for row in sink.table(key, "launches")}
    return sum((row["process"], row["correlation_id"]) in launches for row in sink.table(key, "kernels"))


def test_two_processes_join_inside_themselves_only(shared: Path) -> None:
    """3,986 of 4,010 kernels have their launch, none in the other process; 20 launches show no kernel."""
    sink = Sink()
    first, second = read_nsys(shared / "traces/nsys/mfu_2gpu_before.sqlite", sink)
    assert (first.key, second.key) == ("144", "145")
    assert first.rank is second.rank is None
    assert first.kernels + second.kernels == 4010
    assert joined(sink, "144") + joined(sink, "145") == 3986
    assert first.submitted_before_window + second.submitted_before_window == 24
    assert first.launches_without_kernel + second.launches_without_kernel == 20
    assert first.ranges + second.ranges == 19118
    assert first.format_version == "3.25.0"


def test_registered_strings_name_their_ranges(shared: Path) -> None:
    """462 rows have no text but a text id."""
    sink = Sink()
    read_nsys(shared / "traces/nsys/mfu_2gpu_before.sqlite", sink)
    rows = [row for key in ("144", "145") for row in sink.table(key, "ranges")]
    assert sum(str(row["name"]).startswith("nccl") and row["domain"] != "" for row in rows) == 462
    assert not any(row["name"] == "" for row in rows)


def test_runtime_and_driver_rows_of_one_submission_are_one_launch(shared: Path) -> None:
    """The 2022 export has ten rows for five kernels."""
    summary, sink = one(shared / "traces/nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite")
    assert (summary.kernels, summary.launches, summary.launches_without_kernel) == (5, 5, 0)
    assert joined(sink, summary.key) == 5
    assert {row["api"] for row in sink.table(summary.key, "launches")} == {"cudaLaunchKernel"}
    assert summary.versions["nsys"].startswith("2022.2")
    domains = {row["domain"] for row in sink.table(summary.key, "ranges")}
    assert domains == {"", "MPI"}


def graph_export(tmp_path: Path, kernels: list[tuple[object, ...]], traces: list[tuple[object, ...]]) -> Path:
    return nsys_files.write(
        tmp_path / "graph.sqlite",
        {
            "StringIds": STRINGS,
            RUNTIME: ("start,end,correlationId,nameId", [(50, 60, 8, 3), (1000, 1010, 55, 1)]),
            KERNEL: ("start,end,correlationId,graphNodeId,demangledName", kernels),
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("start,end,correlationId,graphId", traces),
        },
    )


def test_a_graph_traced_as_one_block_hides_its_kernels(tmp_path: Path) -> None:
    """Its launch is counted, its kernels are known to be invisible, and eager kernels stay proven."""
    summary, _ = one(graph_export(tmp_path, [(100, 120, 8, None, 2)], [(1012, 1900, 55, 3)]))
    assert (summary.kernels, summary.graph_launches, summary.graph_kernels) == (1, 1, 0)
    assert not summary.node_ids
    assert summary.launches_without_kernel == 0
    assert "--cuda-graph-trace=node" in summary.notes[0]


def test_node_level_kernels_belong_to_their_graph_launch(tmp_path: Path) -> None:
    """Three nodes of one replay are three kernels of one launch."""
    kernels = [(1010 + n, 1011 + n, 55, 11 + n, 2) for n in range(3)]
    summary, sink = one(graph_export(tmp_path, [(100, 120, 8, None, 2), *kernels], []))
    assert (summary.kernels, summary.graph_kernels, summary.graph_launches, summary.launches) == (4, 3, 1, 2)
    assert summary.node_ids
    assert [row["graph_node_id"] for row in sink.table("0", "kernels")] == [None, 11, 12, 13]


def test_a_graph_launch_that_shows_nothing_at_all_is_lost(tmp_path: Path) -> None:
    """Without a trace of the block either, the file is missing records."""
    summary, _ = one(graph_export(tmp_path, [(100, 120, 8, None, 2)], []))
    assert summary.launches_without_kernel == 1
    assert not summary.node_ids


def test_ids_of_two_processes_collide_and_devices_are_no_ranks(tmp_path: Path) -> None:
    """Both processes use correlation id 5 and device 0: they stay two, with no rank."""
    rows = [(10, 20, 0, 7, 5, gid(100), 2), (11, 21, 0, 7, 5, gid(200), 2)]
    path = nsys_files.write(
        tmp_path / "two.sqlite",
        {
            "StringIds": STRINGS,
            KERNEL: ("start,end,deviceId,streamId,correlationId,globalPid,shortName", rows),
            RUNTIME: ("start,end,globalTid,correlationId,nameId", [(1, 2, gid(100, 1), 5, 3)]),
        },
    )
    sink = Sink()
    first, second = read_nsys(path, sink)
    assert (first.key, first.launches, first.kernels_without_launch, first.rank) == ("100", 1, 0, None)
    assert (second.key, second.launches, second.kernels_without_launch, second.rank) == ("200", 0, 1, None)


def test_full_names_tell_kernels_of_one_short_name_apart(tmp_path: Path) -> None:
    """Identity may live in the template arguments only."""
    strings = [
        (1, "device_kernel"),
        (2, "void cutlass::device_kernel<ns::A<1>>(P)"),
        (3, "void device_kernel<ns::B>(P)"),
    ]
    path = nsys_files.write(
        tmp_path / "names.sqlite",
        {
            "StringIds": ("id,value", strings),
            KERNEL: ("start,end,correlationId,shortName,demangledName", [(1, 2, 1, 1, 2), (3, 4, 2, 1, 3)]),
        },
    )
    _, sink = one(path)
    rows = sink.symbols("0").rows().to_pylist()
    assert {row["full"] for row in rows} == {strings[1][1], strings[2][1]}
    assert {row["base"] for row in rows} == {"device_kernel"}


def test_a_record_delivered_twice_counts_once(tmp_path: Path) -> None:
    """Rows that differ in the stream or the node are different kernels."""
    rows = [
        (100, 150, 7, 33, None, 2),
        (100, 150, 7, 33, None, 2),
        (200, 210, 7, 44, 1, 2),
        (210, 230, 7, 44, 2, 2),
        (300, 310, 7, 55, None, 2),
        (300, 310, 9, 55, None, 2),
    ]
    columns = "start,end,streamId,correlationId,graphNodeId,shortName"
    path = nsys_files.write(tmp_path / "twice.sqlite", {"StringIds": STRINGS, KERNEL: (columns, rows)})
    summary, _ = one(path)
    assert (summary.kernels, summary.duplicates) == (5, 1)


def test_untimed_and_impossible_times_are_counted_and_stay_out_of_sums(tmp_path: Path) -> None:
    """0/0 ran untimed; an end before its start is invalid; neither makes the origin."""
    rows = [(0, 0, 1, 2), (1000, 1004, 2, 2), (1010, 1007, 3, 2)]
    path = nsys_files.write(
        tmp_path / "times.sqlite", {"StringIds": STRINGS, KERNEL: ("start,end,correlationId,shortName", rows)}
    )
    summary, _ = one(path)
    assert (summary.kernels, summary.untimed, summary.invalid_times, summary.summed_ns) == (3, 1, 1, 4)
    assert summary.first_kernel_ns == 1000


def test_launches_made_while_capturing_are_no_loss(tmp_path: Path) -> None:
    """A launch between BeginCapture and EndCapture of its thread makes no kernel; one after it does."""
    strings = [*STRINGS[1], (4, "cudaStreamBeginCapture_v10000"), (5, "cudaStreamEndCapture_v10000")]
    calls = [(10, 11, 1, 4), (20, 21, 2, 3), (30, 31, 3, 5), (40, 41, 4, 3), (50, 51, 5, 3)]
    path = nsys_files.write(
        tmp_path / "capture.sqlite",
        {
            "StringIds": ("id,value", strings),
            RUNTIME: ("start,end,correlationId,nameId", calls),
            KERNEL: ("start,end,correlationId,shortName", [(45, 46, 4, 2)]),
        },
    )
    summary, _ = one(path)
    assert (summary.launches_while_capturing, summary.launches_without_kernel) == (1, 1)


def test_ranges_nest_by_thread_and_open_ones_stay_open(tmp_path: Path) -> None:
    """Push/pop ranges get depths; a start/end range does not nest; payload and domain are kept."""
    rows = [
        (0, 30, 59, "a", None, gid(9, 1), 0, None),
        (10, 20, 59, None, 2, gid(9, 1), 3, 42),
        (50, None, 59, "c", None, gid(9, 1), 0, None),
        (5, 60, 60, "s", None, gid(9, 1), 0, None),
        (1, None, 75, "alphamoe", None, gid(9, 1), 3, None),
        (2, None, 34, "a mark", None, gid(9, 1), 0, None),
    ]
    path = nsys_files.write(
        tmp_path / "ranges.sqlite",
        {
            "StringIds": STRINGS,
            KERNEL: ("start,end,correlationId,globalPid,shortName", [(1, 2, 1, gid(9), 2)]),
            "NVTX_EVENTS": ("start,end,eventType,text,textId,globalTid,domainId,int64Value", rows),
        },
    )
    _, sink = one(path)
    found = {row["name"]: row for row in sink.table("9", "ranges")}
    assert set(found) == {"a", "moe_gemm", "c", "s"}
    assert [found[name]["depth"] for name in ("a", "moe_gemm", "c")] == [0, 1, 0]
    assert found["c"]["end_ns"] is None
    assert (found["s"]["kind"], found["moe_gemm"]["domain"], found["moe_gemm"]["payload"]) == (
        "start_end",
        "alphamoe",
        42,
    )


def test_a_missing_table_is_named_with_the_tools_version(tmp_path: Path) -> None:
    """One line that says what is missing and who wrote it."""
    meta = ("name,value", [("EXPORT_PRODUCT_VERSION", "2023.4.1"), ("EXPORT_SCHEMA_VERSION", "3.11.0")])
    path = nsys_files.write(tmp_path / "empty.sqlite", {"StringIds": STRINGS, "META_DATA_EXPORT": meta})
    with pytest.raises(EvidenceError, match=rf"table {KERNEL} is missing \(nsys 2023.4.1, schema 3.11.0\)"):
        read_nsys(path, Sink())
    path = nsys_files.write(tmp_path / "column.sqlite", {KERNEL: ("start,correlationId,shortName", [])})
    with pytest.raises(EvidenceError, match="no column end"):
        read_nsys(path, Sink())


def test_an_old_schema_without_graph_nodes_still_imports(tmp_path: Path) -> None:
    """The kernels are read, and graph attribution is said to be unavailable."""
    path = nsys_files.write(
        tmp_path / "old.sqlite", {"StringIds": STRINGS, KERNEL: ("start,end,correlationId,shortName", [(1, 2, 1, 2)])}
    )
    summary, _ = one(path)
    assert summary.kernels == 1
    assert any("graph attribution is not available" in note for note in summary.notes)


def test_what_is_no_whole_database_is_one_line(tmp_path: Path, shared: Path) -> None:
    """Zero bytes, text under the name of a database, a cut file, and a missing one."""
    source = (shared / "traces/nsys/mfu_2gpu_before.sqlite").read_bytes()
    files = {
        "zero": (b"", "empty"),
        "text": (b"hello " * 40, "not a SQLite"),
        "cut": (source[: len(source) // 2], "cut at byte"),
    }
    for name, (content, told) in files.items():
        path = tmp_path / f"{name}.sqlite"
        path.write_bytes(content)
        with pytest.raises(EvidenceError, match=told):
            read_nsys(path, Sink())
    with pytest.raises(EvidenceError, match="cannot be read"):
        read_nsys(tmp_path / "nowhere.sqlite", Sink())


def test_damage_inside_a_database_is_one_line(tmp_path: Path, shared: Path) -> None:
    """Pages that were overwritten are told, whatever SQLite makes of them."""
    content = bytearray((shared / "traces/nsys/mfu_2gpu_before.sqlite").read_bytes())
    content[4096 * 3 : 4096 * 300] = b"\xff" * (4096 * 297)
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match=r"damaged\.sqlite"):
        read_nsys(path, Sink())


def test_a_locked_database_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that is still being written is not read."""
    monkeypatch.setattr("alphamoe_tracers.nsys_database._BUSY_TIMEOUT_S", 0.01)
    path = nsys_files.write(tmp_path / "locked.sqlite", {"StringIds": STRINGS})
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(EvidenceError, match="locked"):
            read_nsys(path, Sink())
    finally:
        holder.close()


def test_values_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    """SQLite stores any type in any column; nothing is coerced."""
    path = nsys_files.write(
        tmp_path / "types.sqlite",
        {"StringIds": STRINGS, KERNEL: ("start,end,correlationId,shortName", [(1, "2", 1, 2)])},
    )
    with pytest.raises(EvidenceError, match="column end holds '2'"):
        read_nsys(path, Sink())


def test_the_export_is_never_written(tmp_path: Path) -> None:
    """Reading leaves its bytes and its folder as they were."""
    path = graph_export(tmp_path, [(100, 120, 8, None, 2)], [])
    before = path.read_bytes()
    path.chmod(0o444)
    one(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["graph.sqlite"]


def test_a_view_in_place_of_a_table_is_not_run(tmp_path: Path) -> None:
    """A view could count for ever: an export has tables only."""
    path = tmp_path / "view.sqlite"
    connection = sqlite3.connect(path)
    counting = (
        "WITH RECURSIVE n(start, end, shortName) AS (SELECT 1, 2, 3 UNION ALL"
        " SELECT start + 1, end, shortName FROM n) SELECT * FROM n"
    )
    connection.execute(f"CREATE VIEW {KERNEL} AS {counting}")
    connection.commit()
    connection.close()
    with pytest.raises(EvidenceError, match="is missing"):
        read_nsys(path, Sink())
