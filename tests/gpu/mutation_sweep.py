"""Show every mutant of the fused kernel to every tool and to the output check, and say who catches which.

    python tests/gpu/mutation_sweep.py --captures DIR [--only NAME ...] [--runs all] [--limit SECONDS] [--resume FILE]

Each (mutant, variant, input) is replayed in five processes: without a tool, where its output is compared, and under the
four tools. The kernel itself goes the same way for every variant and input: where a tool does not find it clean, what
the tool says of a mutant there does not count. mutation_schedule.py says what comes first, because at the limit
everything is killed and the table is made of what is there. Exit code 0: everything was caught; 1: the kernel is not
clean, or a mutant survived every tool; 3: the table has gaps.

Without `--runs all`, one run of each mutant that something can be expected to catch: 71 mutants, about 380 processes.
mutations.jsonl gets each outcome as it comes, mutations.json the table so far; `--resume` fills the gaps of an earlier
sweep (mutation_resume.py), and mutation_record.py keeps the result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("profiler", "tracers", "sanitizer_replays", "backend")]

from kernel_mutations import Mutant, all_mutants, write_mutant  # noqa: E402
from mutation_inputs import RAGGED_M, make_ragged  # noqa: E402
from mutation_resume import Identities, read_lines, take_up  # noqa: E402
from mutation_schedule import Schedule, run_schedule  # noqa: E402
from mutation_table import DEADLOCK, KERNEL, Case, Outcome, Report  # noqa: E402
from watched_replay import HANG_FILE  # noqa: E402

from alphamoe_sanitizer_replays.replays.job import ReplayInputs, check_outputs, prepare_inputs, prepare_job  # noqa: E402
from alphamoe_sanitizer_replays.results import TOOLS, Finding, ToolRun  # noqa: E402
from alphamoe_tracers.errors import AlphaMoEError  # noqa: E402

DEADLOCK_MS = 3000
"""How long racecheck lets a mutant that hangs wait at a barrier until it reports that."""


def chosen_runs(mutants: Iterable[Mutant], *, every: bool, inputs: Iterable[str] | None = None) -> list[Mutant]:
    """Keep the first run of each mutant that something must catch, or every run of every mutant.

    Args:
        mutants: all of them.
        every: keep all runs, and the first one of the harmless and of those with the kernel's own code.
        inputs: those that there are; runs on others are left out.
    """
    kept = []
    for mutant in mutants:
        idle = bool(mutant.harmless or mutant.same_code)
        runs = tuple(run for run in mutant.runs if inputs is None or run[1] in inputs)
        if runs and (every or not idle):
            kept.append(dataclasses.replace(mutant, runs=runs if every and not idle else runs[:1]))
    return kept


def cases(mutants: Iterable[Mutant]) -> list[Case]:
    """List every process: the kernel's own of each variant and input first, then those without a tool."""
    runs = [(mutant.name, variant, inputs) for mutant in mutants for variant, inputs in mutant.runs]
    # By input, because the output check keeps the oracle of one capture only.
    runs.sort(key=lambda run: run[2])
    own = sorted({(KERNEL, variant, inputs) for _, variant, inputs in runs}, key=lambda run: run[::-1])
    return [Case(*run, tool) for group in (own, runs) for tool in ("none", *TOOLS) for run in group]


def _told(finding: Finding) -> str:
    place = finding.where
    where = f" {place.file or ''}:{place.line}" if place and place.line else ""
    return f"{finding.severity}: {finding.text}{where}"[:200]


def read_run(run: ToolRun) -> tuple[str, str]:
    """Give the outcome of one process under a tool, and its detail. A finding counts even where the process died."""
    shown = run.log.findings if run.log else ()
    real = [
        finding
        for finding in (*shown, *run.xml_findings)
        if finding.kind not in ("api", "internal") and finding.severity != "info" and finding.in_target is not False
    ]
    if real:
        return "found", f"{sum(finding.count for finding in real)} times, first {_told(real[0])}"
    if run.timed_out:
        return "hang", f"killed after {run.timeout_s:.0f} s"
    if run.result is None or run.result.status != "launched":
        said = run.result.error if run.result else None
        return "crash", said or f"exit {run.exit_code}, {run.signal or 'no signal'}: {'; '.join(run.problems)}"[:200]
    if run.tool == "none":
        return ("clean", "") if run.exit_code == 0 else ("unclear", f"exit {run.exit_code}")
    if run.exit_code != 0 or run.problems or run.log is None or not run.log.banner or not run.log.summaries:
        return "unclear", f"exit {run.exit_code}; {'; '.join(run.problems)}"[:200]
    if run.log.found_errors or run.log.found_warnings or run.log.not_printed:
        return "unclear", "the summary counts what the log does not show"
    return "clean", ""


class Sweep:
    """The processes of one sweep.

    Args:
        inputs: captures by name.
        folder: for logs, mutants and specifications.
        record: takes each outcome as it comes, from any thread.
        device: where replays run; only tests say ``cpu``.
        gpus: that processes are dealt out to, one after the other.
    """

    def __init__(
        self,
        inputs: Mapping[str, ReplayInputs],
        folder: Path,
        record: Callable[[Outcome], None],
        *,
        device: str = "cuda",
        gpus: int = 1,
    ) -> None:
        from alphamoe_sanitizer_replays.tool.environment import child_environment
        from alphamoe_sanitizer_replays.tool.sanitizer import find_tool

        self._inputs, self._folder, self._record = inputs, folder, record
        self._device = device
        here = str(Path(__file__).resolve().parent)
        environment = child_environment()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        # Each of 15 processes would start a spinning thread for every core.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._tool = find_tool()
        self.tool_version = self._tool.version
        folder.mkdir(parents=True, exist_ok=True)
        patient = folder / "deadlock-sanitizer"
        patient.write_text(
            f'#!/bin/sh\nexec {shlex.quote(str(self._tool.path))} --racecheck-deadlock-timeout {DEADLOCK_MS} "$@"\n'
        )
        patient.chmod(0o755)
        self._deadlock_tool = dataclasses.replace(self._tool, path=patient)
        self._gpus = itertools.cycle(range(gpus)) if gpus > 1 else None
        self._checking = threading.Lock()
        self._hung: set[tuple[str, str, str]] = set()

    def run(self, case: Case, source: Path | None, limit_s: float, watch_s: float, cut: bool = False) -> Outcome:
        """Run one process and judge it; whatever goes wrong is an outcome, too.

        Args:
            case: what.
            source: null for the kernel's own.
            limit_s: until the process is killed.
            watch_s: from the launch until the kernel counts as hanging.
            cut: the limit is what was left of the time; that the process reached it says nothing of the mutant.
        """
        began = time.monotonic()
        launch_s = None
        try:
            outcome, detail, launch_s = self._launch(case, source, limit_s, watch_s, cut)
        except Exception as error:  # one case must not lose the others
            outcome, detail = "unclear", f"{type(error).__name__}: {error}"[:200]
        made = Outcome.of(case, outcome, detail, time.monotonic() - began, launch_s)
        self.take(made)
        return made

    def take(self, made: Outcome) -> None:
        """Record an outcome, made now or earlier. Only a mutant that hangs without a tool is one that hangs."""
        if made.tool == "none" and made.outcome == "hang":
            self._hung.add((made.mutant, made.variant, made.input))
        self._record(made)

    def _launch(
        self, case: Case, source: Path | None, limit_s: float, watch_s: float, cut: bool
    ) -> tuple[str, str, float | None]:
        from alphamoe_sanitizer_replays.tool.sanitizer import run_plain, run_tool

        inputs = self._inputs[case.input]
        folder = self._folder / "runs" / case.mutant / f"{case.variant}-{case.input}-{case.tool}"
        job = prepare_job(inputs, folder, device=self._device, variant=case.variant, source=source)
        argv = (sys.executable, "-P", "-m", "watched_replay", str(job.spec), f"{watch_s:.1f}")
        env, note = self._environment, ""
        if self._gpus is not None:
            env = {**env, "CUDA_VISIBLE_DEVICES": str(next(self._gpus))}
        if case.tool == "none":
            run = run_plain(argv, folder=folder, timeout_s=limit_s, env=env, result_file=job.result)
        else:
            again = case.tool == "racecheck" and (case.mutant, case.variant, case.input) in self._hung
            patient = again or case.tool == DEADLOCK
            note = f"{DEADLOCK} detection: " if patient else ""
            run = run_tool(
                "racecheck" if patient else next(tool for tool in TOOLS if tool == case.tool),
                argv,
                tool_path=self._deadlock_tool if patient else self._tool,
                folder=folder,
                symbols=inputs.stored.capture.symbols,
                timeout_s=limit_s,
                env=env,
                result_file=job.result,
            )
        outcome, detail = read_run(run)
        if outcome != "found" and _hung_in(folder):
            outcome, detail = "hang", f"the kernel had not ended {watch_s:.0f} s after its launch"
        elif outcome == "hang" and cut:
            outcome, detail = "not run", "killed at the end of the time"
        elif outcome == "clean" and case.tool == "none":
            with self._checking:
                checked = check_outputs(inputs, job, run.result)
            if checked.verdict != "PASS":
                outcome, detail = "wrong" if checked.verdict == "FAIL" else "unclear", checked.reason[:200]
        return outcome, f"{note}{detail}", run.result.timings_s.get("launch") if run.result else None


def _hung_in(folder: Path) -> bool:
    """Say whether the replay process ended itself because its kernel did not end."""
    file = folder / HANG_FILE
    return file.is_file() and file.stat().st_size > 0


def compile_all(wanted: Iterable[tuple[str | None, str]], folder: Path, jobs: int, limit_s: float) -> list[str]:
    """Compile (source, variant) pairs in parallel and give what did not compile; replays then find them all cached."""
    from alphamoe_sanitizer_replays.tool.process_group import run_group

    # By variant and source, the kernel's own first: what is slow to compile is spread over the processes.
    builds = sorted(set(wanted), key=lambda build: (build[0] is not None, build[1], build[0] or ""))
    folder.mkdir(parents=True, exist_ok=True)

    def one(number: int) -> str:
        listed, output = folder / f"builds-{number}.json", folder / f"builds-{number}.out"
        listed.write_text(json.dumps(builds[number::jobs]))
        argv = [sys.executable, str(Path(__file__).with_name("mutant_builds.py")), "--cache", str(listed)]
        ended = run_group(argv, env=os.environ, output=output, timeout_s=limit_s, bounds={})
        if ended.exit_code == 0:
            return ""
        return f"exit {ended.exit_code}, {ended.signal or 'no signal'}: {output.read_text(errors='replace')[-300:]}"

    with ThreadPoolExecutor(jobs) as pool:
        return [said for said in pool.map(one, range(min(jobs, len(builds)))) if said]


def sweep(
    captures: Mapping[str, Path],
    mutants: list[Mutant],
    results: Path,
    *,
    jobs: int,
    deadline: float,
    ragged_on: str | None = None,
    every: bool = False,
    gpus: int = 1,
    resume: Path | None = None,
) -> int:
    """Run the sweep, print its table, write mutations.json, and return the exit code.

    Args:
        captures: by name.
        mutants: all that are asked for.
        results: folder.
        jobs: processes at once.
        deadline: monotonic seconds when this returns at the latest.
        ragged_on: the device on which to make the ragged captures, which are then added.
        every: all runs, not the first ones.
        gpus: to deal processes out to.
        resume: mutations.jsonl of an earlier sweep, which may be the one that this writes.
    """
    from alphamoe_sanitizer_replays.captures.store import open_capture

    began = time.monotonic()
    results.mkdir(parents=True, exist_ok=True)
    there = {*captures, *(RAGGED_M if ragged_on else ())}
    chosen = chosen_runs(mutants, every=every, inputs=there)
    report = Report(results, chosen)
    lost = {made.name for made in chosen_runs(mutants, every=every)} - {made.name for made in chosen}
    report.incomplete += [f"{name}: there is no capture for any of its runs" for name in sorted(lost)]
    to_do = cases(chosen)
    earlier = read_lines(resume) if resume else []
    outcomes: list[Outcome] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="alphamoe-mutants-", ignore_cleanup_errors=True) as temporary,
        (results / "mutations.jsonl").open("w") as stream,
    ):
        folder, lock = Path(temporary), threading.Lock()
        sources: dict[str, Path | None] = {KERNEL: None}
        sources |= {mutant.name: write_mutant(mutant, folder / "sources") for mutant in chosen}
        wanted = {(str(sources[case.mutant]) if sources[case.mutant] else None, case.variant) for case in to_do}
        with ThreadPoolExecutor(1) as pool:
            left = deadline - time.monotonic() - 10.0
            compiling = pool.submit(compile_all, wanted, folder / "builds", max(1, jobs - 1), max(1.0, left))
            if ragged_on:
                import torch

                captures = {**make_ragged(results / "ragged", torch.device(ragged_on)), **captures}
            inputs: dict[str, ReplayInputs] = {}
            for name in sorted({case.input for case in to_do}):
                try:
                    inputs[name] = prepare_inputs(open_capture(captures[name]), folder / "inputs")
                except AlphaMoEError as error:  # one capture must not lose the others
                    report.incomplete.append(f"capture {name}: {error}")
            to_do = [case for case in to_do if case.input in inputs]
            report.walls["inputs"] = time.monotonic() - began
            report.wrong += [f"did not compile: {line}" for line in compiling.result()]
        report.walls["inputs and compile"] = time.monotonic() - began
        print(f"{len(to_do)} processes; ready after {time.monotonic() - began:.0f} s", flush=True)

        def record(made: Outcome) -> None:
            with lock:
                outcomes.append(made)
                stream.write(identities.line(made) + "\n")
                stream.flush()

        def progress(line: str) -> None:
            print(line, flush=True)
            with lock:
                known = list(outcomes)
            report.write(known)

        runs = Sweep(inputs, folder, record, gpus=gpus)
        captured = {name: given.stored.capture for name, given in inputs.items()}
        identities = Identities(chosen, captured, runs.tool_version or "")

        def run(case: Case, limit_s: float, watch_s: float, cut: bool) -> Outcome:
            return runs.run(case, sources[case.mutant], limit_s, watch_s, cut)

        schedule = Schedule(to_do, chosen, gpus=gpus)
        taken = take_up(earlier, identities, to_do)
        for made in taken:
            runs.take(made)
            with schedule.changed:
                schedule.put(made)
        if earlier:
            print(f"{len(taken)} of {len(earlier)} earlier outcomes are of the same code and inputs", flush=True)
        started = time.monotonic()
        try:
            run_schedule(schedule, run, jobs=jobs, deadline=deadline, progress=progress)
        finally:  # also when it was told to stop
            outcomes = list(schedule.made.values())
            report.walls["replays"] = time.monotonic() - started
            report.write(outcomes)
    return report.finish(outcomes)


def end_on_sigterm() -> None:
    """Make SIGTERM what Ctrl-C is, so that processes are killed and the table is written."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--captures", type=Path, help="folder of the results of sanitizer_check.py --only captures")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--ragged", action="store_true", help="only runs on the made inputs; no capture is needed")
    parser.add_argument("--runs", choices=("first", "all"), default="first", help="all: harmless mutants, too")
    parser.add_argument("--results", type=Path, default=Path("gpu-check"))
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 4) - 1))
    parser.add_argument("--resume", type=Path, metavar="FILE", help="mutations.jsonl of an earlier sweep")
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS", help="of the whole")
    arguments = parser.parse_args()
    import torch
    from captured_runs import choose_captures

    end_on_sigterm()
    results: Path = arguments.results.resolve()
    captures = {} if arguments.ragged else choose_captures(arguments.captures or results)
    mutants = [mutant for mutant in all_mutants() if not arguments.only or mutant.name in arguments.only]
    return sweep(
        captures,
        mutants,
        results,
        jobs=arguments.jobs,
        deadline=BEGAN + arguments.limit,
        ragged_on="cuda",
        every=arguments.runs == "all",
        gpus=torch.cuda.device_count(),
        resume=arguments.resume,
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: giving back a CUDA context waits while another's kernel hangs.
    os._exit(code)
