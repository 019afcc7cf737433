"""Where reports go: what an earlier command left does not stand for a later one, and nothing that is read is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import golden
import pytest

from alphamoe_profiler.cli import main
from alphamoe_profiler.commands import check_outside_runs, claim_targets
from alphamoe_tracers.errors import UsageError

GATE = ["--require-backend", "flashinfer_alphamoe"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run, a folder of captures in name only, and inputs of each kind."""
    golden.build(tmp_path / "run", world_size=1)
    (tmp_path / "caps").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("caps/capture.json", "al.toml", "k.cu", "policy.toml", "trace.json", "prompt.txt", "elsewhere/t.json"):
        (tmp_path / name).write_text("input")
    (tmp_path / "caps" / "linked").symlink_to(tmp_path / "elsewhere" / "t.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["sanitize", "caps", "--out", "run/captures/x"],
        ["sanitize", "caps", "--out", "run/kernels/x/y"],
        ["replay", "caps", "--out", "run/ranks/x"],
        ["dashboard", "run", "-o", "run/captures/page.html"],
        ["dashboard", "other", "-o", "run/kernels/page.html"],
        ["dashboard", "run", "-o", "run/run.json", "--force"],
        ["dashboard", "other", "--png", "run/kernels"],
        ["import", "trace.json", "--ranks", "1", "--out", "run/modules/x"],
        ["capture", "--callable", "json:dumps", "--out", "run/captures/x", "--", "true"],
        ["--prompt", "text:Hello", "--out", "run/kernels/x"],
    ],
)
def test_nothing_is_made_within_a_run_that_would_pass_for_its_evidence(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Such a folder would leave the run unreadable: its parts would contradict each other."""
    golden.build(here / "other", world_size=1)
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "lies in the run" in error or "would replace a part of" in error
    assert {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()} == before
    assert main(["gate", "run", *GATE]) == 0


def test_reports_of_a_run_and_folders_beside_a_run_json_of_another_program_are_places_for_reports(here: Path) -> None:
    """Only what may pass for evidence is kept out."""
    (here / "run.json").write_text('{"steps": []}')
    check_outside_runs(Path("run/reports/mine"), "--out")
    check_outside_runs(Path("new/sanitizer"), "--out")
    (here / "run.json").write_text('{"schema_version": "alph')
    with pytest.raises(UsageError, match="lies in the run"):
        check_outside_runs(Path("new/sanitizer"), "--out")


@pytest.mark.parametrize(
    ("words", "option", "target"),
    [
        (["sanitize", "caps"], "--json", "caps/capture.json"),
        (["sanitize", "caps"], "--junit", "caps/../caps/new.xml"),
        (["sanitize", "caps"], "--junit", "elsewhere/t.json"),
        (["sanitize", "caps", "--allow-list", "al.toml"], "--json", "./al.toml"),
        (["sanitize", "caps", "--source", "k.cu"], "--markdown", "k.cu"),
        (["sanitize", "run/captures"], "--json", "run/run.json"),
        (["replay", "caps"], "--json", "caps/capture.json"),
        (["replay", "run", "--source", "k.cu"], "--json", "k.cu"),
        (["show", "run"], "--json", "run/run.json"),
        (["gate", "run", "--policy", "policy.toml"], "--junit", "policy.toml"),
        (["gate", "run", *GATE], "--junit", "run/ranks/0.json"),
        (["import", "trace.json", "--ranks", "1", "--out", "new"], "--json", "trace.json"),
        (["--prompt", "file:prompt.txt"], "--json", "prompt.txt"),
    ],
)
def test_no_report_takes_the_place_of_what_its_command_reads(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], option: str, target: str
) -> None:
    """However it is spelt, and before another report is removed."""
    other = [] if option != "--json" or words[0] != "sanitize" else ["--junit", "earlier.xml"]
    (here / "earlier.xml").write_text("earlier")
    before = Path(target).read_bytes() if Path(target).exists() else None
    assert main([*words, *other, option, target]) == 2
    assert "which is read" in capsys.readouterr().err
    assert (Path(target).read_bytes() if Path(target).exists() else None) == before
    assert (here / "earlier.xml").exists()


@pytest.mark.parametrize(
    ("words", "replaced"),
    [
        (["sanitize", "caps"], False),
        (["sanitize", "run"], False),
        (["replay", "nowhere"], False),
        (["show", "nowhere"], False),
        (["gate", "nowhere", *GATE], True),
        (["import", "nowhere", "--ranks", "1", "--out", "new"], False),
    ],
)
def test_what_an_earlier_command_left_does_not_stand_for_one_that_ends_without_a_report(
    here: Path, words: list[str], replaced: bool
) -> None:
    """Whatever ends it, once its command line was accepted."""
    (here / "r.json").write_text("earlier")
    assert main([*words, "--json", "r.json"]) in (2, 3)
    assert (here / "r.json").exists() is replaced
    assert not replaced or "earlier" not in (here / "r.json").read_text()


@pytest.mark.parametrize(
    "words", [["sanitize", "caps", "--timeout", "0"], ["sanitize", "caps"], ["gate", "run", *GATE]]
)
def test_nothing_is_removed_before_every_argument_was_accepted(here: Path, words: list[str]) -> None:
    (here / "st.xml").write_text("earlier")
    assert main([*words, "--junit", "st.xml", "--json", "." if "--timeout" not in words else "new.json"]) == 2
    assert (here / "st.xml").read_text() == "earlier"


def test_reports_of_a_run_may_lie_in_its_own_folder_of_reports(here: Path) -> None:
    (here / "run" / "reports").mkdir()
    for _ in range(2):
        assert main(["gate", "run", *GATE, "--json", "run/reports/gate.json"]) == 0


def test_the_step_summary_is_known_however_it_is_spelt(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier steps added to it stays."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here / "sum.md"))
    (here / "sum.md").write_text("an earlier step\n")
    (here / "link.md").symlink_to(here / "sum.md")
    for count, spelt in enumerate(("./sum.md", "caps/../sum.md", "link.md"), start=1):
        assert main(["gate", "run", *GATE, "--markdown", spelt]) == 0
        assert (here / "sum.md").read_text().startswith("an earlier step\n")
        assert (here / "sum.md").read_text().count("witness gate") == count
    assert main(["sanitize", "caps", "--markdown", "./sum.md"]) in (2, 3)
    assert (here / "sum.md").read_text().startswith("an earlier step\n")


def test_a_report_may_lie_in_a_folder_that_the_command_itself_makes(here: Path) -> None:
    """Beside its output, and nowhere else that is not there."""
    claim_targets({"--json": "tt/run.json"}, (), Path("tt/run"))
    claim_targets({"--json": "tt/run.json"}, (), Path("tt/deep/run"))
    for target in ("tt/other/run.json", "t/run.json"):
        with pytest.raises(UsageError, match="there is no folder"):
            claim_targets({"--json": target}, (), Path("tt/run"))
    assert not (here / "tt").exists()


FAIL = "gate run --require-backend triton"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "streams", "code"),
    [
        (FAIL, ">&-", 1),
        (FAIL, ">/dev/full", 1),
        (FAIL, "2>/dev/full", 1),
        (FAIL, "2>&-", 1),
        ("gate run", ">&-", 3),
        ("gate run", ">/dev/full", 3),
        ("gate run", "2>&-", 0),
        ("gate run", "2>/dev/full", 0),
        ("gate run --json g.json", "2>/dev/full", 0),
        ("import nowhere --ranks 1 --out new", "2>&-", 2),
        ("replay nowhere", ">&- 2>&- <&-", 2),
        ("show run", ">/dev/full 2>&-", 3),
    ],
)
def test_a_stream_that_is_full_or_closed_leaves_the_exit_code(
    here: Path, words: str, streams: str, code: int, unbuffered: str
) -> None:
    """Only what should have been told and was not is 3; nothing else becomes a FAIL's 1."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": unbuffered,
    }
    command = f"{sys.executable} -m alphamoe_profiler {words} {streams}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert (here / "run" / "run.json").read_text().startswith("{")
