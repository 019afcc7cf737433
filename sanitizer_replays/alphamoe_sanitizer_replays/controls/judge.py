"""What the control processes of one tool prove: which planted faults it caught, and which sound twins it left alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from alphamoe_sanitizer_replays.controls.table import (
    CANARIES,
    CONTROLS,
    PLANTED,
    SOUND,
    Control,
    ControlJob,
    is_identifier,
)
from alphamoe_sanitizer_replays.results import ControlOutcome, ControlReport, Finding, Tool, ToolRun


@dataclass(frozen=True)
class ControlRun:
    """What became of one job."""

    job: ControlJob
    run: ToolRun
    launched: tuple[str, ...]
    """Kernels that ended without an error, by the process's own word."""
    absent: tuple[str, ...] = ()
    """Kernels whose instructions this GPU has not."""
    device: str | None = None
    """The GPU by the process's own word."""
    trouble: str = ""
    """What the process says went wrong. One line."""


def judge_controls(tool: Tool, runs: tuple[ControlRun, ...], targets: tuple[str, ...]) -> ControlReport:
    """Judge all control processes of one tool.

    Presence can be proven by damaged evidence: a planted fault that a cut log names is caught. A sound twin is clean
    only in a process that ran to its end with one summary of nothing.

    Args:
        tool: the tool of every run.
        runs: one for each of :func:`control_jobs`; missing ones are told as problems.
        targets: as in :func:`control_jobs`.
    """
    by_name = {own.job.name: own for own in runs}
    sound = by_name.get("sound")
    flagged = _named_in(sound, SOUND) if sound else set()
    unclean = "the sound twins were not run" if sound is None else _unclean(sound)
    absent = {kernel for own in runs for kernel in own.absent}
    outcomes = []
    for control in CONTROLS:
        if tool not in control.meant_for or absent & {PLANTED + control.name, SOUND + control.name}:
            continue
        own = by_name.get(PLANTED + control.name) or by_name.get("planted")
        caught = own is not None and control.name in _named_in(own, PLANTED)
        clean = not unclean and control.name not in flagged
        reasons = [] if caught else [_why_missed(own, control)]
        if not clean:
            reasons.append("its sound twin was flagged" if control.name in flagged else unclean)
        outcomes.append(
            ControlOutcome(
                control=control.name,
                mechanism=control.mechanism,
                tool=tool,
                meant_for=True,
                basic=control.name == CANARIES[tool][0],
                caught=caught,
                sound_clean=clean,
                reason="; ".join(reasons),
            )
        )
    problems = [f"{SOUND}{name} was flagged, though nothing is wrong in it" for name in sorted(flagged)]
    if unclean and not flagged:
        problems.append(f"the sound twins prove nothing: {unclean}")
    problems += _canary_problems(tool, by_name, targets)
    devices = sorted({own.device for own in runs if own.device is not None})
    if len(devices) > 1:
        problems.append(f"the planted faults ran on different GPUs: {', '.join(devices)}")
    device = devices[0] if len(devices) == 1 else None
    return ControlReport(tool=tool, outcomes=tuple(outcomes), device=device, problems=tuple(problems))


def _canary_problems(tool: Tool, by_name: Mapping[str, ControlRun], targets: tuple[str, ...]) -> list[str]:
    problems = []
    fault, decoy = CANARIES[tool]
    for number, symbol in enumerate(targets):
        own = by_name.get(f"canary_{number}")
        if not is_identifier(symbol):
            problems.append(f"the filter for {symbol!r} cannot be proven: no kernel can be compiled under that name")
        elif own is None:
            problems.append(f"the canary under the symbol {symbol} was not run")
        elif decoy in _named_in(own, PLANTED):
            problems.append(f"the filter for {symbol} let another kernel's fault ({decoy}) through")
        elif not any(_is_device_fault(item) and {fault, symbol} & _words(item) for item in _findings(own)):
            why = own.trouble or "; ".join(own.run.problems) or "nothing was reported"
            problems.append(f"a planted fault under the symbol {symbol} was not caught through its filter: {why}")
    return problems


def _findings(own: ControlRun) -> tuple[Finding, ...]:
    return own.run.log.findings if own.run.log is not None else ()


def _is_device_fault(finding: Finding) -> bool:
    return finding.severity != "info" and finding.kind not in ("api", "internal")


def _words(finding: Finding) -> set[str]:
    # With line information the tool names the inlined device function, and the kernel only in a device frame.
    places = (finding.kernel, *(access.function for access in (finding.where, finding.other) if access is not None))
    return {word for place in places if place for word in re.findall(r"\w+", place)}


def _named_in(own: ControlRun, prefix: str) -> set[str]:
    """Name the controls of a process's kernels that the log reports."""
    asked = {kernel.removeprefix(prefix) for kernel in own.job.kernels if kernel.startswith(prefix)}
    found: set[str] = set()
    for finding in _findings(own):
        if _is_device_fault(finding):
            words = _words(finding)
            named = {name for name in asked if name in words or prefix + name in words}
            # A process of one kernel needs no name: only that kernel was instrumented.
            found |= asked if not named and len(own.job.kernels) == 1 else named
    return found


def _unclean(own: ControlRun) -> str:
    """Say why a process of sound twins is no proof, or nothing."""
    run, log = own.run, own.run.log
    if run.problems:
        return run.problems[0]
    if run.timed_out:
        return f"no end within {run.timeout_s:g} s"
    if own.trouble:
        return own.trouble
    missing = [name for name in own.job.kernels if name not in own.launched and name not in own.absent]
    if missing:
        return f"{missing[0]} was not launched"
    if log is None or not log.banner or log.cut or len(log.summaries) != 1:
        return "the tool wrote no whole log with one summary"
    found = log.found_errors or log.found_warnings or log.summaries[0].hazards or log.findings or log.notices
    if found or run.exit_code != 0:
        return f"the tool reported something among them (exit code {run.exit_code})"
    return ""


def _why_missed(own: ControlRun | None, control: Control) -> str:
    if own is None:
        return "it was not run"
    if own.run.timed_out:
        return f"no end within {own.run.timeout_s:g} s"
    if own.run.problems:
        return own.run.problems[0]
    if own.trouble and PLANTED + control.name not in own.launched:
        return f"not reported by the tool: {own.trouble}"
    return "the tool reported nothing"
