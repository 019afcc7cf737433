"""Whole sanitize sessions on a stand-in for the tool: how each can end, and what the report says then."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_captures import make_capture
from sessions import captured_run, session

from alphamoe_profiler.cli import main
from alphamoe_sanitizer_replays.captures.store import StoredCapture
from alphamoe_sanitizer_replays.replays.job import ReplayInputs
from alphamoe_sanitizer_replays.session.run import read_report


@pytest.mark.usefixtures("gpu")
def test_a_session_of_caught_controls_and_clean_replays_passes(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All four tools: PASS, every report written, one scope sentence a capture, nothing large left behind."""
    out = tmp_path / "report"
    code, report = session(captures, out, tool(), "--M", "3", tools=("all",))
    assert (code, report.verdict.value) == (0, "PASS"), capsys.readouterr().out
    assert {entry.tool for entry in report.entries} == {"synccheck", "racecheck", "memcheck", "initcheck"}
    assert all(own.basic_caught for own in report.controls)
    (scope,) = report.scope
    assert scope.startswith("M3, H256, I128, E16, k4, BM8, rank 2, layer 1, ")
    assert "racecheck 0 hazards" in scope
    assert "CUDA graph replays, ranks 0, 1 and 3, layer 0" in scope
    assert report.entries[0].timings_s["compile"] == 0.5
    tree = ElementTree.parse(out / "junit.xml").getroot()  # noqa: S314 -- our own file
    assert (tree.get("failures"), tree.get("errors")) == ("0", "0")
    assert "PASS" in (out / "report.md").read_text()
    assert not list(out.rglob("*.safetensors"))
    assert all((out / str(entry.log_file)).is_file() for entry in report.entries)
    assert "PASS" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_a_basic_control_that_is_missed_leaves_its_tool_inconclusive(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """The other tool of the session still passes."""
    code, report = session(captures, tmp_path / "r", tool(miss=["racecheck:planted_block_barrier"]), "--M", "3")
    assert (code, report.verdict.value) == (3, "INCONCLUSIVE")
    assert {entry.tool: entry.verdict.value for entry in report.entries} == {
        "synccheck": "PASS",
        "racecheck": "INCONCLUSIVE",
    }
    assert "block_barrier" in report.reason


@pytest.mark.usefixtures("gpu")
def test_a_mechanism_that_a_tool_does_not_see_is_listed_as_not_covered(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """A miss that is not basic is no verdict, and the scope tells it; a mechanism that is not used is no gap."""
    missed = ["racecheck:planted_warp_sync", "racecheck:planted_warpgroup_fence"]
    code, report = session(captures, tmp_path / "r", tool(miss=missed), "--M", "3", "--variants", "t8_c8")
    assert code == 0
    assert "warp sync by racecheck" in report.scope[0]
    assert "wgmma" not in report.scope[0]


@pytest.mark.usefixtures("gpu")
def test_a_flagged_sound_twin_leaves_its_tool_inconclusive(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """A tool that sees faults where there are none is not believed, whatever it catches."""
    code, report = session(captures, tmp_path / "r", tool(flag=["racecheck:sound_ldmatrix"]), "--M", "3")
    assert code == 3
    own = next(own for own in report.controls if own.tool == "racecheck")
    assert any("sound_ldmatrix was flagged" in problem for problem in own.problems)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"miss": ["racecheck:kernel_alpha_moe_w8a8_up_down"]}, "was not caught through its filter"),
        ({"leak": ["racecheck"]}, "let another kernel's fault (ldmatrix) through"),
    ],
)
def test_a_filter_that_holds_back_the_target_or_lets_others_through_proves_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], behaviour: dict[str, list[str]], told: str
) -> None:
    """The canary under the target's symbol must come through the replay's filter, and the decoy must not."""
    code, report = session(captures, tmp_path / "r", tool(**behaviour), "--M", "3", tools=("racecheck",))
    assert code == 3
    assert told in " ".join(report.controls[0].problems)


@pytest.mark.usefixtures("gpu")
def test_a_finding_in_the_target_fails_even_where_controls_were_missed(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """Presence is proven by itself."""
    fake = tool(fault=["racecheck"], miss=["racecheck:planted_block_barrier"])
    code, report = session(captures, tmp_path / "r", fake)
    assert (code, report.verdict.value) == (1, "FAIL")
    assert report.reason.startswith("racecheck, rank 2 layer 1 M 3")
    failed = [entry for entry in report.entries if entry.verdict.value == "FAIL"]
    assert len(failed) == 2
    assert failed[0].findings[0].count == 1024
    tree = ElementTree.parse(tmp_path / "r" / "junit.xml").getroot()  # noqa: S314 -- our own file
    assert int(tree.get("failures", "0")) == 3


@pytest.mark.usefixtures("gpu")
def test_one_replay_that_hangs_is_killed_and_the_others_are_judged(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """INCONCLUSIVE for the one, with its partial log; PASS for the others."""
    fake = tool(hang="M-5/t8_c8/racecheck")
    code, report = session(captures, tmp_path / "r", fake, "--timeout", "2")
    assert code == 3
    open_entries = [entry for entry in report.entries if entry.verdict.value != "PASS"]
    assert [(entry.label, entry.tool) for entry in open_entries] == [("rank 2 layer 1 M 5", "racecheck")]
    assert "timed out after 2 s" in open_entries[0].reasons[0]
    assert (tmp_path / "r" / str(open_entries[0].log_file)).read_text().startswith("========= COMPUTE-SANITIZER")


@pytest.mark.usefixtures("gpu")
def test_controls_that_hang_leave_the_tool_inconclusive(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """A control that was not run to its end is not caught."""
    code, report = session(
        captures, tmp_path / "r", tool(hang="racecheck:controls"), "--M", "3", "--timeout", "2", tools=("racecheck",)
    )
    assert code == 3
    assert "no end within 2 s" in report.controls[0].outcomes[0].reason


def test_no_tool_is_inconclusive_for_every_replay(
    captures: Path, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry says it, and nothing was run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("alphamoe_sanitizer_replays.tool.sanitizer.shutil.which", lambda *_, **__: None)
    assert main(["sanitize", str(captures), "--out", str(tmp_path / "r")]) == 3
    report = read_report(tmp_path / "r" / "report.json")
    assert "compute-sanitizer was not found" in report.reason
    assert len(report.entries) == 8
    assert all(entry.verdict.value == "INCONCLUSIVE" for entry in report.entries)
    assert not (tmp_path / "r" / "replays").exists()


def test_no_gpu_is_inconclusive(captures: Path, tmp_path: Path, tool: Callable[..., str]) -> None:
    """A tool without a GPU watches nothing, and the scope claims nothing."""
    code, report = session(captures, tmp_path / "r", tool(), "--device", "cpu")
    assert code == 3
    assert "on the CPU" in report.reason
    assert report.scope == ()


@pytest.mark.usefixtures("gpu")
def test_ctrl_c_keeps_what_is_there_and_says_what_is_missing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replay is in the report, the running one is killed, the rest are open."""
    seen: list[str] = []

    def told(self: object, last: str, done: int, total: int) -> None:
        seen.append(last)
        if last.startswith("synccheck, "):
            raise KeyboardInterrupt

    monkeypatch.setattr("alphamoe_sanitizer_replays.session.progress.SessionProgress.__call__", told)
    fake = tool(hang="racecheck/replay-spec")
    code, report = session(captures, tmp_path / "r", fake, "--M", "3")
    assert code == 3
    assert report.interrupted
    assert {entry.tool: entry.verdict.value for entry in report.entries} == {
        "synccheck": "PASS",
        "racecheck": "INCONCLUSIVE",
    }
    assert "interrupted" in report.reason


@pytest.mark.usefixtures("gpu")
def test_ctrl_c_while_controls_run_still_leaves_a_report(
    captures: Path, tmp_path: Path, tool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control that hangs is killed and named; no replay was made, and every one of them is open."""

    def told(self: object, last: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr("alphamoe_sanitizer_replays.session.progress.SessionProgress.__call__", told)
    code, report = session(captures, tmp_path / "r", tool(hang="racecheck:controls"), "--M", "3")
    assert code == 3
    assert report.interrupted
    assert {entry.verdict.value for entry in report.entries} == {"INCONCLUSIVE"}
    (racecheck,) = (own for own in report.controls if own.tool == "racecheck")
    assert any("interrupted" in problem for problem in racecheck.problems)


@pytest.mark.usefixtures("gpu")
def test_a_disk_that_is_full_for_one_capture_leaves_the_others(
    captures: Path, tmp_path: Path, tool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries are open and say why; the other capture is judged."""
    from alphamoe_sanitizer_replays.session import work

    prepare = work.prepare_inputs

    def full(stored: StoredCapture, folder: Path) -> ReplayInputs:
        if stored.capture.M == 3:
            raise OSError(28, "No space left on device")
        return prepare(stored, folder)

    monkeypatch.setattr(work, "prepare_inputs", full)
    code, report = session(captures, tmp_path / "r", tool())
    assert code == 3
    assert [entry.verdict.value for entry in report.entries] == ["INCONCLUSIVE", "INCONCLUSIVE", "PASS", "PASS"]
    assert "No space left" in report.entries[0].reasons[0]


@pytest.mark.usefixtures("gpu")
def test_a_report_that_is_there_is_replaced_by_force_only_and_strangers_never(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the user's is deleted."""
    out, fake = tmp_path / "r", tool()
    words = ["sanitize", str(captures), "--M", "3", "--tool", "synccheck", "--out", str(out), "--sanitizer", fake]
    assert main(words) == 0
    before = (out / "report.json").read_bytes()
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "report.json").read_bytes() == before
    assert main([*words, "--force"]) == 0
    (out / "notes.txt").write_text("mine")
    assert main([*words, "--force"]) == 2
    assert (out / "notes.txt").read_text() == "mine"


def test_a_damaged_capture_is_named_and_the_session_no_pass(
    tmp_path: Path, gpu: None, tool: Callable[..., str]
) -> None:
    """The sound capture beside it is still replayed."""
    make_capture(tmp_path / "captures", M=3)
    make_capture(tmp_path / "captures", M=5)
    (tmp_path / "captures" / "alphamoe_w8a8-M=5" / "capture.json").write_text("{")
    code, report = session(tmp_path / "captures", tmp_path / "r", tool(), tools=("synccheck",))
    assert code == 3
    assert [entry.verdict.value for entry in report.entries] == ["PASS"]
    assert "1 capture left out, damaged or out of place" in report.reason


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tool", "nocheck"], "there is no such tool"),
        (["--M", "7"], "no capture passes"),
        (["--ranks", "x"], "--ranks is a number"),
        (["--variants", "t9"], "no capture's kernel has it"),
        (["--timeout", "0"], "is no time"),
        (["--source", "none.cu"], "no such file"),
        (["--sanitizer", "/nowhere/tool"], "no such program"),
    ],
)
def test_a_wrong_word_is_a_usage_error_and_leaves_nothing(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """One line, exit 2, no folder."""
    assert main(["sanitize", str(captures), "--out", str(tmp_path / "r"), *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.usefixtures("gpu")
def test_a_run_keeps_its_report_and_one_without_captures_names_the_option_that_makes_them(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths in the report are relative to the run, and its id is told."""
    run = captured_run(tmp_path / "run", None)
    assert main(["sanitize", str(run)]) == 2
    assert "--capture layer=0,M=1" in capsys.readouterr().err
    run = captured_run(tmp_path / "captured", captures)
    assert main(["sanitize", str(run), "--tool", "synccheck", "--sanitizer", tool(), "--M", "last"]) == 0
    report = read_report(run / "reports" / "sanitizer" / "report.json")
    assert report.captures[0].path == "captures/rank=2/alphamoe_w8a8-M=5"
    assert report.run_id == json.loads((run / "run.json").read_text())["run_id"]


@pytest.mark.usefixtures("gpu")
def test_an_allowed_finding_is_listed_apart_and_stays_in_the_totals(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """PASS with the finding told; an entry that nothing needed is noted; one without a reason is CONFIG_ERROR."""
    allow, fake = tmp_path / "allow.toml", tool(fault=["racecheck"])
    until = datetime.date.today() + datetime.timedelta(days=365)
    entry = '[[allow]]\nsymbol = "wait"\nhazard = "hazard"\ntool = "racecheck"\n'
    entry += 'tool_versions = "2025.1..2025.4"\n' + f"expires = {until}\n"
    allow.write_text(f'{entry}reason = "known"\n{entry.replace("wait", "other")}reason = "unused"\n')
    more = ("--M", "3", "--allow-list", str(allow))
    code, report = session(captures, tmp_path / "r", fake, *more, tools=("racecheck",))
    assert code == 0, capsys.readouterr().out
    assert (report.entries[0].hazards, len(report.entries[0].findings)) == (1, 1)
    assert "known" in report.entries[0].allowed[0]
    assert f"racecheck 1 hazard (1 finding allowed until {until})" in report.scope[0]
    assert any("not used: other" in note for note in report.notes)
    allow.write_text(entry)
    words = ["sanitize", str(captures), "--out", str(tmp_path / "s"), "--sanitizer", fake, *more]
    assert main(words) == 2
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("kernel", "told"),
    [("kernel_alpha_moe_w8a8_up_down", "nothing shows that it did under it"), ("another_kernel", "did not launch")],
)
def test_a_call_that_cannot_say_what_it_launches_is_seen_once_without_a_tool(
    captures: Path,
    tmp_path: Path,
    tool: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    told: str,
) -> None:
    """One witness run for both tools says why they prove nothing: what the call launched there, and what it did not."""
    from alphamoe_sanitizer_replays.replays import witness
    from alphamoe_sanitizer_replays.results import Witness

    made: list[Path] = []

    def seen(inputs: ReplayInputs, folder: Path, **_: object) -> Witness:
        made.append(folder)
        return Witness(kernels={f"void {kernel}<8>(float*)": 1})

    monkeypatch.setattr(witness, "run_witness", seen)
    found, report = session(captures, tmp_path / "r", tool(unknown_launches=True), "--M", "3")
    assert found == 3
    assert len(made) == 1
    assert len(report.entries) == 2
    assert all(told in " ".join(entry.reasons) for entry in report.entries)
