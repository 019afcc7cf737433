"""One whole session on an H200 with today's options, as it was recorded: what every file of it must come to."""

from __future__ import annotations

import datetime
import gzip
import shutil
from pathlib import Path

import msgspec
import pytest
from fake_sanitizer import CAPTURE, EQUAL, LAUNCHED, caught

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.results import TOOLS, Finding, Tool, ToolLog, ToolRun
from alphamoe_sanitizer_replays.tool.log import parse_log
from alphamoe_sanitizer_replays.tool.xml_records import XmlRecords, parse_xml
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowList
from alphamoe_sanitizer_replays.verdicts.judge import ToolVerdict, judge

DATA = Path(__file__).parents[1] / "data" / "sanitizer" / "session"
KERNEL = "kernel_alpha_moe_w8a8_up_down"
CLEAN = ("replay", "sound")
# File: errors, warnings, distinct findings in the log. The log shows every one of them: no print limit was reached.
COUNTS: dict[str, tuple[int, int, int]] = {
    "initcheck.canary_0": (256, 0, 1),
    "initcheck.planted": (768, 0, 3),
    "initcheck.replay": (0, 0, 0),
    "initcheck.sound": (0, 0, 0),
    "memcheck.canary_0": (1, 0, 1),
    "memcheck.planted_cluster_exit": (0, 0, 0),
    "memcheck.planted_global_copy": (1, 0, 1),
    "memcheck.planted_global_reduction": (8, 0, 1),
    "memcheck.planted_global_write": (1, 0, 1),
    "memcheck.planted_shared_write": (1, 0, 1),
    "memcheck.replay": (0, 0, 0),
    "memcheck.sound": (0, 0, 0),
    "racecheck.canary_0": (1, 0, 1),
    "racecheck.planted": (7, 1, 8),
    "racecheck.replay": (0, 0, 0),
    "racecheck.sound": (0, 0, 0),
    "synccheck.canary_0": (128, 0, 1),
    "synccheck.planted_cluster_exit": (0, 0, 0),
    "synccheck.planted_divergent_barrier": (128, 0, 1),
    "synccheck.planted_mbarrier_use": (256, 0, 1),
    "synccheck.planted_warp_mask": (256, 0, 1),
    "synccheck.replay": (0, 0, 0),
    "synccheck.sound": (0, 0, 0),
}


def unpacked(folder: Path, name: str) -> Path:
    path = folder / name
    with gzip.open(DATA / f"{name}.gz") as packed, path.open("wb") as stream:
        shutil.copyfileobj(packed, stream)
    return path


def recorded(folder: Path, name: str) -> tuple[ToolLog, XmlRecords]:
    """Read a log and its XML as a session does: under the filter that its process had."""
    tool: Tool = name.split(".")[0]  # type: ignore[assignment]
    job = name.split(".")[1]
    target = KERNEL if job in ("canary_0", "replay") else "sound_" if job == "sound" else "planted_"
    log = parse_log(unpacked(folder, f"{name}.log"), tool, (target,), True)
    return log, parse_xml(unpacked(folder, f"{name}.xml"), tool, (target,), True)


def judged(log: ToolLog, xml_records: int) -> ToolVerdict:
    found = log.found_errors + log.found_warnings
    run = ToolRun(
        tool=log.tool,
        tool_path="/t/compute-sanitizer",
        tool_version="2025.3.1.0",
        argv=(),
        error_exitcode=86,
        exit_code=86 if found else 0,
        timeout_s=60,
        wall_s=3,
        log_file="tool.log",
        xml_file="tool.xml",
        log=log,
        xml_records=xml_records,
        symbols=(KERNEL,),
        variant="t8_c8",
        result=msgspec.structs.replace(LAUNCHED, symbols=(KERNEL,), variant="t8_c8"),
    )
    return judge(
        run,
        capture=msgspec.structs.replace(CAPTURE, symbols=(KERNEL,)),
        output=EQUAL,
        controls=caught(log.tool),
        allow=AllowList(),
        today=datetime.date(2026, 6, 1),
    )


def test_the_table_names_every_recorded_file() -> None:
    files = {path.name for path in DATA.glob("*.gz")}
    assert files == {f"{name}.{kind}.gz" for name in COUNTS for kind in ("log", "xml")}


@pytest.mark.parametrize("name", COUNTS)
def test_log_and_xml_hold_as_many_findings_as_were_recorded(name: str, tmp_path: Path) -> None:
    errors, warnings, distinct = COUNTS[name]
    log, xml = recorded(tmp_path, name)
    assert (log.found_errors, log.found_warnings, log.found_infos) == (errors, warnings, 0)
    assert (log.shown, log.not_printed, xml.records) == (errors + warnings, 0, errors + warnings)
    assert (len(log.findings), len(log.summaries)) == (distinct, 1)
    assert (log.banner, log.cut, xml.cut) == (True, False, False)
    # A fault that ends the context makes the program's own calls fail, and the tool says so.
    assert log.notices in ((), ("Target application returned an error",))
    assert not (log.notices and name.endswith(CLEAN))


@pytest.mark.parametrize("name", [name for name, counts in COUNTS.items() if counts[0]])
def test_the_xml_tells_of_each_finding_what_the_log_tells(name: str, tmp_path: Path) -> None:
    def told(finding: Finding) -> tuple[object, ...]:
        places = [(place.line, place.offset, place.access) for place in (finding.where, finding.other) if place]
        address = None if finding.kind == "synchronization" else finding.address  # only the log has a barrier's
        return (
            *(finding.severity, finding.kind, finding.hazard, finding.kernel, finding.shown, finding.count),
            *(finding.thread, finding.block, address, finding.in_target, str(places)),
        )

    log, xml = recorded(tmp_path, name)
    assert sorted(map(told, log.findings), key=str) == sorted(map(told, xml.findings), key=str)
    assert all(finding.in_target for finding in log.findings)


def test_every_recorded_race_is_a_write_and_a_read_in_an_order_that_the_tool_does_not_tell(tmp_path: Path) -> None:
    log, _ = recorded(tmp_path, "racecheck.planted")
    assert {finding.hazard for finding in log.findings} == {"RAW/WAR"}
    assert [finding.severity for finding in log.findings].count("warning") == 1


@pytest.mark.parametrize("tool", TOOLS)
def test_the_recorded_replay_passes_and_the_log_of_a_fault_in_its_place_fails(tool: Tool, tmp_path: Path) -> None:
    log, xml = recorded(tmp_path, f"{tool}.replay")
    verdict = judged(log, xml.records)
    assert (verdict.target, verdict.whole, verdict.reasons) == (Verdict.PASS, Verdict.PASS, ())
    log, xml = recorded(tmp_path, f"{tool}.canary_0")
    verdict = judged(log, xml.records)
    assert (verdict.target, verdict.settled_by) == (Verdict.FAIL, "finding")
