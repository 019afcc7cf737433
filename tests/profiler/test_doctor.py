"""The doctor finds what is missing, says what to do, and survives whatever is broken."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from alphamoe_profiler import doctor
from alphamoe_profiler.cli import main
from alphamoe_profiler.doctor import Check, Diagnosis
from alphamoe_profiler.memory import GpuSurvey, VisibleGpu
from alphamoe_profiler.run_records import GpuInfo


def gpu(capability: str, free_gib: int = 130) -> GpuSurvey:
    info = GpuInfo(index=0, name="NVIDIA H200", uuid="GPU-0", compute_capability=capability)
    return GpuSurvey((VisibleGpu(info, free_gib << 30),), "580.1", None)


def test_the_command_answers_in_one_json_document_and_exits_0_where_a_cpu_run_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cpu_run_works"] is True
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert {states[name] for name in ("python", "packages", "gsm8k", "torch")} == {"ok"}
    assert "compute-sanitizer" in states


def test_every_check_that_is_not_ok_says_what_to_do_and_decides_what_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (
        Check("torch", "broken", "OSError: libtorch.so", "reinstall torch"),
        Check("cuda device", "missing", "none", "use another machine", "gpu"),
        Check("triton", "ok", "3.6.0", needed_for="extra"),
    )
    monkeypatch.setattr(doctor, "diagnose", lambda: Diagnosis(checks))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "-> reinstall torch" in out
    assert "-> use another machine" in out
    assert "No run works here" in out


def test_a_cpu_run_works_without_a_gpu_and_a_gpu_run_does_not() -> None:
    cpu_only = Diagnosis((Check("python", "ok", ""), Check("cupti", "missing", "", "", "gpu")))
    assert cpu_only.cpu_run_works
    assert not cpu_only.gpu_run_works
    assert Diagnosis((Check("python", "ok", ""), Check("cupti", "ok", "", "", "gpu"))).gpu_run_works


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "ended with code -6"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("print('not json')", "answered nothing that can be read"),
        ("", "answered nothing that can be read"),
        ("print('[1]')", "answered nothing that can be read"),
    ],
)
def test_a_probe_that_crashes_or_babbles_becomes_a_reason(code: str, why: str) -> None:
    assert doctor._finish_probe(doctor._start_probe(code)) == (None, why)


def test_a_probe_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    answer = doctor._finish_probe(doctor._start_probe("import threading; threading.Event().wait()"))
    assert answer == (None, "no answer within 0.2 s")


def test_two_cupti_libraries_in_one_process_are_broken() -> None:
    check = doctor._cupti({"mapped": ["/a/libcupti.so.13", "/b/libcupti.so.12"], "trouble": ""}, "")
    assert check.state == "broken"
    assert "LD_LIBRARY_PATH" in check.remedy


def test_another_tools_nvtx_injection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsys/libToolsInjection64.so")
    assert doctor._nvtx({"domain": "Domain"}, "").state == "broken"
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/x/libcupti.so.13")
    assert doctor._nvtx({"domain": "Domain"}, "").state == "ok"


@pytest.mark.parametrize(
    ("capability", "words"), [("9.0", "ours, for Hopper"), ("10.3", "FlashInfer's"), ("8.0", "torch reference")]
)
def test_each_gpu_is_told_which_kernel_it_would_run(capability: str, words: str) -> None:
    line = next(check for check in doctor._gpus(gpu(capability)) if check.name == "cuda:0")
    assert words in line.detail


def test_a_gpu_without_room_is_told_that_tiny_runs_instead() -> None:
    line = next(check for check in doctor._gpus(gpu("9.0", free_gib=10)) if check.name == "cuda:0")
    assert "tiny is run instead" in line.detail


def test_a_full_disk_and_little_memory_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1, 1, 1 << 20))
    assert doctor._disk(tmp_path).state == "missing"
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000000 kB\nMemAvailable: 1000000 kB\n")
    assert doctor._memory(meminfo).state == "missing"
    meminfo.write_text("nonsense")
    assert doctor._memory(meminfo).detail == "unknown on this system"


def test_the_sanitizer_is_asked_for_its_version_and_looked_for_where_sanitize_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("ALPHAMOE_COMPUTE_SANITIZER", raising=False)
    assert doctor._sanitizer(tool).state == "missing"
    tool.write_text("#!/bin/sh\necho Version 2025.3.1.0 '(build 1)'\n")
    tool.chmod(0o755)
    found = doctor._sanitizer(tool)
    assert (found.state, found.detail) == ("ok", f"2025.3.1.0, {tool}")
    tool.write_text("#!/bin/sh\necho hello\n")
    monkeypatch.setenv("ALPHAMOE_COMPUTE_SANITIZER", str(tool))
    assert doctor._sanitizer(tmp_path / "none").state == "broken"
    monkeypatch.setenv("ALPHAMOE_COMPUTE_SANITIZER", "/nowhere/tool")
    assert "no such program" in doctor._sanitizer(tool).detail
