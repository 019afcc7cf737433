"""The sweep over mutants: what comes first, what its end does, and that mutants that hang cost nobody else."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import mutation_schedule
import mutation_sweep
from kernel_mutations import Mutant, all_mutants, mutant
from mutation_inputs import make_ragged
from mutation_schedule import HANGS_AT_ONCE, SUSPECTS_AT_ONCE, Schedule, run_schedule, telling_tools
from mutation_sweep import Sweep, cases, chosen_runs
from mutation_table import CATCHES, DEADLOCK, KERNEL, Case, Outcome, summarise, tabulate

from alphamoe_sanitizer_replays.captures.store import open_capture
from alphamoe_sanitizer_replays.replays.job import prepare_inputs
from alphamoe_sanitizer_replays.results import TOOLS

MADE = (
    mutant("first", "block barrier", "t8_c8@one t16_c4@short"),
    mutant("second", "block barrier", "t8_c8@one"),
    mutant("third", "bounds of the plan", "t8_c8@one", harmless="no reader"),
    mutant("fourth", "bounds of the plan", "t8_c8@one", same_code="no instruction"),
)
REAL = chosen_runs(all_mutants(), every=False)


def outcomes(mutants: list[Mutant], told: dict[tuple[str, str], str]) -> list[Outcome]:
    """Answer every case: ``told`` by (mutant, tool), clean otherwise."""
    return [Outcome.of(case, told.get((case.mutant, case.tool), "clean"), "", 1.0) for case in cases(mutants)]


def test_a_sweep_runs_the_kernel_beside_its_mutants() -> None:
    """Each run goes without a tool and under all four, the kernel once for each variant and input; harmless ones do
    not go at all unless they are asked for."""
    listed = cases(chosen_runs(MADE, every=True))
    assert len(listed) == len(set(listed)) == (5 + 2) * (1 + 4)
    assert {case.tool for case in listed} == {"none", *TOOLS}
    assert [made.name for made in chosen_runs(MADE, every=False)] == ["first", "second"]
    assert [len(made.runs) for made in chosen_runs(MADE, every=True)] == [2, 1, 1, 1]
    assert chosen_runs(MADE, every=False, inputs=("short",))[0].runs == (("t16_c4", "short"),)
    assert not any(made.harmless or made.same_code for made in REAL)


def test_the_rate_leaves_out_what_nothing_can_tell() -> None:
    """Killed is what a tool or the output tells; harmless mutants and the same code do not count, surprises show."""
    mutants = chosen_runs(MADE, every=True)
    told = {("first", "racecheck"): "found", ("third", "none"): "wrong"}
    table = tabulate(outcomes(mutants, told), mutants)
    assert (table.wrong, table.incomplete) == ([], [])
    summary = summarise(table.rows)
    assert (summary["killed"], summary["mutants"]) == (1, 2)
    assert summary["survived"] == summary["unlisted_survivors"] == ["second"]
    assert summary["harmless_but_caught"] == ["third"]
    assert summary["caught_by"] == {**dict.fromkeys(CATCHES, 0), "racecheck": 1}
    assert summary["mechanisms"] == {"block barrier": {"killed": 1, "mutants": 2}}


def test_a_tool_that_flags_the_kernel_itself_catches_nothing() -> None:
    """Where the kernel is not clean under a tool, what the tool says of a mutant is no catch, and it is wrong."""
    mutants = chosen_runs(MADE, every=False)
    table = tabulate(outcomes(mutants, {("first", "racecheck"): "found", (KERNEL, "racecheck"): "found"}), mutants)
    summary = summarise(table.rows)
    assert (summary["killed"], summary["survived"]) == (0, [])
    assert summary["not_known"] == ["first", "second"]
    assert "the kernel itself" in table.wrong[0]


def test_a_finding_of_the_deadlock_detection_needs_a_kernel_that_it_does_not_flag() -> None:
    """What racecheck says with that option counts beside a baseline with it; that the mutant hangs counts anyway."""
    mutants = chosen_runs(MADE[1:2], every=False)
    case = Case("second", "t8_c8", "one", "racecheck")
    known = [Outcome.of(case, "found", "deadlock detection: 3 times") if made.case == case else made for made in
             outcomes(mutants, {("second", "none"): "hang", ("second", "memcheck"): "skipped"})]  # fmt: skip
    row = tabulate(known, mutants).rows[0]
    assert (row.caught_by, row.seen["racecheck"], row.complete) == (("output",), "skipped", True)
    baseline = Outcome.of(Case(KERNEL, "t8_c8", "one", DEADLOCK), "clean", "")
    row = tabulate([*known, baseline], mutants).rows[0]
    assert (row.caught_by, row.complete) == (("output", "racecheck"), True)


def drive(schedule: Schedule, told: dict[str, str], slots: int = 15) -> list[Case]:
    """Play a sweep in which processes end in the order they began in, and give the order."""
    order: list[Case] = []
    running: list[Case] = []
    with schedule.changed:
        while not schedule.finished:
            while len(running) < slots and (case := schedule.take()) is not None:
                running.append(case)
                order.append(case)
            hung = [case for case in running if case.tool in TOOLS and told.get(case.mutant) == "hang"]
            suspects = [case for case in running if case.tool == "none" and schedule._may_hang(case)]
            assert len(hung) <= HANGS_AT_ONCE
            assert len(suspects) <= SUSPECTS_AT_ONCE
            done = running.pop(0)
            outcome = told.get(done.mutant, "clean") if done.tool in ("none", "racecheck") else "clean"
            schedule.put(Outcome.of(done, outcome, "", 8.0, 0.5))
    return order


def test_what_tells_most_comes_first() -> None:
    """Baselines, then mutants without a tool, telling tools, the others where nothing caught yet, hangs at the end."""
    told = {"plan_barrier_half_warp": "hang", "cluster_pushed_wait": "hang", "used_blocks": "found"}
    schedule = Schedule(cases(REAL), REAL)
    order = drive(schedule, told)
    place = {case: number for number, case in enumerate(order)}
    runs = {made.name: (made.name, *made.runs[0]) for made in REAL}
    assert len(order) == len(cases(REAL)) + 1  # the baseline of the deadlock detection, on one input
    assert max(place[case] for case in order if case.mutant == KERNEL and case.tool != DEADLOCK) < 50
    first = [place[Case(*runs[made.name], telling_tools(made)[0])] for made in REAL if made.name not in told]
    last = [place[Case(*runs[made.name], telling_tools(made)[3])] for made in REAL if made.name not in told]
    assert max(first) < min(last)
    hangs = [place[Case(*runs[name], tool)] for name in told if told[name] == "hang" for tool in TOOLS]
    assert min(hangs) > max(last)
    assert place[Case(*runs["used_blocks"], "synccheck")] > sorted(last)[-5]


def test_tools_are_chosen_by_the_mechanism() -> None:
    """Races, parts of a barrier and bounds are each shown to the tool that is for them, and to all in the end."""
    first = {made.name: telling_tools(made)[0] for made in REAL}
    assert first["plan_barrier"] == first["advance_wait"] == first["proxy_fence"] == "racecheck"
    assert first["staging_sync_mask"] == first["cluster_open_arrive"] == "synccheck"
    assert first["used_blocks"] == first["peer_count"] == "memcheck"
    assert all(set(telling_tools(made)) == set(TOOLS) for made in REAL)


def test_limits_follow_the_baselines() -> None:
    """Without a tool 2.5 times the slowest baseline, between 15 and 30 seconds; a kernel's watch follows the tool."""
    for wall_s, launch_s, plain, under in ((2.0, 0.1, 15.0, (20.0, 8.0)), (8.0, 4.0, 20.0, (20.0, 16.0)),
                                           (40.0, 20.0, 30.0, (60.0, 30.0))):  # fmt: skip
        schedule = Schedule([], REAL)
        for tool in ("none", "racecheck"):
            with schedule.changed:
                schedule.put(Outcome.of(Case(KERNEL, "t8_c8", "one", tool), "clean", "", wall_s, launch_s))
        assert schedule.limits(Case("plan_barrier", "t8_c8", "one", "none")) == (plain, 6.0)
        assert schedule.limits(Case("plan_barrier", "t8_c8", "one", "racecheck")) == under


def test_the_end_of_the_time_is_kept_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never ends does not hold the sweep; what was done is there, the rest is not run, not caught."""
    mutants = chosen_runs(MADE, every=False)
    monkeypatch.setattr(mutation_schedule, "HARD_STOP_S", 4.6)

    def run(case: Case, limit_s: float, watch_s: float, cut: bool) -> Outcome:
        assert limit_s < 3.6
        if case.tool == "memcheck":
            time.sleep(30.0)  # deaf to everything
        return Outcome.of(case, "hang" if (case.mutant, case.tool) == ("first", "none") else "clean", "", 0.1)

    lines: list[str] = []
    began = time.monotonic()
    made = run_schedule(Schedule(cases(mutants), mutants), run, jobs=4, deadline=began + 8.1, progress=lines.append)
    assert time.monotonic() - began < 8.1
    table = tabulate(made, mutants)
    by_name = {row.mutant.name: row for row in table.rows}
    assert by_name["first"].caught_by == ("output",)
    assert by_name["second"].seen["memcheck"] == "not run"
    assert not any("first" in line for line in table.incomplete)
    assert summarise(table.rows)["not_known"] == ["second"]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Make a sweep on the CPU with a tool that catches a race in everything."""
    fake = tmp_path / "tool"
    fake.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("session_tool.py").read_text())
    fake.chmod(0o755)
    (tmp_path / "behaviour.json").write_text('{"fault": ["racecheck"]}')
    monkeypatch.setenv("ALPHAMOE_COMPUTE_SANITIZER", str(fake))
    path = make_ragged(tmp_path / "ragged", torch.device("cpu"))["ragged3"]
    inputs = {"ragged3": prepare_inputs(open_capture(path), tmp_path / "inputs")}
    return Sweep(inputs, tmp_path / "sweep", lambda made: None, device="cpu")


def test_a_sweep_goes_through_the_tool(sweep: Sweep) -> None:
    """Each case is a process of its own under the tool that is named, and its logs and outputs are read and judged."""
    to_do = [Case(KERNEL, "t8_c8", "ragged3", tool) for tool in ("none", "synccheck", "racecheck")]
    made = {case.tool: sweep.run(case, None, 60.0, 45.0) for case in to_do}
    assert {tool: outcome.outcome for tool, outcome in made.items()} == {
        "none": "clean",
        "synccheck": "clean",
        "racecheck": "found",
    }, made
    assert "planted_faults.cu:18" in made["racecheck"].detail
    assert made["none"].launch_s is not None


HANGING = """#!{python}
import os, signal, subprocess, sys, time
if "--version" in sys.argv:
    print("Version 2025.3.1.0")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
here = subprocess.Popen([sys.executable, "-c", deaf])
away = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
with open({pids!r}, "w") as stream:
    stream.write(f"{{os.getpid()}} {{here.pid}} {{away.pid}}")
time.sleep(100)
"""


@pytest.mark.usefixtures("short_grace")
def test_a_target_that_hangs_under_a_tool_dies_with_it(sweep: Sweep, tmp_path: Path) -> None:
    """Tool and target ignore SIGTERM, one target in a session of its own; after the limit none of them is left."""
    pids = tmp_path / "pids"
    fake = tmp_path / "tool"
    fake.write_text(HANGING.format(python=sys.executable, pids=str(pids)))
    began = time.monotonic()
    case = Case("first", "t8_c8", "ragged3", "racecheck")
    made = sweep.run(case, None, 2.0, 45.0)
    assert made.outcome == "hang"
    assert time.monotonic() - began < 8.0
    assert _left(pids) == []
    assert sweep.run(case, None, 1.5, 45.0, cut=True).outcome == "not run"
    assert _left(pids) == []


def _left(pids: Path) -> list[str]:
    """Give the processes that still run; what is dead and not yet reaped by its new parent does not."""
    found = []
    for pid in pids.read_text().split():
        for _ in range(100):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.02)
        else:
            found.append(pid)
    return found


def test_a_kernel_that_does_not_end_is_told_from_a_slow_machine(sweep: Sweep, tmp_path: Path) -> None:
    """The replay process ends itself soon after the launch, long before its limit, and says that it hung."""
    plugin = tmp_path / "watched_replay.py"
    real = Path(mutation_sweep.__file__).with_name("watched_replay.py").read_text()
    plugin.write_text(real.replace("            prepared.launch()\n", "            import time; time.sleep(100)\n"))
    sweep._environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), sweep._environment["PYTHONPATH"]])
    began = time.monotonic()
    made = sweep.run(Case("first", "t8_c8", "ragged3", "none"), None, 60.0, 1.0)
    assert (made.outcome, made.detail) == ("hang", "the kernel had not ended 1 s after its launch")
    assert time.monotonic() - began < 30.0


def test_a_case_that_breaks_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in one case is recorded as its outcome and the others still run."""
    monkeypatch.setenv("ALPHAMOE_COMPUTE_SANITIZER", sys.executable)
    recorded: list[Outcome] = []
    made = Sweep({}, tmp_path, recorded.append).run(Case("first", "t8_c8", "one", "racecheck"), None, 10.0, 6.0)
    assert made.outcome == "unclear"
    assert "KeyError" in made.detail
    assert recorded == [made]


def test_builds_run_in_processes_and_say_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that does not compile is one line, and the time limit ends compilers, too."""
    pytest.importorskip("cuda.bindings", reason="NVRTC is for Linux only")
    monkeypatch.setenv("ALPHAMOE_TRACE_CACHE_DIR", str(tmp_path / "cache"))
    broken = tmp_path / "broken.cu"
    broken.write_text("no kernel\n")
    said = mutation_sweep.compile_all([(str(broken), "t8_c8")], tmp_path / "builds", 2, 60.0)
    assert len(said) == 1
    assert "broken.cu t8_c8" in said[0]
    began = time.monotonic()
    said = mutation_sweep.compile_all([(None, "t8_c8")], tmp_path / "builds", 1, 0.05)
    assert len(said) == 1
    assert time.monotonic() - began < 5.0
