"""A sanitize session as markdown for a pull request or a step summary, which may hold no more than 1 MiB.

What a reviewer reads first is open, the rest is folded away.
"""

from __future__ import annotations

from collections.abc import Iterable

from alphamoe_profiler.printable import printable_line
from alphamoe_profiler.reports.markdown import SIGN, markdown_text, within
from alphamoe_sanitizer_replays.reports.lines import (
    CONTROL_WORDS,
    SCOPE_WORDS,
    allow_blocks,
    allowed_lines,
    control_lines,
    open_groups,
    wall_line,
)
from alphamoe_sanitizer_replays.reports.records import SanitizeReport
from alphamoe_sanitizer_replays.reports.rows import ELSEWHERE, ELSEWHERE_WORDS, columns, rows

_MOST_OPEN = 8
"""Rows of the table, and replays with words of their own, that are not folded away."""


def markdown(report: SanitizeReport) -> str:
    """Return the report, cut at a line where it would be too long for a step summary."""
    lines = [
        f"## {SIGN[report.verdict]} {report.verdict.value}: sanitizer replays",
        "",
    ]
    if any(entry.ran for entry in report.entries):  # else the sentence to quote is the reason
        lines += [markdown_text(report.reason), ""]
    lines += [line for text in report.statement.split("\n") for line in (f"> {markdown_text(text)}", "")]
    lines += _table(report)
    groups = open_groups(report)
    opened = [line for title, own in groups for line in _list(title, own)]
    lines += opened if len(groups) <= _MOST_OPEN else _folded("What is not clean", opened)
    lines += _list("Allowed, and still in the totals", allowed_lines(report))
    blocks = allow_blocks(report)
    if blocks:
        fenced = ["```toml", *(line for block in blocks for line in _block(block)), "```", ""]
        lines += _folded("Entries of an allow-list, each to be given a reason", fenced)
    lines += _list("Notes", report.notes)
    controls = [line for own in report.controls for line in control_lines(own)]
    if controls:
        lines += _folded("Positive controls", [*_items((*controls, CONTROL_WORDS)), ""])
    if report.scope:
        lines += _folded("Scope of each capture", [*_items((*report.scope, SCOPE_WORDS)), ""])
    tool = f"compute-sanitizer {report.tool_version}" if report.tool_version else "no compute-sanitizer"
    lines.append(markdown_text(f"{tool}; {report.device or 'no GPU'}. {wall_line(report)}"))
    return within("\n".join(lines).rstrip() + "\n")


def _table(report: SanitizeReport) -> list[str]:
    names = ("capture", "variant", *columns(report))
    every = rows(report)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in every:
        cells = [
            f"{SIGN[cell.verdict]} {markdown_text(cell.text)}" if cell.verdict else markdown_text(cell.text)
            for cell in row.cells
        ]
        lines.append(f"| {' | '.join((markdown_text(row.label), markdown_text(row.variant), *cells))} |")
    lines.append("")
    if any(ELSEWHERE in cell.text for row in every for cell in row.cells):
        lines += [markdown_text(ELSEWHERE_WORDS), ""]
    if len(every) <= _MOST_OPEN:
        return lines
    clean = sum(row.clean for row in every)
    return _folded(f"{len(every)} captures, {clean} of them PASS in every column", lines)


def _folded(title: str, lines: Iterable[str]) -> list[str]:
    return ["<details>", f"<summary>{markdown_text(title)}</summary>", "", *lines, "</details>", ""]


def _list(title: str, lines: Iterable[str]) -> list[str]:
    items = _items(lines)
    return [f"### {markdown_text(title)}", "", *items, ""] if items else []


def _items(lines: Iterable[str]) -> list[str]:
    return [f"- {markdown_text(line)}" for line in lines]


def _block(block: str) -> list[str]:
    """Return lines of a fenced block: nothing in them can end it, or steer a terminal."""
    return [*(printable_line(line).replace("```", "'''") for line in block.split("\n")), ""]
