"""Contradictions inside accepted evidence are FAIL, reason integrity; missing evidence is INCONCLUSIVE."""

from __future__ import annotations

from pathlib import Path

import golden
import msgspec
from golden import RankContent
from judging import FAIL, OPEN, PASS, check, judge, only

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.witness import summarise


def test_ranks_that_disagree_on_m_fail_integrity(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.receipts = [
            msgspec.structs.replace(receipt, M=4) if receipt.step == 8 else receipt for receipt in content.receipts
        ]

    summary = judge(tmp_path, only(1, damage))
    assert summary.verdict is FAIL
    reason = check(summary, "ranks agree on M").reason
    assert reason.startswith("integrity: step 8: ranks disagree")
    assert "M 4 (decode_graph_replay) on rank 1" in reason


def test_more_real_tokens_than_m_fail_integrity(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.receipts = [
            msgspec.structs.replace(receipt, real_tokens=17) if receipt.step == 7 else receipt
            for receipt in content.receipts
        ]

    summary = judge(tmp_path, damage)
    assert summary.verdict is FAIL
    assert check(summary, "receipts").reason.startswith("integrity: rank 0 step 7: 17 real tokens exceed M 16")


def test_two_different_receipts_for_one_step_fail_integrity_and_equal_ones_are_one(tmp_path: Path) -> None:
    def twice(content: RankContent) -> None:
        content.receipts.append(content.receipts[-1])

    assert judge(tmp_path / "same", twice).verdict is PASS

    def differently(content: RankContent) -> None:
        content.receipts.append(msgspec.structs.replace(content.receipts[-1], batch_size=2))

    summary = judge(tmp_path / "other", only(0, differently))
    assert check(summary, "receipts").reason == "integrity: rank 0 step 9: two different receipts"


def test_a_receipt_without_its_kernel_fails_integrity_in_a_proven_window(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(ALPHAMOE_W8A8_SYMBOL, 5)[1:])

    summary = judge(tmp_path, only(0, damage))
    assert summary.verdict is FAIL
    assert check(summary, "receipts equal witnesses").reason == (
        f"integrity: rank 0: step 5 layer 1 {ALPHAMOE_W8A8_SYMBOL}: 1 submitted, 0 witnessed"
    )


def test_a_receipt_without_its_kernel_is_open_where_the_window_is_not_proven(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(ALPHAMOE_W8A8_SYMBOL, 5)[1:])
        content.drop(content.of("alphamoe_trace_sentinel_close"))

    summary = judge(tmp_path, only(0, damage))
    assert summary.verdict is OPEN
    assert check(summary, "receipts equal witnesses").verdict is OPEN


def test_kernels_without_a_receipt_fail_integrity(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.receipts = [receipt for receipt in content.receipts if receipt.step != 5]

    summary = judge(tmp_path, only(1, damage))
    assert summary.verdict is FAIL
    reason = check(summary, "receipts equal witnesses").reason
    assert reason == "integrity: rank 1: 2 MoE kernels in steps 5 without a receipt"


def test_kernels_without_a_receipt_are_open_where_the_receipt_file_was_cut(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run")
    receipts = path / "receipts/rank=1.jsonl"
    receipts.write_bytes(receipts.read_bytes()[:-40])
    summary = summarise(RunBundle.open(path))
    assert check(summary, "receipts equal witnesses").verdict is OPEN
    assert check(summary, "files").verdict is OPEN
    assert summary.verdict is OPEN


def test_a_second_kernel_for_one_submission_fails_integrity(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        kernel = content.of(ALPHAMOE_W8A8_SYMBOL, 8)[0]
        content.kernels.append(kernel | {"start_ns": kernel["start_ns"] + 1})

    summary = judge(tmp_path, only(0, damage))
    assert summary.verdict is FAIL
    assert "1 submitted, 2 witnessed" in check(summary, "receipts equal witnesses").reason


def test_a_launch_shape_that_is_not_the_one_of_its_m_fails_integrity(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(ALPHAMOE_W8A8_SYMBOL, 8)[0]["dynamic_smem_bytes"] += 128

    summary = judge(tmp_path, only(1, damage))
    assert summary.verdict is FAIL
    assert "rank 1: 1 kernels were not launched as their M asks for" in check(summary, "launch shapes").reason


def test_a_file_changed_after_the_run_is_never_a_pass(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run")
    modules = path / "modules/rank=1.jsonl"
    modules.write_bytes(modules.read_bytes() + b"\n")
    summary = summarise(RunBundle.open(path))
    assert summary.verdict is OPEN
    assert check(summary, "files").verdict is OPEN
