"""From a capture to a replay in a process of its own and the check of its output, with a failing twin for each step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from made_captures import ORIGIN, make_capture
from torch import Tensor

from alphamoe_profiler import cli
from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.captures.store import StoredCapture, open_capture
from alphamoe_sanitizer_replays.plugins.protocol import find_plugin
from alphamoe_sanitizer_replays.plugins.uploads import experts_in_use
from alphamoe_sanitizer_replays.replays.job import (
    ReplayInputs,
    check_outputs,
    place_inputs,
    prepare_inputs,
    prepare_job,
    watched_symbols,
)
from alphamoe_sanitizer_replays.replays.process import mapped_tensors, refuse_collectors
from alphamoe_sanitizer_replays.replays.single import ReplayReport, replay_capture
from alphamoe_sanitizer_replays.replays.spec import read_spec
from alphamoe_sanitizer_replays.results import OutputCheck, ReplayResult, read_result
from alphamoe_sanitizer_replays.tool.environment import child_environment
from alphamoe_sanitizer_replays.tool.folder_lock import MARK
from alphamoe_tracers.errors import EvidenceError, UsageError

PLUGINS = Path(__file__).parent / "replay_plugins"


def outputs_of(stored: StoredCapture) -> dict[str, Tensor]:
    return {"out": stored.load("out").clone()}


def check(stored: StoredCapture, outputs: dict[str, Tensor], folder: Path) -> OutputCheck:
    inputs = prepare_inputs(stored, folder)
    return inputs.plugin.check(stored, inputs.tensors, outputs)


def rewrite(stored: StoredCapture, change: Callable[[dict[str, object]], None]) -> StoredCapture:
    path = stored.path / "capture.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return open_capture(stored.path)


@pytest.mark.parametrize("backend", ["flashinfer_alphamoe", "triton"])
def test_a_capture_with_seeded_weights_replays_to_its_own_output(tmp_path: Path, backend: str) -> None:
    """Weights are drawn again, the child runs the reference, and the output is bit for bit the captured one."""
    stored = make_capture(tmp_path / "captures", backend=backend)
    report = replay_capture(stored.path, repeats=2, device="cpu", out=tmp_path / "out")
    (replayed,) = report.replays
    assert (report.verdict, replayed.verdict, replayed.output.verdict) == ("INCONCLUSIVE", "INCONCLUSIVE", "PASS")
    assert replayed.output.max_abs_error == 0
    result = replayed.run.result
    assert result is not None
    assert (result.status, result.variant, result.caching_allocator) == ("launched", "reference", False)
    assert (len(result.cpu_us), result.kernel_us) == (2, ())
    assert {"process_start", "imports", "upload", "launch", "download"} <= set(result.timings_s)
    assert sorted(path.name[:7] for path in (tmp_path / "out").iterdir()) == [MARK[:7], "inputs-", "none"]


def test_stored_weights_are_replayed_where_they_lie(tmp_path: Path) -> None:
    """With --capture-weights nothing is drawn and nothing is written twice."""
    stored = make_capture(tmp_path / "captures", store_weights=True)
    report = replay_capture(stored.path, device="cpu", out=tmp_path / "out")
    assert report.replays[0].output.verdict == "PASS"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MARK, "none"]


def test_weights_of_another_seed_are_refused(tmp_path: Path) -> None:
    """Drawn again from seed 8 they have other hashes, and the message says what to do."""
    stored = make_capture(tmp_path)
    other = rewrite(stored, lambda document: document.update(weights_from=msgspec.to_builtins(ORIGIN) | {"seed": 8}))
    with pytest.raises(EvidenceError, match="drawn again has the hash") as caught:
        prepare_inputs(other, tmp_path)
    assert "--capture-weights" in caught.value.hint


def test_weights_without_a_seed_and_without_a_file_are_refused(tmp_path: Path) -> None:
    """A hash alone makes no weights."""
    stored = rewrite(make_capture(tmp_path), lambda document: document.update(weights_from=None))
    with pytest.raises(EvidenceError, match="not stored, and no seed is known"):
        prepare_inputs(stored, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to draw on")
def test_weights_of_a_gpu_are_not_drawn_on_a_cpu(tmp_path: Path) -> None:
    """Their generators differ, so the message asks for a GPU instead of comparing hashes."""
    origin = msgspec.to_builtins(ORIGIN) | {"device_kind": "cuda"}
    stored = rewrite(make_capture(tmp_path), lambda document: document.update(weights_from=origin))
    with pytest.raises(EvidenceError, match="drawn on a GPU"):
        prepare_inputs(stored, tmp_path)


def test_a_changed_input_file_is_refused(tmp_path: Path) -> None:
    """One flipped byte of a stored tensor is told before anything is launched."""
    stored = make_capture(tmp_path)
    path = stored.path / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    # Whichever tensor lies last in the file, the whole way must not come to its end.
    with pytest.raises(EvidenceError, match="was changed after it was written"):
        check(stored, outputs_of(stored), tmp_path)


@pytest.mark.parametrize("backend", ["flashinfer_alphamoe", "triton"])
def test_an_output_within_the_order_of_additions_passes_and_beyond_it_fails(tmp_path: Path, backend: str) -> None:
    """A last bit here and there is allowed; one element a quarter of the RMS off is not."""
    stored = make_capture(tmp_path, backend=backend)
    near, far = outputs_of(stored), outputs_of(stored)
    near["out"].view(torch.int16)[0, ::3] += 1
    rms = float(far["out"].float().square().mean().sqrt())
    far["out"][1, 5] += rms
    passed, failed = check(stored, near, tmp_path), check(stored, far, tmp_path)
    assert passed.verdict == "PASS"
    assert passed.max_abs_error is not None
    assert passed.max_abs_error > 0
    assert failed.verdict == "FAIL"
    assert "[1, 5]" in failed.reason
    assert failed.max_abs_error == pytest.approx(rms, rel=0.02)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scaled", lambda out: out * 1.05),
        ("a row lost", lambda out: torch.cat([out[:-1], torch.zeros_like(out[:1])])),
        ("rows swapped", lambda out: out.flip(0)),
        ("a NaN", lambda out: out.index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(torch.nan).to(out))),
        ("zeros", torch.zeros_like),
    ],
)
def test_wrong_outputs_fail(tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Each wrong output of a rank's small partial sum is seen, although the absolute tolerance is 0.1."""
    stored = make_capture(tmp_path)
    assert float(stored.load("out").float().abs().max()) < 0.1
    assert check(stored, {"out": change(stored.load("out"))}, tmp_path).verdict == "FAIL", name


def test_a_wrong_captured_output_fails_although_the_replay_repeats_it(tmp_path: Path) -> None:
    """Both are held against the oracle: a kernel that is wrong in the same way twice does not pass."""
    stored = make_capture(tmp_path)
    doubled = {"out": stored.load("out") * 2}

    class Twice(StoredCapture):
        def load(self, name: str) -> Tensor:
            return doubled["out"] if name == "out" else super().load(name)

    twice = Twice(stored.path, stored.capture, stored.sha256)
    failed = check(twice, doubled, tmp_path)
    assert failed.verdict == "FAIL"
    assert failed.max_abs_error == 0
    assert "the captured output is not that of a float64 oracle" in failed.reason


def test_an_output_that_is_missing_or_means_nothing_is_inconclusive(tmp_path: Path) -> None:
    """No output, and inputs whose exact result is zero, prove nothing; another shape is a failure."""
    stored = make_capture(tmp_path)
    assert check(stored, {}, tmp_path).verdict == "INCONCLUSIVE"
    assert check(stored, {"out": stored.load("out")[:1]}, tmp_path).verdict == "FAIL"
    silent = make_capture(tmp_path / "silent", shrink=0.0)
    nothing = check(silent, outputs_of(silent), tmp_path)
    assert nothing.verdict == "INCONCLUSIVE"
    assert "RMS 0" in nothing.reason


def replay_with(stored: StoredCapture, plugin: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ReplayReport:
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    monkeypatch.syspath_prepend(PLUGINS)
    named = rewrite(stored, lambda document: document.update(plugin=plugin))
    return replay_capture(named.path, out=folder / "out")


def test_a_child_that_dies_leaves_no_result_and_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in kills its own process while it launches."""
    report = replay_with(make_capture(tmp_path), "faulty_plugins:DIES", tmp_path, monkeypatch)
    (replayed,) = report.replays
    assert (report.verdict, replayed.run.result, replayed.run.signal) == ("INCONCLUSIVE", None, "SIGKILL")


def test_a_child_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of the launch is the result's error, by its kind, and the verdict is open."""
    report = replay_with(make_capture(tmp_path), "faulty_plugins:RAISES", tmp_path, monkeypatch)
    (replayed,) = report.replays
    assert replayed.run.exit_code == 1
    assert replayed.verdict == "INCONCLUSIVE"
    assert "RuntimeError: " in replayed.reason
    assert "an illegal memory access" in replayed.reason
    assert replayed.output.reason == "the replay failed"


def test_a_child_tells_an_error_of_ours_as_the_command_line_does(tmp_path: Path) -> None:
    """Without the name of a class, and with the way out."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = replay_capture(make_capture(tmp_path).path, device="cuda", out=tmp_path / "out")
    assert report.exit_code == 3
    assert report.replays[0].reason == (
        "the replay failed: there is no CUDA device here (run alphamoe-trace doctor, or name --device cpu)"
    )


def test_a_child_with_a_wrong_output_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the child's output differs, and the exit code is 1."""
    report = replay_with(make_capture(tmp_path), "faulty_plugins:WRONG", tmp_path, monkeypatch)
    assert (report.verdict, report.exit_code) == ("FAIL", 1)


def test_a_child_with_a_collector_refuses_to_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: a plug-in that imports a CUPTI binding is told so, and nothing is launched."""
    report = replay_with(make_capture(tmp_path), "faulty_plugins:COLLECTS", tmp_path, monkeypatch)
    (replayed,) = report.replays
    assert replayed.run.result is not None
    assert replayed.run.result.status == "failed"
    assert "collector" in (replayed.run.result.error or "")


def test_a_profiler_around_the_replay_is_refused() -> None:
    """Its variable is named; nothing of the kind is fine."""
    refuse_collectors({}, {})
    with pytest.raises(UsageError, match="NSYS_PROFILING_SESSION_ID"):
        refuse_collectors({}, {"NSYS_PROFILING_SESSION_ID": "0"})


def test_an_old_result_does_not_pass_for_a_new_one(tmp_path: Path) -> None:
    """Preparing a job removes what an earlier replay of the same folder said."""
    inputs = prepare_inputs(make_capture(tmp_path), tmp_path)
    job = prepare_job(inputs, tmp_path / "job", device="cpu")
    job.result.write_bytes(msgspec.json.encode(ReplayResult(status="launched", caching_allocator=False)))
    assert read_result(prepare_job(inputs, tmp_path / "job", device="cpu").result) is None


@pytest.mark.parametrize(
    "result",
    [
        None,
        ReplayResult(status="failed", error="it broke", caching_allocator=False),
        ReplayResult(status="launched", caching_allocator=False),
        ReplayResult(status="launched", caching_allocator=False, outputs="../elsewhere.safetensors"),
        ReplayResult(status="launched", caching_allocator=False, outputs="gone.safetensors"),
    ],
)
def test_a_replay_that_left_no_output_is_inconclusive(tmp_path: Path, result: ReplayResult | None) -> None:
    """Died, failed, silent about its outputs, pointing elsewhere, or at a file that is not there."""
    inputs = prepare_inputs(make_capture(tmp_path), tmp_path)
    job = prepare_job(inputs, tmp_path / "job", device="cpu")
    assert check_outputs(inputs, job, result).verdict == "INCONCLUSIVE"


def test_a_result_that_is_cut_is_damaged_evidence(tmp_path: Path) -> None:
    """Half a JSON document is not a process that said nothing."""
    path = tmp_path / "replay.json"
    assert read_result(path) is None
    path.write_text('{"status": "laun')
    with pytest.raises(EvidenceError, match="cannot be read"):
        read_result(path)


def test_a_specification_of_another_schema_is_refused(tmp_path: Path) -> None:
    """A child of another version does not guess."""
    inputs = prepare_inputs(make_capture(tmp_path), tmp_path)
    job = prepare_job(inputs, tmp_path / "job", device="cpu")
    assert read_spec(job.spec).device == "cpu"
    job.spec.write_text(job.spec.read_text().replace("replay-v1", "replay-v9"))
    with pytest.raises(EvidenceError, match="replay-v9"):
        read_spec(job.spec)


def test_inputs_that_are_written_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    """The child maps the very bytes that the parent proved, drawn weights and stored inputs alike."""
    stored = make_capture(tmp_path)
    inputs = prepare_inputs(stored, tmp_path)
    mapped = mapped_tensors(inputs.places)
    assert mapped.keys() == inputs.tensors.keys()
    for name, tensor in inputs.tensors.items():
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name].view(torch.uint8), tensor.view(torch.uint8))
    written = {place.file for place in inputs.places} - {str(stored.path / "tensors.safetensors")}
    assert len(written) == 1
    assert place_inputs(tmp_path, stored, inputs.tensors) == inputs.places


def test_only_experts_of_the_used_blocks_are_uploaded() -> None:
    """Entries past the used length and outside the experts count as none; neighbours make one run."""
    ids = torch.tensor([5, 1, 2, 2, -1, 7, 3], dtype=torch.int32)
    assert experts_in_use(ids, torch.tensor([48], dtype=torch.int32), 8, 7) == [(1, 3), (5, 6)]
    assert experts_in_use(ids, torch.tensor([0], dtype=torch.int32), 8, 7) == []


def test_variants_begin_with_the_captured_one_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    """All four compiled variants can be asked for; a fifth is a mistake, and the stock experts have none."""
    inputs = prepare_inputs(make_capture(tmp_path), tmp_path)
    assert set(inputs.plugin.variants(inputs.stored.capture)) == {"t8_c8", "t16_c4", "t32_c2", "t64_w"}
    with pytest.raises(UsageError, match="no variant 't9'"):
        prepare_job(inputs, tmp_path / "job", device="cpu", variant="t9")
    stock = make_capture(tmp_path, backend="triton")
    with pytest.raises(UsageError, match="no variant"):
        ReplayInputs(stock, find_plugin("triton_stock"), {}, (), {}).variant("t8_c8")


def test_a_source_is_no_choice_on_a_cpu(tmp_path: Path) -> None:
    """The reference cannot be compiled from a user's file: the child refuses instead of ignoring it."""
    source = tmp_path / "mine.cu"
    source.write_text("// mine")
    report = replay_capture(make_capture(tmp_path).path, source=source, device="cpu", out=tmp_path / "out")
    assert report.verdict == "INCONCLUSIVE"
    assert "can only be compiled for a GPU" in report.replays[0].reason


def test_plugins_are_found_by_name_entry_point_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown names list the known ones; what is no plug-in is told what it lacks."""
    assert find_plugin("alphamoe_w8a8").name == "alphamoe_w8a8"
    monkeypatch.syspath_prepend(PLUGINS)
    assert find_plugin("faulty_plugins:WRONG").name == "wrong"
    with pytest.raises(UsageError, match="no replay plug-in named 'nothing'") as caught:
        find_plugin("nothing")
    assert "alphamoe_w8a8" in caught.value.hint
    with pytest.raises(UsageError, match="has no name, variants"):
        find_plugin("json:dumps")
    with pytest.raises(UsageError, match="cannot be loaded"):
        find_plugin("no_such_module:x")


def test_the_command_reports_in_words_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output's distance and times for a person; the same verdict in JSON, and the exit code is its own."""
    stored = make_capture(tmp_path / "captures")
    target = tmp_path / "report.json"
    assert cli.main(["replay", str(stored.path), "--device", "cpu", "--repeats", "1", "--json", str(target)]) == 3
    told = capsys.readouterr().out
    assert "rank 2 layer 1 M 3" in told
    assert "median" in told
    document = json.loads(target.read_text())
    assert document["verdict"] == "INCONCLUSIVE"
    assert document["replays"][0]["output"]["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "-1"], "cannot be negative"),
        (["--tool", "racecheck", "--repeats", "3"], "a tool would slow down"),
        (["--device", "tpu"], "no such device"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Exit code 2 and one line."""
    assert cli.main(["replay", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_several_captures_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reproducer replays one; none at all is a mistake too."""
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "no capture lies here" in capsys.readouterr().err
    make_capture(tmp_path, M=1)
    make_capture(tmp_path, M=2)
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "holds 2 captures" in capsys.readouterr().err


def test_what_only_looks_like_a_capture_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sound capture beside a damaged one is not the one that was meant, unless it is named itself."""
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tensors.safetensors").touch()
    assert cli.main(["replay", str(tmp_path)]) == 3
    assert "it has no capture.json" in capsys.readouterr().err
    stored = make_capture(tmp_path, M=1)
    assert cli.main(["replay", str(tmp_path), "--device", "cpu"]) == 2
    assert f"name the one: {stored.path}" in capsys.readouterr().err
    (stored.path / "within").mkdir()
    (stored.path / "within" / "tensors.safetensors").touch()
    assert cli.main(["replay", str(stored.path), "--device", "cpu"]) == 3
    assert "output: that of the capture" in capsys.readouterr().out


def test_the_child_imports_nothing_that_it_does_not_need() -> None:
    """A replay starts under a tool for each variant: no pandas, no pyarrow, no collector, no triton."""
    code = (
        "import sys; import alphamoe_sanitizer_replays.replays.process as r; r.find_plugin('alphamoe_w8a8');"
        "import safetensors.torch; from alphamoe_backend.experts import alphamoe_w8a8;"
        "print(*[m for m in ('pandas', 'pyarrow', 'rich', 'triton', 'cupti', 'alphamoe_tracers.collector',"
        " 'alphamoe_profiler.session', 'alphamoe_backend.engine', 'cuda.core') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child_environment()
    )
    assert done.stdout.strip() == ""


def test_the_childs_environment_is_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No caching allocator, no ranges, no injection, whatever the parent's environment holds."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/somewhere/libinjection.so")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environment = child_environment()
    assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert environment["ALPHAMOE_TRACE_NVTX"] == "0"
    assert not {"NVTX_INJECTION64_PATH", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys()


def test_a_plug_in_named_by_mistake_can_be_replaced_without_another_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option replays what the capture's own name cannot; a name of nothing is a usage error of both commands."""
    stored = make_capture(tmp_path / "captures")
    rewrite(stored, lambda document: document.update(plugin="nope:Nope"))
    words = [str(stored.path), "--device", "cpu"]
    assert cli.main(["replay", *words]) == 2
    assert cli.main(["replay", *words, "--plugin", "alphamoe_w8a8"]) == 3
    assert "output: that of the capture" in capsys.readouterr().out
    out = ["--tool", "none", "--out", str(tmp_path / "report")]
    assert cli.main(["sanitize", *words, "--plugin", "nothing", *out]) == 2
    assert not (tmp_path / "report").exists()
    cli.main(["sanitize", *words, "--plugin", "alphamoe_w8a8", *out])
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert document["entries"][0]["output"]["verdict"] == "PASS"
    capsys.readouterr()


def test_a_plug_in_may_look_at_a_capture_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says against it is the reason; nothing is drawn or written."""
    monkeypatch.syspath_prepend(PLUGINS)
    stored = rewrite(make_capture(tmp_path), lambda document: document.update(plugin="faulty_plugins:REFUSES"))
    with pytest.raises(EvidenceError, match="M 3 is not mine"):
        prepare_inputs(stored, tmp_path / "inputs")
    assert not (tmp_path / "inputs").exists()


def test_initcheck_watches_every_kernel_of_a_call_that_launches_others() -> None:
    """What a kernel wrote that it does not watch it takes for unwritten; the other tools watch the target alone."""
    capture = Capture(
        plugin="callable",
        symbols=("moe_gemm",),
        run_id=None,
        rank=0,
        rank_source="none",
        M=1,
        gpu_name=None,
        compute_capability=None,
        tensors=(),
        versions={},
        created="",
    )
    for name in ("callable", "torch_op"):
        assert watched_symbols("initcheck", find_plugin(name), capture) == ()
        assert watched_symbols("racecheck", find_plugin(name), capture) == ("moe_gemm",)
    for name in ("alphamoe_w8a8", "triton_stock"):
        assert watched_symbols("initcheck", find_plugin(name), capture) == ("moe_gemm",)
