"""What imported kernels are attributed to: launch, range path, step annotation, execution, M and bucket."""

from __future__ import annotations

from pathlib import Path

import foreign
import pandas as pd

from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.evidence import gather
from alphamoe_profiler.import_attribution import exercised_executions
from alphamoe_profiler.import_summary import imported_buckets, symbols_by_bucket
from alphamoe_profiler.m_buckets import witness_mask
from alphamoe_profiler.windows import prove_window


def frame_of(bundle: RunBundle, rank: int = 0) -> pd.DataFrame:
    own = attribute(bundle, rank)
    own.check()
    return own.frame


def one(tmp_path: Path, events: list[foreign.Event], *words: str | int) -> RunBundle:
    return foreign.imported(tmp_path / "run", foreign.trace(tmp_path / "in/rank0.json", events), "--ranks", 1, *words)


def test_a_launch_of_another_thread_is_not_given_to_the_range(tmp_path: Path) -> None:
    """One kernel is attributed, the other counted with its reason."""
    events = [foreign.annotation("work", 1, 100, tid=1)]
    events += [foreign.launch(10, 5, tid=1), foreign.launch(20, 6, tid=2)]
    events += [foreign.kernel("a", 30, 2, 5), foreign.kernel("b", 40, 2, 6)]
    own = attribute(one(tmp_path, events), 0)
    assert own.attributed == 1
    assert dict(own.reasons) == {"launch outside any range": 1}
    assert own.frame.loc[own.frame["reason"].isna(), "base"].tolist() == ["a"]


def test_the_whole_path_tells_two_phases_apart(tmp_path: Path) -> None:
    """moe inside prefill and moe inside decode stay two."""
    events = []
    for at, phase in ((100, "prefill"), (200, "decode")):
        events += [foreign.annotation(phase, at, 50), foreign.annotation("moe", at + 5, 20)]
        events += [foreign.launch(at + 10, at), foreign.kernel("gemm", at + 12, 2, at)]
    paths = frame_of(one(tmp_path, events))["path"].tolist()
    assert paths == ["prefill>moe", "decode>moe"]


def test_annotations_give_mode_tokens_and_m(tmp_path: Path) -> None:
    """Eager: M is the real tokens. A replay's M is the padded size, null where the annotation does not pad."""
    events = [
        foreign.annotation("step[EXTEND bs=1 toks=888]", 100, 50),
        foreign.launch(110, 1),
        foreign.kernel("gemm", 112, 2, 1),
        foreign.annotation("decode[bs=100/112 tok=100 d=100]", 200, 50),
        foreign.launch(210, 2, "cudaGraphLaunch"),
        foreign.kernel("gemm", 212, 2, 2),
        foreign.kernel("gemm", 215, 2, 2),
        foreign.annotation("step[DECODE bs=64]", 300, 50),
        foreign.launch(310, 3, "cudaGraphLaunch"),
        foreign.kernel("gemm", 312, 2, 3),
    ]
    bundle = one(tmp_path, events)
    frame = frame_of(bundle)
    assert frame["execution"].tolist() == ["eager", *["decode_graph_replay"] * 3]
    assert frame["forward_mode"].tolist() == ["EXTEND", *["DECODE"] * 3]
    assert frame["real_tokens"].tolist() == [888, 100, 100, 64]
    assert frame["dispatch_M"].fillna(-1).tolist() == [888, 112, 112, -1]
    assert frame["step"].tolist() == [0, 1, 1, 2]
    assert frame["reason"].isna().all()
    rows = {row.execution: row for row in imported_buckets(gather(bundle)) if row.rank is None}
    assert rows["eager"].kernel_M.values == (888,)
    assert (rows["decode_graph_replay"].real_tokens.values, rows["decode_graph_replay"].kernel_M.values) == (
        (64, 100),
        (112,),
    )


def test_kernels_of_a_capture_are_no_witnesses(tmp_path: Path) -> None:
    """A capture's annotation makes its kernels capture traffic, whatever the user stated of the rest."""
    events = [
        foreign.annotation("capture_8_decode", 100, 50),
        foreign.launch(110, 1),
        foreign.kernel("gemm", 112, 2, 1),
    ]
    events += [
        foreign.annotation("step[DECODE bs=8]", 200, 50),
        foreign.launch(210, 2),
        foreign.kernel("gemm", 212, 2, 2),
    ]
    frame = frame_of(one(tmp_path, events))
    assert frame["purpose"].tolist() == ["capture", "witness"]
    assert witness_mask(frame).tolist() == [False, True]


def test_the_stated_purpose_and_window_bound_what_counts(tmp_path: Path) -> None:
    """Performance traffic, and kernels before the request window, are no witnesses."""
    events = [
        foreign.launch(3, 1),
        foreign.kernel("moe_gemm", 5, 3, 1),
        foreign.launch(150, 2),
        foreign.kernel("x", 155, 3, 2),
    ]
    frame = frame_of(one(tmp_path, events, "--window", "100000:200000"))
    assert dict(zip(frame["base"], witness_mask(frame), strict=True)) == {"moe_gemm": False, "x": True}
    assert frame["reason"].astype(object).tolist()[0] == "before window"
    frame = frame_of(one(tmp_path, events, "--purpose", "performance", "--force"))
    assert not witness_mask(frame).any()


def graph_export(path: Path, nodes: int) -> Path:
    strings = [(1, "cudaGraphLaunch_v10000"), (2, "moe_gemm"), (3, "cudaLaunchKernel_v7000")]
    kernels = [(100, 110, 8, None, 2)] + [(1012 + n, 1013 + n, 55, 11 + n, 2) for n in range(nodes)]
    tables: dict[str, tuple[str, list[tuple[object, ...]]]] = {
        "StringIds": ("id,value", [*strings]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("start,end,correlationId,nameId", [(90, 95, 8, 3), (1000, 1010, 55, 1)]),
        "CUPTI_ACTIVITY_KIND_KERNEL": ("start,end,correlationId,graphNodeId,shortName", [*kernels]),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("start,end,correlationId,graphId", [] if nodes else [(1012, 1900, 55, 3)]),
    }
    return foreign.sqlite(path, tables)


def test_a_graph_traced_as_one_block_is_exercised_but_proves_no_absence(tmp_path: Path) -> None:
    """Eager kernels do not stand for a replay's; the way out is named; eager windows stay proven."""
    bundle = foreign.imported(tmp_path / "run", graph_export(tmp_path / "g.sqlite", 0), "--ranks", 1)
    frame = frame_of(bundle)
    assert frame["execution"].tolist() == ["eager"]
    assert exercised_executions(bundle, 0) == {"eager": 1, "decode_graph_replay": 1}
    proof = prove_window(bundle, 0, frame)
    assert proof.complete("eager")
    assert "--cuda-graph-trace=node" in proof.failures("decode_graph_replay")[0]


def test_node_level_kernels_are_graph_kernels(tmp_path: Path) -> None:
    """Three nodes of one replay are three calls of the graph execution and one launch."""
    bundle = foreign.imported(tmp_path / "run", graph_export(tmp_path / "g.sqlite", 3), "--ranks", 1)
    frame = frame_of(bundle)
    assert frame["execution"].tolist() == ["eager", *["decode_graph_replay"] * 3]
    assert exercised_executions(bundle, 0)["decode_graph_replay"] == 1
    assert prove_window(bundle, 0, frame).complete("decode_graph_replay")


def test_without_launch_records_nothing_is_proven_absent(tmp_path: Path) -> None:
    """A trace of GPU activities only shows what ran, not what did not."""
    bundle = one(tmp_path, [foreign.kernel("gemm", 10, 2, 1)])
    frame = frame_of(bundle)
    assert frame["execution"].isna().all()
    assert any("records no launches" in text for text in prove_window(bundle, 0, frame).failures("eager"))


def test_a_launch_without_its_kernel_leaves_the_window_open(tmp_path: Path) -> None:
    """One of two launches shows nothing."""
    bundle = one(tmp_path, [*foreign.run_of(), foreign.launch(200, 42)])
    proof = prove_window(bundle, 0, frame_of(bundle))
    assert any("1 of 2 launches show no kernel" in text for text in proof.failures("eager"))


def test_equal_ids_on_two_ranks_are_never_joined(tmp_path: Path) -> None:
    """Correlation id 87 is an all-reduce on rank 0 and a gemm on rank 1."""
    for rank, name in enumerate(("all_reduce", "gemm")):
        events = [foreign.launch(10, 87), foreign.kernel(name, 12, 2, 87)]
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", events)
    bundle = foreign.imported(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    assert [frame_of(bundle, rank)["base"].tolist() for rank in range(2)] == [["all_reduce"], ["gemm"]]


def test_real_step_of_a_real_server(tmp_path: Path, shared: Path) -> None:
    """vLLM on a B200: one EXTEND step of 888 tokens on rank 0 of 8; the other seven have no trace."""
    bundle = foreign.imported(tmp_path / "run", shared / "traces/vllm-b200", "--ranks", 8, code=1)
    frame = frame_of(bundle)
    assert len(frame) == 768
    assert set(frame["forward_mode"]) == {"EXTEND"}
    assert set(frame["real_tokens"]) == {888}
    assert [bundle.rank_file(rank) is None for rank in range(8)] == [False] + [True] * 7
    record = bundle.rank_file(0)
    assert record is not None
    (item,) = record.imported
    assert item.overlapping == 74


def test_every_rank_of_a_real_set(tmp_path: Path, shared: Path) -> None:
    """Megatron, eight ranks of 690 kernels under 40 names, absence provable on each."""
    bundle = foreign.imported(tmp_path / "run", shared / "traces/megatron-tp8-a100", "--ranks", 8)
    frames = [frame_of(bundle, rank) for rank in range(8)]
    assert [len(frame) for frame in frames] == [690] * 8
    counts = [frame["full"].astype(str).value_counts().sort_index().to_dict() for frame in frames]
    assert len(counts[0]) == 40
    assert all(own == counts[0] for own in counts)
    assert all(prove_window(bundle, rank, frames[rank]).complete("eager") for rank in range(8))
    assert check(bundle) == []


def test_a_kernel_on_two_ranks_only(tmp_path: Path, shared: Path) -> None:
    """DLRM: the radix sort ran on ranks 3 and 4, and its absence elsewhere is proven."""
    bundle = foreign.imported(tmp_path / "run", shared / "traces/dlrm-8xv100", "--ranks", 8)
    frames = [frame_of(bundle, rank) for rank in range(8)]
    assert [len(frame) for frame in frames] == [245, 310, 246, 315, 251, 245, 246, 246]
    ran = [rank for rank, frame in enumerate(frames) if (frame["base"] == "DeviceRadixSortOnesweepKernel").any()]
    assert ran == [3, 4]
    loose = [int((frame["reason"].astype(object) == "no launch record").sum()) for frame in frames]
    assert loose == [0, 64, 0, 64, 0, 0, 0, 0]
    assert all(prove_window(bundle, rank, frames[rank]).complete("eager") for rank in range(8))


def test_buckets_of_a_real_sweep(tmp_path: Path, shared: Path) -> None:
    """90 names over nine batch sizes, 37 of them at some sizes only; ids of the nine files never mix."""
    words = (shared / "traces/batch-sweep-a100", "--ranks", 1, "--bucket", r"batch_size_(\d+)")
    bundle = foreign.imported(tmp_path / "run", *words)
    frame = frame_of(bundle)
    table = symbols_by_bucket({0: frame})
    assert list(table.columns) == ["2", "4", "8", "16", "32", "64", "128", "256", "512"]
    assert (len(table), int((table == 0).any(axis=1).sum())) == (90, 37)
    assert table.sum().between(544, 558).all()
    assert not (frame["reason"].astype(object) == "no launch record").any()
    assert int(table.to_numpy().sum()) == len(frame)


def test_replays_of_a_real_trace(tmp_path: Path, shared: Path) -> None:
    """H200: 60,000 kernels launched eagerly and 60,000 from 1,200 replays."""
    bundle = foreign.imported(tmp_path / "run", shared / "traces/h200", "--ranks", 1)
    frame = frame_of(bundle)
    assert frame["execution"].astype(object).value_counts().to_dict() == {"eager": 60000, "decode_graph_replay": 60000}
    assert exercised_executions(bundle, 0) == {"eager": 60000, "decode_graph_replay": 1200}
    proof = prove_window(bundle, 0, frame)
    assert proof.complete("eager")
    assert proof.complete("decode_graph_replay")
