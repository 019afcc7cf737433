"""Which captures a session replays: none that was named, or that lies there, is left out in silence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sessions import captured_run, session

from alphamoe_profiler.bundle import BundleWriter, RunBundle
from alphamoe_profiler.cli import main
from alphamoe_sanitizer_replays.captures.store import look_for_captures
from alphamoe_sanitizer_replays.tool.folder_lock import locked_folder

pytestmark = pytest.mark.usefixtures("gpu")
SYNC = ("synccheck",)
NAME = "alphamoe_w8a8-M=5"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "2", "99"], "--ranks 99: no capture passes with it"),
        (["--ranks", "2,last"], "--ranks last (3): no capture passes with it"),
        (["--ranks", "all", "99"], "--ranks all stands alone"),
        (["--layers", "1", "9"], "--layers 9: no capture passes with it"),
        (["--M", "3", "7"], "--M 7: no capture passes with it"),
        (["--variants", ","], "--variants names nothing"),
        (["--M", ","], "--M names nothing"),
        (["--tool", "none", "all"], "--tool none stands alone"),
    ],
)
def test_a_word_that_names_nothing_is_refused_beside_words_that_do(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """Exit 2, with what there is."""
    assert main(["sanitize", str(captures), "--out", str(tmp_path / "r"), *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "rank 2 layer 1 M 3; rank 2 layer 1 M 5" in error or "passes" not in told
    assert not (tmp_path / "r").exists()


def _no_description(folder: Path) -> None:
    (folder / NAME / "capture.json").unlink()


def _cut_short(folder: Path) -> None:
    (folder / NAME).rename(folder / f".{NAME}.abc.tmp")


def _just_begun(folder: Path) -> None:
    (folder / f".{NAME}.abc.tmp").mkdir()


def _hidden(folder: Path) -> None:
    (folder / ".old").mkdir()
    (folder / NAME).rename(folder / ".old" / NAME)


def _linked(folder: Path) -> None:
    (folder / NAME).rename(folder.parent / NAME)
    (folder / NAME).symlink_to(folder.parent / NAME)


def _linked_above(folder: Path) -> None:
    (folder.parent / "more").mkdir()
    (folder / NAME).rename(folder.parent / "more" / NAME)
    (folder / "link").symlink_to(folder.parent / "more")


def _linked_twice(folder: Path) -> None:
    _linked_above(folder)
    (folder.parent / "between").mkdir()
    (folder / "link").rename(folder.parent / "between" / "link")
    (folder / "link").symlink_to(folder.parent / "between")


def _linked_to_what_is_gone(folder: Path) -> None:
    _linked(folder)
    shutil.rmtree(folder.parent / NAME)


def _linked_in_a_circle(folder: Path) -> None:
    (folder / "circle").symlink_to("circle")


def _nested(folder: Path) -> None:
    (folder / NAME).rename(folder / "alphamoe_w8a8-M=3" / NAME)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_no_description, "it has no capture.json"),
        (_cut_short, "it was not written to its end"),
        (_just_begun, "it was not written to its end"),
        (_hidden, "it lies in a hidden folder"),
        (_linked, "links are not followed"),
        (_linked_above, "links are not followed"),
        (_linked_twice, "links are not followed"),
        (_linked_to_what_is_gone, "a link that leads nowhere"),
        (_linked_in_a_circle, "a link that leads nowhere"),
        (_nested, "it lies within a capture"),
    ],
)
def test_what_looks_like_a_capture_and_is_none_leaves_the_session_open(
    folder: Path, tmp_path: Path, tool: Callable[..., str], change: Callable[[Path], None], told: str
) -> None:
    """The captures beside it are replayed."""
    change(folder)
    code, report = session(folder, tmp_path / "r", tool(), "--M", "3", tools=SYNC)
    assert (code, [entry.verdict.value for entry in report.entries]) == (3, ["PASS"])
    assert told in report.reason
    assert any(told in note for note in report.notes)


def test_links_to_files_and_to_what_is_walked_itself_hide_nothing_and_nothing_outside_is_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to ``/`` must not lead through the whole file system."""
    (folder / "latest").symlink_to(NAME)
    (folder / "log").symlink_to(shutil.copy(folder / NAME / "capture.json", folder.parent / "log"))
    assert look_for_captures(folder).left_out == ()
    (folder / "root").symlink_to("/")
    scan, seen = os.scandir, []

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        seen.append(Path(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert len(look_for_captures(folder).left_out) == 1
    assert sorted(seen) == [folder, folder / "alphamoe_w8a8-M=3", folder / NAME]


def test_a_folder_that_cannot_be_read_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold any capture."""
    scan = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith(NAME):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = look_for_captures(folder)
    assert [path.name for path in found.captures] == ["alphamoe_w8a8-M=3"]
    assert found.left_out == ((folder / NAME, "the folder cannot be read: Permission denied"),)


def test_captures_are_found_however_deep_they_lie(folder: Path) -> None:
    """No depth is the last."""
    (folder / "a/b/c/d/e/f/g/h").mkdir(parents=True)
    (folder / NAME).rename(folder / "a/b/c/d/e/f/g/h" / NAME)
    assert len(look_for_captures(folder).captures) == 2


def test_parts_alone_are_no_captures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be replayed, and what lies there is named."""
    _no_description(folder)
    assert main(["sanitize", str(folder / NAME), "--out", str(tmp_path / "r")]) == 3
    assert f"{NAME}: it has no capture.json" in capsys.readouterr().err


def test_a_variant_that_a_damaged_capture_may_have_is_an_open_question(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no wrong word before all captures were read."""
    _no_description(folder)
    assert main(["sanitize", str(folder), "--variants", "t9", "--out", str(tmp_path / "r")]) == 3
    assert "one that is damaged or gone may have it" in capsys.readouterr().err


def test_showing_a_run_names_what_only_looks_like_a_capture(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = captured_run(tmp_path / "run", captures)
    half = run / "captures/rank=2/half"
    half.mkdir()
    (half / "tensors.safetensors").touch()
    main(["show", str(run), "--json"])
    rows = json.loads(capsys.readouterr().out)["captures"]
    assert rows[-1] == {"path": "captures/rank=2/half", "error": "it has no capture.json"}
    assert all("error" not in row for row in rows[:-1])


def _with_a_lost_rank(path: Path, captures: Path) -> Path:
    """Build a run that vouches for captures of ranks 1 and 2, of which those of rank 1 are gone."""
    run = captured_run(path, captures)
    lost = shutil.copytree(run / "captures/rank=2", run / "captures/rank=1")
    record = RunBundle.open(run).rank_file(1)
    assert record is not None
    BundleWriter.join(run).write_rank(record)
    shutil.rmtree(lost)
    return run


@pytest.mark.parametrize("named", ["run", "run/captures", "."])
def test_captures_of_a_rank_that_are_gone_are_missed_by_every_folder_that_would_hold_them(
    captures: Path, tmp_path: Path, tool: Callable[..., str], named: str
) -> None:
    """The run vouches for them: a rank whose folder is gone is no rank without captures."""
    _with_a_lost_rank(tmp_path / "place" / "run", captures)
    code, report = session(tmp_path / "place" / named, tmp_path / "r", tool(), "--M", "3", tools=SYNC)
    assert (code, [entry.verdict.value for entry in report.entries]) == (3, ["PASS"])
    assert "rank 1: captures/rank=1/" in report.reason


@pytest.mark.parametrize("named", ["run", "run/captures", "."])
def test_a_run_of_which_every_capture_is_gone_has_lost_them(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    """It is not a run that was recorded without any."""
    run = captured_run(tmp_path / "place" / "run", captures)
    shutil.rmtree(run / "captures/rank=2")
    assert main(["sanitize", str(tmp_path / "place" / named), "--out", str(tmp_path / "r")]) == 3
    assert "rank 2: captures/rank=2/" in capsys.readouterr().err


def test_the_folder_of_one_rank_stands_for_that_rank_alone(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """What is wrong with another rank's captures is no matter of it."""
    run = captured_run(tmp_path / "run", captures)
    (run / "ranks/1.json").unlink()
    fake = tool()
    assert session(run / "captures/rank=2", tmp_path / "a", fake, "--M", "3", tools=SYNC)[0] == 0
    assert session(run / "captures", tmp_path / "b", fake, "--M", "3", tools=SYNC)[0] == 3


def test_a_copy_of_a_capture_is_the_same_dispatch(folder: Path, tmp_path: Path, tool: Callable[..., str]) -> None:
    """It is replayed once, counted once, and told."""
    shutil.copytree(folder / NAME, folder / "copy")
    code, report = session(folder, tmp_path / "r", tool(), "--M", "5", tools=SYNC)
    assert (code, len(report.entries)) == (0, 1)
    assert "1 captured eager dispatch (" in report.statement
    assert any("is a copy of" in note for note in report.notes)


def test_a_copy_that_was_written_at_another_time_is_one_all_the_same(
    folder: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """The same call with the same tensors."""
    path = shutil.copytree(folder / NAME, folder / "copy") / "capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "2026-02-02T00:00:00Z"}))
    assert len(session(folder, tmp_path / "r", tool(), "--M", "5", tools=SYNC)[1].entries) == 1


def _last_byte(tensors: Path) -> None:
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)


@pytest.mark.parametrize("harm", [_last_byte, lambda tensors: os.truncate(tensors, 10), Path.unlink])
@pytest.mark.parametrize("damaged", [NAME, "copy"])
def test_a_damaged_capture_is_no_copy_of_a_sound_one(
    folder: Path, tmp_path: Path, tool: Callable[..., str], harm: Callable[[Path], None], damaged: str
) -> None:
    """The sound one is replayed, whichever it is, and the other leaves the session open by its name."""
    shutil.copytree(folder / NAME, folder / "copy")
    harm(folder / damaged / "tensors.safetensors")
    code, report = session(folder, tmp_path / "r", tool(), "--M", "5", tools=SYNC)
    assert (code, [entry.verdict.value for entry in report.entries]) == (3, ["PASS"])
    assert str(folder / damaged) in report.reason
    assert not any("is a copy of" in note for note in report.notes)


def test_a_filter_that_names_what_a_damaged_capture_may_be_of_is_inconclusive(
    folder: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no usage error: the capture may be the one that is asked for."""
    (folder / NAME / "capture.json").write_text("{")
    code, report = session(folder, tmp_path / "r", tool(), "--M", "3", "5", tools=SYNC)
    assert (code, [entry.verdict.value for entry in report.entries]) == (3, ["PASS"])
    assert any(note.startswith("--M 5: no capture passes with it") for note in report.notes)
    assert main(["sanitize", str(folder), "--out", str(tmp_path / "s"), "--M", "5"]) == 3
    assert NAME in capsys.readouterr().err


def test_a_filter_that_names_a_rank_whose_captures_are_gone_is_inconclusive(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """A rank that lost nothing and captured nothing is still a wrong word."""
    run = _with_a_lost_rank(tmp_path / "run", captures)
    code, report = session(run, tmp_path / "r", tool(), "--ranks", "1", "2", tools=SYNC)
    assert (code, {entry.verdict.value for entry in report.entries}) == (3, {"PASS"})
    assert "rank 1: captures/rank=1/" in report.reason
    assert any(note.startswith("--ranks 1: no capture passes with it") for note in report.notes)
    assert main(["sanitize", str(run), "--out", str(tmp_path / "s"), "--ranks", "2", "3"]) == 2


@pytest.mark.parametrize(
    ("content", "place", "wanted"),
    [('{"foo": 1}', "x", 0), ('{"foo": 1}', ".", 3), ('{"schema_version', "x", 3)],
)
def test_a_run_json_of_another_program_stops_no_session(
    captures: Path, tmp_path: Path, tool: Callable[..., str], content: str, place: str, wanted: int
) -> None:
    """It is told. It leaves open what it may vouch for, and a damaged one what may have been lost with it."""
    project = tmp_path / "project"
    shutil.copytree(captures, project / "captures")
    (project / place).mkdir(exist_ok=True)
    (project / place / "run.json").write_text(content)
    code, report = session(project, tmp_path / "r", tool(), "--M", "3", tools=SYNC)
    assert (code, [entry.verdict.value for entry in report.entries]) == (wanted, ["PASS"])
    assert any("run.json" in note and "another program's" in note for note in report.notes)


@pytest.mark.parametrize("below", ["replays/z", "controls"])
def test_a_report_is_not_written_into_another_one(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str], below: str
) -> None:
    """The other is replaced as a whole, also while this one runs."""
    session(captures, tmp_path / "r", tool(), "--M", "3", tools=SYNC)
    assert main(["sanitize", str(captures), "--out", str(tmp_path / "r" / below), "--force"]) == 2
    assert "lies in the report" in capsys.readouterr().err


def test_a_session_within_the_folder_of_another_is_refused_either_way(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Force removes nothing that another session holds, and a refused folder leaves nothing behind."""
    out, inner = tmp_path / "r", tmp_path / "r/replays/z"
    for held, asked in ((out, inner), (inner, out)):
        with locked_folder(held):
            assert main(["sanitize", str(captures), "--out", str(asked), "--force"]) == 2
            assert "in use by another session" in capsys.readouterr().err
            assert held.is_dir()
        assert not out.exists()


def test_a_session_that_ends_without_a_report_leaves_no_older_one_for_its_own(
    captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that GITHUB_STEP_SUMMARY names is added to, and stays."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    files = {"--junit": "st.xml", "--json": "st.json", "--markdown": "summary.md"}
    words = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    for name in files.values():
        (tmp_path / name).write_text("green")
    assert main(["sanitize", str(captures), "--ranks", "99", *words]) == 2
    assert [name for name in files.values() if (tmp_path / name).exists()] == ["summary.md"]


@pytest.mark.parametrize("option", ["--json", "--junit", "--markdown"])
def test_folders_of_a_report_are_not_made_on_the_way(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """A misspelt folder is refused before anything runs."""
    assert main(["sanitize", str(captures), option, str(tmp_path / "nope" / "x")]) == 2
    assert f"there is no folder {tmp_path / 'nope'}" in capsys.readouterr().err
    assert not (tmp_path / "nope").exists()
