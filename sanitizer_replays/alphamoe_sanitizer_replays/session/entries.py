"""From one replay process and its verdict to the entry of the report."""

from __future__ import annotations

import datetime
import shlex

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.records import ReplayEntry
from alphamoe_sanitizer_replays.results import ControlReport, OutputCheck, Tool, ToolRun
from alphamoe_sanitizer_replays.session.plan import PlannedCapture, SessionOptions
from alphamoe_sanitizer_replays.tool.environment import REPLAY_ENVIRONMENT
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowEntry, AllowList
from alphamoe_sanitizer_replays.verdicts.judge import judge


def open_entry(own: PlannedCapture, variant: str | None, tool: Tool | None, reason: str, hint: str = "") -> ReplayEntry:
    """Give the entry of a replay that was not made: INCONCLUSIVE, with the reason."""
    return ReplayEntry(
        capture=own.facts.path,
        label=own.facts.label,
        variant=variant,
        tool=tool or "none",
        verdict=Verdict.INCONCLUSIVE,
        whole=Verdict.INCONCLUSIVE,
        reasons=(" ".join(reason.split()),),
        settled_by="evidence",
        hint=hint,
    )


def entry_of(
    own: PlannedCapture,
    variant: str | None,
    run: ToolRun,
    output: OutputCheck,
    controls: ControlReport | None,
    allow: AllowList,
    compile_s: float,
    today: datetime.date,
    options: SessionOptions,
) -> tuple[ReplayEntry, tuple[AllowEntry, ...]]:
    """Judge one replay process; gives its entry, and the entries of the allow-list that were used.

    Args:
        own: the capture.
        variant: that was asked for.
        run: the process.
        output: its output check.
        controls: of its tool; null without a tool.
        allow: findings that are known.
        compile_s: seconds that compiling ahead took.
        today: for entries of the allow-list that expire.
        options: of the session.
    """
    capture = own.stored.capture
    verdict = judge(run, capture=capture, output=output, controls=controls, allow=allow, today=today)
    result, log = run.result, run.log
    source = result.source_sha256 if result is not None else None
    timings = dict(result.timings_s) if result is not None else {}
    if compile_s:
        timings["compile"] = timings.get("compile", 0.0) + compile_s
    entry = ReplayEntry(
        capture=own.facts.path,
        label=own.facts.label,
        variant=variant,
        tool=run.tool,
        verdict=verdict.target,
        whole=verdict.whole,
        reasons=verdict.reasons,
        settled_by=verdict.settled_by,
        errors=log.found_errors if log is not None and log.summaries else None,
        warnings=log.found_warnings if log is not None and log.summaries else None,
        hazards=_hazards(run),
        findings=verdict.target_findings,
        other_findings=verdict.other_findings,
        api_errors=verdict.api_errors,
        allowed=verdict.allowed,
        allowed_until=min((own.expires.isoformat() for own in verdict.allowed_by), default=None),
        notes=verdict.notes,
        symbols=capture.symbols or (result.symbols if result is not None else ()),
        device=result.device if result is not None else None,
        output=output,
        kernel_us=result.kernel_us if result is not None else (),
        timings_s=timings,
        wall_s=run.wall_s,
        source_sha256=source,
        cubin_sha256=result.cubin_sha256 if result is not None else None,
        source_differs=None not in (source, capture.source_sha256) and source != capture.source_sha256,
        command=_repeating_tool(run) if verdict.target_findings else _repeating(own, variant, run.tool, options),
        log_file=run.log_file,
        xml_file=run.xml_file,
    )
    return entry, verdict.allowed_by


def _hazards(run: ToolRun) -> int | None:
    counted = [s.hazards for s in run.log.summaries if s.hazards is not None] if run.log is not None else []
    return sum(counted) if counted else None


def _repeating(own: PlannedCapture, variant: str | None, tool: str, options: SessionOptions) -> str:
    """Give a shell's command that makes a replay again from its capture, and compares the output."""
    words = ["alphamoe-trace", "replay", str(own.stored.path)]
    words += ["--tool", tool] if tool != "none" else []
    for option, value in (
        ("--variant", variant),
        ("--plugin", options.plugin),
        ("--source", options.source),
        ("--sanitizer", options.sanitizer if tool != "none" else None),
        ("--device", options.device if options.device != "auto" else None),
    ):
        words += [option, str(value)] if value is not None else []
    return shlex.join(words)


def _repeating_tool(run: ToolRun) -> str:
    """Give a shell's command that makes a run again, with the tool's report on the terminal; no file of it is kept."""
    words = list(run.argv)
    for option, count in (("--log-file", 2), ("--xml", 1), ("--save", 2)) if run.tool != "none" else ():
        if option in words:
            del words[words.index(option) : words.index(option) + count]
    return shlex.join(["env", *(f"{name}={value}" for name, value in REPLAY_ENVIRONMENT.items()), *words])
