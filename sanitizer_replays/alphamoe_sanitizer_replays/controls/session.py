"""Run the positive controls of a session's tools, each process under its tool and the filter that its job names."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

import msgspec

from alphamoe_sanitizer_replays.controls.judge import ControlRun, judge_controls
from alphamoe_sanitizer_replays.controls.process import read_control_result
from alphamoe_sanitizer_replays.controls.table import CANARIES, ControlJob, control_jobs
from alphamoe_sanitizer_replays.results import ControlReport, Tool
from alphamoe_sanitizer_replays.tool.sanitizer import ToolPath, run_tool

CONTROL_TIMEOUT_S = 120.0
"""A process of controls takes a few seconds; a tool that hangs on one must not take the session's patience."""


def control_argv(job: ControlJob, result: Path) -> tuple[str, ...]:
    """Give the command line of one control process."""
    canary = "-" if job.canary is None else f"{job.canary}:{list(CANARIES).index(job.tool)}"
    module = "alphamoe_sanitizer_replays.controls.process"
    return (sys.executable, "-P", "-m", module, str(result), canary, *job.kernels)


def run_control(job: ControlJob, tool_path: ToolPath, folder: Path, report: Path, timeout_s: float) -> ControlRun:
    """Run one process of controls in a folder of its own, below the report's.

    Raises:
        OSError: the folder cannot be written.
    """
    own = folder / job.tool / job.name
    result = own.resolve() / "control.json"
    run = run_tool(
        job.tool,
        control_argv(job, result),
        tool_path=tool_path,
        folder=own,
        symbols=job.symbols,
        timeout_s=min(timeout_s, CONTROL_TIMEOUT_S),
        relative_to=report,
    )
    told = read_control_result(result)
    return ControlRun(job, run, told.launched, told.absent, told.device, told.trouble)


class ControlSession:
    """The controls of every tool, submitted at once and judged when they are done."""

    def __init__(
        self,
        pool: Executor,
        tools: Sequence[Tool],
        targets: Sequence[str],
        tool_path: ToolPath,
        report: Path,
        timeout_s: float,
    ) -> None:
        """Submit the processes.

        Args:
            pool: where they run.
            tools: the session's tools.
            targets: every symbol that its replays watch.
            tool_path: the compute-sanitizer.
            report: the report's folder; logs go to ``controls/TOOL/JOB`` in it.
            timeout_s: of one process, at most ``CONTROL_TIMEOUT_S``.
        """
        self._targets = tuple(dict.fromkeys(targets))
        self._began_s = time.monotonic()
        self.wall_s = 0.0
        self._runs: dict[Tool, list[tuple[ControlJob, Future[ControlRun]]]] = {
            tool: [
                (job, pool.submit(run_control, job, tool_path, report / "controls", report, timeout_s))
                for job in control_jobs(tool, self._targets)
            ]
            for tool in tools
        }

    @property
    def futures(self) -> list[Future[ControlRun]]:
        """Every process, in the order of tools and jobs."""
        return [future for runs in self._runs.values() for _, future in runs]

    def reports(self) -> tuple[ControlReport, ...]:
        """Judge what is done: a process that was cancelled or failed is told, and proves nothing."""
        self.wall_s = time.monotonic() - self._began_s
        judged = []
        for tool, submitted in self._runs.items():
            runs, problems = [], []
            for job, future in submitted:
                if not future.done() or future.cancelled():
                    problems.append(f"{job.name} was not run to its end: interrupted")
                    continue
                failure = future.exception()
                if failure is None:
                    runs.append(future.result())
                elif isinstance(failure, KeyboardInterrupt):
                    problems.append(f"{job.name} was not run to its end: interrupted")
                else:  # the other tools' controls, and findings, must not be lost with it
                    problems.append(f"{job.name} could not be run: {type(failure).__name__}: {failure}")
            report = judge_controls(tool, tuple(runs), self._targets)
            judged.append(msgspec.structs.replace(report, problems=(*problems, *report.problems)))
        return tuple(judged)
