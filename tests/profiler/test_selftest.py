"""The self test: each way in which evidence can be wrong gets its verdict, and a gate that cannot fail is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from alphamoe_profiler import selftest
from alphamoe_profiler.cli import main
from alphamoe_profiler.gate_records import GateReport
from alphamoe_profiler.selftest import Case, cases, run_case
from alphamoe_profiler.verdicts import Verdict


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_gets_its_verdict_for_its_reason(case: Case, tmp_path: Path) -> None:
    result = run_case(case, tmp_path / "run")
    assert result.right, f"{result.verdict.value}: {result.reason}"


def test_the_cases_name_every_verdict_and_begin_with_a_sound_recording() -> None:
    own = cases()
    assert own[0].expected is Verdict.PASS
    assert {case.expected for case in own} == set(Verdict)
    assert sum(case.expected is Verdict.PASS for case in own) == 1
    assert len({case.name for case in own}) == len(own)


def test_the_command_prints_a_table_and_exits_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "selftest.json"
    assert main(["selftest", "--json", str(target)]) == 0
    document = json.loads(target.read_text())
    assert document["right"] is True
    assert {case["verdict"] for case in document["cases"]} == {own.value for own in Verdict}
    out = capsys.readouterr().out
    assert out.startswith(f"The gate can fail: {len(cases())} of {len(cases())} cases got their verdict")


def test_a_gate_that_passes_everything_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = run_reports()

    def blind(*_: object, **__: object) -> GateReport:
        return sound

    monkeypatch.setattr(selftest, "evaluate", blind)
    assert main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("The gate is NOT to be trusted here")
    assert "WRONG" in out


def run_reports() -> GateReport:
    from alphamoe_profiler.gate_records import GateCell, GateRule, RankInspected
    from alphamoe_profiler.verdicts import Finding

    rule = GateRule("k", "require", 1, None)
    cell = GateCell(0, 0, None, Finding(Verdict.PASS, "", 1))
    return GateReport(Verdict.PASS, "", "run", None, 1, (), (rule,), (cell,), (RankInspected(0, 1, 1, 1, (), ()),))


def test_a_case_that_gets_its_verdict_for_another_reason_is_not_right(tmp_path: Path) -> None:
    case = replace(next(own for own in cases() if own.name == "a stale commit"), told="something else")
    assert not run_case(case, tmp_path / "run").right
