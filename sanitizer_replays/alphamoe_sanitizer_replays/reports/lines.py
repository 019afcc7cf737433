"""What every report of a session says in the same words: one finding, one entry, one control, each on one line."""

from __future__ import annotations

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport, told
from alphamoe_sanitizer_replays.results import Access, ControlReport, Finding

MOST_FINDINGS = 20
"""Shown of one entry; ``report.json`` holds all that the tool printed."""


def finding_line(finding: Finding) -> str:
    """Say one finding: ``error Race reported ... (RAW) in kernel, file.cu:18 and file.cu:20, 1,024 times``."""
    hazard = f" ({finding.hazard})" if finding.hazard else ""
    kernel = f" in {finding.kernel}{'...' if finding.kernel_truncated else ''}" if finding.kernel else ""
    places = " and ".join(_place(access) for access in (finding.where, finding.other) if access is not None)
    at = f", at {places}" if places else ""
    thread = f", thread {finding.thread}" if finding.thread is not None else ""
    block = f" of block {finding.block}" if finding.block is not None else ""
    cta = f", CTA {finding.cluster_rank} of its cluster" if finding.cluster_rank is not None else ""
    address = f", address {finding.address}" if finding.address else ""
    counts = f", counted {finding.count:,}" if finding.count > 1 else ""
    folded = f" in {finding.shown:,} places" if finding.shown > 1 else ""
    return f"{finding.severity} {finding.text}{hazard}{kernel}{at}{thread}{block}{cta}{address}{counts}{folded}"


def finding_lines(findings: tuple[Finding, ...]) -> list[str]:
    """Say findings, no more than ``MOST_FINDINGS`` and how many more there are."""
    lines = [finding_line(finding) for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        lines.append(f"and {len(findings) - MOST_FINDINGS:,} more (report.json lists them)")
    return lines


def counts_told(entry: ReplayEntry) -> str:
    """Say what the tool counted: ``0 errors``, ``3 hazards, 0 errors, 3 warnings``."""
    if entry.tool == "none":
        return "no tool"
    if entry.errors is None:
        return "no count"
    parts = [(entry.hazards, "hazard"), (entry.errors, "error"), (entry.warnings or None, "warning")]
    return ", ".join(f"{n:,} {noun}{'' if n == 1 else 's'}" for n, noun in parts if n is not None)


def output_told(entry: ReplayEntry) -> str:
    """Say how the output compares with the captured one."""
    check = entry.output
    if check is None:
        return "not checked"
    error = f", off by {check.max_abs_error:.2g}" if check.max_abs_error is not None else ""
    return f"{check.verdict}{error}"


def control_lines(report: ControlReport) -> list[str]:
    """Say what one tool made of its controls: a summary, then every one that did not come out as it should."""
    caught = sum(outcome.caught for outcome in report.outcomes)
    clean = sum(outcome.sound_clean for outcome in report.outcomes)
    total = len(report.outcomes)
    basic = "basic control caught" if report.basic_caught else "BASIC CONTROLS FAILED: nothing it calls clean counts"
    lines = [f"{report.tool}: {basic}; {caught} of {total} planted faults caught, {clean} of {total} sound twins clean"]
    lines += [f"{report.tool}: {problem}" for problem in report.problems]
    for outcome in report.outcomes:
        if not outcome.caught or not outcome.sound_clean:
            missed = "missed" if not outcome.caught else "flagged its sound twin"
            lines.append(f"{report.tool} {missed}: {outcome.control} ({outcome.mechanism}): {outcome.reason}")
    return lines


def open_entries(report: SanitizeReport) -> list[ReplayEntry]:
    """Give the entries that need words of their own: not clean, and for another reason than the whole session's."""
    return [
        entry
        for entry in report.entries
        if (entry.verdict is not Verdict.PASS or entry.whole is not entry.verdict)
        and (entry.log_file is not None or entry.reasons != (report.reason,))
    ]


def entry_reasons(entry: ReplayEntry) -> list[str]:
    """Give everything that a reader of an entry that did not pass needs."""
    lines = list(entry.reasons)
    if entry.hint:
        lines.append(f"to settle it: {entry.hint}")
    if entry.output is not None and entry.output.verdict == "FAIL":
        lines.append(f"tolerance of the output: {entry.output.tolerance}")
    lines += entry.notes
    if entry.log_file:
        lines.append(f"log: {entry.log_file}")
    return lines


def seconds(value: float | None) -> str:
    """Show seconds with one decimal, or that they are unknown."""
    return "unknown" if value is None else f"{value:.1f} s"


def wall_lines(report: SanitizeReport) -> list[str]:
    """Say where the wall time went: capture, controls, then each process."""
    lines = [f"session {seconds(report.wall_s)}, controls {seconds(report.controls_wall_s)}"]
    lines += [f"captured {own.label}: {_split(own.capture_s)}" for own in report.captures if own.capture_s]
    for entry in report.entries:
        if entry.timings_s:
            lines.append(f"{told(entry)}: {seconds(entry.wall_s)}, of which {_split(entry.timings_s)}")
        if entry.kernel_us:
            ordered = sorted(entry.kernel_us)
            middle = ordered[len(ordered) // 2]
            lines.append(f"{told(entry)}: {len(ordered)} launches, median {middle:.2f} us, least {ordered[0]:.2f} us")
    return lines


def _split(parts: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in parts.items())


def _place(access: Access) -> str:
    where = f" {access.file}:{access.line}" if access.file and access.line is not None else ""
    kind = f"{access.access} " if access.access else ""
    return f"{kind}{access.function}{where or (access.offset or '')}"
