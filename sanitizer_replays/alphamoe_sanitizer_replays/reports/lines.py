"""What every report of a session says in the same words: one entry, one control, the wall time."""

from __future__ import annotations

import datetime

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.findings import acceptable, allow_block, finding_line
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport, many, told
from alphamoe_sanitizer_replays.results import ControlReport

MOST_FINDINGS = 20
"""Shown of one entry; ``report.json`` holds all that the tool printed."""
MOST_ALLOW_BLOCKS = 10
CONTROL_WORDS = (
    "A planted fault is a kernel with one known fault that its tool must report. Its sound twin is the same kernel "
    "without the fault. The canary is a planted fault under the name of the kernel under test, which must come through "
    "the filter of the replays."
)
SCOPE_WORDS = (
    "M rows of the dispatch, H hidden size, I intermediate size of one rank, E experts, k experts of a token, "
    "BM rows of a tile; then the variant of the kernel that was launched."
)


def counts_told(entry: ReplayEntry) -> str:
    """Say what the tool counted: ``0 errors``, ``3 hazards, 1 of them a warning``."""
    if entry.tool == "none":
        return "no tool"
    if entry.errors is None:
        return "no count"
    warnings = entry.warnings or 0
    if entry.tool != "racecheck":
        return many(entry.errors, "error") + (f", {many(warnings, 'warning')}" if warnings else "")
    hazards = entry.hazards if entry.hazards is not None else entry.errors + warnings
    return many(hazards, "hazard") + (f" ({many(warnings, 'warning')})" if warnings else "")


def output_told(entry: ReplayEntry) -> str:
    """Say how the output compares with the captured one."""
    check = entry.output
    if check is None:
        return "not checked"
    error = f", largest difference {check.max_abs_error:.2g}" if check.max_abs_error is not None else ""
    return f"{check.verdict}{error}"


def control_lines(report: ControlReport) -> list[str]:
    """Say what one tool made of its controls: a summary, then every one that did not come out as it should."""
    caught = sum(outcome.caught for outcome in report.outcomes)
    clean = sum(outcome.sound_clean for outcome in report.outcomes)
    total = len(report.outcomes)
    failed = _what_failed(report)
    trouble = f"{failed}, so nothing it calls clean counts; " if failed else ""
    counted = f"{caught} of {many(total, 'planted fault')} caught, {clean} of {many(total, 'sound twin')} clean"
    lines = [f"{report.tool}: {trouble}{counted}", *(f"{report.tool}: {problem}" for problem in report.problems)]
    for outcome in report.outcomes:
        if not outcome.caught or not outcome.sound_clean:
            missed = "missed" if not outcome.caught else "flagged the sound twin of"
            lines.append(f"{report.tool} {missed} {outcome.control} ({outcome.mechanism}): {outcome.reason}")
    return lines


def _what_failed(report: ControlReport) -> str:
    if report.basic_caught:
        return ""
    if any("filter" in problem for problem in report.problems):
        return "FILTER FAILED"
    if any(outcome.basic and not outcome.caught for outcome in report.outcomes):
        return "BASIC FAULT MISSED"
    if not all(outcome.sound_clean for outcome in report.outcomes):
        return "SOUND TWIN NOT CLEAN"
    return "CONTROLS FAILED"


def open_groups(report: SanitizeReport) -> list[tuple[str, list[str]]]:
    """Tell what is not clean for another reason than the whole session's: replays that came to the same once.

    Returns:
        (title, lines) of each; log and command are those of the first.
    """
    alike: dict[tuple[str, ...], list[ReplayEntry]] = {}
    for entry in report.entries:
        clean = entry.verdict is Verdict.PASS and entry.whole is entry.verdict
        if not clean and (entry.ran or entry.reasons != (report.reason,)):
            key = (entry.tool, entry.verdict.value, *entry.reasons, *map(finding_line, entry.findings))
            alike.setdefault(key, []).append(entry)
    return [
        (told(own[0]) + (f", and {many(len(own) - 1, 'replay')} more alike" if own[1:] else ""), entry_lines(own[0]))
        for own in alike.values()
    ]


def entry_lines(entry: ReplayEntry) -> list[str]:
    """Give everything that a reader of an entry that did not pass needs, each finding once."""
    lines = list(entry.reasons)
    spoken = "\n".join((*entry.reasons, *entry.allowed))
    for found, where in ((entry.findings, ""), (entry.other_findings, "not in the kernel under test: ")):
        own = (finding_line(finding) for finding in found)
        # A reason is cut where it is long.
        lines += [f"{where}{line}" for line in own if line[:200] not in spoken]
    if len(lines) > MOST_FINDINGS:
        lines = [*lines[:MOST_FINDINGS], f"and {len(lines) - MOST_FINDINGS:,} more (report.json lists them)"]
    if entry.hint:
        lines.append(f"to settle it: {entry.hint}")
    if entry.output is not None and entry.output.verdict == "FAIL":
        lines.append(f"tolerance of the output: {entry.output.tolerance}")
    lines += entry.notes
    if entry.log_file:
        lines.append(f"log: {entry.log_file}")
    if entry.command:
        lines.append(f"repeat: {entry.command}")
    return lines


def allowed_lines(report: SanitizeReport) -> list[str]:
    """Name what the allow-list accepted, each once, with the first replay that found it."""
    alike: dict[str, list[ReplayEntry]] = {}
    for entry in report.entries:
        for line in entry.allowed:
            alike.setdefault(line, []).append(entry)
    return [
        told(own[0]) + (f" and {many(len(own) - 1, 'replay')} more" if own[1:] else "") + f": {line}"
        for line, own in alike.items()
    ]


def allow_blocks(report: SanitizeReport) -> list[str]:
    """Write an entry of an allow-list for each finding that none covers, equal ones once."""
    today = datetime.date.fromisoformat(report.created[:10]) if report.created else datetime.date.today()
    blocks = [
        allow_block(finding, report.tool_version, today)
        for entry in report.entries
        if entry.verdict is not Verdict.PASS or entry.whole is not Verdict.PASS
        for finding in (*entry.findings, *entry.other_findings)
        if acceptable(finding) and not any(finding_line(finding)[:200] in line for line in entry.allowed)
    ]
    return list(dict.fromkeys(blocks))[:MOST_ALLOW_BLOCKS]


def seconds(value: float | None) -> str:
    """Show seconds with one decimal, or that they are unknown."""
    return "unknown" if value is None else f"{value:.1f} s"


def wall_line(report: SanitizeReport) -> str:
    """Say where the wall time went; ``report.json`` splits it for each replay."""
    parts = [f"session {seconds(report.wall_s)}"]
    if report.controls:
        parts.append(f"controls {seconds(report.controls_wall_s)}")
    slowest = max((entry for entry in report.entries if entry.ran), key=lambda own: own.wall_s, default=None)
    if slowest is not None:
        parts.append(f"slowest replay {seconds(slowest.wall_s)} ({told(slowest)})")
    return "Wall time: " + ", ".join(parts)
