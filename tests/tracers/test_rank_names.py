"""Ranks from file names: only where the writer is known to put one there."""

from __future__ import annotations

import pytest

from alphamoe_tracers.rank_names import rank_of_trace_name


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("p-TP-0.trace.json", 0),
        ("p-TP-1.trace.json.gz", 1),
        ("1732.5-TP-3.trace.json.gz", 3),
        ("run-a-1732.5-TP-3-EP-3.trace.json.gz", 3),
        ("dp0_pp0_tp2_dcp0_ep2_rank2.1732000000000000000.pt.trace.json.gz", 2),
        ("nightly_dp0_pp0_tp0_dcp0_ep0_rank0.17.pt.trace.json.gz", 0),
        ("megatron_kineto_7.json.gz", 7),
        ("trace_node02_5.json", 5),
        ("trace_rank3.json", 3),
        ("rank-12.sqlite", 12),
    ],
)
def test_names_that_state_a_rank(name: str, rank: int) -> None:
    """SGLang's TP, vLLM's rank and a last number of its own are ranks; a node's number before it is not."""
    assert rank_of_trace_name(name).rank == rank


@pytest.mark.parametrize(
    "name",
    [
        "r1t03_53384.1718.pt.trace.json",
        "worker0_step_12.1694128201545.pt.trace.json.gz",
        "batch_size_128.pt.trace.json.gz",
        "batch_size_128.json",
        "kineto-cuda.json.gz",
        "report1.sqlite",
        "qwen3.json",
        "gpu_0.json",
        "device-1.json",
        "local_rank1.json",
        "rank0_rank1.json",
        "1732000000.trace.json",
    ],
)
def test_names_that_state_no_rank(name: str) -> None:
    """A process id, a time, a device, a batch size, a local rank or a model's name is never a rank."""
    assert rank_of_trace_name(name).rank is None


def test_a_tp_index_among_several_groups_is_no_global_rank() -> None:
    """With DP and PP parts the name gives TP 1, and says why the rank stays unknown."""
    named = rank_of_trace_name("m-TP-1-DP-2-PP-0-EP-3.trace.json.gz")
    assert (named.tp, named.rank) == (1, None)
    assert named.why is not None
    assert "DP and PP" in named.why


def test_stage_profile_and_merged_files_are_told_apart() -> None:
    """A profile split by stage gives two files of one rank; a merged file gives none."""
    named = rank_of_trace_name("17.5-TP-1-DECODE.trace.json.gz")
    assert (named.rank, named.stage, named.profile) == (1, "DECODE", "17.5")
    assert rank_of_trace_name("merged-17.5.trace.json.gz").merged


@pytest.mark.parametrize(
    "path",
    [
        "capture_traces/bs_8_rank0.json",
        "bs_8_rank0.json",
        "graph_capture_profile/cuda_graph_capture-decode-TP-1.json.gz",
        "out/graph_capture_profile/x-TP-0.json",
    ],
)
def test_capture_traces_are_recognised_by_name_or_folder(path: str) -> None:
    """They hold shapes, never executions."""
    assert rank_of_trace_name(path).capture
