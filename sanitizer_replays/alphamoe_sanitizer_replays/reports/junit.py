"""A sanitize session as JUnit XML: a suite is a rank, a case is a capture under a tool; one suite more for controls.

FAIL is a failure. INCONCLUSIVE and CONFIG_ERROR are errors, so that no reader takes them for success. A control that a
tool does not see is skipped with its mechanism. GPU, tool and times are properties of the first suite.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from alphamoe_profiler.printable import printable_line
from alphamoe_profiler.reports.junit import document, xml_text
from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.lines import counts_told, entry_lines, output_told
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport
from alphamoe_sanitizer_replays.results import ControlReport


def junit_xml(report: SanitizeReport) -> str:
    """Return the document, never without a case: an empty one reads as success."""
    root = ElementTree.Element("testsuites", name="alphamoe-trace sanitize", time=_time(report.wall_s))
    overall = _suite(root, "session")
    if report.created:
        overall.set("timestamp", report.created)
    _properties(overall, report)
    lines = [*report.statement.split("\n"), *report.scope]
    _case(overall, "sanitize", "verdict", report.verdict, report.reason, lines, report.wall_s)
    ranks = {facts.path: facts.rank for facts in report.captures}
    suites: dict[int, ElementTree.Element] = {}
    for entry in report.entries:
        rank = ranks.get(entry.capture, -1)
        if rank not in suites:
            suites[rank] = _suite(root, f"rank {rank}" if rank >= 0 else "captures")
        _entry(suites[rank], entry, report.reason)
    for controls in report.controls:
        _controls(root, controls)
    for suite in root:
        counts = {"tests": len(suite.findall("testcase"))}
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            counts[name] = len(suite.findall(f"testcase/{tag}"))
        for name, count in counts.items():
            suite.set(name, str(count))
        suite.set("time", _time(sum(float(case.get("time", "0")) for case in suite.findall("testcase"))))
    return document(root)


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=_line(name))


def _properties(suite: ElementTree.Element, report: SanitizeReport) -> None:
    element = ElementTree.SubElement(suite, "properties")
    told = {
        "gpu": report.device or "none",
        "compute-sanitizer": report.tool_version or "none",
        "tools": ", ".join(report.tools),
        "run_id": report.run_id or "none",
        "session_wall_s": f"{report.wall_s:.3f}",
        "controls_wall_s": f"{report.controls_wall_s:.3f}",
    }
    for name, value in told.items():
        ElementTree.SubElement(element, "property", name=name, value=_line(value))


def _entry(suite: ElementTree.Element, entry: ReplayEntry, session_reason: str) -> None:
    name = " ".join(part for part in (entry.tool, entry.label, entry.variant) if part)
    group = f"sanitize.{entry.tool}"
    if not entry.ran and entry.reasons == (session_reason,):
        _case(suite, group, name, entry.verdict, f"not run: {session_reason}", (), 0.0)
        return
    lines = [f"{counts_told(entry)}, output {output_told(entry)}", *entry_lines(entry)]
    lines += [f"allowed: {line}" for line in entry.allowed]
    reason = entry.reasons[0] if entry.reasons else entry.verdict.value
    _case(suite, group, name, entry.verdict, reason, lines, entry.wall_s)


def _controls(root: ElementTree.Element, controls: ControlReport) -> None:
    suite = _suite(root, f"controls of {controls.tool}")
    group = f"controls.{controls.tool}"
    for number, problem in enumerate(controls.problems):
        _case(suite, group, f"problem {number}", Verdict.INCONCLUSIVE, problem, (), None)
    if not controls.outcomes and not controls.problems:
        _case(suite, group, "planted faults", Verdict.INCONCLUSIVE, "no planted fault was run", (), None)
    for outcome in controls.outcomes:
        sound = outcome.caught and outcome.sound_clean
        if not outcome.caught and outcome.sound_clean and not outcome.basic:
            case = ElementTree.SubElement(suite, "testcase", classname=_line(group), name=_line(outcome.control))
            told = f"not covered by {controls.tool}: {outcome.mechanism}"
            ElementTree.SubElement(case, "skipped", message=_line(told)).text = _line(outcome.reason)
            continue
        verdict = Verdict.PASS if sound else Verdict.INCONCLUSIVE
        _case(suite, group, outcome.control, verdict, outcome.reason, (outcome.mechanism,), None)


def _case(
    suite: ElementTree.Element,
    group: str,
    name: str,
    verdict: Verdict,
    reason: str,
    lines: Iterable[str],
    wall_s: float | None,
) -> None:
    """Add a case; controls run many in one process, so none has a time of its own."""
    case = ElementTree.SubElement(suite, "testcase", classname=_line(group), name=_line(name))
    if wall_s is not None:
        case.set("time", _time(wall_s))
    text = "\n".join(map(_line, lines)) or None
    if verdict is Verdict.PASS:
        ElementTree.SubElement(case, "system-out").text = text
    else:
        kind = "failure" if verdict is Verdict.FAIL else "error"
        ElementTree.SubElement(case, kind, type=verdict.value, message=_line(reason)).text = text


def _line(text: str) -> str:
    """Return text on one line, without anything that XML cannot hold or that steers a terminal or a log's reader."""
    return xml_text(printable_line(text))


def _time(value_s: float) -> str:
    return f"{max(value_s, 0.0):.3f}"
