"""``alphamoe-trace replay``: one capture, launched again without a tool or under single ones, as a record and in words.

Its verdict is that of ``alphamoe-trace sanitize``. Whether the output is that of the capture is told beside it: that is
known on a CPU too, where no kernel is launched. A tool that reports nothing proves nothing here, since its positive
controls are run by ``sanitize`` alone.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.captures.store import open_capture
from alphamoe_sanitizer_replays.plugins.protocol import CompiledAhead
from alphamoe_sanitizer_replays.replays.job import INPUTS_NAME, check_file, prepare_inputs, run_replay
from alphamoe_sanitizer_replays.results import TOOLS, OutputCheck, Tool, ToolRun
from alphamoe_sanitizer_replays.tool.folder_lock import clear_folder, locked_folder
from alphamoe_sanitizer_replays.tool.sanitizer import find_tool
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowList
from alphamoe_sanitizer_replays.verdicts.judge import judge

REPORT_SCHEMA = "alphamoe-trace-replay-report-v1"


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One replay process and its output."""

    run: ToolRun
    output: OutputCheck
    """Whether the output is that of the capture, whatever the verdict."""
    verdict: str
    reason: str
    """One line; empty for PASS."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of replaying one capture."""

    schema: str = REPORT_SCHEMA
    capture: str
    label: str
    plugin: str
    device: str
    source: str | None
    captured_source_sha256: str | None
    replays: tuple[Replayed, ...]
    compile_ahead_s: float
    verdict: str

    @property
    def exit_code(self) -> int:
        """That of the verdict."""
        return Verdict(self.verdict).exit_code


def replay_capture(
    path: Path,
    *,
    tools: tuple[Tool | Literal["none"], ...] = ("none",),
    variant: str | None = None,
    source: Path | None = None,
    plugin: str | None = None,
    repeats: int = 0,
    device: str = "auto",
    timeout_s: float = 120.0,
    sanitizer: str | None = None,
    out: Path | None = None,
    force: bool = False,
) -> ReplayReport:
    """Replay one capture, each tool in a process of its own.

    Args:
        path: the capture's directory.
        tools: ``none`` or tools.
        variant: null for the captured process's own.
        source: compiled instead of the kernel's own source.
        plugin: replays it instead of the plug-in that it names.
        repeats: further launches that are timed; only without a tool.
        device: ``auto``, ``cpu`` or torch's name of a CUDA device.
        timeout_s: of each process.
        sanitizer: the compute-sanitizer to use.
        out: where logs, outputs and inputs stay; null for a temporary folder.
        force: replace an earlier replay in ``out``.

    Raises:
        UsageError: no such variant, source or plug-in, or ``out`` holds something else, or an earlier replay.
        EvidenceError: the capture is damaged, its weights cannot be drawn here, or there is no compute-sanitizer.
    """
    check_file(source, "--source")
    stored = open_capture(path, plugin)
    tool_path = find_tool(sanitizer) if any(tool != "none" for tool in tools) else None
    place = device if device != "auto" else _device()
    with _folder(out, force, path) as folder:
        inputs = prepare_inputs(stored, folder)
        ahead = inputs.compile_ahead(variant, source) if place != "cpu" else CompiledAhead()
        replays = []
        for tool in tools:
            run, output = run_replay(
                inputs,
                folder / tool,
                tool=None if tool == "none" else tool,
                tool_path=tool_path,
                device=place,
                variant=variant,
                source=source,
                repeats=repeats,
                timeout_s=timeout_s,
                relative_to=folder,
            )
            replays.append(_replayed(stored.capture, run, output))
    return ReplayReport(
        capture=str(path),
        label=stored.capture.label,
        plugin=inputs.plugin.name,
        device=place,
        source=str(source) if source is not None else None,
        captured_source_sha256=stored.capture.source_sha256,
        replays=tuple(replays),
        compile_ahead_s=ahead.seconds,
        verdict=worst(Verdict(replayed.verdict) for replayed in replays).value,
    )


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _folder(out: Path | None, force: bool, capture: Path) -> Iterator[Path]:
    if out is not None:
        with locked_folder(out):
            clear_folder(out, _is_own, force, [capture], "replay")
            yield out
        return
    with tempfile.TemporaryDirectory(prefix="alphamoe-trace-replay-") as name:
        yield Path(name)


def _is_own(name: str) -> bool:
    return name in ("none", *TOOLS) or INPUTS_NAME.fullmatch(name) is not None


def _replayed(capture: Capture, run: ToolRun, output: OutputCheck) -> Replayed:
    today = datetime.date.today()
    judged = judge(run, capture=capture, output=output, controls=None, allow=AllowList(), today=today)
    reason = judged.reasons[0] if judged.reasons else ""
    return Replayed(run=run, output=output, verdict=judged.target.value, reason=reason)


def describe(report: ReplayReport) -> str:
    """Tell a report in a few lines."""
    lines = [f"{report.label} ({report.plugin}) replayed on {report.device}: {report.verdict}"]
    for replayed in report.replays:
        run, result, output = replayed.run, replayed.run.result, replayed.output
        tool = "without a tool" if run.tool == "none" else f"{run.tool} {run.tool_version or ''}".strip()
        variant = f", {result.variant}" if result is not None and result.variant else ""
        lines.append(f"  {tool}{variant}: {replayed.verdict}" + (f": {replayed.reason}" if replayed.reason else ""))
        lines.append(f"    output: {_output_told(output)}")
        if run.log is not None:
            lines.append(f"    tool: {run.log.found_errors} errors, {run.log.found_warnings} warnings")
        if result is not None and (result.kernel_us or result.cpu_us):
            times = sorted(result.kernel_us or result.cpu_us)
            of = "launches, inputs in the cache" if result.kernel_us else "calls on the CPU, no kernel's time"
            lines.append(
                f"    time: median {statistics.median(times):.2f} us, least {times[0]:.2f}, most {times[-1]:.2f} "
                f"({len(times)} {of})"
            )
        if result is not None:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.timings_s.items())
            lines.append(f"    wall: {run.wall_s:.2f} s in all; {parts}")
            if (
                result.source_sha256 is not None
                and report.captured_source_sha256 not in (None, result.source_sha256)
                and report.source is None
            ):
                lines.append("    note: the kernel's source has changed since the capture")
    return "\n".join(lines) + "\n"


def _output_told(output: OutputCheck) -> str:
    """Say whether the output is that of the capture: known without a GPU, and no verdict on a kernel."""
    told = {
        "PASS": "that of the capture",
        "FAIL": f"not that of the capture: {output.reason}",
        "INCONCLUSIVE": f"not compared with that of the capture: {output.reason}",
    }[output.verdict]
    if output.max_abs_error is None:
        return told
    relative = output.relative_error
    oracle = f", relative error to the float64 oracle {relative:.4f}" if relative is not None else ""
    return f"{told}, largest difference {output.max_abs_error:.3g}{oracle} ({output.tolerance})"
