"""Ranks, stages and captures in file names and labels (trace-cases T3, M7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphamoe_tracers.kineto_names import TraceName, parse_label, parse_trace_name


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("trace_node02_5.json", 5),
        ("r1t03_53384.1718.pt.trace.json", None),
        ("megatron_kineto_0.json.gz", 0),
        ("worker1_step_12.1694128201556.pt.trace.json.gz", 1),
        ("batch_size_128.pt.trace.json.gz", None),
        ("eager_trace.json.gz", None),
        ("host_4242.1730000000000.pt.trace.json.gz", None),
        ("trace_gpu_3.json", None),
        ("rank3.json", 3),
        ("rank1_of_rank2.json", None),
        ("merged-1764.trace.json.gz", None),
        ("p-TP-0.trace.json", 0),
        ("1718.22-TP-3-EXTEND.trace.json.gz", 3),
        ("1764-TP-2-EP-2.trace.json.gz", 2),
        ("m-TP-1-DP-2-PP-0-EP-3.trace.json.gz", None),
        ("dp0_pp0_tp0_dcp0_ep0_rank0.1730.pt.trace.json.gz", 0),
        ("run_dp0_pp1_tp1_dcp0_ep1_rank5.1730.pt.trace.json.gz", 5),
    ],
)
def test_a_file_name_gives_a_rank_only_where_it_names_one(name: str, rank: int | None) -> None:
    assert parse_trace_name(Path(name)).rank == rank


def test_data_parallel_names_give_the_tensor_parallel_rank_alone() -> None:
    name = parse_trace_name(Path("m-TP-1-DP-2-PP-0-EP-3.trace.json.gz"))
    assert name == TraceName(rank=None, tp=1, dp=2, pp=0, ep=3)


def test_a_stage_is_read_from_the_name() -> None:
    assert parse_trace_name(Path("x-TP-0-EXTEND.trace.json.gz")).stage == "EXTEND"
    assert parse_trace_name(Path("x-TP-0-decode.trace.json.gz")).stage == "DECODE"
    assert parse_trace_name(Path("x-TP-0.trace.json.gz")).stage is None


@pytest.mark.parametrize(
    ("path", "capture"),
    [
        ("capture_traces/bs_8_rank0.json", True),
        ("out/bs_8_rank0.json.gz", True),
        ("graph_capture_profile/x-TP-0.json.gz", True),
        ("cuda_graph_capture-decode-TP-0.json.gz", True),
        ("captured_in_july/x-TP-0.json.gz", False),
        ("out/abs_8_rank0.json", False),
        ("capture_traces/out/x-TP-0.json.gz", False),
    ],
)
def test_capture_traces_are_known_by_name_or_nearest_folder(path: str, capture: bool) -> None:
    assert parse_trace_name(Path(path)).capture is capture


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("[TP00] 4242", ("TP00", 0)),
        ("[TP12-EP03] 0", ("TP12-EP03", 12)),
        ("[TP01-DP01] 0", ("TP01-DP01", None)),
        ("[Unknown] 0", None),
        ("python", None),
        ("TP00", None),
    ],
)
def test_a_label_of_a_merged_trace_gives_its_rank(text: str, label: tuple[str, int | None] | None) -> None:
    assert parse_label(text) == label
