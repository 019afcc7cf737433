"""Real traces that nobody here wrote, against values that were counted independently of this project."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from trace_sinks import KeptRows

from alphamoe_tracers.kineto import read_kineto
from alphamoe_tracers.symbols import base_name
from alphamoe_tracers.trace_files import TraceSummary


def read(path: Path) -> tuple[TraceSummary, KeptRows]:
    sink = KeptRows()
    (summary,) = read_kineto(path, sink)
    return summary, sink


def names(sink: KeptRows) -> Counter[str]:
    return Counter(row["name"] for row in sink.rows("kernels"))


def test_every_megatron_rank_has_the_same_690_kernels_under_40_names(shared: Path) -> None:
    folder = shared / "traces" / "megatron-tp8-a100"
    found = [read(folder / f"megatron_kineto_{rank}.json.gz") for rank in range(8)]
    assert [summary.rank for summary, _ in found] == list(range(8))
    assert {summary.world_size for summary, _ in found} == {8}
    assert [summary.kernels for summary, _ in found] == [690] * 8
    counts = [names(sink) for _, sink in found]
    assert len(counts[0]) == 40
    assert all(count == counts[0] for count in counts)
    assert all(summary.launches_without_kernel == 0 and summary.whole for summary, _ in found)
    assert {summary.clock for summary, _ in found} == {"unix"}


def test_dlrm_ranks_differ_in_three_kernels_and_two_ranks_have_64_kernels_without_a_launch(shared: Path) -> None:
    paths = sorted((shared / "traces" / "dlrm-8xv100").glob("*.gz"))
    found = [read(path) for path in paths]
    assert [summary.kernels for summary, _ in found] == [245, 310, 246, 315, 251, 245, 246, 246]
    counts = [names(sink) for _, sink in found]
    assert len(set().union(*counts)) == 76
    assert len(set.intersection(*map(set, counts))) == 73
    sorting = {f"DeviceRadixSort{part}Kernel" for part in ("Onesweep", "Histogram", "ExclusiveSum")}
    having = [rank for rank, count in enumerate(counts) if sorting <= {base_name(name) for name in count}]
    assert having == [3, 4]
    assert [summary.kernels_without_launch for summary, _ in found] == [0, 64, 0, 64, 0, 0, 0, 0]
    assert [summary.submitted_before_window for summary, _ in found] == [0, 64, 0, 64, 0, 0, 0, 0]
    assert all(summary.launches_without_kernel == 0 for summary, _ in found)


def test_the_batch_sweep_has_90_names_and_its_files_name_no_rank(shared: Path) -> None:
    paths = sorted((shared / "traces" / "batch-sweep-a100").glob("*.gz"))
    found = [read(path) for path in paths]
    assert len(paths) == 9
    assert {summary.rank for summary, _ in found} == {None}
    kernels = [summary.kernels for summary, _ in found]
    assert kernels == [549, 549, 558, 549, 548, 558, 549, 548, 558]
    counts = [names(sink) for _, sink in found]
    every = set().union(*counts)
    assert (len(every), len(every - set.intersection(*map(set, counts)))) == (90, 37)


def test_the_b200_trace_shows_its_step_and_its_overlaps(shared: Path) -> None:
    summary, sink = read(shared / "traces" / "vllm-b200" / "eager_trace.json.gz")
    assert (summary.kernels, summary.overlapping, summary.rank, summary.world_size) == (768, 74, 0, 8)
    assert summary.overlap_share is not None
    assert 0 < summary.overlap_share < 0.01
    assert "execute_context_1(888_788544)_generation_0(0)" in {row["name"] for row in sink.rows("ranges")}
    assert summary.launches_without_kernel == 0
    assert summary.versions["cupti_version"] == "28"


def test_half_of_the_h200_kernels_come_from_1200_replays_and_times_are_exact(shared: Path) -> None:
    path = shared / "traces" / "h200" / "kineto-cuda.json.gz"
    summary, sink = read(path)
    assert (summary.kernels, summary.graph_kernels, summary.graph_launches) == (120_000, 60_000, 1_200)
    assert (summary.launches, summary.launches_without_kernel, summary.node_ids) == (61_200, 0, False)
    trace = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base = trace["baseTimeNanoseconds"]
    wanted = [
        (base + int(event["ts"] * 1000), base + int((event["ts"] + event["dur"]) * 1000))
        for event in trace["traceEvents"]
        if event.get("cat") == "kernel"
    ]
    assert [(row["start_ns"], row["end_ns"]) for row in sink.rows("kernels")] == wanted


@pytest.mark.slow
def test_two_processes_read_the_same_as_one(shared: Path) -> None:
    path = shared / "traces" / "h200" / "kineto-cuda.json.gz"
    one, two = KeptRows(), KeptRows()
    assert read_kineto(path, one) == read_kineto(path, two, workers=2)
    assert one.batches.keys() == two.batches.keys()
    assert all(batches == two.batches[key] for key, batches in one.batches.items())
