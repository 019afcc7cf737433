"""Judge one run, under a tool or none. Clean needs every condition; a finding needs only itself.

Presence can be proven by damaged evidence, absence cannot: a fault that a killed tool printed is a fault, and a log
without a fault proves nothing until every condition of :func:`judge` holds.
"""

from __future__ import annotations

import datetime
import re

import msgspec

from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.reports.findings import finding_line
from alphamoe_sanitizer_replays.results import ControlReport, Finding, OutputCheck, ToolLog, ToolRun
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowEntry, AllowList
from alphamoe_sanitizer_replays.verdicts.evidence import evidence_problems, launches_of

MAX_REASON = 300
# Bindings look up entry points that a driver need not have. Any other failed call, and any other error of a lookup, may
# be a kernel's fault or a launch that was refused, in the driver's spelling or in the runtime's.
_LOOKUP = re.compile(
    r"hit (?:CUDA_ERROR_(?:INVALID_VALUE|NOT_FOUND)|cudaError(?:InvalidValue|SymbolNotFound)) "
    r".* on CUDA API call to cu(?:da)?Get(?:ProcAddress|DriverEntryPoint)\w*\.?\Z"
)


class ToolVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to, under one tool or none."""

    target: Verdict
    """Of the kernel under test."""
    whole: Verdict
    """Of everything that the tool saw: other kernels and host calls included. Never better than ``target``."""
    reasons: tuple[str, ...]
    """Why, the gravest first; empty only for PASS of both."""
    settled_by: str
    """``finding``, ``count`` (findings that were counted, not printed), ``output``, ``allow-list``, ``evidence``,
    ``controls``, or ``all conditions``."""
    allowed: tuple[str, ...] = ()
    """Findings that the allow-list covers, with the entry. They stay in every total."""
    allowed_by: tuple[AllowEntry, ...] = ()
    target_findings: tuple[Finding, ...] = ()
    """In the kernel under test, allowed ones included."""
    other_findings: tuple[Finding, ...] = ()
    """In other kernels, of the tool itself, and those that nothing places."""
    api_errors: int = 0
    """Failed host calls that the tool printed. They are part of its error total."""
    found: int = 0
    """Errors and warnings by the tool's own summaries."""
    shown: int = 0
    """Blocks that it printed."""
    notes: tuple[str, ...] = ()
    """What a reader should know and what changes no verdict."""


def judge(
    run: ToolRun,
    *,
    capture: Capture,
    output: OutputCheck | None,
    controls: ControlReport | None,
    allow: AllowList,
    today: datetime.date,
) -> ToolVerdict:
    """Judge one run.

    Args:
        run: the run, as :func:`tool.sanitizer.run_tool` recorded it.
        capture: what was replayed; its symbols are the target.
        output: the comparison of the replay's output with the captured one; null where none was made.
        controls: what the same tool made of planted faults in the same session; null where none were run.
        allow: accepted findings.
        today: the day on which entries may have expired.

    Returns:
        PASS of the target when the run ended by itself with an exit code that agrees with the log, the log is whole
        and has one summary that agrees with what it shows and with the XML, nothing was found in the target, the replay
        says that it launched the target and that the tool watched it, its output is the captured one, and the basic
        controls of the tool were caught with their sound twins clean. Without a tool nothing is asked of one.
    """
    sorted_findings = _Sorted(run, allow, today)
    failed, settled = _faults(run, sorted_findings, output)
    expired = [
        f"{finding_line(finding)}: the allow-list entry expired: {entry.told()}"
        for finding, entry in sorted_findings.late
    ]
    open_questions = [*evidence_problems(run, capture.symbols), *sorted_findings.questions(), *_of_output(output)]
    without_controls = _of_controls(run, controls)
    elsewhere = sorted_findings.elsewhere(run)
    if failed:
        target = Verdict.FAIL
    elif expired:
        target, settled = Verdict.CONFIG_ERROR, "allow-list"
    elif open_questions or without_controls:
        target, settled = Verdict.INCONCLUSIVE, "evidence" if open_questions else "controls"
    else:
        target, settled = Verdict.PASS, "all conditions"
    return ToolVerdict(
        target=target,
        whole=worst([target, Verdict.FAIL if elsewhere else target]),
        reasons=tuple(
            reason[:MAX_REASON] for reason in (*failed, *expired, *elsewhere, *open_questions, *without_controls)
        ),
        settled_by=settled,
        allowed=tuple(
            f"{finding_line(finding)}: allowed by {entry.told()}" for finding, entry in sorted_findings.allowed
        ),
        allowed_by=tuple(dict.fromkeys(entry for _, entry in sorted_findings.allowed)),
        target_findings=tuple(sorted_findings.target),
        other_findings=(*sorted_findings.others, *sorted_findings.unplaced, *sorted_findings.internal),
        api_errors=sum(finding.shown for finding in sorted_findings.api),
        found=0 if run.log is None else _found(run.log),
        shown=0 if run.log is None else run.log.shown,
        notes=(*_of_seen(run, capture), *_notes(run)),
    )


class _Sorted:
    """The findings of a run, by what they are of and by what the allow-list makes of them."""

    def __init__(self, run: ToolRun, allow: AllowList, today: datetime.date) -> None:
        found = () if run.log is None else run.log.findings
        self.target = [finding for finding in found if finding.in_target]
        if all(allow.match(finding, run.tool_version, today)[0] == "allowed" for finding in self.target):
            # These are kept only where the XML does not agree with the log.
            self.target += [finding for finding in run.xml_findings if finding.in_target]
        rest = [finding for finding in found if not finding.in_target]
        self.api = [finding for finding in rest if finding.kind == "api"]
        self.internal = [finding for finding in rest if finding.kind == "internal"]
        self.others = [f for f in rest if f.in_target is False and f.kind not in ("api", "internal")]
        self.unplaced = [f for f in rest if f.in_target is None and f.kind not in ("api", "internal")]
        self.allowed: list[tuple[Finding, AllowEntry]] = []
        self.late: list[tuple[Finding, AllowEntry]] = []
        self.open: list[Finding] = []
        for finding in (*self.target, *self.others, *self.unplaced):
            state, entry = allow.match(finding, run.tool_version, today)
            if entry is None:
                self.open.append(finding)
            else:
                (self.allowed if state == "allowed" else self.late).append((finding, entry))

    def open_in(self, findings: list[Finding]) -> list[Finding]:
        """Give those of these findings that no entry covers, not even an expired one."""
        return [finding for finding in findings if any(finding is one for one in self.open)]

    def questions(self) -> list[str]:
        """Say what these findings leave open about the target."""
        unplaced = [
            f"{finding_line(finding)}: nothing tells which kernel it is of" for finding in self.open_in(self.unplaced)
        ]
        failed = [
            f"a host call failed, which a kernel or a refused launch may be the cause of: {finding.text}"
            for finding in self.api
            if not _LOOKUP.search(finding.text)
        ]
        return [*unplaced, *(f"the tool itself failed: {finding.text}" for finding in self.internal), *failed]

    def elsewhere(self, run: ToolRun) -> list[str]:
        """Say what makes the whole run unclean although it is not known to be of the target."""
        told = [f"not in the target: {finding_line(finding)}" for finding in self.open_in(self.others)]
        told += [f"not placed: {finding_line(finding)}" for finding in self.open_in(self.unplaced)]
        told += [f"host call failed, {finding.shown} times: {finding.text}" for finding in self.api]
        hidden = _hidden(run.log)
        return [*told, f"{hidden} findings were counted and not printed"] if hidden else told


def _faults(run: ToolRun, found: _Sorted, output: OutputCheck | None) -> tuple[list[str], str]:
    """Say what proves a fault of the target, and which kind of proof comes first."""
    faults = found.open_in(found.target)
    told = [finding_line(finding) for finding in faults]
    if faults and all(finding.severity != "error" for finding in faults):
        told[0] += "; warnings are not clean"
    settled = "finding" if told else ""
    hidden = _hidden(run.log)
    # Under a filter the tool watched the target alone, so what it counted is the target's, unless it shows otherwise.
    if hidden and run.symbols and not (found.others or found.api or found.unplaced or found.internal):
        told.append(f"the tool counted {hidden} findings that it did not print, and it watched the target alone")
        settled = settled or "count"
    if output is not None and output.verdict == "FAIL":
        told.append(f"the output is not the captured one: {output.reason}")
        settled = settled or "output"
    return told, settled


def _hidden(log: ToolLog | None) -> int:
    """Count what the summaries, or the tool's word on what it did not print, hold beyond the printed blocks."""
    if log is None:
        return 0
    return max(_found(log) - log.shown, log.not_printed, 0)


def _found(log: ToolLog) -> int:
    """Give the findings that the summaries count, by the greater of their two units."""
    return max(log.found_errors + log.found_warnings, sum(summary.hazards or 0 for summary in log.summaries))


def _of_output(output: OutputCheck | None) -> list[str]:
    if output is None:
        return ["the output was not compared with the captured one"]
    return [f"the output could not be compared: {output.reason}"] if output.verdict == "INCONCLUSIVE" else []


def _of_controls(run: ToolRun, controls: ControlReport | None) -> list[str]:
    if run.tool == "none":
        return []
    if controls is None or controls.tool != run.tool:
        return [f"no planted faults were run under {run.tool} in this session (alphamoe-trace sanitize runs them)"]
    told = [*_of_gpu(run, controls), *controls.problems]
    if controls.basic_caught:
        return told
    missed = [one for one in controls.outcomes if one.basic and not one.caught]
    told += [f"planted fault {one.control} was not caught: {one.reason}" for one in missed]
    told += [f"{one.control}: its sound twin is not clean" for one in controls.outcomes if not one.sound_clean]
    return told or [f"no basic planted fault of {run.tool} was run"]


def _of_gpu(run: ToolRun, controls: ControlReport) -> list[str]:
    """Ask that planted faults and replay ran on one kind of GPU: what a tool catches differs between them."""
    device = run.result.device if run.result is not None else None
    if device is None or device == "cpu":
        return []
    if controls.device is None:
        return ["the planted faults do not say on which GPU they ran"]
    same = controls.device == device
    return [] if same else [f"the replay ran on {device}, and the planted faults on {controls.device}"]


def _of_seen(run: ToolRun, capture: Capture) -> tuple[str, ...]:
    """Say what told of the target's launches, where the plug-in does not know them."""
    seen = (run.result.seen if run.result is not None else None) or {}
    counts = ", ".join(
        f"{symbol} ({launches_of(symbol, seen)} launched)" for symbol in capture.symbols if launches_of(symbol, seen)
    )
    where = "" if run.tool == "none" else "under the tool "
    return (f"seen {where}by Triton's launch hook: {counts}",) if counts else ()


def _notes(run: ToolRun) -> tuple[str, ...]:
    if run.tool == "none":
        return ("no tool looked: nothing is known of races and memory",)
    log = run.log
    if log is None or not log.not_printed:
        return ()
    return (f"print limit reached: {_found(log)} found, {log.shown} shown",)
