"""M buckets: exact discrete sets with only observed values, kept apart by execution and rank."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
from golden import Step

from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.m_buckets import (
    DiscreteSet,
    bucket_table,
    buckets,
    fold,
    kernels_by_bucket,
    m_disagreements,
)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, 2, 3, 5], "1-3, 5"),
        ([8, 4, 3, 2, 1, 12, 4], "1-4, 8, 12"),
        ([1, 2], "1, 2"),
        ([1, 3, 5], "1, 3, 5"),
        ([7], "7"),
        ([], ""),
        (range(1, 513), "1-512"),
    ],
)
def test_only_runs_that_were_all_observed_are_folded(values: list[int], text: str) -> None:
    assert fold(values) == text


def test_the_summary_counts_distinct_values_and_unknown_is_left_out() -> None:
    chosen = DiscreteSet.of([8, None, 512, 8, 16])
    assert str(chosen) == "(3; 8, 512) 8, 16, 512"
    assert str(DiscreteSet.of([None])) == "(0)"


def test_warm_up_and_capture_steps_make_no_bucket(tmp_path: Path) -> None:
    bundle = RunBundle.open(golden.build(tmp_path / "run"))
    receipts = {rank: bundle.receipts(rank).receipts for rank in bundle.ranks}
    assert any(receipt.purpose == "warmup" and receipt.M == 13 for receipt in receipts[0])
    rows = {row.execution: row for row in buckets(receipts) if row.rank is None}
    assert rows["eager"].steps == 12
    only_warm_up = {rank: [r for r in own if r.purpose == "warmup"] for rank, own in receipts.items()}
    assert buckets(only_warm_up) == []


def test_real_tokens_dispatch_m_and_kernel_m_stay_three_columns(tmp_path: Path) -> None:
    bundle = RunBundle.open(golden.build(tmp_path / "run"))
    receipts = {rank: bundle.receipts(rank).receipts for rank in bundle.ranks}
    frames = {rank: attribute(bundle, rank).frame for rank in bundle.ranks}
    rows = {(row.execution, row.rank): row for row in buckets(receipts, frames)}
    decode = rows["decode_graph_replay", None]
    assert (decode.real_tokens.values, decode.dispatch_M.values, decode.kernel_M.values) == ((1,), (2,), (2,))
    prefill = rows["prefill_graph_replay", 3]
    assert (prefill.real_tokens.values, prefill.dispatch_M.values) == ((13,), (16,))
    assert all(row.witnessed_M == row.kernel_M for row in rows.values())
    table = bucket_table(rows.values())
    assert len(table) == 3 * 5 * 4
    counted = kernels_by_bucket(frames)
    chosen = counted[(counted["rank"] == 1) & (counted["execution"] == "decode_graph_replay")]
    assert chosen[["kernel_M", "steps", "kernels"]].to_numpy().tolist() == [[2, 2, 4]]


def test_without_kernels_nothing_is_witnessed(tmp_path: Path) -> None:
    bundle = RunBundle.open(golden.build(tmp_path / "run"))
    receipts = {rank: bundle.receipts(rank).receipts for rank in bundle.ranks}
    assert all(row.witnessed_M.values == () and row.kernel_M.values for row in buckets(receipts))


def test_ranks_that_disagree_on_m_are_named_with_the_step(tmp_path: Path) -> None:
    content = [golden.rank_content(rank, 4, golden.STEPS, "flashinfer_alphamoe") for rank in range(4)]
    receipts = {rank.rank: rank.receipts for rank in content}
    assert m_disagreements(receipts) == []
    other = Step(8, "decode_graph_replay", "DECODE", 4, 1)
    receipts[2] = [golden.receipt(content[2], other, "k") if r.step == 8 else r for r in receipts[2]]
    assert m_disagreements(receipts) == [
        "step 8: ranks disagree: M 2 (decode_graph_replay) on rank 0, 1, 3, M 4 (decode_graph_replay) on rank 2"
    ]


def test_m_and_layer_never_run_together_in_one_key(tmp_path: Path) -> None:
    steps = (Step(1, "eager", "EXTEND", 23, 23), Step(12, "eager", "EXTEND", 3, 3))
    bundle = RunBundle.open(golden.build(tmp_path / "run", world_size=1, steps=steps, executions=("eager",)))
    counted = kernels_by_bucket({0: attribute(bundle, 0).frame})
    assert counted[["kernel_M", "steps", "kernels"]].to_numpy().tolist() == [[3, 1, 2], [23, 1, 2]]
