"""The answer of a gate as markdown for a GitHub step summary, which may hold no more than 1 MiB."""

from __future__ import annotations

import re

from alphamoe_profiler.gate_records import GateReport
from alphamoe_profiler.printable import printable
from alphamoe_profiler.reports.gate_table import gap_lines, open_lines, rule_table
from alphamoe_profiler.verdicts import Verdict

MAX_BYTES = 1_000_000
"""A summary of more than 1 MiB is refused as a whole; other steps may write into it too."""
SIGN = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "❔", Verdict.CONFIG_ERROR: "⚙️"}
_CUT = "\n\n*The report was cut here: a step summary holds at most 1 MiB. The JSON report holds everything.*\n"


def markdown(report: GateReport) -> str:
    """Return the report, cut at a line where it would pass ``MAX_BYTES``."""
    lines = [f"## {SIGN[report.verdict]} {report.verdict.value}: witness gate", "", markdown_text(report.reason), ""]
    lines += [f"Run {_code(report.run)}, policy {', '.join(_code(own) for own in report.policies) or 'none'}", ""]
    if report.inspected:
        lines += _table(report)
    opened = open_lines(report)
    if opened:
        lines += ["### Open", ""]
        lines += [f"- {SIGN[verdict]} **{verdict.value}** {markdown_text(text)}" for verdict, text in opened]
        lines.append("")
    for title, own in (
        ("Known gaps, tolerated", gap_lines(report)),
        ("Warnings", report.warnings),
        ("Notes", report.notes),
    ):
        if own:
            lines += [f"### {title}", "", *(f"- {markdown_text(text)}" for text in own), ""]
    if report.inspected:
        lines += ["### Inspected", "", "| rank | kernels | launches | receipts | window |", "|---|---|---|---|---|"]
        for rank in report.inspected:
            window = markdown_text(rank.window[0]) if rank.window else "proven complete"
            lines.append(f"| {rank.rank} | {rank.kernels:,} | {rank.launches:,} | {rank.receipts:,} | {window} |")
        lines.append("")
    if report.ran:
        lines += ["### What did run", "", "| rank | execution | symbol | kernels |", "|---|---|---|---|"]
        lines += [
            f"| {r.rank} | {r.execution or '-'} | {markdown_text(r.symbol)} | {r.kernels:,} |" for r in report.ran
        ]
    return within("\n".join(lines).rstrip() + "\n")


def _table(report: GateReport) -> list[str]:
    shown = rule_table(report)
    lines = [f"| rule | {' | '.join(shown.columns)} |", "|---" * (len(shown.columns) + 1) + "|"]
    for title, squares in shown.rows:
        cells = [f"{SIGN[own.verdict]} {own.text}" if own.verdict else own.text for own in squares]
        lines.append(f"| {markdown_text(title)} | {' | '.join(cells)} |")
    return [*lines, ""]


def within(text: str) -> str:
    """Return a report, cut at a line where it would pass ``MAX_BYTES``."""
    content = text.encode("utf-8", errors="backslashreplace")
    if len(content) <= MAX_BYTES:
        return text
    kept = content[: MAX_BYTES - len(_CUT.encode())]
    return kept[: kept.rfind(b"\n")].decode() + _CUT


def markdown_text(text: str) -> str:
    """Return text in which nothing of a kernel's name is read as markup, a mention or a link, or steers a terminal."""
    flat = printable(" ".join(text.split()))
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = re.sub(r"([\\`*_{}\[\]#|~@])", r"\\\1", flat)
    # GitHub makes links of bare addresses.
    return re.sub(r"(?i)\b(https?|ftp)://", r"\1:&#47;&#47;", flat).replace("www.", "www&#46;")


def _code(text: str) -> str:
    flat = printable(" ".join(text.split())).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`"
