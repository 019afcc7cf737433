"""A sanitize session as markdown for a pull request or a step summary, which may hold no more than 1 MiB."""

from __future__ import annotations

import re

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.lines import (
    control_lines,
    counts_told,
    entry_reasons,
    finding_lines,
    open_entries,
    output_told,
    seconds,
    wall_lines,
)
from alphamoe_sanitizer_replays.reports.records import SanitizeReport, told

MAX_BYTES = 1_000_000
"""A summary of more than 1 MiB is refused as a whole; other steps may write into it too."""
_SIGN = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "❔", Verdict.CONFIG_ERROR: "⚙️"}
_CUT = "\n\n*The report was cut here. The JSON report holds everything.*\n"


def markdown(report: SanitizeReport) -> str:
    """Return the report, cut at a line where it would pass ``MAX_BYTES``."""
    lines = [f"## {_SIGN[report.verdict]} {report.verdict.value}: sanitizer replays", "", _text(report.reason), ""]
    lines += _list("Scope", report.scope)
    if report.entries:
        lines += [
            "| capture | variant | tool | verdict | counted | output | wall |",
            "|---|---|---|---|---|---|---|",
        ]
        for entry in report.entries:
            cells = (entry.label, entry.variant or "-", entry.tool)
            rest = (counts_told(entry), output_told(entry), seconds(entry.wall_s))
            verdict = f"{_SIGN[entry.verdict]} {entry.verdict.value}"
            lines.append(f"| {' | '.join(_text(cell) for cell in (*cells, verdict, *rest))} |")
        lines.append("")
    for entry in open_entries(report):
        found = [*finding_lines(entry.findings), *(f"other: {o}" for o in finding_lines(entry.other_findings))]
        lines += _list(told(entry), (*entry_reasons(entry), *found))
    allowed = [f"{told(entry)}: {line}" for entry in report.entries for line in entry.allowed]
    lines += _list("Allowed, and still in the totals", allowed)
    lines += _list("Positive controls", [line for own in report.controls for line in control_lines(own)])
    lines += _list("Notes", report.notes)
    tool = f"compute-sanitizer {report.tool_version}" if report.tool_version else "no compute-sanitizer"
    lines += _list("Session", (f"{tool}; {report.device or 'no GPU'}", *wall_lines(report)))
    return _within("\n".join(lines).rstrip() + "\n")


def _list(title: str, lines: tuple[str, ...] | list[str]) -> list[str]:
    return [f"### {_text(title)}", "", *(f"- {_text(line)}" for line in lines), ""] if lines else []


def _within(text: str) -> str:
    content = text.encode("utf-8", errors="backslashreplace")
    if len(content) <= MAX_BYTES:
        return text
    kept = content[: MAX_BYTES - len(_CUT.encode())]
    return kept[: kept.rfind(b"\n")].decode() + _CUT


def _text(text: str) -> str:
    """Return text in which nothing of a kernel's name is read as markup or as a mention."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#|~@])", r"\\\1", flat)
