"""What a gate says beside a verdict: the way out that fits, the set that was allowed, names that a reader knows."""

from __future__ import annotations

import json
from pathlib import Path

import foreign
import golden
import pytest
from gating import REQUIRE, SYMBOL, cell, gate
from golden import RankContent
from judging import FAIL, OPEN

from alphamoe_profiler.gate import evaluate
from alphamoe_profiler.policy_source import parse_policy
from alphamoe_profiler.verdicts import Verdict

PROMPT, BATCH = "a prompt of that many tokens", "that many prompts decoded in one batch"


@pytest.mark.parametrize(
    ("execution", "of", "told", "untold"),
    [
        ("eager", "kernel", (PROMPT, BATCH), ("--cuda-graph",)),
        ("prefill_graph_replay", "kernel", (PROMPT, "--cuda-graph-bs-prefill"), (BATCH, "bs-decode")),
        ("decode_graph_replay", "kernel", (BATCH, "--cuda-graph-bs-decode"), (PROMPT, "bs-prefill")),
        ("decode_graph_replay", "dispatch", (BATCH, "--cuda-graph-bs-decode"), (PROMPT, "bs-prefill")),
        ("prefill_graph_replay", "real_tokens", (PROMPT,), (BATCH, "--cuda-graph")),
        ("decode_graph_replay", "real_tokens", (BATCH,), (PROMPT, "--cuda-graph")),
    ],
)
def test_a_size_that_was_not_served_names_what_sets_it_in_that_execution(
    tmp_path: Path, execution: str, of: str, told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    """Prompts set the M of a prefill, their number that of a decode, and padding adds no real token."""
    report = gate(tmp_path, f'{REQUIRE}executions = ["{execution}"]\n[require.M]\nof = "{of}"\nat_least = [512]\n')
    own = cell(report, SYMBOL, 0, execution)
    assert own.finding.verdict is OPEN
    assert own.settled_by is not None
    assert all(word in own.settled_by for word in told)
    assert not any(word in own.settled_by for word in untold)


def test_the_way_out_of_an_imported_trace_names_no_option_of_a_recording(tmp_path: Path) -> None:
    """Another server made the trace."""
    log = tmp_path / "server.log"
    item = {"kernel": "k", "M": 1, "E": 8, "H": 8, "I_local": 8, "top_k": 2, "block_m": 8}
    record = {"execution": "eager", "forward_mode": "DECODE", "M": 1, "real_tokens": 1, "batch_size": 1}
    record |= {"schema": "sglang-flashinfer-alphamoe-runtime-v2", "kernels": [item]}
    log.write_text(f"[2026 TP0] ALPHAMOE_RUNTIME_EXECUTION {json.dumps(record)}\n")
    path = foreign.trace(tmp_path / "p-TP-0.trace.json", foreign.run_of(), 0, 1)
    bundle = foreign.imported(tmp_path / "run", path, log, "--ranks", 1)
    rule = '[[require]]\nsymbol = "moe_gemm"\n[require.M]\nof = "dispatch"\nat_least = [512]\n'
    report = evaluate(bundle, [parse_policy(rule, "p.toml", (), "p.toml")])
    settled = next(own.settled_by for own in report.cells if own.finding.reason.endswith("was not exercised"))
    assert settled == f"a trace of rank 0 with {PROMPT}, or {BATCH}"


@pytest.mark.parametrize(("dropped", "verdict"), [(0, FAIL), (3, OPEN)])
def test_a_dispatched_m_without_a_kernel_is_a_failure_only_where_nothing_can_be_missing(
    tmp_path: Path, dropped: int, verdict: Verdict
) -> None:
    """Absence is proven by whole evidence only."""

    def damage(content: RankContent) -> None:
        content.drop(content.of(SYMBOL, 4))
        content.collector = {"dropped": dropped}

    rule = f'{REQUIRE}executions = ["eager"]\n[require.M]\nat_least = [13]\n'
    found = cell(gate(tmp_path, rule, damage), SYMBOL, 0, "eager").finding
    assert found.verdict is verdict
    assert "kernel M 13 was dispatched and never witnessed" in found.reason


def test_every_reason_of_a_cell_keeps_its_way_out(tmp_path: Path) -> None:
    """A lacking size and dropped records are settled by different recordings."""

    def damage(content: RankContent) -> None:
        content.collector = {"dropped": 3}

    report = gate(tmp_path, f'{REQUIRE}executions = ["eager"]\nexactly = 6\n[require.M]\nat_least = [512]\n', damage)
    settled = cell(report, SYMBOL, 0, "eager").settled_by
    assert settled is not None
    assert "shorter window" in settled
    assert BATCH in settled


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("within = [[2, 16], [20, 20], [64, 512]]", "2-16, 20, 64-512"),
        ("exact = [13, 14, 15, 64]", "13-15, 64"),
        ("exact = [13, 14]\nwithin = [[13, 64]]", "13, 14 within 13-64"),
    ],
)
def test_an_m_that_is_not_allowed_is_told_with_the_set_that_is(tmp_path: Path, asked: str, allowed: str) -> None:
    """Nobody should have to open the policy to see by how much a run is outside of it."""
    report = gate(tmp_path, f'{REQUIRE}executions = ["eager"]\n[require.M]\n{asked}\n')
    assert report.verdict is FAIL
    assert report.reason.endswith(f"kernel M 1 is not in the set that is allowed: {allowed}")


def test_a_forbidden_expression_is_told_by_its_rules_name_and_the_kernels_behind_it(tmp_path: Path) -> None:
    """An expression in a headline says nothing to a reader."""
    rule = '[[forbid]]\nname = "our experts"\nsymbol = \'^(void )?kernel_alpha_moe_\'\nmatch = "regex"\n'
    report = gate(tmp_path, rule)
    assert report.verdict is FAIL
    assert f"forbidden our experts ({SYMBOL}) ran 6 times" in report.reason
    assert "(void )?" not in report.reason
    unnamed = gate(tmp_path / "unnamed", rule.replace('name = "our experts"\n', ""))
    assert (
        f"no /^(void )?kernel_alpha_moe_/ on ranks 0, 1 eager: forbidden /^(void )?kernel_alpha_moe_/ ({SYMBOL}) ran"
        in (unnamed.reason)
    )


def test_a_decode_that_never_ran_names_every_option_that_could_have_kept_it_out(tmp_path: Path) -> None:
    """Executions, one token only, or a batch that fits no graph."""
    steps = tuple(step for step in golden.STEPS if step.execution != "decode_graph_replay")
    settled = cell(gate(tmp_path, steps=steps), SYMBOL, 0, "decode_graph_replay").settled_by
    assert settled is not None
    assert all(option in settled for option in ("--executions", "--max-new-tokens", "--cuda-graph-bs-decode"))
