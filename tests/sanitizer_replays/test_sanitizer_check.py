"""The GPU check of sanitizer replays on a machine without one: it loses no step, and calls nothing good that is not."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import mutation_sweep
import sanitizer_check
from captured_runs import RUNS, WANTED, choose_captures, find
from kernel_mutations import Mutant, mutant
from mutation_inputs import make_ragged
from mutation_table import Case, Outcome
from sanitizer_check import Bench, Step, command, report_problems, run_steps

from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.kernels.launch import choose_variant
from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.captures.request import parse_capture
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport
from alphamoe_sanitizer_replays.results import TOOLS, ControlOutcome, ControlReport, OutputCheck


def bench(home: Path, seconds: float = 60.0) -> Bench:
    """Make a bench with so much time."""
    return Bench(home, 2, time.monotonic() + seconds)


def test_a_step_that_breaks_loses_no_other(tmp_path: Path) -> None:
    """What a step raises is its own problem; the others run, and each leaves its record."""

    def breaks(bench: Bench, step: Step) -> None:
        raise KeyError("nothing")

    def works(bench: Bench, step: Step) -> None:
        step.lines.append("done")

    made = run_steps(bench(tmp_path), ("first", "second"), {"first": breaks, "second": works})
    assert made[0].problems == ["KeyError: 'nothing'"]
    assert (made[1].problems, made[1].lines) == ([], ["done"])
    assert json.loads((tmp_path / "step-first.json").read_text())["problems"] == made[0].problems
    assert json.loads((tmp_path / "step-second.json").read_text())["lines"] == ["done"]


def test_a_step_without_time_is_a_problem(tmp_path: Path) -> None:
    """A step that the time of the whole does not reach is not run, and that is said; nothing is wrong with it."""
    made = run_steps(bench(tmp_path, -1.0), ("late",), {"late": lambda bench, step: None})
    assert (made[0].problems, made[0].incomplete) == ([], ["not run: the time of the whole was up"])
    assert json.loads((tmp_path / "step-late.json").read_text())["incomplete"] == made[0].incomplete


def test_a_command_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command beyond its time is ended, gives no exit code, and what it printed is kept."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho begun\nexec sleep 60\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitizer_check.sys, "executable", str(program))
    began = time.monotonic()
    assert command(["sanitize"], tmp_path / "log", 0.5) is None
    assert time.monotonic() - began < 10.0
    assert (tmp_path / "log").read_text() == "begun\n"


def test_captures_are_found_by_run_and_m(tmp_path: Path) -> None:
    """A capture's kind is the run it lies in and its M; rank 0 and layer 0 come first."""
    names = (
        ("long", "rank=3/layer=3-M=1-step=9"),
        ("long", "rank=0/layer=3-M=1-step=9"),
        ("long", "rank=0/layer=0-M=1-step=9"),
        ("long", "rank=0/layer=0-M=906-step=2"),
        ("batch", "rank=0/layer=0-M=3-step=7"),
        ("short", "rank=0/layer=0-M=906-step=7"),
    )
    for run, name in names:
        folder = tmp_path / f"run-{run}" / "captures" / name
        folder.mkdir(parents=True)
        (folder / "capture.json").write_text("{}")
    found = find(tmp_path)
    assert {kind: len(paths) for kind, paths in found.items()} == {
        "one": 3,
        "prefill": 1,
        "decode": 1,
        "short": 0,
        "middle": 0,
    }
    assert found["one"][0].as_posix().endswith("rank=0/layer=0-M=1-step=9")
    assert set(choose_captures(tmp_path)) == {"one", "prefill", "decode"}


def test_every_kind_is_captured_and_the_rule_gives_each_variant() -> None:
    """The runs ask for captures that parse, and the prompts' sizes bring every variant into use on an H200."""
    assert {run for run, _ in WANTED.values()} == set(RUNS)
    for _, captures in RUNS.values():
        for capture in captures:
            assert parse_capture(capture).ranks == (0, 3)
    geometry = LocalGeometry(E=512, H=2048, I_local=128, top_k=10)
    chosen = {kind: {choose_variant(geometry, M, 132).name for M in sizes} for kind, (_, sizes) in WANTED.items()}
    assert chosen == {
        "one": {"t8_c8"},
        "decode": {"t8_c8"},
        "short": {"t16_c4"},
        "middle": {"t32_c2"},
        "prefill": {"t64_w"},
    }


def a_report(change: Callable[[dict[str, Any]], None] = lambda document: None) -> dict[str, Any]:
    """Make the document of a session in which everything is as it should be, changed."""
    controls = [
        ControlReport(
            tool=tool,
            outcomes=(
                ControlOutcome(
                    control="planted",
                    mechanism="block barrier",
                    tool=tool,
                    meant_for=True,
                    basic=True,
                    caught=True,
                    sound_clean=True,
                ),
            ),
        )
        for tool in TOOLS
    ]
    entries = [
        ReplayEntry(
            capture="c",
            label="rank 0 layer 0 M 1",
            variant="t8_c8",
            tool=tool,
            verdict=Verdict.PASS,
            whole=Verdict.PASS,
            output=OutputCheck(verdict="PASS"),
        )
        for tool in TOOLS
    ]
    report = SanitizeReport(
        verdict=Verdict.PASS,
        reason="clean",
        scope=("M1",),
        targets=("c",),
        controls=tuple(controls),
        entries=tuple(entries),
    )
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(report))
    change(document)
    return document


def test_a_report_with_everything_has_no_problem() -> None:
    """Controls of every tool caught, every replay clean with its output checked."""
    assert report_problems(a_report(), 4) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda report: report.update(verdict="INCONCLUSIVE"), "verdict INCONCLUSIVE"),
        (lambda report: report["controls"].pop(), "no controls of initcheck"),
        (lambda report: report["controls"][0]["problems"].append("it did not start"), "it did not start"),
        (lambda report: report["controls"][0]["outcomes"][0].update(caught=False), "did not catch planted"),
        (lambda report: report["controls"][0]["outcomes"][0].update(sound_clean=False), "flagged the sound twin"),
        (lambda report: report["entries"].pop(), "3 of 4 replays"),
        (lambda report: report["entries"][1].update(verdict="FAIL", reasons=["a hazard"]), "FAIL a hazard"),
        (lambda report: report["entries"][1].update(output=None), "output None"),
        (lambda report: report["entries"][1]["output"].update(verdict="FAIL", reason="far off"), "output far off"),
        (lambda report: report["entries"][1].update(tool="none"), "3 of 4 replays"),
    ],
)
def test_a_report_that_lacks_something_says_what(change: Callable[[dict[str, Any]], None], said: str) -> None:
    """Anything missing, not caught, not clean or not compared is a problem."""
    problems = report_problems(a_report(change), 4)
    assert any(said in problem for problem in problems), problems


def test_the_plain_step_reads_the_commands_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own JSON gives the kernel times; kinds without a capture are problems, and so is a CPU."""
    made = make_ragged(tmp_path / "ragged", torch.device("cpu"))["ragged3"]
    shutil.copytree(made, tmp_path / "run-long" / "captures" / "rank=0" / "layer=0-M=1-step=1")
    monkeypatch.setattr(sanitizer_check, "REPEATS", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    missing = [f"no capture {kind}" for kind in WANTED if kind != "one"]
    step = Step("plain")
    sanitizer_check.plain(bench(tmp_path), step)
    (problem,) = [problem for problem in step.problems if problem not in missing]
    assert problem.startswith("one: exit 3: ")

    def on_a_gpu(argv: list[str], log: Path, limit_s: float) -> int:
        report = {"replays": [{"run": {"result": {"kernel_us": [9.5, 9.75], "cpu_us": []}}}]}
        Path(argv[argv.index("--json") + 1]).write_text(json.dumps(report))
        return 0

    monkeypatch.setattr(sanitizer_check, "command", on_a_gpu)
    step = Step("plain")
    sanitizer_check.plain(bench(tmp_path), step)
    assert step.problems == missing
    assert "9.8 us (median of 2)" in step.lines[0]


def test_the_sweep_prints_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table, the JSON and the exit code agree: a survivor that is not listed is a failure."""

    class Fake(mutation_sweep.Sweep):
        def run(self, case: Case, source: Path | None, limit_s: float, watch_s: float, cut: bool = False) -> Outcome:
            assert (source is None) == (case.mutant == "kernel")
            caught = (case.mutant, case.tool) == ("plan", "racecheck")
            made = Outcome.of(case, "found" if caught else "clean", "")
            self._record(made)
            return made

    monkeypatch.setattr(mutation_sweep, "Sweep", Fake)
    monkeypatch.setattr(mutation_sweep, "compile_all", lambda wanted, folder, jobs, limit_s: [])
    monkeypatch.setenv("ALPHAMOE_COMPUTE_SANITIZER", sys.executable)
    captures = make_ragged(tmp_path / "ragged", torch.device("cpu"))
    gone = ("kernel", "    }\n    __syncthreads();\n\n#pragma unroll 1", "    }\n\n\n#pragma unroll 1")
    plan = mutant("plan", "block barrier", "t8_c8@ragged3", gone)
    other = mutant("other", "block barrier", "t8_c8@ragged3", gone)

    def sweep(captures: dict[str, Path], mutants: list[Mutant], seconds: float = 60.0) -> int:
        return mutation_sweep.sweep(captures, mutants, tmp_path, jobs=2, deadline=time.monotonic() + seconds)

    assert sweep(captures, [plan]) == 0
    assert sweep(captures, [plan, other]) == 1
    said = json.loads((tmp_path / "mutations.json").read_text())
    assert said["summary"]["survived"] == ["other"]
    assert said["rows"][0]["lines"] == ["alphamoe_w8a8_up_down.cu:74"]
    assert len((tmp_path / "mutations.jsonl").read_text().splitlines()) == 15
    assert "1 of 2 mutants are caught" in capsys.readouterr().out
    assert sweep({}, [plan]) == 3
    assert json.loads((tmp_path / "mutations.json").read_text())["incomplete"] == [
        "plan: there is no capture for any of its runs"
    ]
    assert sweep(captures, [plan], 2.5) == 3
    assert len(json.loads((tmp_path / "mutations.json").read_text())["incomplete"]) == 10
    (captures["ragged150"] / "capture.json").write_text("{")
    two = mutant("two", "block barrier", "t16_c4@ragged150", gone)
    assert sweep(captures, [plan, two]) == 3
    said = json.loads((tmp_path / "mutations.json").read_text())
    assert (said["summary"]["killed"], said["summary"]["not_known"]) == (1, ["two"])
    assert said["incomplete"][0].startswith("capture ragged150")
