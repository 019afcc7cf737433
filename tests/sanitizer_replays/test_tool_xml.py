"""The XML records: as recorded, and hostile."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphamoe_sanitizer_replays.results import Tool
from alphamoe_sanitizer_replays.tool.log import parse_log
from alphamoe_sanitizer_replays.tool.xml_records import XmlRecords, parse_xml
from alphamoe_tracers.errors import EvidenceError

DATA = Path(__file__).parents[1] / "data" / "sanitizer"


def given(tmp_path: Path, text: str) -> XmlRecords:
    path = tmp_path / "tool.xml"
    path.write_text(text)
    return parse_xml(path, "memcheck", ("moe_gemm",), True)


def test_a_recorded_clean_run_has_no_records() -> None:
    assert parse_xml(DATA / "synccheck.sound_block_barrier.xml", "synccheck", ("k",), True) == XmlRecords((), 0, False)


@pytest.mark.parametrize("tool", ["racecheck", "memcheck"])
def test_recorded_records_are_as_many_as_the_log_of_the_same_run_shows(tool: Tool) -> None:
    name = f"{tool}.planted_block_barrier"
    records = parse_xml(DATA / f"{name}.xml", tool, ("planted_block_barrier",), False)
    log = parse_log(DATA / f"{name}.log", tool, ("planted_block_barrier",), False)
    assert records.records == log.shown > 0
    assert [(f.kind, f.shown, f.count, f.api, f.in_target) for f in records.findings] == [
        (f.kind, f.shown, f.count, f.api, f.in_target) for f in log.findings
    ]


def test_a_recorded_race_is_placed_as_in_the_log() -> None:
    (finding,) = parse_xml(DATA / "racecheck.planted_block_barrier.xml", "racecheck", ("k",), True).findings
    assert finding.where is not None
    assert finding.other is not None
    assert (finding.severity, finding.where.line, finding.other.line, finding.other.access) == ("error", 18, 20, "Read")
    assert (finding.where.file, finding.in_target, finding.count) == ("planted_faults.cu", True, 1024)
    assert finding.hazard == "RAW/WAR"


@pytest.mark.parametrize(
    ("tool", "kernel"), [("initcheck", "planted_plain_read"), ("synccheck", "planted_divergent_barrier")]
)
def test_recorded_findings_name_kernel_thread_and_line(tool: Tool, kernel: str) -> None:
    records = parse_xml(DATA / f"{tool}.{kernel}.xml", tool, (kernel,), False)
    assert records.records == 3
    (finding,) = records.findings
    assert (finding.kernel, finding.in_target, finding.thread, finding.shown) == (kernel, True, (64, 0, 0), 3)
    assert finding.where is not None
    assert finding.where.file == "planted_faults.cu"


def test_a_file_that_ends_early_keeps_what_it_holds_and_says_that_it_is_cut(tmp_path: Path) -> None:
    whole = (DATA / "initcheck.planted_plain_read.xml").read_text()
    records = given(tmp_path, whole[: int(len(whole) * 0.7)])
    assert records.cut
    assert records.records == 2


@pytest.mark.parametrize(
    "text",
    [
        "<!DOCTYPE a [<!ENTITY b 'x'>]><ComputeSanitizerOutput>&b;</ComputeSanitizerOutput>",
        "<!DOCTYPE a SYSTEM 'file:///etc/hostname'><ComputeSanitizerOutput/>",
        "<!-- first --><!DOCTYPE ComputeSanitizerOutput><ComputeSanitizerOutput/>",
    ],
)
def test_a_document_type_is_refused_before_anything_in_it_is_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(EvidenceError, match="document type"):
        given(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not XML",
        "<html/>",
        "<ComputeSanitizerOutput/><ComputeSanitizerOutput/>",
        "<ComputeSanitizerOutput><summary/></ComputeSanitizerOutput>",
        "<ComputeSanitizerOutput>&undefined;</ComputeSanitizerOutput>",
        "<ComputeSanitizerOutput><record></other></ComputeSanitizerOutput>",
        f"<ComputeSanitizerOutput><record>{'<a>' * 100}</record></ComputeSanitizerOutput>",
        f"<ComputeSanitizerOutput><record>{'<a/>' * 20_000}</record></ComputeSanitizerOutput>",
    ],
)
def test_what_is_not_the_tools_xml_is_an_evidence_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(EvidenceError):
        given(tmp_path, text)


def test_a_missing_file_is_an_evidence_error(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError):
        parse_xml(tmp_path / "none.xml", "memcheck", ("k",), True)


def test_a_record_of_an_unknown_kind_is_still_a_finding(tmp_path: Path) -> None:
    text = "<ComputeSanitizerOutput><record><kind>New</kind></record></ComputeSanitizerOutput>"
    (finding,) = given(tmp_path, text).findings
    assert (finding.kind, finding.severity, finding.in_target) == ("other", "error", True)
