"""The gate on golden runs: every condition, and evidence that is whole and wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest
from gating import REQUIRE, SYMBOL, TODAY, cell, gate
from golden import RankContent, Step
from judging import FAIL, OPEN, PASS, fall_back, no_cuda, only

from alphamoe_backend.experts.registry import STOCK_SYMBOL
from alphamoe_profiler.bundle import RunBundle, SourceRevision
from alphamoe_profiler.gate import Expected, evaluate
from alphamoe_profiler.gate_bundle import NarrowBundle
from alphamoe_profiler.gate_records import GateCell, GateReport, GateRule
from alphamoe_profiler.policy_source import builtin_policy, parse_policy
from alphamoe_profiler.verdicts import Finding, Verdict
from alphamoe_profiler.witness import summarise
from alphamoe_tracers.errors import UsageError

CONFIG = Verdict.CONFIG_ERROR
COMMIT, TREE = "c0ffee0" + "1" * 33, "7e" * 32
FULL = (
    REQUIRE
    + "equals_receipts = true\nequal_across_ranks = true\nper_layer = 1\n"
    + f'source_sha256 = ["{golden.SOURCE}"]\n[require.M]\nwithin = [[1, 16]]\n'
)


def test_a_sound_run_passes_every_condition_and_cites_its_first_record(tmp_path: Path) -> None:
    report = gate(tmp_path, FULL, world_size=4)
    assert (report.verdict, report.exit_code) == (PASS, 0)
    assert report.reason == f"{SYMBOL} witnessed 48 times on ranks 0-3"
    own = cell(report, SYMBOL, 3, "decode_graph_replay")
    assert (own.finding.witnesses, own.file) == (4, "kernels/rank=3")
    assert own.first is not None
    assert own.first.graph_node_id is not None
    assert own.first.start_ns > 1_000_000_000
    assert [rank.kernels for rank in report.inspected] == [len(golden_kernels())] * 4


def golden_kernels() -> list[Any]:
    return golden.rank_content(0, 4, golden.STEPS, "flashinfer_alphamoe").kernels


@pytest.mark.parametrize("damage", [None, only(1, fall_back)])
def test_the_built_in_policy_comes_to_what_the_run_report_says(tmp_path: Path, damage: Any) -> None:
    path = golden.build(tmp_path / "run", damage, world_size=2)
    report = evaluate(RunBundle.open(path), [builtin_policy("flashinfer_alphamoe")], today=TODAY)
    assert report.verdict is summarise(RunBundle.open(path)).verdict


def test_partial_fallback_fails_and_names_rank_and_count(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 4)[0]["_base"] = STOCK_SYMBOL

    report = gate(tmp_path, f'{REQUIRE}[[forbid]]\nsymbol = "{STOCK_SYMBOL}"\n', only(1, damage))
    assert report.verdict is FAIL
    assert report.reason.startswith("no fused_moe_kernel on rank 1 eager: forbidden fused_moe_kernel ran 1 times")


def test_a_forbidden_symbol_that_was_seen_fails_whatever_else_is_missing(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        fall_back(content)
        content.receipts, content.rank_file, content.sentinels = [], None, {}

    report = gate(tmp_path, f'[[forbid]]\nsymbol = "{STOCK_SYMBOL}"\nmatch = "triton"\n', only(1, damage))
    assert report.verdict is FAIL


@pytest.mark.parametrize(
    ("extra", "verdict", "told"),
    [
        ("exactly = 6\n", PASS, ""),
        ("exactly = 5\n", FAIL, "seen 6 times, not exactly 5"),
        ("exactly = 7\n", FAIL, "seen 6 times, not exactly 7"),
        ("at_least = 6\n", PASS, ""),
        ("at_least = 7\n", FAIL, "seen 6 times of 7"),
        ("per_layer = 1\n", PASS, ""),
        ("per_layer = 2\n", FAIL, "1 kernels in step 4 layer 0, not 2 (and 5 more)"),
        ("[require.M]\nexact = [1, 13]\n", PASS, ""),
        ("[require.M]\nexact = [1]\n", FAIL, "kernel M 13 is not in the set"),
        ("[require.M]\nwithin = [[2, 64]]\n", FAIL, "kernel M 1 is not in the set"),
        ("[require.M]\nat_least = [13]\n", PASS, ""),
        ("[require.M]\nat_least = [13, 512]\n", OPEN, "kernel M 512 was not exercised"),
        ('[require.M]\nof = "real_tokens"\nexact = [1, 13]\n', PASS, ""),
        ('[require.M]\nof = "dispatch"\nexact = [13]\n', FAIL, "dispatch M 1 is not in the set"),
    ],
)
def test_each_condition_has_its_verdict(tmp_path: Path, extra: str, verdict: Verdict, told: str) -> None:
    report = gate(tmp_path, f'{REQUIRE}executions = ["eager"]\n{extra}')
    assert report.verdict is verdict
    assert told in report.reason


@pytest.mark.parametrize(
    ("extra", "verdict"), [("exactly = 6\n", OPEN), ("exactly = 5\n", FAIL), ("at_least = 7\n", OPEN), ("", PASS)]
)
def test_dropped_records_make_counts_lower_bounds_and_leave_presence(
    tmp_path: Path, extra: str, verdict: Verdict
) -> None:
    def damage(content: RankContent) -> None:
        content.collector = {"dropped": 3}

    report = gate(tmp_path, f'{REQUIRE}executions = ["eager"]\n{extra}', damage)
    own = cell(report, SYMBOL, 0, "eager")
    assert own.finding.verdict is verdict
    if verdict is OPEN:
        assert "dropped" in own.finding.reason
        assert own.settled_by is not None
        assert "shorter window" in own.settled_by


def test_counts_in_conditional_graphs_are_lower_bounds_when_the_policy_says_so(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(SYMBOL, 9))

    text = f'{REQUIRE}executions = ["decode_graph_replay"]\nexactly = 4\n'
    assert gate(tmp_path / "plain", text, damage).verdict is FAIL
    report = gate(tmp_path / "while", f"conditional_graphs = true\n{text}", damage)
    own = cell(report, SYMBOL, 0, "decode_graph_replay").finding
    assert (own.verdict, own.witnesses) == (OPEN, 2)
    assert "seen at least 2 times, not exactly 4" in own.reason


def test_ranks_are_no_different_where_only_the_m_of_one_is_unknown(tmp_path: Path) -> None:
    """Without its graph nodes a rank ran as many kernels as the other one, at an M that nothing tells."""

    def damage(content: RankContent) -> None:
        content.graph_nodes = []

    report = gate(tmp_path, f"{REQUIRE}equal_across_ranks = true\n", only(0, damage))
    own = cell(report, f"{SYMBOL}: equal on all ranks", None, "decode_graph_replay").finding
    assert own.verdict is OPEN
    assert "no known M on rank 0" in own.reason


@pytest.mark.parametrize("extra", ["exactly = 6\n", "exactly = 5\n", "per_layer = 1\n", "equals_receipts = true\n"])
def test_a_count_is_open_where_a_kernel_ran_that_nothing_places(tmp_path: Path, extra: str) -> None:
    """One launch record is lost: its kernel may be the one that a step lacks, or one more than are counted."""

    def damage(content: RankContent) -> None:
        lost = content.of(SYMBOL, 4)[0]["correlation_id"]
        content.launches = [row for row in content.launches if row["correlation_id"] != lost]

    report = gate(tmp_path, f'{REQUIRE}executions = ["eager"]\n{extra}', only(0, damage))
    own = cell(report, SYMBOL, 0, "eager").finding
    assert (own.verdict, own.witnesses) == (OPEN, 5)
    assert "could not be attributed" in own.reason or "there may be more" in own.reason


def test_a_missing_kernel_of_one_layer_fails_per_layer_and_equals_receipts(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(SYMBOL, 4)[:1])

    report = gate(tmp_path, f"{REQUIRE}per_layer = 1\nequals_receipts = true\n", only(1, damage))
    own = cell(report, SYMBOL, 1, "eager").finding
    assert own.verdict is FAIL
    assert "0 kernels in step 4 layer 0, not 1" in own.reason
    assert "0 kernels for 1 submissions in step 4 layer 0" in own.reason
    assert cell(report, SYMBOL, 0, "eager").finding.verdict is PASS


def test_divergence_across_ranks_is_told_by_m(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(SYMBOL, 7)[:1])

    report = gate(tmp_path, f"{REQUIRE}equal_across_ranks = true\n", only(2, damage), world_size=4)
    own = cell(report, f"{SYMBOL}: equal on all ranks", None, "prefill_graph_replay").finding
    assert own.verdict is FAIL
    assert own.reason == "the ranks differ: M 16: 2 on rank 0, 1, 3, 1 on rank 2"


@pytest.mark.parametrize(
    ("source", "expected", "verdict", "told"),
    [
        (SourceRevision(COMMIT, False, TREE), Expected(COMMIT, TREE), PASS, ""),
        (SourceRevision(COMMIT, False, TREE), Expected(COMMIT[:7]), PASS, ""),
        (SourceRevision(COMMIT, False, TREE), Expected(COMMIT[:6]), FAIL, "stale"),
        (SourceRevision("d" * 40, False, TREE), Expected(COMMIT), FAIL, "stale evidence"),
        (SourceRevision(COMMIT, True, TREE), Expected(COMMIT), FAIL, "uncommitted"),
        (SourceRevision(COMMIT, None, TREE), Expected(COMMIT), OPEN, "uncommitted"),
        (SourceRevision(None, None, TREE), Expected(COMMIT), OPEN, "names no commit"),
        (SourceRevision(COMMIT, False, "00" * 32), Expected(COMMIT, TREE), FAIL, "stale evidence"),
        (SourceRevision(COMMIT, False, None), Expected(None, TREE), OPEN, "no hash"),
    ],
)
def test_evidence_is_bound_to_the_code_under_review(
    tmp_path: Path, source: SourceRevision, expected: Expected, verdict: Verdict, told: str
) -> None:
    report = gate(tmp_path, expected=expected, run={"source": source})
    assert report.verdict is verdict
    assert told in report.reason


def test_another_world_size_than_the_policys_fails(tmp_path: Path) -> None:
    report = gate(tmp_path, f"world_size = 4\n{REQUIRE}")
    assert report.verdict is FAIL
    assert "the run has 2 ranks, the policy asks for 4" in report.reason


def other_module(content: RankContent) -> None:
    content.symbol_modules[SYMBOL] = "ee" * 32
    content.modules = [golden.ModuleRecord("ee" * 32, 10, 1, (SYMBOL,), None)]


@pytest.mark.parametrize("pin", [f'source_sha256 = ["{golden.SOURCE}"]', f'module_sha256 = ["{golden.CUBIN}"]'])
def test_another_module_under_the_right_symbol_fails_where_the_code_is_pinned(tmp_path: Path, pin: str) -> None:
    assert gate(tmp_path / "sound", f"{REQUIRE}{pin}\n").verdict is PASS
    report = gate(tmp_path / "other", f"{REQUIRE}{pin}\n", only(1, other_module))
    assert report.verdict is FAIL
    assert cell(report, f"{SYMBOL}: pinned code", 1).finding.verdict is FAIL
    assert cell(report, f"{SYMBOL}: pinned code", 0).finding.verdict is PASS
    assert gate(tmp_path / "free", REQUIRE, only(1, other_module)).verdict is PASS


def test_a_pin_holds_only_when_every_module_that_may_have_run_is_pinned(tmp_path: Path) -> None:
    def two(content: RankContent) -> None:
        content.symbol_modules[SYMBOL] = None
        content.modules.append(golden.ModuleRecord("ee" * 32, 10, 1, (SYMBOL,), None))

    def none(content: RankContent) -> None:
        content.symbol_modules[SYMBOL] = None
        content.modules = []

    text = f'{REQUIRE}module_sha256 = ["{golden.CUBIN}"]\n'
    assert gate(tmp_path / "two", text, two).verdict is FAIL
    assert gate(tmp_path / "none", text, none).verdict is OPEN


def gap(expires: str = "2027-01-01", extra: str = "") -> str:
    return f'[[known_gap]]\nsymbol = "{STOCK_SYMBOL}"\nreason = "ticket 7"\nexpires = {expires}\n{extra}'


def test_a_known_gap_is_tolerated_and_listed_apart(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 9)[0]["_base"] = STOCK_SYMBOL

    forbid = f'[[forbid]]\nsymbol = "{STOCK_SYMBOL}"\n'
    text = f"{REQUIRE}{forbid}"
    assert gate(tmp_path / "without", text, only(1, damage), backend="flashinfer_alphamoe").verdict is FAIL
    report = gate(tmp_path / "elsewhere", text + gap(extra="ranks = [0]\n"), only(1, damage))
    assert report.verdict is FAIL
    assert "was not needed" in report.notes[0]
    report = gate(tmp_path / "with", text + gap(), only(1, damage))
    (tolerated,) = report.tolerated
    assert (tolerated.rank, tolerated.execution) == (1, "decode_graph_replay")
    assert report.verdict is PASS


def test_a_known_gap_never_hides_missing_evidence_and_cannot_be_all_there_is(tmp_path: Path) -> None:
    own = f'[[known_gap]]\nsymbol = "{SYMBOL}"\nreason = "r"\nexpires = 2027-01-01\n'

    def cut(content: RankContent) -> None:
        content.rank_file = None

    assert gate(tmp_path / "open", REQUIRE + own, cut).verdict is OPEN
    absent = (
        '[[require]]\nsymbol = "not_there"\n[[known_gap]]\nsymbol = "not_there"\nreason = "r"\nexpires = 2027-01-01\n'
    )
    report = gate(tmp_path / "all", absent)
    assert report.verdict is CONFIG
    assert "nothing is left to judge" in report.reason
    assert gate(tmp_path / "some", REQUIRE + absent).verdict is PASS
    assert gate(tmp_path / "expired", REQUIRE + own.replace("2027", "2020")).verdict is CONFIG


def test_a_symbol_that_matches_nothing_anywhere_is_listed_with_its_nearest_names(tmp_path: Path) -> None:
    report = gate(tmp_path, '[[require]]\nsymbol = "kernel_alpha_moe_w8a8_updown"\n')
    assert report.verdict is FAIL
    assert report.notes[0] == f"kernel_alpha_moe_w8a8_updown matches no kernel on any rank; nearest: {SYMBOL}"


def test_a_required_kernel_that_no_backend_dispatches_needs_no_receipt(tmp_path: Path) -> None:
    report = gate(tmp_path, f'[[require]]\nsymbols = ["{golden.NORM}", "{golden.ALL_REDUCE}"]\n')
    assert report.verdict is PASS
    own = gate(tmp_path / "equals", f'[[require]]\nsymbol = "{golden.NORM}"\nequals_receipts = true\n')
    assert own.verdict is FAIL
    assert "no receipt submits it" in own.reason


def test_rules_of_named_ranks_ask_of_no_other(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(SYMBOL))
        content.receipts = [msgspec.structs.replace(r, kernels=()) for r in content.receipts]

    report = gate(tmp_path, f"{REQUIRE}ranks = [0]\n", only(1, damage))
    assert report.verdict is PASS
    assert {own.rank for own in report.cells} == {0, None}


def test_a_policy_about_versions_warns_of_others_and_of_unknown_ones(tmp_path: Path) -> None:
    text = f'{REQUIRE}[versions]\ntriton = ["3.6.*"]\n'
    other = gate(tmp_path / "other", text, run={"versions": {"triton": "3.7.0"}})
    assert other.verdict is PASS
    assert other.warnings == ("policy.toml was written for triton 3.6.*; the run has 3.7.0",)
    assert gate(tmp_path / "same", text, run={"versions": {"triton": "3.6.1"}}).warnings == ()
    unknown = gate(tmp_path / "unknown", text, run={"versions": {}})
    assert unknown.warnings == ("policy.toml is tied to versions of triton; the run names none of them",)


# Evidence that is whole and wrong.


def test_traffic_of_another_purpose_never_counts(tmp_path: Path) -> None:
    for purpose in ("warmup", "capture", "performance"):
        steps = tuple(Step(s.step, s.execution, s.forward_mode, s.M, s.real_tokens, purpose) for s in golden.STEPS)
        steps = tuple(s for s in steps if purpose != "warmup" or s.execution == "eager")
        report = gate(tmp_path / purpose, steps=steps, executions=("eager",))
        assert report.verdict is OPEN, purpose
        assert "not exercised" in report.reason


def test_decode_that_was_never_exercised_is_inconclusive_and_says_what_would_exercise_it(tmp_path: Path) -> None:
    steps = tuple(step for step in golden.STEPS if step.execution != "decode_graph_replay")
    report = gate(tmp_path, steps=steps)
    assert report.verdict is OPEN
    own = cell(report, SYMBOL, 0, "decode_graph_replay")
    assert own.settled_by is not None
    assert "--max-new-tokens" in own.settled_by
    assert cell(report, SYMBOL, 0, "eager").finding.verdict is PASS


def test_one_ranks_recording_cloned_as_another_is_a_usage_error(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=2)
    for name in ("kernels", "launches", "ranges", "graph_nodes", "symbols"):
        shutil.rmtree(path / name / "rank=1")
        shutil.copytree(path / name / "rank=0", path / name / "rank=1")
    with pytest.raises(UsageError, match="one rank under two names"):
        evaluate(RunBundle.open(path), [parse_policy(REQUIRE, "p")], today=TODAY)


def test_kernels_of_another_run_are_no_evidence(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=2)
    other = golden.build(tmp_path / "other", world_size=2, backend="triton")
    shutil.copyfile(other / "kernels/rank=1/part-00000.parquet", path / "kernels/rank=1/part-00000.parquet")
    report = evaluate(RunBundle.open(path), [parse_policy(REQUIRE, "p")], today=TODAY)
    assert report.verdict is not PASS
    shutil.copyfile(other / "ranks/1.json", path / "ranks/1.json")
    (path / "ranks/1.json").write_text((path / "ranks/1.json").read_text().replace("golden-0001", "other-0002"))
    with pytest.raises(UsageError, match="of run other-0002"):
        evaluate(RunBundle.open(path), [parse_policy(REQUIRE, "p")], today=TODAY)


def test_two_variants_swapped_and_an_m_against_the_launch_shape_fail(tmp_path: Path) -> None:
    def swapped(content: RankContent) -> None:
        first, second = content.of(SYMBOL, 4)[0], content.of(SYMBOL, 8)[0]
        names = [key for key in first if key.split("_")[0] in ("grid", "block", "cluster", "dynamic")]
        for name in names:
            first[name], second[name] = second[name], first[name]

    def wrong(content: RankContent) -> None:
        content.receipts = [
            msgspec.structs.replace(r, kernels=tuple(msgspec.structs.replace(k, M=k.M + 200) for k in r.kernels))
            for r in content.receipts
        ]

    for name, damage in (("swapped", swapped), ("wrong", wrong)):
        report = gate(tmp_path / name, f"{REQUIRE}equals_receipts = true\n", damage)
        assert report.verdict is FAIL
        assert "launched as" in report.reason


def test_receipts_without_kernels_and_kernels_without_receipts_do_not_pass(tmp_path: Path) -> None:
    def no_kernels(content: RankContent) -> None:
        content.drop(content.of(SYMBOL))

    def no_receipts(content: RankContent) -> None:
        content.receipts = []

    assert gate(tmp_path / "kernels", damage=no_kernels).verdict is FAIL
    assert gate(tmp_path / "receipts", damage=only(1, no_receipts)).verdict is FAIL
    assert gate(tmp_path / "silent", damage=no_receipts).verdict is OPEN


def test_a_run_without_a_gpu_or_without_kernels_never_passes(tmp_path: Path) -> None:
    def nothing(content: RankContent) -> None:
        content.kernels = []

    forbid = f'[[forbid]]\nsymbol = "{STOCK_SYMBOL}"\n'
    eager = tuple(step for step in golden.STEPS if step.execution == "eager")
    for policy in (REQUIRE, forbid):
        assert gate(tmp_path / f"cpu{len(policy)}", policy, no_cuda, steps=eager, executions=("eager",)).verdict is OPEN
        assert gate(tmp_path / f"none{len(policy)}", policy, nothing).verdict is OPEN


def test_dispatch_is_judged_by_receipt_and_is_no_witness(tmp_path: Path) -> None:
    rule = '[[dispatch]]\nkernel = "alphamoe_fp8_block_scale_aligned_moe"\nexecutions = ["eager"]\nexactly = 3\n'
    assert gate(tmp_path / "right", REQUIRE + rule).verdict is PASS
    assert gate(tmp_path / "count", REQUIRE + rule.replace("= 3", "= 4")).verdict is FAIL
    other = gate(tmp_path / "other", REQUIRE + rule.replace("aligned_moe", "other"))
    assert other.verdict is FAIL
    assert "dispatched: alphamoe_fp8_block_scale_aligned_moe" in other.reason
    assert gate(tmp_path / "set", REQUIRE + rule + "[dispatch.M]\nexact = [1, 13]\n").verdict is PASS
    alone = gate(tmp_path / "alone", rule)
    assert alone.verdict is CONFIG


def test_two_symbols_that_differ_where_names_meet_numbers_stay_two(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        first, second = content.of(golden.NORM, 4)
        first["_base"], second["_base"] = "gemm1", "gemm12"

    report = gate(tmp_path, '[[require]]\nsymbols = ["gemm1", "gemm12"]\nexecutions = ["eager"]\n', damage)
    assert [cell(report, name, 0, "eager").finding.witnesses for name in ("gemm1", "gemm12")] == [1, 1]


def test_a_narrow_reading_comes_to_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 9)[0]["_base"] = STOCK_SYMBOL

    text = f'{FULL}[[forbid]]\nsymbol = "{STOCK_SYMBOL}"\n'
    for name, own in (
        ("sound", None),
        ("fallback", only(1, damage)),
        ("cut", only(0, lambda c: setattr(c, "rank_file", None))),
    ):
        path = golden.build(tmp_path / name, own, world_size=2)
        whole = evaluate(RunBundle.open(path), [parse_policy(text, "p")], today=TODAY)
        with monkeypatch.context() as patch:
            patch.setattr("alphamoe_profiler.gate_bundle.NARROW_FROM_ROWS", 1)
            patch.setattr("alphamoe_profiler.gate_bundle._HEAD_ROWS", 1)
            narrow = evaluate(RunBundle.open(path), [parse_policy(text, "p")], today=TODAY)
            bundle = NarrowBundle.narrow(RunBundle.open(path), lambda row: row["base"] == SYMBOL)
            assert bundle.read_table("kernels", 0).skipped > 0
        assert narrow == whole


def test_a_narrow_reading_gives_way_where_rows_repeat_or_a_name_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphamoe_profiler.gate_bundle.NARROW_FROM_ROWS", 1)

    def twice(content: RankContent) -> None:
        content.kernels.append(dict(content.of(golden.NORM, 8)[0]))

    path = golden.build(tmp_path / "twice", twice, world_size=2)
    read = NarrowBundle.narrow(RunBundle.open(path), lambda row: row["base"] == SYMBOL).read_table("kernels", 0)
    assert (read.skipped, read.duplicates) == (0, 1)


def test_a_verdict_that_no_cell_carries_cannot_be_built() -> None:
    rule = GateRule("k", "require", 1, None)
    good = GateCell(0, 0, None, Finding(PASS, "", 3))
    with pytest.raises(ValueError, match="not the worst"):
        GateReport(PASS, "", "run", None, None, (), (rule,), (GateCell(0, 0, None, Finding(OPEN, "why")),))
    with pytest.raises(ValueError, match="not the worst"):
        GateReport(PASS, "", "run", None, None, (), (rule,), ())
    with pytest.raises(ValueError, match="kernels that were inspected"):
        GateReport(PASS, "", "run", None, None, (), (rule,), (good,))
