"""The answer of a gate as JUnit XML: a suite is a rank, a case is a rule in an execution.

FAIL is a failure. INCONCLUSIVE and CONFIG_ERROR are errors, so that no reader takes them for success; a known gap is
skipped, with its reason.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from alphamoe_profiler.gate_records import GateCell, GateReport
from alphamoe_profiler.printable import printable, printable_line
from alphamoe_profiler.verdicts import Verdict

# What XML 1.0 cannot hold, however it is escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: GateReport) -> str:
    """Return the document, never without a case: an empty one reads as success."""
    root = ElementTree.Element("testsuites", name="alphamoe-trace gate")
    suites: dict[int | None, list[GateCell]] = {}
    for cell in report.cells:
        suites.setdefault(cell.rank, []).append(cell)
    for rank in sorted(suites, key=lambda own: (own is None, own or 0)):
        _suite(root, report, rank, suites[rank])
    return document(root)


def document(root: ElementTree.Element) -> str:
    """Return the whole document, with the sums of its suites' counts."""
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, report: GateReport, rank: int | None, cells: list[GateCell]) -> None:
    name = "run" if rank is None else f"rank {rank}"
    suite = ElementTree.SubElement(root, "testsuite", name=name)
    counts = dict.fromkeys(("failures", "errors", "skipped"), 0)
    for cell in cells:
        title = report.rules[cell.rule].title + (f" [{cell.execution}]" if cell.execution else "")
        case = ElementTree.SubElement(
            suite, "testcase", classname=xml_text(f"gate.{name}"), name=xml_text(title), time="0"
        )
        verdict, told = cell.finding.verdict, printable_line(cell.told)
        if cell.settled_by:
            told += f"\nsettled by: {printable_line(cell.settled_by)}"
        if cell.tolerated is not None:
            reason = f"known gap until {cell.tolerated.expires}: {cell.tolerated.reason}"
            ElementTree.SubElement(case, "skipped", message=xml_text(reason)).text = xml_text(told)
            counts["skipped"] += 1
        elif verdict is not Verdict.PASS:
            kind = "failure" if verdict is Verdict.FAIL else "error"
            element = ElementTree.SubElement(case, kind, type=verdict.value, message=xml_text(cell.finding.reason))
            element.text = xml_text(told)
            counts[f"{kind}s"] += 1
        else:
            ElementTree.SubElement(case, "system-out").text = xml_text(told)
    for key, count in {"tests": len(cells), **counts}.items():
        suite.set(key, str(count))


def xml_text(text: str) -> str:
    """Return text in which nothing is left that XML cannot hold or that steers the terminal it is shown in."""
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", printable(text))
