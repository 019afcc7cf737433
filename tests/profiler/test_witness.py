"""The witness summary: each golden bundle, sound or damaged in one way, gets its right verdict and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest
from golden import RankContent, Step
from judging import FAIL, OPEN, PASS, cell, check, fall_back, judge, no_cuda, only

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.integrity import Check
from alphamoe_profiler.run_records import RankEnd
from alphamoe_profiler.verdicts import Finding, Verdict, worst
from alphamoe_profiler.witness import summarise
from alphamoe_profiler.witness_records import WitnessSummary
from alphamoe_tracers.errors import UsageError


def test_a_sound_run_of_four_ranks_and_three_executions_passes(tmp_path: Path) -> None:
    summary = judge(tmp_path, world_size=4)
    assert summary.verdict is PASS
    assert summary.witnesses == 48
    assert [own.name for own in summary.checks] == [
        "files", "requests", "receipts", "ranks agree on M", "every layer in every step",
        "receipts equal witnesses", "launch shapes",
    ]  # fmt: skip
    assert {own.verdict for own in summary.checks} == {PASS}
    assert cell(summary, 3, "decode_graph_replay").kernels == 4
    assert cell(summary, 3, "decode_graph_replay").submissions == 4
    assert summary.notes == ()


def test_the_stock_backend_passes_with_its_own_symbol_and_two_launches_a_layer(tmp_path: Path) -> None:
    summary = judge(tmp_path, backend="triton")
    assert summary.verdict is PASS
    assert cell(summary, 0, "eager", STOCK_SYMBOL).kernels == 12
    assert cell(summary, 0, "eager", ALPHAMOE_W8A8_SYMBOL).kernels == 0


def test_a_fallback_on_one_rank_fails_and_names_rank_symbol_and_count(tmp_path: Path) -> None:
    summary = judge(tmp_path, only(2, fall_back), world_size=4)
    assert summary.verdict is FAIL
    assert summary.reason.startswith("rank 2 eager: forbidden fused_moe_kernel ran 6 times; ")
    assert cell(summary, 2, "eager").finding.verdict is FAIL
    assert "window proven complete" in cell(summary, 2, "eager").finding.reason
    assert {own.rank for own in summary.cells if own.finding.verdict is FAIL} == {2}


def test_one_forbidden_kernel_among_many_required_ones_fails(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 9)[0]["_base"] = STOCK_SYMBOL

    summary = judge(tmp_path, only(1, damage))
    assert summary.verdict is FAIL
    assert "rank 1 decode_graph_replay: forbidden fused_moe_kernel ran 1 times" in summary.reason


def test_a_forbidden_kernel_fails_even_where_the_rank_was_cut_short_and_records_were_dropped(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        fall_back(content)
        content.receipts, content.rank_file = [], None

    summary = judge(tmp_path, only(1, damage))
    assert summary.verdict is FAIL
    assert "forbidden fused_moe_kernel ran" in summary.reason


def test_a_forbidden_kernel_in_warm_up_only_is_noted_and_not_judged(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 1)[0]["_base"] = STOCK_SYMBOL

    summary = judge(tmp_path, only(0, damage))
    assert summary.verdict is PASS
    assert summary.notes == ("rank 0: 1 forbidden kernels ran in other traffic, not judged",)


def test_a_missing_rank_file_is_inconclusive_but_its_presence_is_still_shown(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.rank_file = None

    summary = judge(tmp_path, only(3, damage), world_size=4)
    assert summary.verdict is OPEN
    own = cell(summary, 3, "eager")
    assert (own.finding.verdict, own.kernels) == (OPEN, 6)
    assert "ranks/3.json" in own.finding.reason
    assert cell(summary, 2, "eager").finding.verdict is PASS


def test_a_rank_killed_after_its_last_file_is_inconclusive(tmp_path: Path) -> None:
    ends = {1: RankEnd(rank=1, exit_code=-11, signal="SIGSEGV")}
    summary = judge(tmp_path, ends=ends)
    assert summary.verdict is OPEN
    assert cell(summary, 1, "eager").finding.reason == "its process ended with SIGSEGV"


def test_dropped_records_leave_presence_proven(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.collector = {"dropped": 3}

    summary = judge(tmp_path, only(0, damage))
    assert cell(summary, 0, "eager").finding.verdict is PASS
    # What must not be there is absent only as far as the records reach.
    absent = cell(summary, 0, "eager", STOCK_SYMBOL).finding
    assert absent.verdict is OPEN
    assert "3 records were dropped" in absent.reason
    assert summary.verdict is OPEN


def test_dropped_records_make_absence_inconclusive(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(ALPHAMOE_W8A8_SYMBOL, 7))
        content.collector = {"dropped": 3}

    summary = judge(tmp_path, only(0, damage))
    own = cell(summary, 0, "prefill_graph_replay").finding
    assert own.verdict is OPEN
    assert "3 records were dropped" in own.reason
    assert check(summary, "receipts equal witnesses").verdict is OPEN
    assert summary.verdict is OPEN


def test_a_run_without_cuda_is_inconclusive_and_says_no_cuda_device(tmp_path: Path) -> None:
    eager = tuple(step for step in golden.STEPS if step.execution == "eager")
    summary = judge(tmp_path, no_cuda, steps=eager, executions=("eager",), world_size=4)
    assert summary.verdict is OPEN
    assert summary.reason == "ranks 0-3: no CUDA device"
    of_receipts = {"receipts", "ranks agree on M", "every layer in every step"}
    assert {own.name for own in summary.checks} == {"files", "requests", *of_receipts}


def test_zero_kernels_everywhere_never_pass(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.kernels = []

    summary = judge(tmp_path, damage)
    assert summary.verdict is OPEN
    assert not any(own.finding.verdict is PASS for own in summary.cells)


def test_kernels_of_warm_up_only_are_no_presence_in_the_request_window(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        for step in (4, 5, 6):
            content.drop(content.of(ALPHAMOE_W8A8_SYMBOL, step))

    summary = judge(tmp_path, damage)
    assert summary.verdict is FAIL
    reason = cell(summary, 0, "eager").finding.reason
    assert "not seen in a window proven complete (6 submissions by receipt)" in reason
    assert "kernels of it ran outside this execution, the window or its requests" in reason


def test_a_run_of_warm_up_steps_only_is_inconclusive_not_exercised(tmp_path: Path) -> None:
    steps = (Step(1, "eager", "EXTEND", 13, 13, "warmup"),)
    summary = judge(tmp_path, steps=steps, executions=("eager",))
    assert summary.verdict is OPEN
    assert "not exercised" in summary.reason


def test_a_run_that_only_captured_is_inconclusive_not_exercised(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.receipts = [r for r in content.receipts if r.execution == "eager"]
        for step in (7, 8, 9):
            content.drop([kernel for kernel in content.kernels if kernel["_step"] == step])

    summary = judge(tmp_path, damage)
    assert summary.verdict is OPEN
    assert "not exercised" in cell(summary, 0, "decode_graph_replay").finding.reason
    assert cell(summary, 0, "eager").finding.verdict is PASS


def test_an_execution_that_was_not_asked_for_is_not_needed(tmp_path: Path) -> None:
    eager = tuple(step for step in golden.STEPS if step.execution == "eager")
    assert judge(tmp_path, steps=eager, executions=("eager",)).verdict is PASS


def test_eager_kernels_do_not_satisfy_a_graph_execution(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        for kernel in content.of(ALPHAMOE_W8A8_SYMBOL, 8) + content.of(ALPHAMOE_W8A8_SYMBOL, 9):
            launch = next(e for e in content.launches if e["correlation_id"] == kernel["correlation_id"])
            content.correlation += 1
            content.launches.append(launch | {"correlation_id": content.correlation, "api": "cuLaunchKernelEx"})
            kernel.update(correlation_id=content.correlation, graph_node_id=None, graph_id=None)

    summary = judge(tmp_path, only(0, damage))
    own = cell(summary, 0, "decode_graph_replay")
    assert (own.finding.verdict, own.kernels) == (OPEN, 0)
    assert "could not be attributed" in own.finding.reason
    assert summary.verdict is not PASS


@pytest.mark.parametrize("kind", ["open", "close", "step"])
def test_a_missing_sentinel_leaves_presence_and_makes_absence_inconclusive(tmp_path: Path, kind: str) -> None:
    def damage(content: RankContent) -> None:
        content.drop(content.of(f"alphamoe_trace_sentinel_{kind}")[:1])

    summary = judge(tmp_path, only(0, damage))
    assert cell(summary, 0, "eager").finding.verdict is PASS
    absent = cell(summary, 0, "eager", STOCK_SYMBOL).finding
    assert absent.verdict is OPEN
    assert f"{kind} sentinel seen" in absent.reason


def test_sentinels_that_were_never_launched_prove_nothing(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.drop([kernel for kernel in content.kernels if kernel["_base"].startswith("alphamoe_trace")])
        content.sentinels = {}

    summary = judge(tmp_path, damage)
    assert summary.verdict is OPEN
    assert "no open sentinel was launched" in cell(summary, 0, "eager", STOCK_SYMBOL).finding.reason


def test_a_graph_sentinel_without_its_node_id_proves_nothing_about_graphs(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        for kernel in content.of("alphamoe_trace_sentinel_graph_open"):
            kernel["graph_node_id"] = None

    summary = judge(tmp_path, damage)
    assert cell(summary, 0, "eager", STOCK_SYMBOL).finding.verdict is PASS
    absent = cell(summary, 0, "decode_graph_replay", STOCK_SYMBOL).finding
    assert absent.verdict is OPEN
    assert "graph_open sentinel seen 0 times of 1" in absent.reason


def test_unknown_graph_nodes_leave_presence_but_no_layer_so_the_run_is_inconclusive(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.graph_nodes = []

    summary = judge(tmp_path, only(0, damage))
    assert cell(summary, 0, "decode_graph_replay").finding.verdict is PASS
    own = check(summary, "receipts equal witnesses")
    assert own.verdict is OPEN
    assert own.reason == "rank 0: 6 MoE kernels have no known layer, compared by step only"
    assert summary.verdict is OPEN


def test_another_module_under_the_symbol_is_shown(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.symbol_modules[ALPHAMOE_W8A8_SYMBOL] = "ee" * 32
        content.modules = [golden.ModuleRecord("ee" * 32, 10, 1, (ALPHAMOE_W8A8_SYMBOL,), None)]

    summary = judge(tmp_path, only(1, damage), world_size=4)
    assert summary.verdict is PASS
    assert [(own.ranks, own.tied, own.kernels) for own in summary.identities] == [
        ((0, 2, 3), True, 36),
        ((1,), False, 12),
    ]
    assert "unknown code under an AlphaMoE symbol" in summary.notes[0]
    assert "eeeeeeeeeeee" in summary.notes[0]


def test_variants_of_one_kernel_are_tied_to_its_source_although_the_symbol_names_no_one_module(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.symbol_modules[ALPHAMOE_W8A8_SYMBOL] = None
        variant = msgspec.structs.replace(content.modules[0], sha256="dd" * 32)
        content.modules.append(variant)

    (identity,) = judge(tmp_path / "tied", damage).identities
    assert (identity.modules, identity.source_sha256) == ((golden.CUBIN, "dd" * 32), golden.SOURCE)

    def one_stranger(content: RankContent) -> None:
        damage(content)
        content.modules[-1] = msgspec.structs.replace(content.modules[-1], source_sha256=None)

    summary = judge(tmp_path / "untied", one_stranger)
    assert not summary.identities[0].tied
    assert "unknown code under an AlphaMoE symbol" in summary.notes[0]


def test_contradictory_files_are_a_usage_error_and_nothing_is_judged(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run")
    (path / "ranks/01.json").write_bytes((path / "ranks/1.json").read_bytes())
    with pytest.raises(UsageError, match=r"ranks/01\.json"):
        summarise(RunBundle.open(path))


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"executions": ()}, "asks for no execution"), ({"moe_runner_backend": "cutlass"}, "cutlass")],
)
def test_an_empty_or_unknown_question_is_a_config_error(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    summary = judge(tmp_path, run=fields)
    assert summary.verdict is Verdict.CONFIG_ERROR
    assert told in summary.reason


def test_duplicate_records_are_noted_and_change_no_count(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.kernels.append(dict(content.of(ALPHAMOE_W8A8_SYMBOL, 8)[0]))

    summary = judge(tmp_path, only(0, damage))
    assert summary.verdict is PASS
    assert summary.notes == ("rank 0: 1 records were delivered twice and counted once",)


def test_equal_correlation_ids_on_two_ranks_never_join_them(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        for launch in content.launches:
            launch["process"] = 1
        for kernel in content.kernels:
            kernel["process"] = 1
        content.ranges = [entry | {"process": 1} for entry in content.ranges]
        content.graph_nodes = [entry | {"process": 1} for entry in content.graph_nodes]
        if content.rank == 1:
            fall_back(content)

    summary = judge(tmp_path, damage)
    assert {own.rank for own in summary.cells if own.finding.verdict is FAIL} == {1}


def test_the_worst_verdict_wins_and_nothing_at_all_is_a_config_error() -> None:
    assert worst([PASS, OPEN, Verdict.CONFIG_ERROR, FAIL]) is FAIL
    assert worst([PASS, OPEN, Verdict.CONFIG_ERROR]) is Verdict.CONFIG_ERROR
    assert worst([PASS, OPEN]) is OPEN
    assert worst([]) is Verdict.CONFIG_ERROR
    assert [verdict.exit_code for verdict in Verdict] == [0, 1, 3, 2]


def test_a_pass_that_nothing_carries_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="at least one witness"):
        Finding(PASS, "")
    with pytest.raises(ValueError, match="forbidden"):
        Finding(PASS, "", 2, must_be_seen=False)
    with pytest.raises(ValueError, match="needs a reason"):
        Finding(OPEN, "")
    with pytest.raises(ValueError, match="compared something"):
        Check("files", PASS, "", 0)
    with pytest.raises(ValueError, match="at least one witness"):
        WitnessSummary(PASS, "", (), (Check("files", PASS, "", 1),), (), ())
    with pytest.raises(ValueError, match="not the worst"):
        WitnessSummary(PASS, "", (), (Check("files", FAIL, "why", 1),), (), ())
