"""Reports of the gate: the command's exit codes and files, JUnit, markdown, annotations, and the terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import golden
import msgspec
import pytest
from gating import REQUIRE, SYMBOL, gate
from golden import RankContent
from judging import fall_back, only

from alphamoe_backend.experts.registry import STOCK_SYMBOL
from alphamoe_profiler.cli import main
from alphamoe_profiler.gate_records import GateCell, GateReport, GateRule, Ran
from alphamoe_profiler.reports.annotations import MOST, error_line, error_lines
from alphamoe_profiler.reports.gate_json import gate_document
from alphamoe_profiler.reports.gate_terminal import print_gate
from alphamoe_profiler.reports.junit import junit_xml
from alphamoe_profiler.reports.markdown import MAX_BYTES, markdown
from alphamoe_profiler.verdicts import Finding, Verdict

FORBID = f'\n[[forbid]]\nsymbol = "{STOCK_SYMBOL}"\n'
EVIL = "k<b>|x|`y`\x00\x1b[31m]]>&\"'@team ::error::%0A"


def failed(tmp_path: Path) -> GateReport:
    return gate(tmp_path, REQUIRE + FORBID, only(1, fall_back))


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 -- this program wrote it a moment ago


def cut(content: RankContent) -> None:
    content.rank_file = None


def evil() -> GateReport:
    rule = GateRule(EVIL, "require", 3, "policy.toml")
    finding = Finding(Verdict.FAIL, f"not seen\n::error::injected {EVIL}")
    return GateReport(
        Verdict.FAIL, EVIL, "run", "id", 1, ("p",), (rule,), (GateCell(0, 0, "eager", finding),),
        ran=(Ran(0, None, EVIL, None, 3),),
    )  # fmt: skip


def test_junit_has_a_suite_a_rank_and_a_case_a_rule(tmp_path: Path) -> None:
    report = failed(tmp_path)
    root = parsed(junit_xml(report))
    assert [suite.get("name") for suite in root] == ["rank 0", "rank 1", "run"]
    of_one = {case.get("name"): case for case in root[1]}
    assert of_one[f"no {STOCK_SYMBOL} [eager]"].find("failure") is not None
    assert {case.get("name") for case in root[0] if len(case) and case[0].tag != "system-out"} == set()
    cells = [own for own in report.cells if own.finding.verdict is Verdict.FAIL]
    assert int(root.get("failures", "0")) == len(cells) > 0
    assert int(root.get("tests", "0")) == len(report.cells)


def test_junit_calls_missing_evidence_an_error_and_says_what_would_settle_it(tmp_path: Path) -> None:
    root = parsed(junit_xml(gate(tmp_path, REQUIRE, only(1, cut))))
    errors = root.findall(".//testcase/error")
    assert errors
    assert int(root.get("errors", "0")) == len(errors)
    assert {own.get("type") for own in errors} == {"INCONCLUSIVE"}
    assert all("settled by: " in (own.text or "") for own in errors)
    assert root.findall(".//failure") == []


def test_junit_and_markdown_hold_any_name(tmp_path: Path) -> None:
    root = parsed(junit_xml(evil()))
    assert "\x00" not in (root[0][0].get("name") or "")
    text = markdown(evil())
    assert "<b>" not in text
    assert "\n::error::" not in text
    row = next(line for line in text.splitlines() if line.startswith("| 0 | -"))
    assert row.replace("\\|", "").count("|") == 5


def test_markdown_begins_with_the_verdict_and_stays_under_its_limit(tmp_path: Path) -> None:
    text = markdown(failed(tmp_path))
    assert text.startswith("## ❌ FAIL: witness gate\n\nno fused\\_moe\\_kernel on rank 1")
    rows = tuple(Ran(0, "eager", f"kernel_{number}" + "ü" * 200, None, 1) for number in range(4000))
    big = markdown(replace(evil(), ran=rows))
    assert len(big.encode()) <= MAX_BYTES < 1 << 20
    assert big.endswith("holds everything.*\n")


def test_no_file_of_a_gate_steers_the_terminal_that_shows_it() -> None:
    """Escapes, text that runs backwards and a line that a log's reader would obey come out as text."""
    report = evil()
    (cell,) = report.cells
    reason = f"{cell.finding.reason} \u202e http://example.invalid"
    report = replace(report, cells=(replace(cell, finding=replace(cell.finding, reason=reason)),))
    for text in (markdown(report), junit_xml(report)):
        assert not {"\x1b", "\u202e"} & set(text)
        assert not any(line.strip().startswith("::error::") for line in text.split("\n"))
    assert "http://" not in markdown(report)


def test_annotations_point_at_the_policys_line_and_are_ten_at_most(tmp_path: Path) -> None:
    lines = error_lines(failed(tmp_path))
    assert any(
        line.startswith("::error file=policy.toml,line=4,title=witness gate%3A FAIL::no fused") for line in lines
    )
    rules = tuple(GateRule(f"k{number}", "require", number + 1, "policy.toml") for number in range(30))
    cells = tuple(GateCell(n, 0, None, Finding(Verdict.FAIL, "not seen")) for n in range(30))
    many = error_lines(GateReport(Verdict.FAIL, "", "run", None, 1, (), rules, cells))
    assert len(many) == MOST
    assert "and 21 more" in many[-1]
    assert error_lines(gate(tmp_path / "sound", REQUIRE)) == []


def test_a_workflow_command_is_one_line_whatever_the_message_holds() -> None:
    line = error_line("a\n::error::b%", "x,y:z.toml", 2, "T")
    assert line == "::error file=x%2Cy%3Az.toml,line=2,title=witness gate%3A T::a ::error::b%25"
    assert all("\n" not in own for own in error_lines(evil()))


def test_the_terminal_says_the_verdict_first_then_rules_by_rank_then_what_did_run(tmp_path: Path) -> None:
    stream = io.StringIO()
    print_gate(failed(tmp_path), stream, width=160)
    text = stream.getvalue()
    assert text.startswith("FAIL no fused_moe_kernel on rank 1")
    header = re.search(r"rule +rank 0 +rank 1 +run", text)
    assert header is not None
    table, ran = header.start(), text.index("What did run")
    assert table < text.index("Open") < ran
    assert STOCK_SYMBOL in text[ran:]
    assert "\x1b" not in text


def test_the_json_document_cites_evidence_and_what_would_settle_it(tmp_path: Path) -> None:
    document = json.loads(msgspec.json.encode(gate_document(gate(tmp_path, REQUIRE, only(1, cut)))))
    described = (Path(__file__).parents[2] / "docs/gate.md").read_text()
    cells = document["rules"][0]["cells"]
    assert all(f"`{key}`" in described for key in ("verdict", "reason", "kernels", "evidence", "settled_by"))
    assert cells[0]["evidence"]["file"] == "kernels/rank=0"
    assert cells[0]["evidence"]["first"]["start_ns"] > 0
    assert document["exit_code"] == 3
    assert all(own["settled_by"] for own in cells if own["verdict"] == "INCONCLUSIVE")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(REQUIRE + FORBID)
    return path


def test_the_command_exits_with_the_verdict_and_writes_every_report(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("an earlier step\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    names = {name: tmp_path / f"gate.{name}" for name in ("json", "junit")}
    files = [word for name, path in names.items() for word in (f"--{name}", str(path))]
    for name, damage, code in (("sound", None, 0), ("fallback", only(1, fall_back), 1), ("cut", only(1, cut), 3)):
        run = golden.build(tmp_path / name, damage, world_size=2)
        assert main(["gate", str(run), "--policy", str(policy), *files, "--markdown", str(summary)]) == code
        assert json.loads(names["json"].read_text())["exit_code"] == code
        assert parsed(names["junit"].read_text()).tag == "testsuites"
        assert ("::error file=" in capsys.readouterr().out) is (code != 0)
    assert summary.read_text().startswith("an earlier step\n## ✅ PASS")
    assert summary.read_text().count("witness gate") == 3


def test_a_recorded_run_is_judged_for_its_own_backend_where_nothing_else_is_asked(tmp_path: Path) -> None:
    assert main(["gate", str(golden.build(tmp_path / "run", world_size=2))]) == 0
    assert main(["gate", str(golden.build(tmp_path / "stock", world_size=2, backend="triton"))]) == 0
    assert main(["gate", str(tmp_path / "stock"), "--require-backend", "flashinfer_alphamoe"]) == 1


def test_what_cannot_be_judged_exits_2_and_replaces_the_reports_of_an_earlier_gate(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = golden.build(tmp_path / "run", world_size=2)
    target = tmp_path / "gate.json"
    command = ["gate", str(run), "--policy", str(policy), "--json", str(target)]
    assert main(command) == 0
    policy.write_text('[[require]]\nsymbl = "x"\n')
    assert main(command) == 2
    assert json.loads(target.read_text())["verdict"] == "CONFIG_ERROR"
    assert "did you mean 'symbol'?" in capsys.readouterr().err
    policy.write_text(REQUIRE + FORBID)
    (run / "ranks/01.json").write_bytes((run / "ranks/1.json").read_bytes())
    assert main(command) == 2
    (run / "ranks/01.json").unlink()
    (run / "run.json").write_text("{")
    assert main(command) == 3
    assert json.loads(target.read_text())["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gate", "nowhere", "--require-backend", "triton"], "no such file"),
        (["gate", ".", "--require-backend", "triton"], "--ranks N"),
        (["gate", ".", "--ranks", "2"], "nothing is asked"),
        (["gate", ".", "--require-backend", "tritn"], "did you mean 'triton'?"),
        (["gate"], "RUN|TRACE"),
        (["gate", ".", "--ranks", "1", "--expect-commit", ""], "--expect-commit '' is no hash"),
        (["gate", ".", "--ranks", "1", "--expect-commit", "abc123"], "at least 7 digits"),
        (["gate", ".", "--ranks", "1", "--expect-commit", "main"], "no hash"),
        (["gate", ".", "--ranks", "1", "--expect-tree", "7e7e7e7"], "at least 64 digits"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert SYMBOL not in err
