"""Small traces with one property each (trace-cases T7, T8, A2 to A4, A7, A8, A15, A17 and their neighbours)."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from trace_sinks import KeptRows, kernel, launch, trace, write

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.kineto import read_kineto
from alphamoe_tracers.trace_files import TraceSummary


@pytest.fixture
def sink() -> KeptRows:
    return KeptRows()


def read(tmp_path: Path, sink: KeptRows, text: str | bytes, name: str = "trace.json") -> TraceSummary:
    (summary,) = read_kineto(write(tmp_path / name, text), sink)
    return summary


def test_a_kernel_keeps_what_the_trace_says_of_it(tmp_path: Path, sink: KeptRows) -> None:
    event = kernel(
        "moe",
        10.25,
        2.5,
        dev=3,
        stream=9,
        corr=41,
        context=1,
        grid=[8, 4, 2],
        block=[128, 1, 1],
        **{"registers per thread": 40, "shared memory": 2048, "graph node id": 11, "graph id": 5},
    )
    read(tmp_path, sink, trace([event, launch("cudaLaunchKernel", 9, 1, 41)]))
    (row,) = sink.rows("kernels")
    assert row == {
        "process": 900,
        "start_ns": 10_250,
        "end_ns": 12_750,
        "device": 3,
        "context": 1,
        "stream": 9,
        "correlation_id": 41,
        "graph_id": 5,
        "graph_node_id": 11,
        "symbol_id": 0,
        "grid_x": 8,
        "grid_y": 4,
        "grid_z": 2,
        "block_x": 128,
        "block_y": 1,
        "block_z": 1,
        "cluster_x": 0,
        "cluster_y": 0,
        "cluster_z": 0,
        "static_smem_bytes": 0,
        "dynamic_smem_bytes": 2048,
        "registers": 40,
        "name": "moe",
    }


def test_an_exact_repetition_counts_once_and_near_ones_count(tmp_path: Path, sink: KeptRows) -> None:
    twice = kernel("a", 0.1, 0.05, corr=33)
    graph = [kernel("a", 0.2 + 0.01 * node, 0.01, corr=44, **{"graph node id": node}) for node in (1, 2, 3)]
    streams = [kernel("a", 0.3, 0.01, stream=7, corr=55), kernel("a", 0.3, 0.01, stream=9, corr=55)]
    summary = read(tmp_path, sink, trace([twice, twice, *graph, *streams]))
    assert (summary.kernels, summary.duplicates) == (6, 1)
    assert len(sink.rows("kernels")) == 6


@pytest.mark.parametrize("change", [{"ts": 2.0}, {"dur": 2.0}, {"stream": 8}, {"corr": 2}, {"dev": 1}, {"name": "b"}])
def test_kernels_that_differ_in_anything_are_two(tmp_path: Path, sink: KeptRows, change: dict[str, Any]) -> None:
    first: dict[str, Any] = {"name": "a", "ts": 1.0, "dur": 1.0, "corr": 1}
    summary = read(tmp_path, sink, trace([kernel(**first), kernel(**first | change)]))
    assert (summary.kernels, summary.duplicates) == (2, 0)


def test_untimed_kernels_of_a_replay_are_no_duplicates_when_nothing_tells_them_apart(
    tmp_path: Path, sink: KeptRows
) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", 0, 0)] * 3))
    assert (summary.kernels, summary.untimed, summary.duplicates) == (3, 3, 0)


def test_untimed_and_impossible_times_stay_out_of_every_sum(tmp_path: Path, sink: KeptRows) -> None:
    events = [
        kernel("a", 0, 0, corr=1),
        kernel("a", 1000.5, 4, corr=2),
        kernel("b", 1010, -3, corr=3),
        launch("cudaLaunchKernel", 1020, 2, 4),
        kernel("b", 1019.2, 5, corr=4),
    ]
    summary = read(tmp_path, sink, trace(events))
    assert (summary.kernels, summary.untimed, summary.invalid_times) == (4, 1, 1)
    assert (summary.summed_ns, summary.first_kernel_ns) == (9_000, 1_000_500)
    times = [(row["name"], row["start_ns"], row["end_ns"]) for row in sink.rows("kernels")]
    assert times == [
        ("a", 0, 0),
        ("a", 1_000_500, 1_004_500),
        ("b", 1_010_000, 1_007_000),
        ("b", 1_019_200, 1_024_200),
    ]


def test_a_kernel_of_no_length_at_a_real_time_is_timed(tmp_path: Path, sink: KeptRows) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", 5, 0, corr=1)]))
    assert (summary.untimed, summary.invalid_times, summary.overlap_share) == (0, 0, None)


@pytest.mark.parametrize("value", [None, "soon", [1], 1e30, 5e15])
def test_a_time_that_cannot_be_read_leaves_the_kernel_untimed(tmp_path: Path, sink: KeptRows, value: Any) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", value, 4, corr=1), kernel("a", 2, 1, corr=2)]))
    assert (summary.kernels, summary.untimed, summary.first_kernel_ns) == (2, 1, 2_000)
    assert "1 records without a readable time" in summary.notes


def test_a_base_moves_times_but_not_untimed_ones(tmp_path: Path, sink: KeptRows) -> None:
    base = 1_790_857_026_000_000_000
    text = trace([kernel("a", 0, 0, corr=1), kernel("a", 1.5, 1, corr=2)], baseTimeNanoseconds=base)
    summary = read(tmp_path, sink, text)
    assert (summary.clock, summary.base_ns) == ("unix", base)
    assert [row["start_ns"] for row in sink.rows("kernels")] == [0, base + 1_500]


@pytest.mark.parametrize("base", ["1790857026000000000", 1.79e18, -1, True, 1 << 63])
def test_a_base_that_is_no_time_is_not_added(tmp_path: Path, sink: KeptRows, base: Any) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", 1, 1, corr=1)], baseTimeNanoseconds=base))
    assert (summary.base_ns, summary.first_kernel_ns) == (0, 1_000)
    assert any("baseTimeNanoseconds" in note for note in summary.notes)


@pytest.mark.parametrize(("ts", "clock"), [(1.7e15, "unix"), (8.2e9, "boot"), (12, "unknown"), (0, "unknown")])
def test_the_clock_is_told_from_the_size_of_the_times(tmp_path: Path, sink: KeptRows, ts: float, clock: str) -> None:
    assert read(tmp_path, sink, trace([kernel("a", ts, 0, corr=1)])).clock == clock


def test_display_units_change_nothing(tmp_path: Path) -> None:
    found = []
    for unit in ({"displayTimeUnit": "ms"}, {"displayTimeUnit": "ns"}, {}):
        sink = KeptRows()
        read(tmp_path, sink, trace([kernel("a", 1.5, 2, corr=1), kernel("b", 4, 1, corr=2)], **unit))
        found.append(sink.everything())
    assert found[0] == found[1] == found[2]
    assert found[0]["kernels"][0]["start_ns"] == 1_500


def test_spellings_of_one_stream_are_one_stream(tmp_path: Path, sink: KeptRows) -> None:
    events = [kernel("a", 10 * at, 1, corr=at) for at in (1, 2, 3, 4)]
    for event, tid in zip(events, (7, "7", "stream 7", "7"), strict=True):
        event["tid"] = tid
        del event["args"]["stream"]
    events[3]["args"]["stream"] = "7"
    summary = read(tmp_path, sink, trace(events))
    assert summary.kernels == 4
    assert {row["stream"] for row in sink.rows("kernels")} == {7}


def test_streams_without_a_number_stay_distinct(tmp_path: Path, sink: KeptRows) -> None:
    events = [kernel("a", at, 1, stream=name, corr=at) for at, name in enumerate(("default", -1, None, 7, "x"), 1)]
    read(tmp_path, sink, trace(events))
    assert len({row["stream"] for row in sink.rows("kernels")}) == 5


def test_overlap_within_a_stream_is_measured_and_between_streams_is_not(tmp_path: Path, sink: KeptRows) -> None:
    events = [kernel("a", 0.001, 900, corr=1), kernel("b", 10, 5, corr=2), kernel("c", 20, 5, corr=3)]
    summary = read(tmp_path, sink, trace(events))
    assert (summary.overlapping, summary.summed_ns, summary.busy_ns) == (2, 910_000, 900_000)
    assert summary.overlap_share == pytest.approx(10 / 910)
    events[1]["args"]["stream"], events[2]["args"]["device"] = 8, 1
    apart = read(tmp_path, KeptRows(), trace(events))
    assert (apart.overlapping, apart.overlap_share) == (0, 0.0)


def test_overlap_is_the_same_in_any_order_and_over_block_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    events = [
        kernel("a", rng.randrange(1, 500), rng.randrange(0, 9), dev=rng.randrange(2), stream=rng.randrange(3), corr=at)
        for at in range(1, 300)
    ]
    overlapping = busy = 0
    for lane in itertools.product(range(2), range(3)):
        members = [event for event in events if (event["pid"], event["tid"]) == lane]
        latest, covered = 0, set[int]()
        for event in sorted(members, key=lambda event: event["ts"]):
            overlapping += event["ts"] < latest
            latest = max(latest, event["ts"] + event["dur"])
            covered.update(range(event["ts"], event["ts"] + event["dur"]))
        busy += 1000 * len(covered)
    for block_rows in (1 << 17, 5):
        monkeypatch.setattr("alphamoe_tracers.kineto_rows._BLOCK_ROWS", block_rows)
        summary = read(tmp_path, KeptRows(), trace(events))
        assert (summary.overlapping, summary.busy_ns) == (overlapping, busy)


def test_kernels_that_touch_do_not_overlap(tmp_path: Path, sink: KeptRows) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", 1, 2, corr=1), kernel("b", 3, 1, corr=2)]))
    assert (summary.overlapping, summary.busy_ns) == (0, 3_000)


def test_launches_are_counted_against_kernels_both_ways(tmp_path: Path, sink: KeptRows) -> None:
    events = [
        kernel("early", 1, 1, corr=5),
        kernel("lost", 2, 1, corr=25),
        kernel("no id", 3, 1, corr=0),
        kernel("good", 31, 1, corr=20),
        launch("cudaLaunchKernel", 30, 1, 20),
        launch("cuLaunchKernelEx", 30.2, 0.5, 20),
        launch("cudaLaunchKernel", 40, 1, 21),
        launch("cudaDeviceSynchronize", 50, 1, 22),
        launch("cudaLaunchHostFunc", 50, 1, 23),
    ]
    summary = read(tmp_path, sink, trace(events))
    assert (summary.launches, summary.launches_without_kernel) == (2, 1)
    assert (summary.kernels_without_launch, summary.submitted_before_window) == (3, 1)
    assert [row["correlation_id"] for row in sink.rows("launches")] == [20, 20, 21]
    assert [row["correlation_id"] for row in sink.rows("kernels")] == [5, 25, None, 20]


def test_a_graph_launch_owns_all_kernels_of_its_id(tmp_path: Path, sink: KeptRows) -> None:
    replay = launch("cudaGraphLaunch", 5, 1, 9)
    events = [replay, kernel("a", 7, 1, corr=9), kernel("b", 8, 1, corr=9), launch("cudaGraphLaunch", 20, 1, 10)]
    summary = read(tmp_path, sink, trace(events))
    assert (summary.graph_launches, summary.graph_kernels, summary.launches_without_kernel) == (2, 2, 1)
    assert not summary.node_ids
    for event, node in zip(events[1:3], (11, 12), strict=True):
        event["args"]["graph node id"] = node
    assert read(tmp_path, KeptRows(), trace(events)).node_ids


def test_launches_made_while_a_stream_was_capturing_make_no_kernel(tmp_path: Path, sink: KeptRows) -> None:
    events = [
        launch("cudaStreamBeginCapture", 1, 1, 1),
        launch("cudaLaunchKernel", 3, 1, 2),
        launch("cudaLaunchKernel", 4, 1, 3, tid=901),
        launch("cudaStreamEndCapture", 5, 1, 4),
        launch("cudaLaunchKernel", 7, 1, 5),
    ]
    summary = read(tmp_path, sink, trace(events))
    assert (summary.launches, summary.launches_while_capturing, summary.launches_without_kernel) == (3, 1, 2)


def test_a_call_of_any_name_that_made_a_kernel_is_a_launch(tmp_path: Path, sink: KeptRows) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", 2, 1, corr=4), launch("INVALID", 1, 1, 4)]))
    assert (summary.launches, summary.kernels_without_launch) == (1, 0)


def test_traces_of_2021_and_of_rocm_are_read(tmp_path: Path, sink: KeptRows) -> None:
    old = kernel("a", 2, 1, corr=1) | {"cat": "Kernel", "pid": "0", "tid": "stream 7"}
    calls = [launch("cudaLaunchKernel", 1, 1, 1) | {"cat": "Runtime", "pid": "900"}, launch("hipLaunchKernel", 3, 1, 2)]
    copies = [
        kernel("Memcpy HtoD (Pinned -> Device)", 5, 1, corr=3, bytes=64) | {"cat": "Memcpy"},
        kernel("CopyDeviceToHost", 6, 1, corr=4, bytes=32) | {"cat": "gpu_memcpy"},
        kernel("Memset (Device)", 7, 1, corr=5, bytes=16) | {"cat": "Memset"},
    ]
    summary = read(tmp_path, sink, trace([old, *calls, kernel("b", 4, 1, corr=2), *copies]))
    assert (summary.kernels, summary.launches, summary.launches_without_kernel, summary.transfers) == (2, 2, 0, 3)
    kinds = [(row["kind"], row["bytes"]) for row in sink.rows("transfers")]
    assert kinds == [("memcpy HtoD", 64), ("memcpy DtoH", 32), ("memset", 16)]
    assert {row["process"] for row in sink.rows("kernels")} == {900}


def test_annotations_of_the_device_are_no_kernels(tmp_path: Path, sink: KeptRows) -> None:
    summary = read(tmp_path, sink, trace([kernel("step[DECODE bs=8]", 1, 9) | {"cat": "gpu_user_annotation"}]))
    assert (summary.kernels, summary.ranges, summary.events) == (0, 0, {"gpu_user_annotation": 1})


def test_annotations_become_nested_ranges(tmp_path: Path, sink: KeptRows) -> None:
    outer = launch("step[DECODE bs=8]", 0.5, 10, 0) | {"cat": "user_annotation"}
    inner = launch("moe", 2, 1, 0) | {"cat": "user_annotation"}
    summary = read(tmp_path, sink, trace([inner, outer]))
    assert summary.ranges == 2
    found = {row["name"]: (row["depth"], row["domain"], row["kind"], row["thread"]) for row in sink.rows("ranges")}
    assert found == {"step[DECODE bs=8]": (0, "kineto", "push_pop", 900), "moe": (1, "kineto", "push_pop", 900)}


def test_begin_and_end_events_pair_by_stack_and_imbalance_is_told(tmp_path: Path, sink: KeptRows) -> None:
    marks = [("B", "a", 0.001), ("B", "b", 10), ("E", "", 20), ("E", "", 30), ("E", "", 40), ("B", "c", 50)]
    events = [{"ph": ph, "name": name, "pid": 900, "tid": 1, "ts": ts} for ph, name, ts in marks]
    summary = read(tmp_path, sink, trace(events))
    found = {row["name"]: (row["start_ns"], row["end_ns"]) for row in sink.rows("ranges")}
    assert found == {"a": (1, 30_000), "b": (10_000, 20_000), "c": (50_000, None)}
    assert "thread 1: 1 range ends without a start" in summary.notes
    assert "thread 1: 1 ranges never closed" in summary.notes


@pytest.mark.parametrize("text", ["[]", "{}", '{"traceEvents":null}', '{"traceEvents":[]}', " \n[ ] "])
def test_a_trace_of_nothing_is_a_summary_of_nothing(tmp_path: Path, sink: KeptRows, text: str) -> None:
    summary = read(tmp_path, sink, text)
    assert (summary.kernels, summary.launches, summary.events, sink.batches) == (0, 0, {}, {})
    assert summary.whole is ("[" in text)


def test_a_bare_list_is_read_and_names_no_rank(tmp_path: Path, sink: KeptRows) -> None:
    summary = read(tmp_path, sink, json.dumps([kernel("k", 1, 2, corr=1)]))
    assert (summary.kernels, summary.rank, summary.world_size, summary.whole) == (1, None, None, True)


def test_a_trace_of_metadata_alone_and_one_of_copies_alone_hold_no_kernel(tmp_path: Path, sink: KeptRows) -> None:
    meta = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}
    summary = read(tmp_path, sink, trace([meta], rank=1))
    assert (summary.kernels, summary.events, summary.rank) == (0, {"ph=M": 1}, 1)
    copies = read(tmp_path, sink, trace([kernel("Memcpy DtoD", 1, 1, corr=1) | {"cat": "gpu_memcpy"}]))
    assert (copies.kernels, copies.transfers, copies.first_kernel_ns) == (0, 1, None)


def test_a_name_that_is_not_utf8_is_replaced_and_told(tmp_path: Path, sink: KeptRows) -> None:
    text = trace([kernel("moe#gemm", 1, 1, corr=1), kernel("good", 3, 1, corr=2)]).encode().replace(b"#", b"\x9f")
    summary = read(tmp_path, sink, text)
    assert [row["name"] for row in sink.rows("kernels")] == ["moe\ufffdgemm", "good"]
    assert any("1 kernel names hold bytes that are not UTF-8" in note for note in summary.notes)


def test_a_category_that_is_not_utf8_hides_no_other_record(tmp_path: Path, sink: KeptRows) -> None:
    odd = kernel("x", 1, 1) | {"cat": "od#d"}
    summary = read(tmp_path, sink, trace([odd, kernel("good", 3, 1, corr=2)]).encode().replace(b"#", b"\x9f"))
    assert (summary.kernels, summary.events) == (1, {"od\ufffdd": 1, "kernel": 1})


def test_escapes_in_names_are_decoded_as_json_says(tmp_path: Path, sink: KeptRows) -> None:
    read(tmp_path, sink, trace([kernel('a\\b "q" \u00e9 </script>', 1, 1, corr=1)]))
    assert sink.rows("kernels")[0]["name"] == 'a\\b "q" \u00e9 </script>'


def test_names_cut_by_a_tool_are_counted_once_each(tmp_path: Path, sink: KeptRows) -> None:
    cut = [kernel(name, at, 0.5, corr=at) for at, name in enumerate(("k<a…", "k<a…", "k<b...", "whole"), 1)]
    assert read(tmp_path, sink, trace(cut)).truncated_names == 2


@pytest.mark.parametrize("item", [None, 1, "x", [], [{"ph": "X"}]])
def test_what_is_no_event_is_counted_and_the_others_are_read(tmp_path: Path, sink: KeptRows, item: Any) -> None:
    summary = read(tmp_path, sink, trace([kernel("a", 1, 1, corr=1), item, kernel("a", 3, 1, corr=2)]))
    assert (summary.kernels, summary.notes) == (2, ("1 records that are no objects",))


@pytest.mark.parametrize(
    "change", [{"args": []}, {"args": "x"}, {"args": None}, {"pid": {}}, {"tid": None}, {"cat": 5}]
)
def test_fields_of_an_odd_type_never_stop_the_reading(tmp_path: Path, sink: KeptRows, change: dict[str, Any]) -> None:
    summary = read(tmp_path, sink, trace([kernel("odd", 1, 1, corr=1) | change, kernel("a", 3, 1, corr=2)]))
    assert summary.kernels == (1 if "cat" in change else 2)


@pytest.mark.parametrize("value", [-1, 2**64, "7", 1.5, "x", None, [1], True])
def test_odd_ids_and_shapes_are_unknown_and_never_wrap(tmp_path: Path, sink: KeptRows, value: Any) -> None:
    odd = kernel("a", 1, 1, corr=value, grid=[value, 1, 1], block=value, context=value)
    odd["args"]["graph node id"] = value
    read(tmp_path, sink, trace([odd]))
    (row,) = sink.rows("kernels")
    assert row["correlation_id"] in (None, 7, 1)
    assert row["block_x"] == (1 if value == [1] else 0)
    assert row["context"] in (-1, 7)


def test_gzip_is_known_by_its_bytes_and_members_and_padding_are_joined(tmp_path: Path, sink: KeptRows) -> None:
    text = trace([kernel("a", 1, 1, corr=1), kernel("b", 3, 1, corr=2)]).encode()
    data = gzip.compress(text[:80]) + b"\0" * 3 + gzip.compress(text[80:]) + b"\0" * 700
    summary = read(tmp_path, sink, data, "trace.json")
    assert (summary.kernels, summary.size_bytes) == (2, len(data))
    plain = read(tmp_path, KeptRows(), text, "trace.json.gz")
    assert plain.kernels == 2
    assert plain.sha256 != summary.sha256


@pytest.mark.parametrize("cut", [5, 40, -1, -9])
def test_a_cut_gzip_file_is_told_with_its_byte_and_gives_nothing(tmp_path: Path, sink: KeptRows, cut: int) -> None:
    path = write(tmp_path / "t.gz", gzip.compress(trace([kernel("a", 1, 1, corr=1)]).encode())[:cut])
    with pytest.raises(EvidenceError, match=r"t\.gz: the gzip data is cut at byte \d+") as told:
        read_kineto(path, sink)
    assert told.value.hint
    assert sink.batches == {}


def test_damage_inside_gzip_and_bytes_behind_it_are_told(tmp_path: Path, sink: KeptRows) -> None:
    good = gzip.compress(trace([kernel("a", 1, 1, corr=1)]).encode())
    with pytest.raises(EvidenceError, match="damaged gzip data near byte"):
        read_kineto(write(tmp_path / "a.gz", good[:30] + bytes([good[30] ^ 255]) + good[31:]), sink)
    with pytest.raises(EvidenceError, match=f"at byte {len(good)} of the file, something else follows"):
        read_kineto(write(tmp_path / "b.gz", good + b"more"), sink)
    assert sink.batches == {}


def test_a_file_that_is_not_there_is_told(tmp_path: Path, sink: KeptRows) -> None:
    with pytest.raises(EvidenceError, match="cannot be read"):
        read_kineto(tmp_path / "none.json", sink)
    with pytest.raises(EvidenceError, match="cannot be read"):
        read_kineto(tmp_path, sink)


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path, sink: KeptRows) -> None:
    path = write(tmp_path / "t.json", trace([kernel("a", 1, 1, corr=1)]))
    seen: list[tuple[int, int]] = []
    read_kineto(path, sink, progress=lambda done, size: seen.append((done, size)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
