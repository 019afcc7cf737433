"""The report of single hazards, as recorded: one record a hazard, both threads, two units in its summary."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from alphamoe_sanitizer_replays.results import Access, Summary, ToolLog
from alphamoe_sanitizer_replays.tool.log import parse_log
from alphamoe_sanitizer_replays.tool.xml_records import XmlRecords, parse_xml

DATA = Path(__file__).parents[1] / "data" / "sanitizer" / "hazards"
TARGET = ("planted_block_barrier",)


def read(report: str, folder: Path) -> tuple[ToolLog, XmlRecords]:
    """Read the log and the XML of one recording."""
    for ending in ("log", "xml"):
        packed = DATA / f"racecheck.{report}.{ending}.gz"
        plain = DATA / f"racecheck.{report}.{ending}"
        (folder / ending).write_bytes(gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes())
    log = parse_log(folder / "log", "racecheck", TARGET, True)
    return log, parse_xml(folder / "xml", "racecheck", TARGET, True)


@pytest.mark.parametrize(("report", "hazards", "errors"), [("hazard", 5, 1024), ("all", 100, 2818)])
def test_hazards_are_read_with_both_units_of_their_summary(
    tmp_path: Path, report: str, hazards: int, errors: int
) -> None:
    """What is displayed is in the log and in the XML; what is only counted is in the summary, and nowhere printed."""
    log, xml = read(report, tmp_path)
    assert log.summaries == (Summary(errors=errors, hazards=hazards),)
    assert (log.banner, log.notices, log.cut, log.not_printed) == (True, (), False, 0)
    assert log.shown == xml.records == hazards
    assert not xml.cut


@pytest.mark.parametrize("report", ["hazard", "all"])
def test_a_hazard_has_its_type_both_accesses_and_their_threads(tmp_path: Path, report: str) -> None:
    """Log and XML name the same hazard: a write that the read of a thread of another warp does not wait for."""
    log, xml = read(report, tmp_path)
    for (finding,) in (log.findings, xml.findings):
        assert (finding.severity, finding.kind, finding.hazard, finding.in_target) == ("error", "hazard", "RAW", True)
        assert (finding.thread, finding.other_thread, finding.block) == ((224, 0, 0), (192, 0, 0), (0, 0, 0))
        assert finding.address == "0x780"
        assert isinstance(finding.where, Access)
        assert isinstance(finding.other, Access)
        assert (finding.where.access, finding.where.line, finding.where.offset) == ("Write", 20, "+0xa0")
        assert (finding.other.access, finding.other.line, finding.other.offset) == ("Read", 22, "+0xb0")
        assert finding.where.file == finding.other.file == "planted_faults.cu"


def test_a_hazard_type_that_nobody_knows_is_told_by_the_accesses(tmp_path: Path) -> None:
    """The tool's own word counts only where it is one of the three; the accesses have no order."""
    text = (DATA / "racecheck.hazard.xml").read_text().replace("<type>RAW<", "<type>other<")
    (tmp_path / "xml").write_text(text)
    (finding,) = parse_xml(tmp_path / "xml", "racecheck", TARGET, True).findings
    assert (finding.hazard, finding.count) == ("RAW/WAR", 5)
