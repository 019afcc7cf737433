"""Check on a GPU that sanitizer replays can be believed: captures of real runs, clean tools, caught mutants.

    python tests/gpu/sanitizer_check.py [--only captures plain walls sanitize variants mutations] [--results DIR]

captures   four traced runs on four ranks; M 1, an eager decode batch, whole prefills of 24, 48 and 900 tokens
plain      `alphamoe-trace replay` of one capture of each kind: output and kernel times
walls      one tool process at a time, for M <= 8: seconds from start to end
sanitize   `alphamoe-trace sanitize` of all captures under all tools, with controls
variants   the same of one capture of each kind, in every launch variant
mutations  mutation_sweep.py over one run of each mutant

Every step is tried whatever became of those before it, and everything that runs is killed when the time of the whole
is up. The captures that `--only` finds under --results/sanitizer are used again. Exit code 1: something is wrong; 3:
nothing is, as far as the time allowed to look.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = ("profiler", "tracers", "sanitizer_replays", "backend", "dashboards")
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in PACKAGE_ROOTS]

from captured_runs import LAYERS, RANKS, RUNS, WANTED, choose_captures, find  # noqa: E402

MAX_WALL_S = 15.0
"""Of one process under one tool for M <= 8, its start included."""
GRACE_S = 8.0
"""For a command to end what it started and to keep what there is, before its time and after it was told to stop."""
REPEATS = 30
"""Timed launches of a replay without a tool."""


@dataclass
class Step:
    """What one step came to."""

    name: str
    problems: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    """What the time did not allow to find out."""
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0


@dataclass(frozen=True)
class Bench:
    """Where everything lies and how much time there is."""

    home: Path
    jobs: int
    deadline: float
    """Monotonic seconds."""
    every_run: bool = False
    """Of the mutants."""

    def left_s(self, most: float) -> float:
        """Give the seconds that a command may take: ``most``, or what is left but for its way to end."""
        return max(1.0, min(most, self.deadline - GRACE_S - 1.0 - time.monotonic()))


def environment() -> dict[str, str]:
    """Give the environment of the commands, which find the packages in this checkout."""
    roots = [str(ROOT / folder) for folder in PACKAGE_ROOTS]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])}


def command(argv: Sequence[str], log: Path, timeout_s: float, cwd: Path | None = None) -> int | None:
    """Run ``alphamoe-trace`` with its output in a file and give its exit code; null when it was stopped."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "alphamoe_profiler", *argv],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Asked first, so that it ends the tools and ranks that it started and keeps what there is.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep a process for a while
                process.wait(1.0)


def tail(log: Path, characters: int = 600) -> str:
    """Give the end of a log in one line."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return " | ".join(text[-characters:].splitlines())


def captures(bench: Bench, step: Step) -> None:
    """Record the runs, all at once: four ranks each on one GPU."""

    def record(name: str) -> tuple[str, int | None, float]:
        prompts, wanted = RUNS[name]
        run = bench.home / f"run-{name}"
        shutil.rmtree(run, ignore_errors=True)
        argv = ["trace", "--ranks", str(RANKS), "--model", "qwen3-next-80b", "--layers", str(LAYERS), "--out", str(run)]
        argv += ["--max-new-tokens", "4"]
        if name != "long":  # graphs are captured once, in the run that is recorded as a user would
            argv += ["--executions", "eager"]
        for prompt in prompts:
            argv += ["--prompt", prompt]
        for capture in wanted:
            argv += ["--capture", capture]
        began = time.monotonic()
        code = command(argv, bench.home / f"trace-{name}.log", bench.left_s(240))
        return name, code, time.monotonic() - began

    with ThreadPoolExecutor(len(RUNS)) as pool:
        for name, code, wall_s in pool.map(record, RUNS):
            step.numbers[f"{name}_s"] = wall_s
            if code != 0:
                step.problems.append(f"run {name}: exit {code}: {tail(bench.home / f'trace-{name}.log')}")
    for kind, paths in find(bench.home).items():
        if len(paths) != 4:
            step.problems.append(f"{kind}: {len(paths)} captures for ranks 0 and 3, layers 0 and 3")
        size = sum(file.stat().st_size for path in paths for file in path.iterdir())
        step.lines.append(f"{kind:8} {len(paths)} captures {size / 1e6:8.2f} MB  {paths[0].name if paths else ''}")
        step.numbers[kind] = {"captures": len(paths), "bytes": size}


def plain(bench: Bench, step: Step) -> None:
    """Replay one capture of each kind without a tool, one after another, since kernels are timed."""
    for kind, path in _chosen(bench, step).items():
        report = bench.home / f"replay-{kind}.json"
        report.unlink(missing_ok=True)
        log = bench.home / f"replay-{kind}.log"
        began = time.monotonic()
        code = command(["replay", str(path), "--repeats", str(REPEATS), "--json", str(report)], log, bench.left_s(90))
        wall_s = time.monotonic() - began
        if code != 0 or not report.is_file():
            step.problems.append(f"{kind}: exit {code}: {tail(log)}")
            continue
        said = json.loads(report.read_text())
        step.numbers[kind] = {"wall_s": wall_s, "report": said}
        times = sorted(_numbers(said, "kernel_us"))
        median = f"{times[len(times) // 2]:8.1f} us" if times else "   no times"
        step.lines.append(f"{kind:8} {median} (median of {len(times)}), command {wall_s:5.1f} s")
        if not times:
            step.problems.append(f"{kind}: no kernel times")


def _numbers(value: Any, key: str) -> list[float]:
    """Collect the numbers under a key, wherever in the document it stands."""
    if isinstance(value, dict):
        own = value.get(key)
        here = [float(number) for number in own] if isinstance(own, list) else []
        return here + [number for name, part in value.items() if name != key for number in _numbers(part, key)]
    if isinstance(value, list):
        return [number for part in value for number in _numbers(part, key)]
    return []


def walls(bench: Bench, step: Step) -> None:
    """Time one process under each tool, alone on the machine, for the small captures."""
    from mutation_sweep import read_run

    from alphamoe_sanitizer_replays.captures.store import open_capture
    from alphamoe_sanitizer_replays.replays.job import prepare_inputs, prepare_job
    from alphamoe_sanitizer_replays.results import TOOLS
    from alphamoe_sanitizer_replays.tool.environment import child_environment
    from alphamoe_sanitizer_replays.tool.sanitizer import find_tool, run_tool

    tool_path = find_tool()
    step.numbers["tool_version"] = tool_path.version
    for kind, path in _chosen(bench, step, ("one", "decode")).items():
        stored = open_capture(path)
        inputs = prepare_inputs(stored, bench.home / "inputs")
        compile_s = inputs.compile_ahead(None, None).seconds
        for tool in TOOLS:
            folder = bench.home / "walls" / f"{kind}-{tool}"
            job = prepare_job(inputs, folder, device="cuda")
            run = run_tool(
                tool,
                job.argv,
                tool_path=tool_path,
                folder=folder,
                symbols=stored.capture.symbols,
                timeout_s=bench.left_s(60),
                env=child_environment(),
                result_file=job.result,
            )
            outcome, detail = read_run(run)
            parts = dict(run.result.timings_s) if run.result else {}
            split = " ".join(f"{name} {value:.2f}" for name, value in parts.items())
            step.lines.append(f"{kind:8} {tool:10} {run.wall_s:6.2f} s  {outcome:8} {split}")
            step.numbers[f"{kind} {tool}"] = {"wall_s": run.wall_s, "compile_ahead_s": compile_s, **parts}
            if outcome != "clean":
                step.problems.append(f"{kind} {tool}: {outcome} {detail}")
            if run.wall_s > MAX_WALL_S:
                step.problems.append(f"{kind} {tool}: {run.wall_s:.1f} s, more than {MAX_WALL_S:.0f}")
    shutil.rmtree(bench.home / "inputs", ignore_errors=True)


def report_problems(report: Mapping[str, Any], replays: int) -> list[str]:
    """Say what keeps a session's report from being what the bars ask for.

    Args:
        report: the JSON of ``alphamoe-trace sanitize``.
        replays: entries that are due at least.
    """
    problems = [] if report["verdict"] == "PASS" else [f"verdict {report['verdict']}: {report['reason']}"]
    tools = {"synccheck", "racecheck", "memcheck", "initcheck"}
    if missing := tools - {controls["tool"] for controls in report["controls"]}:
        problems.append(f"no controls of {', '.join(sorted(missing))}")
    for controls in report["controls"]:
        problems += [f"controls of {controls['tool']}: {problem}" for problem in controls["problems"]]
        for made in controls["outcomes"]:
            if made["basic"] and not made["caught"]:
                problems.append(f"{controls['tool']} did not catch {made['control']}: {made['reason']}")
            if made["sound_clean"] is False:
                problems.append(f"{controls['tool']} flagged the sound twin of {made['control']}: {made['reason']}")
    entries = [entry for entry in report["entries"] if entry["tool"] in tools]
    if len(entries) < replays:
        problems.append(f"{len(entries)} of {replays} replays under a tool")
    for entry in entries:
        label = f"{entry['tool']} {entry['label']} {entry['variant']}"
        if entry["verdict"] != "PASS":
            problems.append(f"{label}: {entry['verdict']} {'; '.join(entry['reasons'])}"[:400])
        elif not entry["output"] or entry["output"]["verdict"] != "PASS":
            problems.append(f"{label}: output {entry['output'] and entry['output']['reason']}"[:400])
    return problems


def _sanitize(bench: Bench, step: Step, paths: Sequence[Path], options: Sequence[str], due: int) -> None:
    """Run the command once over captures and read its report."""
    place = bench.home / step.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    report, log = place / "session.json", bench.home / f"{step.name}.log"
    argv = ["sanitize", *map(str, paths), "--tool", "all", "--jobs", str(bench.jobs), "--timeout", "120"]
    argv += [*options, "--out", str(place / "report"), "--force", "--json", str(report)]
    code = command(argv, log, bench.left_s(400), cwd=place)
    if not report.is_file():
        step.problems.append(f"exit {code} and no report: {tail(log)}")
        return
    said = json.loads(report.read_text())
    if code != 0:
        step.problems.append(f"exit {code}")
    step.problems += report_problems(said, due)
    by_tool: dict[str, list[float]] = {}
    for entry in said["entries"]:
        by_tool.setdefault(entry["tool"], []).append(entry["wall_s"])
    for tool, times in by_tool.items():
        step.lines.append(
            f"{tool:10} {len(times):3} replays, {min(times):5.1f} to {max(times):5.1f} s, {bench.jobs} at once"
        )
    for controls in said["controls"]:
        meant = [made for made in controls["outcomes"] if made["meant_for"]]
        missed = ", ".join(made["control"] for made in meant if not made["caught"])
        caught = sum(made["caught"] for made in meant)
        step.lines.append(f"{controls['tool']:10} controls {caught} of {len(meant)} caught; missed: {missed or 'none'}")
    step.lines += said["scope"][:2]
    step.numbers = {"verdict": said["verdict"], "wall_s": said["wall_s"], "controls_wall_s": said["controls_wall_s"]}


def sanitize(bench: Bench, step: Step) -> None:
    """Run every capture in the variant that the launch rule gave it."""
    paths = [path for kind in find(bench.home).values() for path in kind]
    # By rank and layer, because the weights that were drawn last are kept.
    paths.sort(key=lambda path: (path.parent.name, path.name.partition("-")[0]))
    if len(paths) < 20:
        step.problems.append(f"{len(paths)} of 20 captures are there")
    if paths:
        _sanitize(bench, step, paths, (), 4 * len(paths))


def variants(bench: Bench, step: Step) -> None:
    """Run one capture of each kind in every variant; the whole prefill only in the one that the rule gives it."""
    paths = list(_chosen(bench, step, ("one", "decode", "short", "middle")).values())
    if paths:
        _sanitize(bench, step, paths, ("--variants", "all"), 16 * len(paths))


def mutations(bench: Bench, step: Step) -> None:
    """Show one run of every mutant, or with ``--runs all`` every run, to every tool."""
    import torch
    from kernel_mutations import all_mutants
    from mutation_sweep import sweep

    code = sweep(
        _chosen(bench, step),
        list(all_mutants()),
        bench.home,
        jobs=bench.jobs,
        deadline=bench.deadline - 1.0,
        ragged_on="cuda",
        every=bench.every_run,
        gpus=torch.cuda.device_count(),
    )
    said = json.loads((bench.home / "mutations.json").read_text())
    if code == 1:
        step.problems.append("see the table of mutants above")
    if said["incomplete"] or code == 3:
        step.incomplete.append(f"{len(said['incomplete'])} gaps in the table of mutants above")
    step.numbers = said["summary"]
    step.lines.append(f"{said['summary']['killed']} of {said['summary']['mutants']} mutants caught")


def _chosen(bench: Bench, step: Step, kinds: Sequence[str] = tuple(WANTED)) -> dict[str, Path]:
    found = choose_captures(bench.home)
    step.problems += [f"no capture {kind}" for kind in kinds if kind not in found]
    return {kind: found[kind] for kind in kinds if kind in found}


STEPS: Mapping[str, Callable[[Bench, Step], None]] = {
    "captures": captures,
    "plain": plain,
    "walls": walls,
    "sanitize": sanitize,
    "variants": variants,
    "mutations": mutations,
}


def run_steps(bench: Bench, names: Sequence[str], steps: Mapping[str, Callable[[Bench, Step], None]]) -> list[Step]:
    """Run steps in order; whatever one of them raises is its problem alone."""
    made = []
    for name in names:
        step = Step(name)
        made.append(step)
        print(f"\n--- {name}", flush=True)
        began = time.monotonic()
        if began >= bench.deadline:
            step.incomplete.append("not run: the time of the whole was up")
        else:
            try:
                steps[name](bench, step)
            except Exception as error:  # one step must not lose the rest
                step.problems.append(f"{type(error).__name__}: {error}")
        step.wall_s = time.monotonic() - began
        said = [*step.lines, *(f"    WRONG {problem}" for problem in step.problems[:25])]
        for line in [*said, *(f"    INCOMPLETE {gap}" for gap in step.incomplete)]:
            print(line, flush=True)
        record = {"problems": step.problems, "incomplete": step.incomplete, "wall_s": step.wall_s}
        record |= {"numbers": step.numbers, "lines": step.lines}
        (bench.home / f"step-{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS))
    parser.add_argument("--results", type=Path, default=Path("gpu-check"))
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 4) - 1))
    parser.add_argument("--limit", type=float, default=560.0, metavar="SECONDS", help="of the whole")
    parser.add_argument("--runs", choices=("first", "all"), default="first", help="of mutants; all: harmless, too")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    home = (arguments.results / "sanitizer").resolve()
    home.mkdir(parents=True, exist_ok=True)
    bench = Bench(home, arguments.jobs, BEGAN + arguments.limit, arguments.runs == "all")
    made = run_steps(bench, arguments.only or tuple(STEPS), STEPS)
    print(f"\n{'step':10} {'outcome':12} {'wall s':>7}")
    for step in made:
        gaps = "incomplete" if step.incomplete else "ok"
        outcome = f"{len(step.problems)} wrong" if step.problems else gaps
        print(f"{step.name:10} {outcome:12} {step.wall_s:7.1f}")
    if any(step.problems for step in made):
        return 1
    return 3 if any(step.incomplete for step in made) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: giving back a CUDA context waits while another's kernel hangs.
    os._exit(code)
