"""A sanitize session as JUnit XML: a suite is a rank, a case is a capture under a tool; one suite more for controls.

FAIL is a failure. INCONCLUSIVE and CONFIG_ERROR are errors, so that no reader takes them for success. A control that a
tool does not see is skipped with its mechanism.
"""

from __future__ import annotations

from xml.etree import ElementTree

from alphamoe_profiler.reports.junit import document, xml_text
from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.lines import counts_told, entry_reasons, finding_lines, output_told
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport
from alphamoe_sanitizer_replays.results import ControlReport


def junit_xml(report: SanitizeReport) -> str:
    """Return the document, never without a case: an empty one reads as success."""
    root = ElementTree.Element("testsuites", name="alphamoe-trace sanitize")
    overall = _suite(root, "session")
    _case(overall, "sanitize", "verdict", report.verdict, report.reason, "\n".join(report.scope), report.wall_s)
    ranks = {facts.path: facts.rank for facts in report.captures}
    suites: dict[int, ElementTree.Element] = {}
    for entry in report.entries:
        rank = ranks.get(entry.capture, -1)
        if rank not in suites:
            suites[rank] = _suite(root, f"rank {rank}" if rank >= 0 else "captures")
        _entry(suites[rank], entry)
    for controls in report.controls:
        _controls(root, controls)
    for suite in root:
        counts = {"tests": len(suite.findall("testcase"))}
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            counts[name] = len(suite.findall(f"testcase/{tag}"))
        for name, count in counts.items():
            suite.set(name, str(count))
    return document(root)


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=xml_text(name))


def _entry(suite: ElementTree.Element, entry: ReplayEntry) -> None:
    name = " ".join(part for part in (entry.tool, entry.label, entry.variant) if part)
    lines = [f"{counts_told(entry)}, output {output_told(entry)}", *entry_reasons(entry)]
    lines += finding_lines(entry.findings)
    lines += [f"other kernels: {line}" for line in finding_lines(entry.other_findings)]
    lines += [f"allowed: {line}" for line in entry.allowed]
    reason = entry.reasons[0] if entry.reasons else entry.verdict.value
    _case(suite, f"sanitize.{entry.tool}", name, entry.verdict, reason, "\n".join(lines), entry.wall_s)


def _controls(root: ElementTree.Element, controls: ControlReport) -> None:
    suite = _suite(root, f"controls of {controls.tool}")
    verdict = Verdict.PASS if controls.basic_caught else Verdict.INCONCLUSIVE
    problems = "; ".join(controls.problems) or ("" if controls.basic_caught else "a basic control was not caught")
    _case(suite, f"controls.{controls.tool}", "session", verdict, problems, problems, 0.0)
    for outcome in controls.outcomes:
        sound = outcome.caught and outcome.sound_clean
        verdict = Verdict.PASS if sound else Verdict.INCONCLUSIVE
        case = _case(
            suite, f"controls.{controls.tool}", outcome.control, verdict, outcome.reason, outcome.mechanism, 0.0
        )
        if not outcome.caught and outcome.sound_clean and not outcome.basic:
            for element in case.findall("error"):
                case.remove(element)
            told = f"not covered by {controls.tool}: {outcome.mechanism}"
            ElementTree.SubElement(case, "skipped", message=xml_text(told)).text = xml_text(outcome.reason)


def _case(
    suite: ElementTree.Element, group: str, name: str, verdict: Verdict, reason: str, text: str, wall_s: float
) -> ElementTree.Element:
    case = ElementTree.SubElement(
        suite, "testcase", classname=xml_text(group), name=xml_text(name), time=f"{max(wall_s, 0.0):.3f}"
    )
    if verdict is Verdict.PASS:
        ElementTree.SubElement(case, "system-out").text = xml_text(text)
    else:
        kind = "failure" if verdict is Verdict.FAIL else "error"
        element = ElementTree.SubElement(case, kind, type=verdict.value, message=xml_text(reason))
        element.text = xml_text(text)
    return case
