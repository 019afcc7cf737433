"""The command itself on a CPU: a traced run of real ranks, and what is left when one of them dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.cli import main
from alphamoe_profiler.prompts import GSM8K_SHA256
from alphamoe_profiler.rank_messages import RankMessage
from alphamoe_profiler.session import SessionResult, run_session
from alphamoe_profiler.trace_config import TraceConfig

pytestmark = pytest.mark.slow
PLANTED = "hf_abcdefghijklmnop"


def trace(out: Path, *words: str, ranks: int = 2) -> int:
    argv = ["--ranks", str(ranks), "--device", "cpu", "--model", "tiny", "--max-new-tokens", "3", "--out", str(out)]
    return main([*argv, *words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One complete run: two prompts on two ranks."""
    out = tmp_path_factory.mktemp("runs") / "complete"
    assert (
        trace(out, "--prompt", "gsm8k:17", "--prompt", f"text:my key is {PLANTED}", "--json", str(out) + ".json") == 0
    )
    return out


def test_a_cpu_run_is_complete_checks_clean_and_is_inconclusive_for_want_of_a_device(recorded: Path) -> None:
    bundle = RunBundle.open(recorded)
    assert check(bundle) == []
    outcome = bundle.outcome()
    assert outcome is not None
    assert outcome.complete
    report = json.loads(Path(f"{recorded}.json").read_text())
    assert report["verdict"] == "INCONCLUSIVE"
    assert "no CUDA device" in report["reason"]


def test_run_json_holds_the_identity_of_prompt_code_and_machine_and_no_secret(recorded: Path) -> None:
    run = RunBundle.open(recorded).run
    assert (run.world_size, run.device_kind, run.model, run.executions) == (2, "cpu", "tiny", ("eager",))
    first, second = run.prompts
    assert (first.dataset, first.row, first.dataset_sha256, first.token_count) == ("gsm8k", 17, GSM8K_SHA256, 906)
    assert second.dataset is None
    assert run.source.tree_sha256 is not None
    assert len(run.source.tree_sha256) == 64
    assert {"python", "torch", "pyarrow", "mistral-common"} <= run.versions.keys()
    assert "SGLANG_FLASHINFER_ALPHAMOE_ROUTER_ONLY" in run.environment
    assert PLANTED not in (recorded / "run.json").read_text()


def test_both_ranks_left_equal_receipts_with_the_padding_and_step_of_each_forward(recorded: Path) -> None:
    bundle = RunBundle.open(recorded)
    by_rank = [[r for r in bundle.receipts(rank).receipts if r.purpose == "witness"] for rank in range(2)]
    assert [(r.step, r.forward_mode, r.M, r.real_tokens) for r in by_rank[0]] == [
        (r.step, r.forward_mode, r.M, r.real_tokens) for r in by_rank[1]
    ]
    assert [r.forward_mode for r in by_rank[0]] == ["EXTEND", "EXTEND", "DECODE", "DECODE"]
    assert by_rank[0][0].M == 906
    assert {r.request_ids for r in by_rank[0]} >= {("request-0@eager",), ("request-1@eager",)}


def test_requests_hold_what_was_asked_and_what_was_answered(recorded: Path) -> None:
    requests = RunBundle.open(recorded).requests()
    assert [request.request_id for request in requests] == ["request-0@eager", "request-1@eager"]
    assert all(request.status == "finished" and request.completion_tokens == 3 for request in requests)
    assert requests[0].prompt.endswith("annual salary?\nAnswer:")
    assert all(request.response and request.executions == ("eager",) for request in requests)


def test_each_rank_file_keeps_its_wall_times_apart_and_has_three_memory_snapshots(recorded: Path) -> None:
    for rank in range(2):
        record = RunBundle.open(recorded).rank_file(rank)
        assert record is not None
        assert {"start_up", "load", "warm_up", "capture", "prefill", "decode", "collection"} <= record.wall_s.keys()
        assert [taken.label for taken in record.memory] == ["after_start_up", "after_graph_capture", "after_run"]
        assert (record.collector.state, record.collector.reason) == ("off", "no CUDA device")
        assert record.receipts == len(RunBundle.open(recorded).receipts(rank).receipts)


def test_show_prints_the_same_report_again(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(recorded), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(f"{recorded}.json").read_text())
    assert main(["show", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "gsm8k:17" in out
    assert "INCONCLUSIVE" in out


def test_force_replaces_a_run_and_its_absence_does_not(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (recorded / "run.json").read_bytes()
    assert trace(recorded, "--prompt", "text:hi") == 2
    assert "--force" in capsys.readouterr().err
    assert (recorded / "run.json").read_bytes() == before


def cut_short(out: Path, capsys: pytest.CaptureFixture[str], fault: str) -> tuple[str, RunBundle]:
    """Run with a planted fault; returns what stderr said and the bundle that is left."""
    began = time.monotonic()
    assert trace(out, "--prompt", "text:hi", "--inject-fault", fault) == 1
    assert time.monotonic() - began < 30 + 30  # 30 s to end after the fault, and a start-up on a busy machine
    *before, err = capsys.readouterr().err.splitlines()
    assert err.startswith("alphamoe-trace: ")
    assert all(re.fullmatch(r"[a-z :,A-Z]+, \d+ s", line) for line in before), "what the ranks were doing until then"
    outcome = RunBundle.open(out).outcome()
    assert outcome is not None
    assert not outcome.complete
    return err, RunBundle.open(out)


@pytest.mark.parametrize("phase", ["start_up", "prefill", "collection"])
def test_a_rank_killed_in_any_phase_is_named_and_what_was_recorded_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    err, bundle = cut_short(tmp_path / "run", capsys, f"kill:rank=1,phase={phase}")
    assert f"rank 1 was killed by SIGKILL in {phase}" in err
    assert bundle.rank_file(1) is None
    assert any("rank 1" in problem for problem in check(bundle))
    if phase == "collection":
        assert [r.forward_mode for r in bundle.receipts(1).receipts if r.purpose == "witness"] == ["EXTEND"] + 2 * [
            "DECODE"
        ]


def test_a_rank_that_raises_leaves_its_reason_and_the_receipts_up_to_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err, bundle = cut_short(tmp_path / "run", capsys, "exception:rank=0,phase=decode")
    assert "rank 0 failed in decode: planted by --inject-fault exception:rank=0,phase=decode" in err
    record = bundle.rank_file(0)
    assert record is not None
    assert (record.ended, record.error) == ("exception", "planted by --inject-fault exception:rank=0,phase=decode")
    assert [r.forward_mode for r in bundle.receipts(0).receipts if r.purpose == "witness"] == ["EXTEND"]
    assert [request.status for request in bundle.requests()] == ["cut"]


def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_nothing_of_that_rank_looks_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err, bundle = cut_short(tmp_path / "run", capsys, "disk-full:rank=1,phase=decode")
    assert "rank 1 failed in decode: OSError: [Errno 27] File too large" in err
    assert bundle.rank_file(1) is None


def test_a_real_kill_from_outside_is_named_too(tmp_path: Path) -> None:
    """Not a planted fault: another process sends SIGKILL to rank 1 while it decodes."""

    def kill_rank_1(message: RankMessage) -> None:
        if message.rank == 1 and message.phase == "decode":
            victim = next(p for p in multiprocessing.active_children() if p.name == "alphamoe-rank-1")
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)

    options: dict[str, Any] = {"ranks": 2, "device": "cpu", "model": "tiny", "max_new_tokens": 400}
    result = run_session(TraceConfig(prompts=("text:hi",), out=tmp_path / "run", **options), kill_rank_1)
    assert isinstance(result, SessionResult)
    assert result.error == "rank 1 was killed by SIGKILL in decode"
    bundle = RunBundle.open(tmp_path / "run")
    assert all(bundle.receipts(rank).receipts for rank in range(2))
