"""Contradictions inside accepted evidence are FAIL, reason integrity; missing evidence is INCONCLUSIVE."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import golden
import msgspec
import pytest
from golden import RankContent
from judging import FAIL, OPEN, PASS, check, judge, only

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.inspection import inspect_run
from alphamoe_profiler.reports.json_report import to_json
from alphamoe_profiler.run_identity import LAUNCH_RULE, launch_rule_sha256
from alphamoe_profiler.witness import summarise
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import TABLES


def test_a_run_without_a_finished_request_is_never_a_pass(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=1)
    (path / "requests.jsonl").write_bytes(b"")
    assert check(summarise(RunBundle.open(path)), "requests").reason == "requests.jsonl has no served request"


def test_a_run_whose_launcher_was_cut_short_is_never_a_pass(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=1)
    (path / "outcome.json").unlink()
    summary = summarise(RunBundle.open(path))
    assert summary.verdict is OPEN
    assert check(summary, "files").reason == "no outcome.json, the launcher was cut short"


FILES = (
    "run.json", "requests.jsonl", "outcome.json", "ranks/0.json", "modules/rank=0.jsonl", "receipts/rank=0.jsonl",
    *(f"{name}/rank=0/part-00000.parquet" for name in TABLES),
)  # fmt: skip


@pytest.mark.parametrize("relative", FILES)
def test_damage_to_any_one_file_is_told_in_one_line_and_never_left_a_pass(tmp_path: Path, relative: str) -> None:
    sound = golden.build(tmp_path / "sound", world_size=1)
    original = (sound / relative).read_bytes()
    rng = random.Random(relative)
    flipped = bytearray(original)
    flipped[rng.randrange(len(flipped))] ^= 0xFF
    for number, content in enumerate((original[: len(original) // 2], b"", b"\x00\xff{[" * 50, bytes(flipped), None)):
        path = Path(shutil.copytree(sound, tmp_path / f"damaged{number}"))
        (path / relative).unlink()
        if content is not None:
            (path / relative).write_bytes(content)
        told, report = None, None
        try:
            report = inspect_run(RunBundle.open(path))
        except AlphaMoEError as error:
            told = str(error)
        if report is None:
            assert told
            assert len(told.splitlines()) == 1
        else:
            assert report.verdict is not PASS, f"content {number}"
            assert to_json(report)


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


def test_launch_shapes_are_checked_against_the_rule_of_the_recording_only(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(ALPHAMOE_W8A8_SYMBOL, 5)[0]["grid_x"] += 1

    for name, rule, verdict in (("same", launch_rule_sha256(), FAIL), ("other", "ab" * 32, PASS)):
        summary = judge(tmp_path / name, damage, run={"versions": {LAUNCH_RULE: rule}})
        assert summary.verdict is verdict
        assert any("launch shapes not checked" in note for note in summary.notes) is (verdict is PASS)


def test_a_run_recorded_without_receipts_lacks_evidence_and_contradicts_nothing(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.receipts = []

    summary = judge(tmp_path / "all", damage)
    assert summary.verdict is OPEN
    assert judge(tmp_path / "one", only(1, damage)).verdict is FAIL


def test_a_file_changed_after_the_run_is_never_a_pass(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run")
    modules = path / "modules/rank=1.jsonl"
    modules.write_bytes(modules.read_bytes() + b"\n")
    summary = summarise(RunBundle.open(path))
    assert summary.verdict is OPEN
    assert check(summary, "files").verdict is OPEN
