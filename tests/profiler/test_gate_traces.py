"""The gate on traces of other tools: small made-up ones, and the real ones with values that others counted."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.cli import main
from alphamoe_profiler.gate import evaluate
from alphamoe_profiler.gate_records import GateReport
from alphamoe_profiler.importing import ImportConfig, run_import
from alphamoe_profiler.policy_source import builtin_policy, parse_policy
from alphamoe_profiler.verdicts import Verdict
from alphamoe_tracers.errors import UsageError

PASS, FAIL, OPEN, CONFIG = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.CONFIG_ERROR
Event = dict[str, Any]


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7) -> Event:
    args = {"device": 0, "stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def launch(name: str, ts: float, correlation: int) -> Event:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 900, "tid": 900, "ts": ts, "dur": 2, "args": args}


def ran(*names: str) -> list[Event]:
    """Kernels one after the other, each with its launch."""
    events = []
    for number, name in enumerate(names, start=1):
        events += [launch("cudaLaunchKernel", 100 * number, number), kernel(name, 100 * number + 10, 5, number)]
    return events


def written(folder: Path, ranks: dict[int, list[Event]], world_size: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank, events in ranks.items():
        path = folder / f"p-TP-{rank}.trace.json"
        info = {"rank": rank, "world_size": world_size}
        path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
        paths.append(path)
    return paths


def gate(folder: Path, paths: list[Path], ranks: int, policy: str, mapping: tuple[str, ...] = ()) -> GateReport:
    out = folder / "run"
    run_import(ImportConfig(tuple(paths), ranks, out, mapping), lambda plan: lambda index, done, size: None)
    return evaluate(RunBundle.open(out), [parse_policy(policy, "p")])


def moved(events: list[Event], us: float) -> list[Event]:
    """The same events later: no two ranks have equal timestamps."""
    return [event | {"ts": event["ts"] + us} for event in events]


def require(symbol: str, match: str = "base", extra: str = "") -> str:
    return f"[[require]]\nsymbol = '{symbol}'\nmatch = '{match}'\n{extra}"


def witnesses(report: GateReport) -> dict[int | None, int]:
    return {cell.rank: cell.finding.witnesses for cell in report.cells if report.rules[cell.rule].kind == "require"}


def test_a_fallback_on_one_rank_fails_and_names_rank_and_count(tmp_path: Path) -> None:
    ranks = {
        0: ran("bmm_moe_x", "bmm_moe_x", "bmm_moe_x"),
        1: moved(ran("bmm_moe_x", "bmm_moe_x", "fused_moe_kernel"), 3),
    }
    policy = require("bmm_moe_x") + "[[forbid]]\nsymbol = 'fused_moe_kernel'\n"
    report = gate(tmp_path, written(tmp_path / "t", ranks, 2), 2, policy)
    assert report.verdict is FAIL
    assert report.reason == "no fused_moe_kernel on rank 1: forbidden fused_moe_kernel ran 1 times"
    assert witnesses(report) == {0: 3, 1: 2}


def test_a_missing_rank_is_inconclusive_and_named_and_is_never_counted_from_files(tmp_path: Path) -> None:
    report = gate(tmp_path, written(tmp_path / "t", {0: ran("k"), 1: ran("k")}, 4), 4, require("k"))
    assert report.verdict is OPEN
    assert report.reason.startswith("k on ranks 2, 3: no trace was imported for the rank")
    settled = {cell.settled_by for cell in report.cells if cell.rank == 2}
    assert settled == {"a GPU trace of rank 2"}


def test_two_equal_traces_stay_two_ranks_when_a_map_says_so_and_a_long_clone_is_refused(tmp_path: Path) -> None:
    paths = []
    for name, count in (("a", 1), ("b", 1), ("long_a", 40), ("long_b", 40)):
        paths.append(tmp_path / f"{name}.json")
        extra = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}]
        paths[-1].write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*ran(*["moe_gemm"] * count), *extra]}))
    report = gate(tmp_path / "short", paths[:2], 2, require("moe_gemm"), ("a.json=0", "b.json=1"))
    assert witnesses(report) == {0: 1, 1: 1}
    with pytest.raises(UsageError, match="one rank under two names"):
        gate(tmp_path / "long", paths[2:], 2, require("moe_gemm"), ("long_a.json=0", "long_b.json=1"))


def test_host_launches_without_a_gpu_kernel_are_no_evidence(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]
    events.append(launch("cudaGraphLaunch", 5, 9))
    paths = written(tmp_path / "t", {0: events, 1: events[:1]}, 2)
    for number, policy in enumerate((require("k"), "[[forbid]]\nsymbol = 'k'\n")):
        report = gate(tmp_path / str(number), paths, 2, policy)
        assert report.verdict is OPEN
        assert [rank.kernels for rank in report.inspected] == [0, 0]
    report = gate(tmp_path / "misspelt", written(tmp_path / "m", {0: ran("moe_gemm")}, 1), 1, require("moe_gem"))
    assert report.verdict is FAIL
    assert report.notes[0] == "moe_gem matches no kernel on any rank; nearest: moe_gemm"


T4 = (
    "void combineKernel<half, DispatchLayout::RANK_MAJOR>(Args)",
    "void cutlass::device_kernel<ns::GroupedGemm<e4m3, 128>>(P)",
    "void cutlass::device_kernel<ns::Reduce<f32>>(P)",
    "_Z12moe_scatter4PfiE",
    "fused_moe_kernel",
    "fused_moe_kernel_gptq_awq",
    "fused_moe_kernel_0d1d2de3",
)


@pytest.mark.parametrize(
    ("symbol", "match", "kernels", "verdict"),
    [
        ("dispatch", "base", 0, FAIL),
        ("GroupedGemm", "full", 1, PASS),
        ("device_kernel", "base", 2, PASS),
        ("fused_moe_kernel", "base", 1, PASS),
        ("fused_moe_kernel", "triton", 2, PASS),
        ("_Z12moe_scatter4PfiE", "mangled", 1, PASS),
    ],
)
def test_names_are_matched_in_one_form(tmp_path: Path, symbol: str, match: str, kernels: int, verdict: Verdict) -> None:
    report = gate(tmp_path, written(tmp_path / "t", {0: ran(*T4)}, 1), 1, require(symbol, match))
    assert (report.verdict, witnesses(report)) == (verdict, {0: kernels})
    ambiguous = [note for note in report.notes if "is ambiguous: 2 full names" in note]
    assert bool(ambiguous) is (kernels == 2)


def test_a_truncated_name_cannot_prove_absence_but_others_are_seen(tmp_path: Path) -> None:
    paths = written(tmp_path / "t", {0: ran("void cutlass::Kernel<cutlass_80_tensorop_s16…", "k")}, 1)
    report = gate(tmp_path / "absent", paths, 1, require("GroupedGemm", "full"))
    assert report.verdict is OPEN
    assert "cut" in report.reason
    assert gate(tmp_path / "seen", paths, 1, require("k")).verdict is PASS


def test_times_of_zero_or_below_leave_presence_and_counts(tmp_path: Path) -> None:
    events = [
        launch("cudaLaunchKernel", 990, 1), kernel("a", 0, 0, 1), launch("cudaLaunchKernel", 991, 2),
        kernel("a", 1000.5, 4, 2), launch("cudaLaunchKernel", 992, 3), kernel("b", 1010, -3, 3),
        launch("cudaLaunchKernel", 1020, 4), kernel("b", 1019.2, 5, 4),
    ]  # fmt: skip
    policy = require("a", extra="exactly = 2\n") + require("b", extra="exactly = 2\n")
    report = gate(tmp_path, written(tmp_path / "t", {0: events}, 1), 1, policy)
    assert report.verdict is PASS
    first = next(cell.first for cell in report.cells if cell.rank == 0)
    assert first is not None
    assert first.start_ns > 0


def test_a_record_delivered_twice_counts_once(tmp_path: Path) -> None:
    events = [launch("cudaLaunchKernel", 90, 33), kernel("k", 100, 50, 33), kernel("k", 100, 50, 33)]
    events += [launch("cudaLaunchKernel", 290, 55), kernel("k", 300, 10, 55), kernel("k", 300, 10, 55, stream=9)]
    report = gate(tmp_path, written(tmp_path / "t", {0: events}, 1), 1, require("k", extra="exactly = 3\n"))
    assert report.verdict is PASS
    assert any("1 records were delivered twice" in note for note in report.notes)


def test_a_capture_folders_traces_are_shapes_and_no_execution(tmp_path: Path) -> None:
    folder = tmp_path / "capture_traces"
    (path,) = written(folder, {0: ran("moe_gemm")}, 1)
    path.rename(folder / "bs_8_rank0.json")
    report = gate(tmp_path, [folder], 1, require("moe_gemm"))
    assert report.verdict is not PASS


def test_kernels_outside_the_stated_request_window_are_no_presence(tmp_path: Path) -> None:
    (path,) = written(tmp_path / "t", {0: ran("moe_gemm", "other")}, 1)
    out = tmp_path / "run"
    config = ImportConfig((path,), 1, out, window_ns=(150_000, 400_000))
    run_import(config, lambda plan: lambda index, done, size: None)
    report = evaluate(RunBundle.open(out), [parse_policy(require("moe_gemm"), "p")])
    assert report.verdict is not PASS
    warm = ImportConfig((path,), 1, tmp_path / "warm", purpose="warmup")
    run_import(warm, lambda plan: lambda index, done, size: None)
    report = evaluate(RunBundle.open(tmp_path / "warm"), [parse_policy(require("moe_gemm"), "p")])
    assert report.verdict is not PASS


def sqlite_trace(path: Path, block: bool) -> Path:
    db = sqlite3.connect(path)
    db.executescript(
        """
        CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT);
        INSERT INTO StringIds VALUES (1,'cudaGraphLaunch_v10000'),(2,'moe_gemm'),(3,'cudaLaunchKernel_v7000');
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start INT, end INT, eventClass INT, globalTid INT, correlationId INT,
            nameId INT, returnValue INT);
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (90,95,0,16777217,8,3,0),(1000,1010,0,16777217,55,1,0);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start INT, end INT, deviceId INT, contextId INT, streamId INT,
            correlationId INT, globalPid INT, demangledName INT, shortName INT, gridX INT, gridY INT, gridZ INT,
            blockX INT, blockY INT, blockZ INT, graphNodeId INT);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (100,110,0,1,7,8,16777216,2,2,1,1,1,1,1,1,NULL);
        """
    )
    if block:
        db.executescript(
            """
            CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE(start INT, end INT, deviceId INT, contextId INT, streamId INT,
                correlationId INT, globalPid INT, graphId INT);
            INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1012,1900,0,1,7,55,16777216,3);
            """
        )
    else:
        rows = [(1012 + 10 * n, 1020 + 10 * n, 0, 1, 7, 55, 16777216, 2, 2, 1, 1, 1, 1, 1, 1, 11 + n) for n in range(3)]
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows)
    db.commit()
    db.close()
    return path


def test_a_graph_traced_as_one_block_is_inconclusive_with_the_option_that_shows_its_nodes(tmp_path: Path) -> None:
    rule = require("moe_gemm", extra="executions = ['decode_graph_replay']\n")
    report = gate(tmp_path / "block", [sqlite_trace(tmp_path / "block.sqlite", True)], 1, rule)
    assert report.verdict is OPEN
    (own,) = [cell for cell in report.cells if cell.rank == 0]
    assert own.finding.witnesses == 0
    assert own.settled_by is not None
    assert "--cuda-graph-trace=node" in own.settled_by
    report = gate(tmp_path / "nodes", [sqlite_trace(tmp_path / "nodes.sqlite", False)], 1, rule)
    assert (report.verdict, witnesses(report)) == (PASS, {0: 3})


LOG = (
    '[2026-01-31 12:00:00 TP{rank}] ALPHAMOE_RUNTIME_EXECUTION {{"M": {M}, "attribution": "direct_submissions", '
    '"batch_size": 1, "execution": "eager", "forward_mode": "EXTEND", "graph_backend": null, "graph_key": null, '
    '"kernels": [{{"E": 512, "H": 2048, "I_local": 128, "M": {M}, "block_m": 8, "captured": false, "device": 0, '
    '"kernel": "alphamoe_fp8_block_scale_aligned_moe", "top_k": 10}}], "real_tokens": {M}, '
    '"schema": "sglang-flashinfer-alphamoe-runtime-v2"}}\n'
)


def test_of_a_server_log_sets_are_judged_counts_are_a_config_error_and_presence_stays_open(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(LOG.format(rank=rank, M=M) for rank in (0, 1) for M in (13, 97)))
    symbol = require("kernel_alpha_moe_w8a8_up_down")
    sets = "[[dispatch]]\nexecutions = ['eager']\n[dispatch.M]\nof = 'dispatch'\n"

    def judged(name: str, policy: str) -> GateReport:
        return gate(tmp_path / name, [log], 2, policy)

    report = judged("right", symbol + sets + "exact = [13, 97]\n")
    assert report.verdict is OPEN
    assert "a server log is no witness" in report.reason
    kinds = {report.rules[cell.rule].kind: cell.finding.verdict for cell in report.cells if cell.rank == 1}
    assert kinds == {"require": OPEN, "dispatch": PASS}
    assert judged("set", symbol + sets + "exact = [13]\n").verdict is FAIL
    for name, policy in (
        ("exactly", symbol + "exactly = 3\n"),
        ("receipts", symbol + "equals_receipts = true\n"),
        ("layers", symbol + "per_layer = 1\n"),
        ("ranks", symbol + "equal_across_ranks = true\n"),
        ("forwards", symbol + "[[dispatch]]\nexactly = 2\n"),
    ):
        report = judged(name, policy)
        assert report.verdict is CONFIG, name
        assert "it holds sets, never counts" in report.reason


def test_traces_are_gated_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    written(folder, {0: ran("fused_moe_kernel"), 1: ran("fused_moe_kernel_0d1d2de3")}, 2)
    target = tmp_path / "gate.json"
    words = ["gate", str(folder), "--ranks", "2", "--json", str(target)]
    assert main([*words, "--require-backend", "triton"]) == 0
    assert json.loads(target.read_text())["run_directory"] == str(folder)
    assert main([*words, "--require-backend", "marlin"]) == 1
    assert "fused_moe_kernel (triton) ran 1 times" in " ".join(capsys.readouterr().out.split())
    assert main([*words[:3], "4", "--require-backend", "triton"]) == 2  # the content says world size 2


# Real traces, and values that were counted independently of this project.


def test_every_symbol_of_the_megatron_set_is_witnessed_on_eight_ranks(shared: Path, tmp_path: Path) -> None:
    names: set[str] = set()
    for path in sorted((shared / "traces/megatron-tp8-a100").glob("*.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names |= {event["name"] for event in events if event.get("cat") == "kernel"}
    assert len(names) == 40
    listed = ", ".join(json.dumps(name) for name in sorted(names))
    policy = f"[[require]]\nmatch = 'mangled'\nequal_across_ranks = true\nsymbols = [{listed}]\n"
    report = gate(tmp_path, [shared / "traces/megatron-tp8-a100"], 8, policy)
    assert (report.verdict, report.reason) == (PASS, "40 symbols witnessed 5,520 times on ranks 0-7")
    for rank in range(8):
        own = [c for c in report.cells if c.rank == rank and report.rules[c.rule].kind == "require"]
        assert sum(cell.finding.witnesses for cell in own) == 690


@pytest.mark.parametrize("symbol", ["Onesweep", "Histogram", "ExclusiveSum"])
def test_a_kernel_of_two_dlrm_ranks_fails_on_the_six_others(shared: Path, tmp_path: Path, symbol: str) -> None:
    report = gate(tmp_path, [shared / "traces/dlrm-8xv100"], 8, require(f"DeviceRadixSort{symbol}Kernel"))
    assert report.verdict is FAIL
    assert report.reason.endswith("on ranks 0-2, 5-7: not seen in a window proven complete")
    assert [cell.rank for cell in report.cells if cell.finding.verdict is FAIL] == [0, 1, 2, 5, 6, 7]
    loose = [note for note in report.notes if "64 kernels have no launch record" in note or "submitted before" in note]
    assert {note.split(":")[0] for note in loose} == {"rank 1", "rank 3"}


def test_one_rank_of_eight_leaves_the_others_inconclusive(shared: Path, tmp_path: Path) -> None:
    trace = shared / "traces/vllm-b200/eager_trace.json.gz"
    run_import(ImportConfig((trace,), 8, tmp_path / "run"), lambda plan: lambda index, done, size: None)
    report = evaluate(RunBundle.open(tmp_path / "run"), [builtin_policy("flashinfer_trtllm")])
    assert report.verdict is OPEN
    assert report.reason.startswith("TensorRT-LLM batched GEMM on ranks 1-7: no trace was imported")
    assert witnesses(report)[0] == 72
    policy = require("TensorRT", extra="").replace("TensorRT", "finalizeKernelVecLoad") + "[require.M]\nexact = [888]\n"
    out = gate(tmp_path / "m", [trace], 8, policy)
    assert next(cell.finding.verdict for cell in out.cells if cell.rank == 0) is PASS


def test_launches_without_their_kernels_leave_absence_open_in_the_two_gpu_trace(shared: Path, tmp_path: Path) -> None:
    trace = shared / "traces/nsys/mfu_2gpu_before.sqlite"
    mapping = (f"{trace.name}:144=0", f"{trace.name}:145=1")
    report = gate(tmp_path, [trace], 2, require("never_there"), mapping)
    assert report.verdict is OPEN
    own = [cell for cell in report.cells if cell.rank is not None]
    assert any("launches show no kernel" in cell.finding.reason for cell in own)
    assert sum(rank.kernels for rank in report.inspected) == 4010
