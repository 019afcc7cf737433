"""Workflow commands of GitHub Actions: what failed, at the line of the policy that asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from alphamoe_profiler.gate_records import GateReport
from alphamoe_profiler.printable import printable
from alphamoe_profiler.reports.gate_table import open_lines
from alphamoe_profiler.verdicts import Verdict

MOST = 10
"""GitHub shows ten annotations of one kind a step."""


def on_github(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether this process runs in a step of GitHub Actions."""
    return environment.get("GITHUB_ACTIONS", "").lower() == "true"


def error_lines(report: GateReport) -> list[str]:
    """Return at most ten ``::error`` lines, worst first; none for a PASS."""
    if report.verdict is Verdict.PASS:
        return []
    lines = []
    told = dict.fromkeys(text for _, text in open_lines(report))
    by_title = {rule.title: rule for rule in reversed(report.rules)}
    for text in told:
        title = max((own for own in by_title if text.startswith(own)), key=len, default=None)
        rule = by_title[title] if title is not None else None
        lines.append(error_line(text, rule.path if rule else None, rule.line if rule else None, report.verdict.value))
    if len(lines) > MOST:
        more = f"and {len(lines) - MOST + 1} more: the JSON report lists all"
        lines = [*lines[: MOST - 1], error_line(more, None, None, report.verdict.value)]
    return lines


def error_line(message: str, path: str | None, line: int | None, title: str) -> str:
    """Return one workflow command; nothing in the message can end it or begin another."""
    properties = {"title": f"witness gate: {title}"}
    if path is not None:
        properties = {"file": _relative(path), "line": str(line or 1), **properties}
    told = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {told}::{_data(printable(' '.join(message.split())))}"


def _relative(path: str) -> str:
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    full = Path(path).resolve()
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else path


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
