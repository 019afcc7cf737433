"""Positive controls: the table fits the source, every planted fault is in the code, and what each outcome proves."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from elftools.elf.elffile import ELFFile

from alphamoe_sanitizer_replays.controls import process as control_process
from alphamoe_sanitizer_replays.controls.judge import ControlRun, judge_controls
from alphamoe_sanitizer_replays.controls.process import arch_of, compile_controls, read_control_result
from alphamoe_sanitizer_replays.controls.table import (
    BY_NAME,
    CANARIES,
    CONTROLS,
    ControlJob,
    control_jobs,
)
from alphamoe_sanitizer_replays.reports import scope
from alphamoe_sanitizer_replays.results import TOOLS, Access, Finding, Summary, Tool, ToolLog, ToolRun

TARGET = "kernel_alpha_moe_w8a8_up_down"
CLEAN = ToolLog(tool="racecheck", banner=True, summaries=(Summary(errors=0, hazards=0),), findings=())


def run_of(job: ControlJob, log: ToolLog | None, **changes: object) -> ToolRun:
    run = ToolRun(
        tool=job.tool,
        tool_path="tool",
        tool_version="2025.3",
        argv=(),
        error_exitcode=86,
        exit_code=86 if log is not None and log.findings else 0,
        timeout_s=9.0,
        wall_s=1.0,
        log_file=None,
        log=log,
        xml_records=0,
    )
    return msgspec.structs.replace(run, **changes)


def race(name: str, severity: str = "error") -> Finding:
    """The finding as racecheck prints it: the inlined device functions, and no kernel."""
    place = Access(f"void {name}<(bool)1>(float *)", "planted_faults.cu", 18)
    return Finding(tool="racecheck", severity=severity, kind="hazard", text="Race", where=place, other=place)  # type: ignore[arg-type]


def good_runs(tool: Tool = "racecheck", *, missed: str = "", severity: str = "error") -> list[ControlRun]:
    """What a tool that catches everything but ``missed`` leaves."""
    runs = []
    for job in control_jobs(tool, (TARGET,)):
        names = [CANARIES[tool][0]] if job.canary else [k.removeprefix("planted_") for k in job.kernels]
        found = () if job.name == "sound" else tuple(race(name, severity) for name in names if name != missed)
        log = msgspec.structs.replace(CLEAN, tool=tool, findings=found)
        runs.append(ControlRun(job, run_of(job, log), job.kernels))
    return runs


def changed(runs: list[ControlRun], name: str, **changes: object) -> tuple[ControlRun, ...]:
    return tuple(
        replace(own, run=msgspec.structs.replace(own.run, **changes)) if own.job.name == name else own for own in runs
    )


def test_controls_name_the_gpu_that_they_all_ran_on() -> None:
    """Two of them are a problem: what was caught on one says nothing of the other."""
    runs = [replace(own, device="H200") for own in good_runs()]
    report = judge_controls("racecheck", tuple(runs), (TARGET,))
    assert (report.device, report.basic_caught) == ("H200", True)
    runs[0] = replace(runs[0], device="T4")
    report = judge_controls("racecheck", tuple(runs), (TARGET,))
    assert (report.device, report.basic_caught) == (None, False)
    assert report.problems == ("the planted faults ran on different GPUs: H200, T4",)


def test_every_control_of_the_table_is_a_pair_of_the_source() -> None:
    """No control without kernels, no kernels without a control."""
    source = (resources.files("alphamoe_sanitizer_replays.controls") / "planted_faults.cu").read_text()
    assert sorted(re.findall(r"^PAIR\((\w+),", source, re.MULTILINE)) == sorted(BY_NAME)
    assert set(CANARIES) == set(TOOLS)
    assert all(tool in BY_NAME[name].meant_for for tool, names in CANARIES.items() for name in names)


def test_each_planted_fault_changes_the_code_of_its_twin() -> None:
    """A fault that the compiler optimised away would be caught by nobody."""
    elf = ELFFile(io.BytesIO(compile_controls("sm_90a").code))
    code = {s.name.removeprefix(".text."): s.data() for s in elf.iter_sections() if s.name.startswith(".text.")}
    same = [name for name in BY_NAME if code[f"planted_{name}"] == code[f"sound_{name}"]]
    assert not same


@pytest.mark.parametrize("tool", TOOLS)
def test_a_canary_lies_under_the_symbol_of_the_target(tool: Tool) -> None:
    """Each tool's canary is its basic fault: the same code as the planted one, under another name."""
    code = compile_controls("sm_90a", TARGET, list(CANARIES).index(tool)).code
    elf = ELFFile(io.BytesIO(code))
    sizes = {s.name: s.data_size for s in elf.iter_sections() if s.name.startswith(".text.")}
    assert sizes[f".text.{TARGET}"] == sizes[f".text.planted_{CANARIES[tool][0]}"]


def test_an_older_gpu_gets_the_controls_that_it_can_run() -> None:
    """wgmma, clusters and bulk copies are left out, and nothing else."""
    assert (arch_of(8, 0), arch_of(9, 0), arch_of(10, 0)) == ("sm_80", "sm_90a", "sm_100a")
    elf = ELFFile(io.BytesIO(compile_controls("sm_80").code))
    there = {s.name for s in elf.iter_sections()}
    assert ".text.planted_block_barrier" in there
    assert ".text.planted_cluster_memory" not in there


def test_faults_that_end_the_context_get_processes_of_their_own() -> None:
    """What would come after them never ran."""
    for tool in TOOLS:
        for job in control_jobs(tool, (TARGET,)):
            planted = [BY_NAME[k.removeprefix("planted_")] for k in job.kernels if k.startswith("planted_")]
            if job.canary is None and len(planted) > 1:
                assert not any(control.alone(tool) for control in planted)
    assert len(control_jobs("memcheck", ("a", "b"))) == 5 + 1 + 2


def test_everything_caught_and_clean_is_basic_caught() -> None:
    """The one case in which a clean result of the tool counts."""
    report = judge_controls("racecheck", tuple(good_runs()), (TARGET,))
    assert report.basic_caught
    assert report.not_covered == ()


def test_a_warning_catches_too() -> None:
    """racecheck calls a missing __syncwarp a warning, and warnings are not clean."""
    report = judge_controls("racecheck", tuple(good_runs(severity="warning")), (TARGET,))
    assert all(outcome.caught for outcome in report.outcomes)
    info = judge_controls("racecheck", tuple(good_runs(severity="info")), (TARGET,))
    assert not any(outcome.caught for outcome in info.outcomes)


def test_a_missed_fault_is_a_gap_and_a_missed_basic_one_ends_belief() -> None:
    """The names of one finding catch no other control, though one name begins with another's."""
    gap = judge_controls("racecheck", tuple(good_runs(missed="cp_async")), (TARGET,))
    assert gap.basic_caught
    assert gap.not_covered == ("cp.async group",)
    assert not judge_controls("racecheck", tuple(good_runs(missed="block_barrier")), (TARGET,)).basic_caught


def test_a_fault_in_a_cut_log_is_caught_but_a_cut_log_of_sound_twins_proves_nothing() -> None:
    """Presence can be proven by damaged evidence, absence cannot."""
    runs = good_runs()
    planted = next(own for own in runs if own.job.name == "planted").run.log
    assert planted is not None
    cut = msgspec.structs.replace(planted, cut=True, summaries=())
    assert judge_controls("racecheck", changed(runs, "planted", log=cut, timed_out=True), (TARGET,)).basic_caught
    sound = msgspec.structs.replace(CLEAN, cut=True)
    assert not judge_controls("racecheck", changed(runs, "sound", log=sound), (TARGET,)).basic_caught


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_code": 1},
        {"timed_out": True},
        {"problems": ("no log",)},
        {"log": None},
        {"log": msgspec.structs.replace(CLEAN, summaries=())},
        {"log": msgspec.structs.replace(CLEAN, summaries=CLEAN.summaries * 2)},
        {"log": msgspec.structs.replace(CLEAN, notices=("Target application returned an error",))},
        {"log": msgspec.structs.replace(CLEAN, findings=(race("ldmatrix"),))},
    ],
)
def test_sound_twins_need_a_whole_clean_run(changes: dict[str, object]) -> None:
    """Anything less leaves the tool without proof."""
    report = judge_controls("racecheck", changed(good_runs(), "sound", **changes), (TARGET,))
    assert not report.basic_caught
    assert report.problems


def test_a_sound_twin_that_was_not_launched_is_not_clean_and_one_this_gpu_lacks_is_left_out() -> None:
    """A kernel that never ran was not flagged by anybody."""
    runs = good_runs()
    fewer = tuple(replace(own, launched=own.launched[:-1]) if own.job.name == "sound" else own for own in runs)
    assert not judge_controls("racecheck", fewer, (TARGET,)).basic_caught
    lost = tuple(
        replace(own, launched=own.launched[:-1], absent=own.job.kernels[-1:]) if own.job.name == "sound" else own
        for own in runs
    )
    assert judge_controls("racecheck", lost, (TARGET,)).basic_caught


def test_jobs_that_were_not_run_prove_nothing() -> None:
    """Neither without sound twins nor without the canary is a tool believed."""
    for name in ("sound", "canary_0", "planted"):
        left = tuple(own for own in good_runs() if own.job.name != name)
        assert not judge_controls("racecheck", left, (TARGET,)).basic_caught, name


def test_a_symbol_that_no_kernel_can_have_leaves_the_filter_unproven() -> None:
    """It is told, not skipped."""
    assert not judge_controls("racecheck", tuple(good_runs()), (TARGET, "a::b")).basic_caught


def test_a_control_process_without_a_gpu_says_so_and_one_that_died_launched_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is written whatever happens, short of its death."""

    def no_driver(canary: str) -> object:
        raise RuntimeError(f"no libcuda for {canary}")

    monkeypatch.setattr(control_process, "_start", no_driver)
    result = tmp_path / "control.json"
    assert control_process.main([str(result), "-", "sound_ldmatrix"]) == 1
    assert read_control_result(result).trouble == "no libcuda for -"
    assert read_control_result(result).launched == ()
    assert "died" in read_control_result(tmp_path / "none.json").trouble
    (tmp_path / "odd.json").write_text(json.dumps({"launched": 3}))
    assert "died" in read_control_result(tmp_path / "odd.json").trouble


def test_a_control_process_imports_no_torch() -> None:
    """A process without torch under a tool takes a third of the time of one with it."""
    import subprocess

    code = "import sys, alphamoe_sanitizer_replays.controls.process; sys.exit('torch' in sys.modules)"
    from alphamoe_sanitizer_replays.tool.environment import child_environment

    assert subprocess.run([sys.executable, "-c", code], env=child_environment(), check=False).returncode == 0


def test_gaps_are_those_of_the_mechanisms_that_the_variant_uses() -> None:
    """A kernel that is not known may use any mechanism."""
    report = judge_controls("racecheck", tuple(good_runs(missed="cluster_memory")), (TARGET,))
    gap = ("distributed shared memory by racecheck",)
    used = scope.mechanisms_used
    assert scope.not_covered([used("alphamoe_w8a8", "t8_c8")], [report]) == gap
    assert scope.not_covered([used("alphamoe_w8a8", "t64_w")], [report]) == ()
    assert scope.not_covered([used("triton_stock", None)], [report]) == gap
    ours = frozenset().union(*(used("alphamoe_w8a8", name) for name in ("t8_c8", "t64_w")))
    assert ours < {control.mechanism for control in CONTROLS}


def test_the_name_of_a_device_ends_where_its_string_does() -> None:
    """The driver fills a buffer of the size that it was given."""
    assert control_process.device_name(b"NVIDIA H200" + bytes(89)) == "NVIDIA H200"
    assert control_process.device_name(b"NVIDIA H200\0left over") == "NVIDIA H200"
