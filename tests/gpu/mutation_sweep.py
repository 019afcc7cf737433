"""Show every mutant of the fused kernel to every tool and to the output check, and say who catches which.

    python tests/gpu/mutation_sweep.py --captures DIR [--only NAME ...] [--runs all] [--jobs N] [--limit SECONDS]

Each (mutant, variant, input) is replayed in five processes: without a tool, where its output is compared, and under the
four tools. The kernel itself goes the same way for every variant and input: where a tool does not find it clean, what
the tool says of a mutant there does not count. One run of each mutant takes about four minutes on 16 cores, all runs
twice that. Results are appended to mutations.jsonl as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("profiler", "tracers", "sanitizer_replays", "backend")]

from kernel_mutations import Mutant, all_mutants, changed_lines, write_mutant  # noqa: E402
from mutant_builds import ARCH  # noqa: E402
from mutation_table import KERNEL, Case, Outcome, print_table, summarise, tabulate  # noqa: E402

from alphamoe_sanitizer_replays.replays.job import ReplayInputs, check_outputs, prepare_inputs, prepare_job  # noqa: E402
from alphamoe_sanitizer_replays.results import TOOLS, Finding, ToolRun  # noqa: E402

PLAIN_LIMIT_S, TOOL_LIMIT_S, HUNG_LIMIT_S = 30.0, 60.0, 25.0
"""Seconds a process; the last under a tool when the same hung without one."""


def chosen_runs(mutants: Iterable[Mutant], *, every: bool, inputs: Iterable[str] | None = None) -> list[Mutant]:
    """Keep the first run of each mutant, or every one of them; what has the kernel's own code is not run at all.

    Args:
        mutants: all of them.
        every: keep all runs of those that are not harmless.
        inputs: keep only runs on these.
    """
    kept = []
    for mutant in mutants:
        runs = tuple(run for run in mutant.runs if inputs is None or run[1] in inputs)
        if runs and not mutant.same_code:
            kept.append(dataclasses.replace(mutant, runs=runs if every and not mutant.harmless else runs[:1]))
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
    """

    def __init__(
        self,
        inputs: Mapping[str, ReplayInputs],
        folder: Path,
        record: Callable[[Outcome], None],
        *,
        device: str = "cuda",
    ) -> None:
        from alphamoe_sanitizer_replays.replays.spec import child_environment
        from alphamoe_sanitizer_replays.tool.sanitizer import find_tool

        self._inputs, self._folder, self._record = inputs, folder, record
        self._device = device
        self._environment = child_environment()
        self._tool = find_tool()
        self._checking = threading.Lock()
        self._hung: set[tuple[str, str, str]] = set()

    def run(self, case: Case, source: Path | None, limit_s: float) -> Outcome:
        """Run one process and judge it; whatever goes wrong is an outcome, too."""
        began = time.monotonic()
        try:
            outcome, detail = self._launch(case, source, limit_s)
        except Exception as error:  # one case must not lose the others
            outcome, detail = "unclear", f"{type(error).__name__}: {error}"[:200]
        made = Outcome(**dataclasses.asdict(case), outcome=outcome, detail=detail, wall_s=time.monotonic() - began)
        self._record(made)
        return made

    def _launch(self, case: Case, source: Path | None, limit_s: float) -> tuple[str, str]:
        from alphamoe_sanitizer_replays.tool.sanitizer import run_plain, run_tool

        inputs = self._inputs[case.input]
        folder = self._folder / "runs" / case.mutant / f"{case.variant}-{case.input}-{case.tool}"
        job = prepare_job(inputs, folder, device=self._device, variant=case.variant, source=source)
        if case.tool == "none":
            limit = min(PLAIN_LIMIT_S, limit_s)
            run = run_plain(job.argv, folder=folder, timeout_s=limit, env=self._environment, result_file=job.result)
            outcome, detail = read_run(run)
            if outcome == "hang":
                self._hung.add((case.mutant, case.variant, case.input))
            if outcome == "clean":
                with self._checking:
                    checked = check_outputs(inputs, job, run.result)
                if checked.verdict != "PASS":
                    return ("wrong" if checked.verdict == "FAIL" else "unclear"), checked.reason[:200]
            return outcome, detail
        hung = (case.mutant, case.variant, case.input) in self._hung
        run = run_tool(
            next(tool for tool in TOOLS if tool == case.tool),
            job.argv,
            tool_path=self._tool,
            folder=folder,
            symbols=inputs.stored.capture.symbols,
            timeout_s=min(HUNG_LIMIT_S if hung else TOOL_LIMIT_S, limit_s),
            env=self._environment,
            result_file=job.result,
        )
        return read_run(run)


def _compile(source: str | None, variant: str) -> str:
    """Put one cubin into the disk cache, in a worker process; gives the compiler's complaint, or an empty string."""
    sys.path[:0] = [str(ROOT / name) for name in ("tracers", "backend")]
    from alphamoe_backend.kernels import jit, launch

    try:
        text = jit.file_text(Path(source)) if source else jit.source_text(launch.SOURCE_NAME)
        jit.compile_source(launch.SOURCE_NAME, text, ARCH, launch.variant(variant).defines())
    except Exception as error:  # exceptions of the compiler's bindings do not survive the way back
        return f"{type(error).__name__}: {error}"[-300:]
    return ""


def compile_all(wanted: Iterable[tuple[str | None, str]], jobs: int) -> list[str]:
    """Compile (source, variant) pairs in parallel and give what did not compile; replays then find them all cached."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compile, source, variant): (source, variant) for source, variant in set(wanted)}
        return [f"{futures[done]}: {done.result()}" for done in as_completed(futures) if done.result()]


def run_sweep(
    to_do: list[Case],
    sources: Mapping[str, Path | None],
    run: Callable[[Case, Path | None, float], Outcome],
    *,
    jobs: int,
    deadline: float,
) -> list[Outcome]:
    """Run every case, ``jobs`` at a time; what does not begin by the deadline (monotonic seconds) is ``not run``."""

    def one(case: Case) -> Outcome:
        left = deadline - time.monotonic()
        if left < 5.0:
            return Outcome(**dataclasses.asdict(case), outcome="not run", detail="out of time", wall_s=0.0)
        return run(case, sources[case.mutant], left)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, to_do))


def sweep(captures: Mapping[str, Path], mutants: list[Mutant], results: Path, *, jobs: int, limit_s: float) -> int:
    """Run the sweep, print its table, write mutations.json, and return the exit code."""
    from alphamoe_sanitizer_replays.captures.store import open_capture

    deadline = time.monotonic() + limit_s
    results.mkdir(parents=True, exist_ok=True)
    needed = sorted({inputs for mutant in mutants for _, inputs in mutant.runs})
    missing = [name for name in needed if name not in captures]
    problems = [f"there is no capture {name}" for name in missing]
    todo = [case for case in cases(mutants) if case.input not in missing]
    with tempfile.TemporaryDirectory(prefix="alphamoe-mutants-") as temporary:
        folder = Path(temporary)
        began = time.monotonic()
        inputs: dict[str, ReplayInputs] = {}
        for name in (name for name in needed if name not in missing):
            inputs[name] = prepare_inputs(open_capture(captures[name]), folder / "inputs")
        sources: dict[str, Path | None] = {KERNEL: None}
        sources |= {mutant.name: write_mutant(mutant, folder / "sources") for mutant in mutants}
        ready = time.monotonic()
        wanted = {(str(sources[case.mutant]) if sources[case.mutant] else None, case.variant) for case in todo}
        problems += [f"did not compile: {line}" for line in compile_all(wanted, jobs)]
        compiled = time.monotonic()
        lock = threading.Lock()
        with (results / "mutations.jsonl").open("w") as stream:

            def record(made: Outcome) -> None:
                with lock:
                    stream.write(json.dumps(dataclasses.asdict(made)) + "\n")
                    stream.flush()

            outcomes = run_sweep(todo, sources, Sweep(inputs, folder, record).run, jobs=jobs, deadline=deadline)
    walls = {"inputs": ready - began, "compile": compiled - ready, "replays": time.monotonic() - compiled}
    rows, more = tabulate(outcomes, mutants)
    problems += more
    summary = summarise(rows)
    print_table(rows, summary)
    print(f"{len(outcomes)} replays; seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in walls.items()))
    for problem in problems[:40]:
        print(f"    WRONG {problem}")
    listed = [
        {
            "mutant": row.mutant.name,
            "mechanism": row.mutant.mechanism,
            "lines": [f"{file}:{line}" for file, line in changed_lines(row.mutant)],
            "variant": row.variant,
            "input": row.input,
            "seen": dict(row.seen),
            "caught_by": row.caught_by,
            "harmless": row.mutant.harmless,
            "same_code": row.mutant.same_code,
        }
        for row in rows
    ]
    document = {"summary": summary, "wall_s": walls, "problems": problems, "rows": listed}
    (results / "mutations.json").write_text(json.dumps(document, indent=1) + "\n")
    return 1 if problems or summary["unlisted_survivors"] or not rows else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--captures", type=Path, help="folder of the results of sanitizer_check.py --only captures")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--ragged", action="store_true", help="only runs on the made inputs; no capture is needed")
    parser.add_argument("--runs", choices=("first", "all"), default="first", help="of each mutant")
    parser.add_argument("--results", type=Path, default=Path("gpu-check"))
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 4) - 1))
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS")
    arguments = parser.parse_args()
    import torch
    from captured_runs import choose_captures
    from mutation_inputs import make_ragged

    results: Path = arguments.results.resolve()
    captures = make_ragged(results / "ragged", torch.device("cuda"))
    if not arguments.ragged:
        captures = {**captures, **choose_captures(arguments.captures or results)}
    mutants = [mutant for mutant in all_mutants() if not arguments.only or mutant.name in arguments.only]
    only = captures if arguments.ragged else None
    mutants = chosen_runs(mutants, every=arguments.runs == "all", inputs=only)
    return sweep(captures, mutants, results, jobs=arguments.jobs, limit_s=arguments.limit)


if __name__ == "__main__":
    raise SystemExit(main())
