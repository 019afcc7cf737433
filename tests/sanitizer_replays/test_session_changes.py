"""What a session rests on is the same from its first look to its last, and no word of a tool loses what it found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_captures import make_capture
from safetensors.torch import load_file, save_file
from sessions import captured_run, session

import alphamoe_sanitizer_replays.session.work as session_work
from alphamoe_profiler.cli import main
from alphamoe_sanitizer_replays.captures.store import StoredCapture
from alphamoe_sanitizer_replays.replays.job import ReplayInputs
from alphamoe_sanitizer_replays.tool.folder_lock import MARK

pytestmark = pytest.mark.usefixtures("gpu")
RACE = ("racecheck",)
NAME = "alphamoe_w8a8-M=5"


def _exchanged(path: Path, of: str) -> None:
    """Let the tool put another one, or another version of what it starts, into its own place at its first replay."""
    text = path.read_text()
    other = text.replace("Version 2025.3.1.0", "Version 2019.1.0.0")
    new = path.with_name("new")
    new.write_text(other if of == "version" else text)
    new.chmod(0o755)
    exchange = f"    if module.endswith('.replays.process') and os.path.exists({str(new)!r}):\n"
    exchange += f"        os.replace({str(new)!r}, __file__)\n"
    path.write_text(text.replace("    play = _controls if", f"{exchange}    play = _controls if"))


@pytest.mark.parametrize("of", ["version", "file"])
def test_a_tool_that_is_exchanged_during_the_session_proves_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], of: str
) -> None:
    """The planted faults were caught by another one; what it found is found all the same."""
    path = Path(tool())
    _exchanged(path, of)
    code, report = session(captures, tmp_path / "r", str(path), "--M", "3", tools=RACE)
    assert code == 3
    assert f"{path} was changed during the session" in report.reason
    shutil.rmtree(path.parent)
    path = Path(tool(fault=["racecheck"]))
    _exchanged(path, of)
    code, report = session(captures, tmp_path / "r2", str(path), "--M", "3", tools=RACE)
    assert (code, len(report.entries[0].findings)) == (1, 1)


def test_a_wrapper_that_starts_another_tool_than_before_proves_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """The file that is called stays the same."""
    real = Path(tool())
    _exchanged(real, "version")
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    code, report = session(captures, tmp_path / "r", str(wrapper), "--M", "3", tools=RACE)
    assert code == 3
    assert "it was 2025.3.1.0 and is 2019.1.0.0" in report.reason


def _arguments(capture: Path) -> None:
    said = json.loads((capture / "capture.json").read_text())
    said["arguments"]["routed_scaling_factor"] = 7.0
    (capture / "capture.json").write_text(json.dumps(said))


def _tensors(capture: Path) -> None:
    held = load_file(capture / "tensors.safetensors")
    held["topk_weights"] = held["topk_weights"] * 3
    save_file(held, capture / "tensors.safetensors")


@pytest.mark.parametrize("change", [_arguments, _tensors])
@pytest.mark.parametrize("when", ["before it is read for the replay", "after that"])
def test_a_capture_that_changes_during_the_session_proves_nothing(
    folder: Path,
    tmp_path: Path,
    tool: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    when: str,
) -> None:
    """Neither that the kernel is wrong, nor that it is right; a race that the tool saw in it is a race."""
    prepare = session_work.prepare_inputs

    def prepared(stored: StoredCapture, out: Path) -> ReplayInputs:
        if when != "after that":
            change(stored.path)
        inputs = prepare(stored, out)
        if when == "after that":
            change(stored.path)
        return inputs

    monkeypatch.setattr(session_work, "prepare_inputs", prepared)
    code, report = session(folder, tmp_path / "r", tool(), "--M", "3", tools=RACE)
    assert code == 3
    assert "changed" in report.reason
    if when == "after that":
        shutil.rmtree(tmp_path / "tool")
        code, report = session(folder, tmp_path / "r2", tool(fault=["racecheck"]), "--M", "5", tools=RACE)
        assert (code, len(report.entries[0].findings)) == (1, 1)
        words = [
            "sanitize",
            str(folder),
            "--M",
            "3",
            "--tool",
            "none",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "r3"),
        ]
        assert main(words) == 3


@pytest.mark.parametrize("outputs", ["", ".", "..", "a\0b", "a" * 300, "tool.log", "other.safetensors"])
def test_what_a_replay_says_of_its_outputs_costs_no_finding_and_no_log(
    captures: Path, tmp_path: Path, tool: Callable[..., str], outputs: str
) -> None:
    """Only the one file that a replay leaves is read, and removed."""
    code, report = session(
        captures, tmp_path / "r", tool(fault=["racecheck"], told={"outputs": outputs}), "--M", "3", tools=RACE
    )
    assert (code, len(report.entries[0].findings)) == (1, 1)
    assert report.entries[0].log_file is not None
    assert (tmp_path / "r" / report.entries[0].log_file).is_file()
    assert list((tmp_path / "r").rglob("*.outputs.safetensors")) == []


@pytest.mark.parametrize("encoding", ["foo", "utf-7", "shift_jis", "hex"])
def test_xml_in_an_encoding_that_cannot_be_read_costs_no_finding(
    captures: Path, tmp_path: Path, tool: Callable[..., str], encoding: str
) -> None:
    """The log holds it."""
    path = Path(tool(fault=["racecheck"]))
    text = path.read_text()
    path.write_text(text.replace('encoding="utf-8"?>\\n{records}', f'encoding="{encoding}"?>\\n{{records}}'))
    assert path.read_text() != text
    code, report = session(captures, tmp_path / "r", str(path), "--M", "3", tools=RACE)
    assert (code, report.entries[0].verdict.value, len(report.entries[0].findings)) == (1, "FAIL", 1)


def test_a_pipe_in_the_place_of_a_capture_is_damage_and_is_not_waited_for(
    folder: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """Nobody will write into it."""
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "capture.json")
    code, report = session(folder, tmp_path / "r", tool(), "--M", "3", tools=RACE)
    assert code == 3
    assert "it is no plain file" in report.reason


@pytest.mark.parametrize("left", ["nothing", "a folder", "a pipe"])
@pytest.mark.parametrize("named", [".", "run", "run/captures", "run/captures/rank=2"])
def test_a_run_whose_description_is_gone_vouches_for_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], left: str, named: str
) -> None:
    """It is no folder of loose captures: those that are missing can only be told by it."""
    run = captured_run(tmp_path / "place" / "run", captures)
    shutil.rmtree(run / "captures/rank=2" / NAME)
    (run / "run.json").unlink()
    if left == "a folder":
        (run / "run.json").mkdir()
    elif left == "a pipe":
        os.mkfifo(run / "run.json")
    code, report = session(tmp_path / "place" / named, tmp_path / "r", tool(), tools=RACE)
    assert code == 3
    assert "run.json: gone, or no plain file" in report.reason


def test_a_folder_that_no_report_of_ours_marks_is_not_emptied(
    captures: Path, folder: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody's files may lie in folders of the names that ours have."""
    for command, place, inside in (
        (["sanitize", str(captures), "--M", "3", "--sanitizer", tool()], tmp_path / "user", "inputs"),
        (["replay", str(captures / NAME)], tmp_path / "mem", "none"),
    ):
        (place / inside).mkdir(parents=True)
        (place / inside / "thesis.txt").write_text("mine")
        assert main([*command, "--out", str(place), "--force"]) == 2
        assert "nothing says that a" in capsys.readouterr().err
        assert (place / inside / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("chosen", ["3", "5"])
def test_a_folder_that_holds_what_was_named_is_not_emptied_whether_it_is_replayed_or_not(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str], chosen: str
) -> None:
    """A filter, or damage, leaves a capture out of the session and not out of its inputs."""
    mine = tmp_path / "mine"
    made = make_capture(mine / "inputs", M=5)
    (mine / MARK).touch()
    words = ["sanitize", str(captures / "alphamoe_w8a8-M=3"), str(mine), "--M", chosen, "--sanitizer", tool()]
    assert main([*words, "--out", str(mine), "--force"]) == 2
    assert "holds captures that this report reads" in capsys.readouterr().err
    (made.path / "capture.json").unlink()
    assert main([*words[:3], *words[5:], "--out", str(mine), "--force"]) == 2
    assert (made.path / "tensors.safetensors").is_file()


def test_a_plug_in_of_a_name_that_no_package_has_is_a_usage_error(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sanitize", str(captures), "--plugin", "..:x", "--out", str(tmp_path / "r")]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
