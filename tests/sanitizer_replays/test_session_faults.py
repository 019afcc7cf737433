"""What must not disturb a sanitize session, and what must not pass for its evidence."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_captures import make_capture
from sessions import captured_run, session

from alphamoe_profiler.cli import main
from alphamoe_profiler.commands import deliver
from alphamoe_sanitizer_replays.session.progress import SessionProgress
from alphamoe_sanitizer_replays.session.run import read_report
from alphamoe_sanitizer_replays.tool.folder_lock import locked_folder
from alphamoe_sanitizer_replays.tool.leash import EXIT_ORPHANED, LAUNCHER_VARIABLE

pytestmark = pytest.mark.usefixtures("gpu")
RACE = ("racecheck",)


@pytest.fixture
def run(tmp_path: Path, captures: Path) -> Path:
    """A run of four ranks with two captures of rank 2."""
    return captured_run(tmp_path / "run", captures)


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_second_session_in_one_folder_is_refused_and_deletes_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str], force: list[str]
) -> None:
    """Each would take the other's logs for its own."""
    out = tmp_path / "r"
    with locked_folder(out):
        (out / "controls").mkdir()
        assert main(["sanitize", str(captures), "--out", str(out), "--sanitizer", tool(), *force]) == 2
        assert "in use by another session" in capsys.readouterr().err
        assert (out / "controls").is_dir()


def _changed(run: Path) -> None:
    path = run / "captures/rank=2/alphamoe_w8a8-M=3/capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"notes": ["edited"]}))


def _gone(run: Path) -> None:
    shutil.rmtree(run / "captures/rank=2/alphamoe_w8a8-M=5")


def _added(run: Path) -> None:
    folder = run / "captures/rank=2"
    shutil.copytree(folder / "alphamoe_w8a8-M=3", folder / "another")


def _no_rank_file(run: Path) -> None:
    (run / "ranks/2.json").unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_changed, "was changed after it was written"),
        (_gone, "alphamoe_w8a8-M=5/capture.json cannot be read"),
        (_added, "is not among the files that ranks/2.json lists"),
        (_no_rank_file, "nothing vouches for its captures"),
    ],
)
def test_captures_that_a_run_does_not_vouch_for_prove_nothing(
    run: Path, tmp_path: Path, tool: Callable[..., str], damage: Callable[[Path], None], told: str
) -> None:
    """Named by the run, or by the folder of a capture in it."""
    damage(run)
    fake = tool()
    for number, path in enumerate((run, run / "captures/rank=2/alphamoe_w8a8-M=3")):
        code, report = session(path, tmp_path / f"r{number}", fake, "--M", "3", tools=RACE)
        assert (code, report.verdict.value) == (3, "INCONCLUSIVE")
        assert told in report.reason


def test_a_run_that_was_cut_short_elsewhere_still_has_its_captures(
    run: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """What is missing of the run is no matter of captures that verify."""
    shutil.rmtree(run / "kernels" / "rank=2")
    (run / "outcome.json").unlink()
    assert session(run, tmp_path / "r", tool(), "--M", "3", tools=RACE)[0] == 0


@pytest.mark.parametrize(
    ("key", "value", "told"), [("run_id", "other", "of run other"), ("rank", 1, "its content says rank 1")]
)
def test_a_capture_of_another_run_or_rank_is_a_config_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, told: str
) -> None:
    """Nothing is judged, exit 2."""
    path = run / "captures/rank=2/alphamoe_w8a8-M=3/capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert main(["sanitize", str(run), "--out", str(tmp_path / "r")]) == 2
    assert told in capsys.readouterr().err


def test_captures_behind_a_link_out_of_the_run_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, as docs/run-bundle.md says."""
    (run / "captures").rename(tmp_path / "elsewhere")
    (run / "captures").symlink_to(tmp_path / "elsewhere")
    assert main(["sanitize", str(run), "--out", str(tmp_path / "r")]) == 2
    assert "link out of the bundle" in capsys.readouterr().err


def test_reports_behind_a_link_are_neither_written_nor_deleted(
    run: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--force must not delete what lies elsewhere."""
    victim = tmp_path / "victim"
    (victim / "sanitizer" / "controls").mkdir(parents=True)
    (run / "reports").symlink_to(victim)
    assert main(["sanitize", str(run), "--sanitizer", tool(), "--force"]) == 2
    assert "a link is none" in capsys.readouterr().err
    assert (victim / "sanitizer" / "controls").is_dir()


def test_a_capture_without_the_variant_asked_for_is_an_open_entry(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """It was asked for and not replayed, so the session is no PASS."""
    folder = tmp_path / "both"
    shutil.copytree(captures / "alphamoe_w8a8-M=3", folder / "ours")
    make_capture(folder, backend="triton", M=3)
    code, report = session(folder, tmp_path / "r", tool(), "--variants", "t8_c8", tools=RACE)
    assert code == 3
    assert sorted(entry.verdict.value for entry in report.entries) == ["INCONCLUSIVE", "PASS"]
    assert "has no variant t8_c8" in report.reason


def test_replays_of_one_variant_that_ran_two_builds_prove_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """The source was saved again while the session ran."""
    code, report = session(captures, tmp_path / "r", tool(other_build=["racecheck"]), "--M", "3")
    assert code == 3
    assert all("ran 2 builds" in entry.reasons[0] for entry in report.entries)


def test_a_replay_of_another_build_than_was_compiled_ahead_proves_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tool alone cannot disagree with itself."""
    from alphamoe_sanitizer_replays.plugins.protocol import CompiledAhead

    monkeypatch.setattr(
        "alphamoe_sanitizer_replays.replays.job.ReplayInputs.compile_ahead",
        lambda *_: CompiledAhead(0.5, "5" * 64, "d" * 64),
    )
    code, report = session(captures, tmp_path / "r", tool(), "--M", "3", tools=RACE)
    assert code == 3
    assert "ran 2 builds" in report.reason


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"plugin": "faulty:NONE"}, "cannot be loaded"),
        ({"plugin": "builtins:len"}, "is no replay plug-in"),
        ({"plugin": "..:x"}, "cannot be loaded"),
        ({"arguments": {"top_k": 4, "block_m": 8, "routed_scaling_factor": "abc"}}, "routed_scaling_factor|ValueError"),
    ],
)
def test_one_odd_capture_costs_the_others_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], change: dict[str, object], told: str
) -> None:
    """Whatever its plug-in raises is its own entry's reason."""
    folder = tmp_path / "caps"
    shutil.copytree(captures, folder)
    path = folder / "alphamoe_w8a8-M=3" / "capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, report = session(folder, tmp_path / "r", tool(), tools=RACE)
    assert code == 3
    verdicts = {entry.label: (entry.verdict.value, " ".join(entry.reasons)) for entry in report.entries}
    assert verdicts["rank 2 layer 1 M 5"][0] == "PASS"
    assert verdicts["rank 2 layer 1 M 3"][0] == "INCONCLUSIVE"
    assert any(word in verdicts["rank 2 layer 1 M 3"][1] for word in told.split("|"))


def test_a_finding_outlives_a_check_that_stumbles(
    captures: Path, tmp_path: Path, tool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presence is proven by the tool alone."""
    from alphamoe_sanitizer_replays.plugins.alphamoe_w8a8 import AlphaMoEW8A8

    def check(*_: object) -> None:
        raise IndexError("odd")

    monkeypatch.setattr(AlphaMoEW8A8, "check", check)
    code, report = session(captures, tmp_path / "r", tool(fault=["racecheck"]), "--M", "3", tools=RACE)
    assert (code, report.verdict.value) == (1, "FAIL")
    assert report.entries[0].output is not None
    assert "unexpected IndexError: odd" in report.entries[0].output.reason


@contextlib.contextmanager
def _running(words: list[str], marker: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that believes in a GPU in a process of its own, from the moment that ``marker`` is there."""
    script = (
        "import sys; from types import SimpleNamespace as N; from alphamoe_profiler import memory\n"
        "memory.survey_gpus = lambda: N(gpus=(N(info=N(name='Fake')),), reason=None)\n"
        "from alphamoe_sanitizer_replays.replays.job import CompiledAhead, ReplayInputs\n"
        "ReplayInputs.compile_ahead = lambda *_: CompiledAhead()\n"
        "from alphamoe_profiler.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", script, *words], env=environment, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while not marker.is_file() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert marker.is_file()
        yield process
    finally:
        process.kill()
        process.wait()


def _of(folder: Path) -> list[int]:
    """Give the processes whose command line names a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_session_that_is_told_to_end_leaves_no_process_and_if_it_can_a_report(
    captures: Path, tmp_path: Path, tool: Callable[..., str], number: signal.Signals
) -> None:
    """A cancelled job, a lost terminal, and a kill that nothing can catch."""
    out = tmp_path / "r"
    words = ["sanitize", str(captures), "--M", "3", "--tool", "racecheck", "--out", str(out)]
    words += ["--sanitizer", tool(hang="racecheck/replay-spec")]
    log = out / "replays" / "000-rank-2-layer-1-M-3" / "t8_c8" / "racecheck" / "tool.log"
    with _running(words, log) as process:
        process.send_signal(number)
        if number is not signal.SIGKILL:
            process.send_signal(number)
        code = process.wait(timeout=20)
    until = time.monotonic() + 5
    while _of(out) and time.monotonic() < until:
        time.sleep(0.02)
    assert _of(out) == []
    if number is signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 3
        assert read_report(out / "report.json").interrupted
        assert not (out / "inputs").exists()


@pytest.mark.parametrize("reaped", [True, False])
def test_a_program_under_a_tool_ends_when_the_session_is_gone(reaped: bool) -> None:
    """It is the tool's child, and the kernel tells it nothing; a session that nobody reaps is gone too."""
    gone = subprocess.Popen([sys.executable, "-ISc", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    code = "import time; from alphamoe_sanitizer_replays.tool import leash; leash.die_with_launcher(); time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), LAUNCHER_VARIABLE: str(gone.pid)}
    try:
        assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=30).returncode == EXIT_ORPHANED
    finally:
        gone.wait()


def test_a_link_to_a_capture_does_not_lead_past_its_run(run: Path, tmp_path: Path, tool: Callable[..., str]) -> None:
    """Changed after its run vouched for it: nothing is proven, by whatever path it is named."""
    (tmp_path / "link").symlink_to(run / "captures/rank=2/alphamoe_w8a8-M=3")
    fake = tool()
    assert session(tmp_path / "link", tmp_path / "a", fake, tools=RACE)[0] == 0
    _changed(run)
    code, report = session(tmp_path / "link", tmp_path / "b", fake, tools=RACE)
    assert code == 3
    assert "not proven to be its own" in report.reason


def test_a_run_that_a_capture_names_alone_is_told_as_its_own_word(
    run: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """Outside a bundle nothing vouches for it."""
    (run / "captures").rename(tmp_path / "moved")
    code, report = session(tmp_path / "moved", tmp_path / "r", tool(), tools=RACE)
    assert code == 0
    assert any("2 captures of run" in note and "own word alone" in note for note in report.notes)


def test_a_capture_named_twice_is_one(captures: Path, tmp_path: Path, tool: Callable[..., str]) -> None:
    """Else a sentence counts a dispatch that nobody captured."""
    own = captures / "alphamoe_w8a8-M=3"
    words = ["sanitize", str(own), str(own / ".." / own.name), "--tool", *RACE, "--out", str(tmp_path / "r")]
    assert main([*words, "--sanitizer", tool()]) == 0
    assert len(read_report(tmp_path / "r" / "report.json").captures) == 1


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"device": "cpu"}, "ran on the CPU"),
        ({"device": None}, "does not say on which GPU"),
        ({"device": "NVIDIA T4"}, "the replay ran on NVIDIA T4, and the planted faults on fake"),
        ({"launches": -1}, "launched -1 kernels"),
        ({"collector": "torch.profiler"}, "a collector (torch.profiler)"),
    ],
)
def test_a_replay_that_ran_elsewhere_or_otherwise_proves_nothing(
    captures: Path, tmp_path: Path, tool: Callable[..., str], told: dict[str, object], reason: str
) -> None:
    """INCONCLUSIVE by its own word."""
    code, report = session(captures, tmp_path / "r", tool(told=told), "--M", "3", tools=RACE)
    assert code == 3
    assert reason in report.reason


def test_the_gpu_of_a_report_is_the_one_that_was_used(captures: Path, tmp_path: Path, tool: Callable[..., str]) -> None:
    """Not the first that a survey lists (``Fake H200`` here)."""
    code, report = session(captures, tmp_path / "r", tool(), "--M", "3", tools=RACE)
    assert (code, report.device) == (0, "fake")
    assert ", fake, compute-sanitizer" in report.statement


def test_a_variant_that_was_asked_for_and_did_not_run_is_no_pass_of_replay(
    captures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU the reference runs, whatever was asked for."""
    capture = str(captures / "alphamoe_w8a8-M=3")
    assert main(["replay", capture, "--variant", "t64_w", "--device", "cpu"]) == 3
    assert "no GPU: it ran on the CPU, where no kernel is launched" in capsys.readouterr().out


def test_two_replays_do_not_share_a_folder(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each would take the other's output for its own."""
    with locked_folder(tmp_path / "out"):
        words = ["replay", str(captures / "alphamoe_w8a8-M=3"), "--device", "cpu", "--out", str(tmp_path / "out")]
        assert main(words) == 2
    assert "in use by another session" in capsys.readouterr().err


def test_a_full_disk_does_not_hide_a_verdict_or_pass_for_one(
    captures: Path,
    tmp_path: Path,
    tool: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The verdict is on stdout, the exit code is FAIL's, and each file that is missing is named."""

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("alphamoe_profiler.commands.sanitize._replace", full)
    words = ["sanitize", str(captures), "--M", "3", "--tool", "racecheck", "--out", str(tmp_path / "r")]
    assert main([*words, "--sanitizer", tool(fault=["racecheck"]), "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["verdict"] == "FAIL"
    assert "report.json: No space left on device" in told.err


def test_a_pass_whose_report_cannot_be_written_is_no_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Every other place is reached all the same."""
    reached: list[str] = []

    def full() -> None:
        raise OSError(28, "No space left on device")

    assert deliver({"a": full, "b": lambda: reached.append("b")}, 0) == 3
    assert reached == ["b"]
    assert "could not write a: No space left" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--junit", "--markdown"])
def test_a_report_that_cannot_be_written_is_refused_before_the_session(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """By the option's own name, and nothing is run."""
    (tmp_path / "file").write_text("")
    for target in (str(tmp_path), str(tmp_path / "file" / "x"), "/proc/x"):
        words = ["sanitize", str(captures), "--out", str(tmp_path / "r"), "--sanitizer", "no", option, target]
        assert main(words) == 2
        assert f"{option} {target}" in capsys.readouterr().err
    assert main(["sanitize", str(captures), "--out", "/proc/x", "--sanitizer", tool()]) == 2
    assert "/proc/x cannot be made" in capsys.readouterr().err


def test_a_missing_tool_and_a_missing_gpu_are_told_together(
    captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One headline and no row for each replay that was never made."""
    monkeypatch.setattr("alphamoe_sanitizer_replays.tool.sanitizer.shutil.which", lambda *_, **__: None)
    assert main(["sanitize", str(captures), "--out", str(tmp_path / "r"), "--device", "cpu"]) == 3
    reason = read_report(tmp_path / "r" / "report.json").reason
    assert reason.index("on the CPU") < reason.index("compute-sanitizer was not found")  # a tool alone would not do
    assert "--tool none compares outputs here" in reason
    assert "rank 2" not in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["flashinfer_alphamoe", "triton"])
def test_without_a_gpu_no_replay_passes_in_either_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    """No kernel was launched, whatever the plug-in; that the output is the captured one is told beside it."""
    reason = "no GPU: it ran on the CPU, where no kernel is launched"
    make_capture(tmp_path / "captures", backend=backend)
    words = [str(tmp_path / "captures"), "--tool", "none", "--device", "cpu"]
    assert main(["sanitize", *words, "--out", str(tmp_path / "report")]) == 3
    (entry,) = read_report(tmp_path / "report" / "report.json").entries
    assert entry.reasons == (reason,)
    assert entry.output is not None
    program, *again = shlex.split(entry.command)
    assert program == "alphamoe-trace"
    assert main(again) == 3
    assert "output: that of the capture" in capsys.readouterr().out
    assert (entry.output.verdict, entry.kernel_us) == ("PASS", ())
    capsys.readouterr()
    assert main(["replay", *words, "--repeats", "3", "--json", str(tmp_path / "replay.json")]) == 3
    told = capsys.readouterr().out
    assert f"without a tool, reference: INCONCLUSIVE: {reason}\n" in told
    assert "output: that of the capture, largest difference 0, " in told
    assert "(3 calls on the CPU, no kernel's time)" in told
    (replayed,) = json.loads((tmp_path / "replay.json").read_text())["replays"]
    assert (replayed["verdict"], replayed["output"]["verdict"]) == ("INCONCLUSIVE", "PASS")
    assert (len(replayed["run"]["result"]["cpu_us"]), replayed["run"]["result"]["kernel_us"]) == (3, [])


def test_a_replay_folder_is_replaced_by_force_only_and_strangers_never(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of an earlier replay, or of the user's, is lost without a word."""
    out = tmp_path / "out"
    words = ["replay", str(captures / "alphamoe_w8a8-M=3"), "--device", "cpu", "--out", str(out)]
    assert main(words) == 3
    before = (out / "none" / "replay.json").read_bytes()
    assert main(words) == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert (out / "none" / "replay.json").read_bytes() == before
    assert main([*words, "--force"]) == 3
    (out / "notes.txt").write_text("mine")
    assert main([*words, "--force"]) == 2
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["sanitize", "replay"])
def test_a_source_that_is_no_regular_file_is_told_as_what_it_is(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """It is there, so it is not told that it is not; one that is not there is."""
    words = [command, str(captures / "alphamoe_w8a8-M=3"), "--out", str(tmp_path / "out"), "--source"]
    assert main([*words, "/dev/null"]) == 2
    assert "--source /dev/null: this is no regular file" in capsys.readouterr().err
    assert main([*words, "none.cu"]) == 2
    assert "--source none.cu: there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sanitize", "--json", "CAPTURE"], "name it before the options"),
        (["replay", "--json", "CAPTURE"], "name it before the options"),
        (["replay", "--tool", "racecheck", "CAPTURE"], "name the capture before --tool"),
    ],
)
def test_an_option_that_took_the_capture_is_told_with_the_remedy(
    captures: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """Exit 2, one line."""
    assert main([word.replace("CAPTURE", str(captures / "alphamoe_w8a8-M=3")) for word in words]) == 2
    assert told in capsys.readouterr().err


def test_captures_that_would_read_alike_are_told_apart(
    captures: Path, tmp_path: Path, tool: Callable[..., str]
) -> None:
    """By the step of the call where the label is the same."""
    for step in (4, 9):
        shutil.copytree(captures / "alphamoe_w8a8-M=3", tmp_path / "caps" / f"step={step}")
        path = tmp_path / "caps" / f"step={step}" / "capture.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"step": step}))
    _, report = session(tmp_path / "caps", tmp_path / "r", tool(), tools=RACE)
    assert [entry.label for entry in report.entries] == ["rank 2 layer 1 M 3 step 4", "rank 2 layer 1 M 3 step 9"]


def test_the_command_of_a_finding_repeats_it(
    captures: Path, tmp_path: Path, tool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shell, with inputs that were kept for it, and the recorded log stays as it is."""
    out = tmp_path / "a folder"
    _, report = session(captures, out, tool(fault=["racecheck"]), "--M", "3", tools=RACE)
    (entry,) = report.entries
    assert "--kernel-name kernel_substring=kernel_alpha_moe_w8a8_up_down" in entry.command
    assert "--log-file" not in entry.command
    spec = json.loads(next(out.rglob("replay-spec.json")).read_text())
    assert all(Path(place["file"]).is_file() for place in spec["tensors"])
    assert any(str(out) in place["file"] for place in spec["tensors"])
    shown = subprocess.run(f"printf '%s\\n' {entry.command}", shell=True, capture_output=True, text=True, check=True)  # noqa: S602
    assert str(next(out.rglob("replay-spec.json"))) in shown.stdout.splitlines()


def test_progress_without_a_terminal_is_a_line_a_tenth_and_none_in_between(capsys: pytest.CaptureFixture[str]) -> None:
    """And what is to come is told first."""
    with SessionProgress() as progress:
        progress("100 replays x 1 tool, 8 at a time", 0, 100)
        for done in range(1, 101):
            progress("racecheck", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["100 replays x 1 tool, 8 at a time", "10 of 100: racecheck"]
    assert len(lines) == 11


def test_progress_is_told_again_when_nothing_is_done_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    """A log without a word looks like a job that hangs."""
    with SessionProgress(quiet_s=0.02) as progress:
        progress("1 replay x 1 tool, 1 at a time", 0, 1)
        time.sleep(0.2)
    assert "at a time (0 s)" in capsys.readouterr().err


def test_progress_names_the_variant(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four variants of one capture are not four equal lines."""
    words = ["--M", "3", "--tool", "none", "--device", "cpu", "--variants", "t8_c8", "t64_w", "--out"]
    main(["sanitize", str(captures), *words, str(tmp_path / "r")])
    told = capsys.readouterr().err
    assert "no tool, rank 2 layer 1 M 3, t8_c8\n" in told
    assert "no tool, rank 2 layer 1 M 3, t64_w\n" in told


def test_a_session_says_what_is_to_come(
    captures: Path, tmp_path: Path, tool: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first control."""
    session(captures, tmp_path / "r", tool(), tools=RACE)
    assert capsys.readouterr().err.startswith("2 replays x 1 tool, 3 control processes, 4 at a time\n")
