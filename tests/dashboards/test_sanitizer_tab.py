"""The Sanitizer tab shows what ``alphamoe-trace sanitize`` wrote: replays, findings, controls, scope."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pytest
from msgspec.structs import replace

from alphamoe_dashboards.verdict_facts import SANITIZE_SCHEMA, report_facts
from alphamoe_profiler.cli import main
from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.reports.records import REPORT_SCHEMA, CaptureFacts, ReplayEntry, SanitizeReport
from alphamoe_sanitizer_replays.results import Access, ControlOutcome, ControlReport, Finding, OutputCheck
from alphamoe_sanitizer_replays.session.run import report_files

CAUGHT = ControlReport(
    tool="racecheck",
    outcomes=(
        ControlOutcome(
            control="block_barrier",
            mechanism="block barrier",
            tool="racecheck",
            meant_for=True,
            basic=True,
            caught=True,
            sound_clean=True,
        ),
    ),
)


def report(run_id: str | None) -> SanitizeReport:
    """One replay that failed racecheck, with a control that was missed."""
    race = Finding(
        tool="racecheck",
        severity="warning",
        kind="hazard",
        text="Race reported",
        hazard="RAW",
        where=Access("void publish<(bool)1>(float *)", "kernel.cu", 18),
        count=1024,
    )
    missed = ControlOutcome(
        control="stmatrix",
        mechanism="ldmatrix/stmatrix",
        tool="racecheck",
        meant_for=True,
        basic=False,
        caught=False,
        sound_clean=True,
        reason="the tool reported nothing",
    )
    entry = ReplayEntry(
        capture="captures/rank=0/layer=0-M=1-step=2",
        label="rank 0 layer 0 M 1",
        variant="t8_c8",
        tool="racecheck",
        verdict=Verdict.FAIL,
        whole=Verdict.FAIL,
        reasons=("racecheck warning: Race reported; warnings are not clean",),
        warnings=1,
        hazards=1,
        findings=(race,),
        output=OutputCheck(verdict="PASS"),
        wall_s=9.5,
    )
    facts = CaptureFacts(path=entry.capture, plugin="alphamoe_w8a8", symbols=("k",), rank=0, layer=0, M=1)
    return SanitizeReport(
        verdict=Verdict.FAIL,
        reason="racecheck, rank 0 layer 0 M 1, t8_c8: a race",
        statement="FAIL: k, NVIDIA H200: racecheck: 1 finding in 1 of 1 replay",
        device="NVIDIA H200",
        scope=("M1, rank 0, layer 0, t8_c8; racecheck 1 hazard, 1 warning",),
        run_id=run_id,
        targets=("RUN",),
        tool_version="2025.3.1.0",
        tools=("racecheck",),
        controls=(ControlReport(tool="racecheck", outcomes=(missed,), problems=("nothing was caught",)),),
        captures=(facts,),
        entries=(entry,),
    )


def write_report(made: SanitizeReport, folder: Path) -> None:
    """Leave ``report.json`` as a session does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(report_files(made)["report.json"]())


def test_facts_are_read_from_the_report_that_sanitize_writes(tmp_path: Path) -> None:
    """Replays, findings and controls are rows; records of single processes beside it are no reports."""
    assert SANITIZE_SCHEMA == REPORT_SCHEMA
    folder = tmp_path / "reports" / "sanitizer"
    (folder / "replays").mkdir(parents=True)
    write_report(report("run-1"), folder)
    (folder / "replays" / "replay.json").write_text(json.dumps({"status": "launched"}))
    gates, (facts,), problems = report_facts(tmp_path / "reports", "run-1")
    assert (gates, problems) == ([], [])
    assert facts["verdict"] == "FAIL"
    assert (
        facts["replays"][0] | {"verdict": "FAIL", "hazards": 1, "output": "PASS", "wall_s": 9.5} == facts["replays"][0]
    )
    (finding,) = facts["findings"]
    assert (finding["hazard"], finding["source"], finding["count"]) == ("RAW", "kernel.cu:18", "1024")
    assert [own["control"] for own in facts["controls"]] == ["stmatrix"]
    assert facts["notes"] == ["racecheck: nothing was caught"]
    assert facts["name"] == "sanitizer replays, compute-sanitizer 2025.3.1.0, NVIDIA H200"
    assert report_facts(tmp_path / "reports", "run-2")[1] == []


def test_a_replay_with_an_allowed_finding_is_not_shown_as_clean(tmp_path: Path) -> None:
    """Its verdict is PASS, and the row says what that rests on."""
    folder = tmp_path / "reports" / "sanitizer"
    folder.mkdir(parents=True)
    (entry,) = report(None).entries
    accepted = replace(entry, verdict=Verdict.PASS, whole=Verdict.PASS, reasons=(), allowed=("a race: known",))
    passed = replace(report(None), verdict=Verdict.PASS, entries=(accepted,), controls=(CAUGHT,), statement="PASS: k")
    write_report(passed, folder)
    _, (facts,), problems = report_facts(tmp_path / "reports")
    assert (facts["verdict"], problems) == ("PASS", [])
    assert [(row["verdict"], row["reason"]) for row in facts["replays"]] == [("PASS", "not clean: 1 finding allowed")]


def test_a_damaged_report_of_that_schema_is_shown_without_what_cannot_be(tmp_path: Path) -> None:
    """Values of the wrong kind never reach the page."""
    folder = tmp_path / "reports" / "sanitizer"
    folder.mkdir(parents=True)
    odd = {"schema": SANITIZE_SCHEMA, "verdict": "PASS", "entries": [3, {"errors": "x", "output": 1}], "controls": [{}]}
    (folder / "report.json").write_text(json.dumps(odd))
    _, (facts,), _ = report_facts(tmp_path / "reports")
    assert [(row["verdict"], row["errors"]) for row in facts["replays"]] == [("INCONCLUSIVE", None)]
    assert facts["verdict"] == "INCONCLUSIVE"


def _failed(made: SanitizeReport) -> SanitizeReport:
    return made


def _entry(made: SanitizeReport, **changed: Any) -> SanitizeReport:
    passed = _passed(made)
    return replace(passed, entries=(replace(passed.entries[0], **changed),))


def _passed(made: SanitizeReport) -> SanitizeReport:
    clean = replace(made.entries[0], verdict=Verdict.PASS, whole=Verdict.PASS, reasons=(), findings=())
    return replace(made, entries=(clean,), controls=(CAUGHT,))


@pytest.mark.parametrize(
    ("change", "shown", "why"),
    [
        (_failed, "FAIL", "a replay in it is FAIL"),
        (lambda made: replace(_passed(made), controls=made.controls), "INCONCLUSIVE", "no basic planted fault"),
        (lambda made: replace(_passed(made), controls=()), "INCONCLUSIVE", "no basic planted fault of racecheck"),
        (lambda made: replace(_passed(made), entries=()), "INCONCLUSIVE", "no replay is in it"),
        (lambda made: replace(_passed(made), interrupted=True), "INCONCLUSIVE", "that it was interrupted"),
        (lambda made: _entry(made, output=OutputCheck(verdict="FAIL")), "INCONCLUSIVE", "an output that is not"),
        (lambda made: _entry(made, findings=made.entries[0].findings), "INCONCLUSIVE", "findings that nothing allows"),
        (lambda made: replace(_entry(made, tool="none"), controls=()), "INCONCLUSIVE", "no replay in it is under race"),
        (
            lambda made: replace(_entry(made, device="A"), controls=(replace(CAUGHT, device="B"),)),
            "INCONCLUSIVE",
            "different devices",
        ),
    ],
)
def test_a_pass_that_does_not_follow_from_what_is_beside_it_is_not_shown_as_one(
    tmp_path: Path, change: Callable[[SanitizeReport], SanitizeReport], shown: str, why: str
) -> None:
    """Nor is there anything to quote; a proven fault stays one."""
    forged = replace(change(report("run-1")), verdict=Verdict.PASS, statement="PASS: k", scope=("k",))
    write_report(forged, tmp_path / "reports" / "sanitizer")
    _, (facts,), problems = report_facts(tmp_path / "reports", "run-1")
    assert (facts["verdict"], facts["statement"], facts["scopes"]) == (shown, [], [])
    assert why in facts["reason"]
    assert "the report contradicts itself" in problems[0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"exit_code": 3}, "its exit code is 3"),
        ({"statement": "FAIL: k"}, "its statement is of another verdict"),
        ({"schema": "alphamoe-trace-sanitize-v9"}, "alphamoe-trace-sanitize-v9 cannot be checked"),
    ],
)
def test_words_of_another_verdict_or_schema_are_not_shown_as_pass(
    tmp_path: Path, changed: dict[str, object], why: str
) -> None:
    """The same report without the change is."""
    passed = replace(_passed(report("run-1")), verdict=Verdict.PASS, statement="PASS: k")
    folder = tmp_path / "reports" / "sanitizer"
    write_report(passed, folder)
    assert report_facts(tmp_path / "reports", "run-1")[1][0]["verdict"] == "PASS"
    document = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(document | changed))
    _, (facts,), problems = report_facts(tmp_path / "reports", "run-1")
    assert facts["verdict"] == "INCONCLUSIVE"
    assert why in problems[0]


@pytest.mark.parametrize(
    ("verdict", "cells", "shown"),
    [
        ("PASS", [{"verdict": "PASS"}], "PASS"),
        ("PASS", [{"verdict": "PASS"}, {"verdict": "FAIL", "known_gap": {"reason": "x"}}], "PASS"),
        ("PASS", [{"verdict": "PASS"}, {"verdict": "FAIL"}], "FAIL"),
        ("FAIL", [{"verdict": "PASS"}], "INCONCLUSIVE"),
        ("PASS", [], "INCONCLUSIVE"),
        ("CONFIG_ERROR", [], "CONFIG_ERROR"),
    ],
)
def test_a_gates_verdict_is_shown_where_it_is_the_worst_of_its_cells(
    tmp_path: Path, verdict: str, cells: list[dict[str, Any]], shown: str
) -> None:
    """Known gaps count for nothing, and what could not be judged has no cells."""
    (tmp_path / "reports").mkdir()
    document = {"schema": "alphamoe-trace-gate-v1", "verdict": verdict, "rules": [{"title": "r", "cells": cells}]}
    (tmp_path / "reports" / "gate.json").write_text(json.dumps(document))
    (facts,), _, problems = report_facts(tmp_path / "reports")
    assert (facts["verdict"], bool(problems)) == (shown, shown != verdict)


@pytest.mark.parametrize(
    ("of_report", "of_capture", "accepted"),
    [
        ("run-1", None, True),
        (None, "run-1", True),
        (None, None, False),
        (None, "run-2", False),
        ("run-1", "run-2", False),
    ],
)
def test_a_report_is_about_the_run_that_it_or_its_captures_name(
    tmp_path: Path, of_report: str | None, of_capture: str | None, accepted: bool
) -> None:
    """One that names none may be about any."""
    made = report(of_report)
    write_report(
        replace(made, captures=(replace(made.captures[0], run_id=of_capture),)), tmp_path / "reports/sanitizer"
    )
    _, sanitizers, problems = report_facts(tmp_path / "reports", "run-1")
    assert (len(sanitizers), len(problems)) == ((1, 0) if accepted else (0, 1))


def test_the_tab_shows_scope_replays_controls_and_findings(open_page: Any, tmp_path: Path) -> None:
    """What a reader of the page sees."""
    run = golden.build(tmp_path / "run", world_size=1)
    folder = run / "reports" / "sanitizer"
    folder.mkdir(parents=True)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    write_report(report(run_id), folder)
    assert main(["dashboard", str(run)]) == 0
    tab = open_page(run / "reports" / "dashboard.html", "#view=sanitizer")
    text = tab.locator("main").inner_text()
    assert "To quote: FAIL: k, NVIDIA H200: racecheck: 1 finding in 1 of 1 replay" in text
    assert "compute-sanitizer 2025.3.1.0, NVIDIA H200" in text
    tab.locator("summary", has_text="Scope of each capture").click()
    assert "M1, rank 0, layer 0, t8_c8; racecheck 1 hazard, 1 warning" in tab.locator("main").inner_text()
    assert "0 of 1 planted faults caught" in text
    assert "kernel.cu:18" in text
    assert "9.5" in tab.locator("#replay-table").inner_text()
