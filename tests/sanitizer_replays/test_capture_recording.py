"""Captures of traced runs: what each rank stores while it serves, and that a run survives what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.engine import Engine, EngineConfig, NoObserver, Request
from alphamoe_backend.experts.alphamoe_w8a8 import alphamoe_fp8_block_scale_aligned_moe
from alphamoe_backend.experts.factory import create_experts
from alphamoe_backend.experts.stock_reference import stock_experts_reference
from alphamoe_backend.geometry import preset
from alphamoe_backend.handover import DispatchHandover
from alphamoe_backend.kernels.launch import launch_shape, variants
from alphamoe_backend.layer import AlphaMoELayer
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.quantization.fp8 import ExpertWeights
from alphamoe_backend.routing import AlignedPlan
from alphamoe_backend.weights import SeededWeights
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.cli import main
from alphamoe_profiler.rank_messages import RankDevice, RankTask
from alphamoe_sanitizer_replays.captures import store as capture_store
from alphamoe_sanitizer_replays.captures.recording import CaptureRecorder, RankWithCaptures
from alphamoe_sanitizer_replays.captures.records import LaunchInfo
from alphamoe_sanitizer_replays.captures.request import estimate, parse_capture
from alphamoe_sanitizer_replays.captures.store import StoredCapture, find_captures, open_capture
from alphamoe_tracers.errors import UsageError


def rank_task(out: Path, **changes: Any) -> RankTask:
    """Give the only rank of a run of the tiny model."""
    fields: dict[str, Any] = {
        "run_id": "run",
        "out": str(out),
        "rank": 0,
        "world_size": 1,
        "device": "cpu",
        "gpu_uuid": None,
        "shared_gpu": False,
        "communication": "gloo",
        "rendezvous": "",
        "model": "tiny",
        "layers": 2,
        "dtype": "float32",
        "moe_runner_backend": "flashinfer_alphamoe",
        "executions": ("eager",),
        "cuda_graph_bs_decode": None,
        "cuda_graph_bs_prefill": None,
        "max_new_tokens": 3,
        "seed": 5,
        "requests": (),
        "nvtx": False,
        "receipts": False,
        "collector_off": "a test",
        "inject_fault": None,
        "launcher_pid": os.getpid(),
        "spawned_ns": 0,
        "threads": 1,
        "timeout_s": 60.0,
    }
    return RankTask(**(fields | changes))


def serve(
    out: Path, *specs: str, weights: bool = False, backend: str = "flashinfer_alphamoe", lengths: tuple[int, ...] = (5,)
) -> CaptureRecorder:
    """Serve prompts of made-up tokens on one rank in this process, and give what stored its captures."""
    task = rank_task(out, moe_runner_backend=backend)
    factory = RankWithCaptures(tuple(parse_capture(spec) for spec in specs), weights)
    captures = factory.store(task, RankDevice(None, None, None))
    config = EngineConfig(
        model="tiny",
        layers=2,
        rank=0,
        world_size=1,
        device="cpu",
        dtype="float32",
        moe_runner_backend=backend,
        executions=("eager",),
        max_new_tokens=3,
        seed=5,
        nvtx=False,
    )
    engine = Engine(config, DispatchRecorder("run", 0, None, captures), NoObserver(), TensorParallelGroup())
    engine.load()
    engine.warm_up()
    engine.capture(lengths, batch_size=len(lengths))
    requests = [Request(f"r{length}", tuple(range(1, length + 1))) for length in lengths]
    engine.serve(requests, ("eager",))
    return captures


def names(out: Path) -> list[str]:
    """List the captures of rank 0."""
    return [path.name for path in find_captures(out / "captures")] if (out / "captures").is_dir() else []


def test_a_capture_computes_its_own_output_again(tmp_path: Path) -> None:
    """With its weights stored, a capture of the fused path is all that the operator needs to give the same bits."""
    serve(tmp_path, "layer=last,M=prefill", weights=True)
    (path,) = find_captures(tmp_path)
    stored = open_capture(path)
    loaded = {info.name: stored.load(info.name) for info in stored.capture.tensors}
    wanted, _ = loaded.pop("out"), loaded.pop("topk_ids")
    out = torch.zeros_like(wanted)
    alphamoe_fp8_block_scale_aligned_moe(**loaded, **stored.capture.arguments, out=out)
    assert torch.equal(out, wanted)
    assert wanted.abs().max() > 0
    capture = stored.capture
    assert (capture.layer, capture.M, capture.forward_mode, capture.request_ids) == (1, 5, "EXTEND", ("r5@eager",))
    assert (capture.plugin, capture.symbols) == ("alphamoe_w8a8", ("kernel_alpha_moe_w8a8_up_down",))
    assert capture.launch is None
    assert capture.weights_from is None


def test_the_stock_path_is_captured_under_its_own_name_with_the_canonical_weights(tmp_path: Path) -> None:
    """What the experts object really is decides plug-in, symbol and weight layout."""
    serve(tmp_path, "layer=0,M=decode", weights=True, backend="triton")
    (path,) = find_captures(tmp_path)
    stored = open_capture(path)
    assert (stored.capture.plugin, stored.capture.symbols) == ("triton_stock", ("fused_moe_kernel",))
    weights = ExpertWeights(*(stored.load(name) for name in ("gate_up", "gate_up_scale", "down", "down_scale")))
    plan = AlignedPlan(*(stored.load(name) for name in AlignedPlan._fields))
    block_m = stored.capture.arguments["block_m"]
    q, q_scale, topk_weights = (stored.load(n) for n in ("hidden_states", "hidden_states_scale", "topk_weights"))
    again = stock_experts_reference(q, q_scale, weights, plan, topk_weights, block_m=block_m, dtype=torch.float32)
    assert torch.equal(again, stored.load("out"))


def test_without_stored_weights_a_capture_says_how_they_are_drawn_again(tmp_path: Path) -> None:
    """Model, seed, dtype and kind of device are all that seeded weights depend on."""
    serve(tmp_path, "layer=0,M=1")
    stored = open_capture(find_captures(tmp_path)[0])
    assert stored.missing() == ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    origin = stored.capture.weights_from
    assert origin is not None
    assert (origin.model, origin.layers, origin.seed, origin.dtype, origin.device_kind) == (
        "tiny",
        2,
        5,
        "float32",
        "cpu",
    )
    assert not list(tmp_path.rglob("weights-*"))


def test_only_the_first_match_of_each_layer_is_stored_and_with_every_bucket_one_for_each_m(tmp_path: Path) -> None:
    """Steps 0 to 2 are the warm-up, 3 and 4 the prefills, 5 the first decode of two."""
    serve(tmp_path / "first", "M=all", lengths=(5, 9))
    assert names(tmp_path / "first") == ["layer=0-M=5-step=3", "layer=1-M=5-step=3"]
    serve(tmp_path / "each", "layer=0,every=bucket", lengths=(5, 9))
    assert names(tmp_path / "each") == ["layer=0-M=2-step=5", "layer=0-M=5-step=3", "layer=0-M=9-step=4"]


def test_two_requests_for_one_dispatch_store_it_once(tmp_path: Path) -> None:
    """Requests add up; a dispatch that answers both is one capture."""
    captures = serve(tmp_path, "layer=0,M=5", "layer=0,M=prefill")
    assert names(tmp_path) == ["layer=0-M=5-step=3"]
    assert captures.notes() == ()
    assert captures.wall_s > 0


def test_warm_up_traffic_is_captured_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """The purpose of a request is ``witness`` unless it says otherwise."""
    serve(tmp_path / "asked", "layer=0,M=8,purpose=warmup")
    assert names(tmp_path / "asked") == ["layer=0-M=8-step=0"]
    captures = serve(tmp_path / "not", "layer=0,M=8")
    assert names(tmp_path / "not") == []
    assert captures.notes() == ("rank 0: no eager forward matched --capture layer=0,M=8",)


def test_a_full_disk_fails_that_capture_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill does not fit and is noted; the run is served, and what fits is stored."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=capture_store.ROOM_KEPT_BYTES + 20_000))
    captures = serve(tmp_path, "layer=0,M=prefill", "layer=0,M=1", lengths=(200,))
    assert names(tmp_path) == ["layer=0-M=1-step=4"]
    (note,) = captures.notes()
    assert note.startswith("rank 0: capture layer=0-M=200-step=3 is missing: a capture of ")


def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Hopper kernel be what serves every device, compiled by nobody."""

    def compile_cubin(_: str, __: str, defines: dict[str, int]) -> SimpleNamespace:
        name = next(variant.name for variant in variants() if variant.defines() == defines)
        return SimpleNamespace(sha256=f"cubin of {name}", source_sha256="source")

    monkeypatch.setattr("alphamoe_backend.experts.alphamoe_w8a8.implementation", lambda _: "hopper")
    monkeypatch.setattr("alphamoe_backend.kernels.jit.compile_cubin", compile_cubin)


def test_on_a_gpu_of_ours_the_launch_and_the_identity_of_its_code_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch is the rule's for this M and GPU; the output is what the kernel adds in, bfloat16."""
    device = RankDevice("H200", "9.0", 132)
    captures = CaptureRecorder(rank_task(tmp_path), device, (parse_capture("M=1"),), store_weights=False)
    recorder = DispatchRecorder("run", 0, None, captures)
    weights = SeededWeights(preset("tiny"), layers=1, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    experts = create_experts("flashinfer_alphamoe", preset("tiny").moe.local(1), weights.experts(0, 0, 1))
    layer = AlphaMoELayer(0, torch.ones(16, 256), experts, recorder=recorder)
    take = captures.take

    def take_as_on_a_gpu(handover: DispatchHandover) -> None:
        # The experts have run by now: only what is said about them follows the device.
        patched(monkeypatch)
        take(handover)

    monkeypatch.setattr(captures, "take", take_as_on_a_gpu)
    with recorder.forward(
        step=4,
        purpose="witness",
        request_ids=("r",),
        forward_mode="DECODE",
        execution="eager",
        M=1,
        real_tokens=1,
        batch_size=1,
    ):
        layer(torch.ones(1, 256))
    (path,) = find_captures(tmp_path)
    capture = open_capture(path).capture
    rule = launch_shape(experts.geometry, 1, 132)
    assert capture.launch == LaunchInfo(rule.variant, rule.grid, rule.block, rule.cluster, rule.dynamic_smem_bytes)
    assert (capture.cubin_sha256, capture.source_sha256) == (f"cubin of {rule.variant}", "source")
    assert (capture.gpu_name, capture.compute_capability, capture.sm_count) == ("H200", "9.0", 132)
    assert capture.tensor("out").dtype == "bfloat16"


def test_requests_of_other_ranks_are_left_to_them(tmp_path: Path) -> None:
    """A rank that captures nothing has nothing to say about requests that nothing matched."""
    task = rank_task(tmp_path, world_size=2)
    recorder = CaptureRecorder(
        task, RankDevice(None, None, None), (parse_capture("rank=1,layer=0"),), store_weights=False
    )
    assert recorder.notes() == ()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks through the command itself, and what it said on stderr."""
    out = tmp_path_factory.mktemp("runs") / "run"
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", SimpleNamespace(write=said.append, isatty=lambda: False, flush=lambda: None))
        argv = ["--ranks", "2", "--prompt", "text:Write a haiku about kernels", "--max-new-tokens", "2"]
        argv += ["--device", "cpu", "--model", "tiny", "--out", str(out), "--json", f"{out}.json"]
        argv += ["--capture", "layer=0,M=1", "--capture", "rank=all,layer=last,M=prefill"]
        assert main(argv) == 0
    return out, "".join(said)


def test_captures_of_a_traced_run_open_with_verified_hashes(recorded: tuple[Path, str]) -> None:
    """Each rank holds one decode of layer 0 and one prefill of the last layer, of its own slice."""
    out, said = recorded
    found: list[StoredCapture] = [open_capture(path) for path in find_captures(out)]
    for stored in found:
        stored.verify()
    run = RunBundle.open(out).run
    prompt = run.prompts[0].token_count
    assert [(s.capture.rank, s.capture.layer, s.capture.M, s.capture.forward_mode) for s in found] == [
        (rank, layer, M, mode) for rank in (0, 1) for layer, M, mode in ((0, 1, "DECODE"), (1, prompt, "EXTEND"))
    ]
    assert {s.capture.run_id for s in found} == {run.run_id}
    first, second = (next(s for s in found if s.capture.rank == rank and s.capture.layer == 0) for rank in (0, 1))
    assert first.capture.tensor("hidden_states") == second.capture.tensor("hidden_states")
    assert first.capture.tensor("out").sha256 != second.capture.tensor("out").sha256
    assert "up to 4 captures, " in said
    assert f"4 captures in {out / 'captures'}" in said
    assert "--capture layer=0,M=1: the first eager dispatch of M 1 alone, rank all, layer 0" in said
    assert "next: " not in said


def test_showing_a_run_lists_its_captures(recorded: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Rank, layer, M and bytes of each, in words and in JSON; a run without captures has no such key."""
    out, _ = recorded
    assert main(["show", str(out)]) == 0
    told = capsys.readouterr().out
    before, _, after = told.partition("\nINCONCLUSIVE ranks 0, 1: no CUDA device\n")
    assert "\nCaptures: 4\n" in before
    assert before.count(" captures/rank=") == 4
    assert "captured on a CPU: under a tool of sanitize they can only be INCONCLUSIVE" in before
    assert after.splitlines() == ["next: alphamoe-trace doctor"]
    assert main(["show", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["captures"]
    assert [(row["rank"], row["layer"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["bytes"] > 0 and row["variant"] is None for row in rows)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layer=0", "the first eager dispatch alone, rank all, layer 0, which is a prefill; every=bucket"),
        ("M=decode,rank=0+last", "the first eager decode alone, rank 0+last, layer all"),
        ("layer=last,every=bucket", "the first eager dispatch of each M, rank all, layer last"),
    ],
)
def test_a_request_says_what_it_takes(text: str, told: str) -> None:
    """What an option leaves out is told before the run."""
    assert parse_capture(text).told().startswith(told)


def test_a_run_with_captures_checks_clean_and_its_rank_files_vouch_for_them(recorded: tuple[Path, str]) -> None:
    """Every file of a capture is hashed in ranks/N.json, and the time that captures took is told apart."""
    out, _ = recorded
    bundle = RunBundle.open(out)
    assert check(bundle) == []
    for rank in (0, 1):
        record = bundle.rank_file(rank)
        assert record is not None
        listed = [name for name in record.sha256 if name.startswith("captures/")]
        assert len(listed) == 4
        assert record.wall_s["dispatch_captures"] > 0


def test_the_size_that_is_stated_is_an_upper_bound(recorded: tuple[Path, str]) -> None:
    """What was stored is no more than what was stated, and not less than a twentieth of it."""
    out, _ = recorded
    requests = (parse_capture("layer=0,M=1"), parse_capture("rank=all,layer=last,M=prefill"))
    bound = estimate(requests, RunBundle.open(out).run, weights=False)
    stored = sum(open_capture(path).capture.bytes for path in find_captures(out))
    assert bound.captures == 4
    assert bound.bytes / 20 < stored <= bound.bytes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--capture", "layer=9,M=1"), "the run has layers 0 to 1"),
        (("--capture", "M=500"), "no eager forward of this run has M=500"),
        (("--capture", "execution=decode_graph_replay"), "cannot be captured"),
        (("--capture-weights",), "--capture-weights without --capture"),
    ],
)
def test_a_capture_that_cannot_be_ends_the_command_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    """Exit code 2, one line, and no directory."""
    out = tmp_path / "run"
    argv = ["--prompt", "text:Hello", "--max-new-tokens", "2", "--device", "cpu", "--model", "tiny", "--out", str(out)]
    assert main([*argv, *words]) == UsageError.exit_code
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_run_whose_captures_cannot_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upper bound is checked against the disk before a rank is started."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    out = tmp_path / "run"
    argv = ["--prompt", "text:Hello", "--max-new-tokens", "2", "--device", "cpu", "--model", "tiny", "--out", str(out)]
    assert main([*argv, "--capture", "layer=0,M=1", "--capture-weights"]) == 1
    assert "does not fit on the disk" in capsys.readouterr().err
    assert not out.exists()
