"""The check of several GPUs on a machine without one: it loses no step, and calls nothing good that is not."""

from __future__ import annotations

import copy
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest
from golden import RankContent
from golden_rank import _sentinel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import multi_gpu_check
import multi_gpu_cost
import run_all
from multi_gpu_check import Bench, Outcome, plan, run_steps
from multi_gpu_judging import Traced, bundle_problems, report_problems

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.inspection import inspect_run
from alphamoe_profiler.reports.json_report import json_document

LAYERS = 2
TWO = Traced("h200-tp2", 2, 2)


def as_nccl(content: RankContent) -> None:
    """Make a golden rank one of a run with a GPU a rank, whole decode graphs and a sentinel in each graph."""
    _sentinel(content, "graph_step")
    content.rank_file = {"communication": "nccl", "gpu_uuid": f"GPU-{content.rank}"}
    content.receipts = [
        item if item.graph_key is None else msgspec.structs.replace(item, graph_key=f"runner0:full|{item.graph_key}")
        for item in content.receipts
    ]


def bench(home: Path, seconds: float = 60.0) -> Bench:
    """Make a bench with two GPUs and so much time."""
    for name in ("work", "results"):
        (home / name).mkdir()
    return Bench(home / "work", home / "results", ("0", "1"), LAYERS, time.monotonic() + seconds)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A bundle of two ranks, and its report with as many all-reduces as the real model makes."""
    path = golden.build(tmp_path_factory.mktemp("sound") / "run", as_nccl, world_size=2)
    report = json_document(inspect_run(RunBundle.open(path)))
    for row in report["skew"]["all_reduces"]:
        row["kernels"] = 6 * (2 * LAYERS + 1)
    return path, report


def test_a_sound_run_has_no_problem(sound: tuple[Path, dict[str, Any]]) -> None:
    """Neither its report nor its bundle."""
    path, report = sound
    assert report_problems(report, TWO, LAYERS) + bundle_problems(path, TWO) == []


def _cell(report: dict[str, Any]) -> None:
    report["cells"][0]["kernels"] -= 1


def _gloo(report: dict[str, Any]) -> None:
    report["ranks"][1]["communication"] = "gloo"


def _dropped(report: dict[str, Any]) -> None:
    report["ranks"][1]["dropped"] = 3


def _silent(report: dict[str, Any]) -> None:
    report["skew"]["spreads"] = [row for row in report["skew"]["spreads"] if row["moment"] != "all-reduce start"]


def _few(report: dict[str, Any]) -> None:
    report["skew"]["all_reduces"][0]["kernels"] -= 1


def _window(report: dict[str, Any]) -> None:
    report["ranks"][0]["window_failures"] = ["sentinel step: 1 of 2 seen"]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_cell, "rank 0 eager: 5 kernels, 6 submissions"),
        (_gloo, "rank 1: gloo, shared GPU False"),
        (_dropped, "rank 1 dropped 3"),
        (_silent, "no skew of decode_graph_replay all-reduce start"),
        (_few, "rank 0: 29 of 30 all-reduce kernels"),
        (_window, "rank 0 window: sentinel step: 1 of 2 seen"),
    ],
)
def test_each_thing_that_is_wrong_with_a_report_is_told(
    sound: tuple[Path, dict[str, Any]], spoil: Callable[[dict[str, Any]], None], told: str
) -> None:
    """One change, one kind of problem."""
    report = copy.deepcopy(sound[1])
    spoil(report)
    assert any(told in problem for problem in report_problems(report, TWO, LAYERS))


def test_a_bundle_on_one_gpu_with_cut_graphs_and_a_lost_sentinel_is_told(tmp_path: Path) -> None:
    """Three things that the report does not show."""

    def damage(content: RankContent) -> None:
        content.sentinels["step"] += 1
        content.rank_file = {"gpu_uuid": "GPU-0"}

    told = "; ".join(bundle_problems(golden.build(tmp_path / "run", damage, world_size=2), TWO))
    assert "rank 1: sentinels step: 6 of 7 seen" in told
    assert "rank 0: decode graphs are cut at the all-reduces" in told
    assert "the ranks opened 1 GPUs" in told


def test_the_plan_grows_with_the_machine() -> None:
    """Runs that need GPUs which are not there are no steps; gloo on two of them always is one."""
    two, four, eight = (list(plan(gpus, (1, 2, 4, 8))) for gpus in (2, 4, 8))
    assert two == ["smoke", "h200-tp2", "gloo-tp4", "triton-tp2", "dashboard", "cost", "sanitize"]
    assert [name for name in four if name not in two] == ["h200-tp4", "triton-tp4"]
    assert [name for name in eight if name not in four] == ["h200-tp8"]
    assert list(plan(8, (1, 2, 4))) == four


def test_a_step_that_raises_loses_no_other_and_results_are_written_after_each(tmp_path: Path) -> None:
    """The JSON grows by one step at a time; a step that time does not reach is a problem."""
    written: list[list[str]] = []

    def fails(bench: Bench, outcome: Outcome) -> None:
        raise RuntimeError("broken")

    def works(bench: Bench, outcome: Outcome) -> None:
        outcome.lines.append("fine")

    made = run_steps(bench(tmp_path), {"a": fails, "b": works}, lambda made: written.append([o.name for o in made]))
    assert [outcome.problems for outcome in made] == [["RuntimeError: broken"], []]
    assert written == [["a"], ["a", "b"]]
    late_home = tmp_path / "late"
    late_home.mkdir()
    (late,) = run_steps(bench(late_home, -1.0), {"b": works}, lambda made: None)
    assert late.problems == ["not run: the time of the whole was up"]


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """The limit holds, and the child of a killed program is gone too."""
    code = (
        "import os,signal,subprocess,sys,time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    assert multi_gpu_check.run(["-c", code], log, 2.0, dict(os.environ), tmp_path) is None
    pid = int(log.read_text().split()[0])
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.01)
    else:
        pytest.fail("the child lives on")


def test_multicast_is_off_whatever_the_caller_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the GPUs that the step may see are visible."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    env = multi_gpu_check.environment(("2", "5"))
    assert {name: env[name] for name in multi_gpu_check.NO_MULTICAST} == multi_gpu_check.NO_MULTICAST
    assert env["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_fewer_than_two_gpus_are_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit 77, which the whole check shows as skipped and never as a pass."""
    monkeypatch.setattr(multi_gpu_check, "visible_gpus", lambda: (("0",), "1 x NVIDIA H200, driver 580"))
    monkeypatch.setattr(sys, "argv", ["multi_gpu_check.py"])
    assert multi_gpu_check.main() == multi_gpu_check.SKIPPED
    assert capsys.readouterr().out == "skipped: 1 x NVIDIA H200, driver 580; one GPU a rank needs two\n"
    step = run_all.Step("s", ("-c", f"raise SystemExit({run_all.SKIPPED})"), 20, needs_gpus=2)
    assert run_all.run_step(step, tmp_path, dict(os.environ))[0] == "skipped: needs 2 GPUs"
    assert run_all.run_step(run_all.Step("s", step.argv, 20), tmp_path, dict(os.environ))[0] == "exit 77"


@pytest.mark.slow
def test_a_recorded_run_is_shown_gated_put_on_a_page_and_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recording is a golden bundle; show, gate and dashboard are the real commands."""
    place = bench(tmp_path, 120.0)
    real = multi_gpu_check.product

    def product(bench: Bench, argv: Sequence[str], name: str, limit_s: float, gpus: int | None = None) -> int | None:
        if argv[0] != "--ranks":
            return real(bench, argv, name, limit_s, gpus)
        golden.build(bench.work / argv[argv.index("--out") + 1], as_nccl, world_size=int(argv[1]))
        return 0

    monkeypatch.setattr(multi_gpu_check, "product", product)
    steps = {name: step for name, step in plan(2, (1, 2)).items() if name in ("h200-tp2", "dashboard")}
    traced, page = run_steps(place, steps, lambda made: None)
    assert (traced.numbers["verdict"], traced.numbers["gate"], page.problems) == ("PASS", "PASS", [])
    # A golden layer makes one all-reduce, and nothing compares its tokens.
    assert [problem.split(" (")[0] for problem in traced.problems] == [
        f"rank {rank}: 12 of 30 all-reduce kernels" for rank in range(2)
    ]
    assert "decode_graph_replay   all-reduce start" in capsys.readouterr().out
    multi_gpu_check.pack(place)
    with tarfile.open(place.results / "bundles.tar.gz") as archive:
        assert "examples/h200-tp2/run.json" in archive.getnames()
    assert json.loads(json.dumps(vars(traced)))["numbers"]["skew"]["clock_error_ns"] == 0


def test_the_cost_is_judged_against_torch_profiler_and_a_missing_mode_is_no_pass() -> None:
    """Ratios of medians; an incomplete recording is told as well."""

    def row(mode: str, ms: float, stop_s: float, size: int, **more: Any) -> dict[str, Any]:
        return {"mode": mode, "bytes": size, "ranks": [{"step_ms": [ms, ms], "stop_s": stop_s, **more}] * 2}

    ours = {"state": "on", "dropped": 0}
    runs = [row("bare", 1.0, 0.0, 0), row("ours", 1.1, 0.1, 50, **ours), row("theirs", 1.5, 1.0, 100)]
    said = multi_gpu_cost.summarise(runs)
    assert said["missed"] == []
    assert said["ratios"] == {"slow_down": pytest.approx(1.1 / 1.5), "stop_s": 0.1, "bytes": 0.5}
    assert multi_gpu_cost.summarise(runs[:2])["missed"] == ["theirs did not run"]
    dear = multi_gpu_cost.summarise([runs[0], row("ours", 2.0, 0.5, 200, state="on", dropped=1), runs[2]])["missed"]
    due = ["a recording was not complete", "a recording was not complete", "slow_down", "stop_s", "bytes"]
    assert [text.split(":")[0] for text in dear] == due
