"""Finding the tool, its command line, and a process that leaves nothing running and nothing stale behind it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from fake_sanitizer import BANNER, CLEAN, LAUNCHED, TARGET, body_of, make_tool, run_fake

from alphamoe_sanitizer_replays.results import TOOLS, Tool
from alphamoe_sanitizer_replays.tool.environment import SPAWNED_VARIABLE
from alphamoe_sanitizer_replays.tool.interrupts import Interrupts
from alphamoe_sanitizer_replays.tool.leash import LAUNCHER_VARIABLE
from alphamoe_sanitizer_replays.tool.process_group import run_group
from alphamoe_sanitizer_replays.tool.sanitizer import PATH_VARIABLE, find_tool, run_plain, run_tool, tool_argv
from alphamoe_tracers.errors import EvidenceError, UsageError


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def gone(pid: int) -> bool:
    """A killed orphan needs a moment until the kernel has taken it away."""
    until = time.monotonic() + 5
    while running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not running(pid)


def test_the_option_goes_before_the_variable_and_that_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {where: make_tool(tmp_path / where, "", version=f"2025.{n}") for n, where in enumerate(["a", "b", "c", "d"])}
    monkeypatch.setenv("PATH", str(tmp_path / "c"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv(PATH_VARIABLE, str(made["b"].path))
    assert find_tool(str(made["a"].path)).version == "2025.0"
    assert find_tool().version == "2025.1"
    monkeypatch.delenv(PATH_VARIABLE)
    assert find_tool().path == made["c"].path


def test_the_toolkit_of_cuda_home_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_tool(tmp_path / "cuda" / "bin", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert find_tool() == made


def test_a_tool_that_was_named_and_is_not_there_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="--sanitizer"):
        find_tool(str(tmp_path / "none"))
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match=PATH_VARIABLE):
        find_tool()


def test_no_tool_at_all_is_inconclusive_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        pytest.skip("this machine has the real one in its default place")
    with pytest.raises(EvidenceError) as raised:
        find_tool()
    assert raised.value.exit_code == 3
    assert PATH_VARIABLE in raised.value.hint


def test_a_tool_that_does_not_say_its_version_has_none(tmp_path: Path) -> None:
    path = tmp_path / "compute-sanitizer"
    path.write_text("#!/bin/sh\necho nothing\n")
    path.chmod(0o755)
    assert find_tool(str(path)).version is None


@pytest.mark.parametrize(
    ("body", "timeout_s", "told"),
    [
        ("open(PID, 'w').write(str(subprocess.Popen(['sleep', '300']).pid)); time.sleep(300)", 1.0, "did not end"),
        ("while True: print('x' * 100_000)", 20.0, "printed more than 1 MiB"),
    ],
)
def test_a_tool_that_does_not_come_to_its_version_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout_s: float, told: str
) -> None:
    monkeypatch.setattr("alphamoe_sanitizer_replays.tool.sanitizer.VERSION_TIMEOUT_S", timeout_s)
    pid, path = tmp_path / "pid", tmp_path / "compute-sanitizer"
    path.write_text(f"#!{sys.executable} -IS\nimport subprocess, time\nPID = {str(pid)!r}\n{body}\n")
    path.chmod(0o755)
    with pytest.raises(EvidenceError, match=told):
        find_tool(str(path))
    assert not pid.exists() or gone(int(pid.read_text()))


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_given_its_exit_code_its_limit_its_files_and_its_filter(tool: Tool) -> None:
    argv = tool_argv(
        tool, Path("/t/cs"), ["prog", "--x"], log=Path("/o/l"), xml=Path("/o/x"), symbols=["moe_gemm", "second"]
    )
    pairs = list(itertools.pairwise(argv))
    assert argv[0] == "/t/cs"
    assert argv[-2:] == ("prog", "--x")
    for pair in (
        ("--tool", tool),
        ("--error-exitcode", "86"),
        ("--show-backtrace", "device"),
        ("--target-processes", "all"),
        ("--kernel-name", "kernel_substring=moe_gemm"),
        ("--kernel-name", "kernel_substring=second"),
        ("--log-file", "/o/l"),
        ("--save", "/o/x"),
    ):
        assert pair in pairs
    assert (("--padding", "4096") in pairs) == (tool == "memcheck")
    assert (("--report-api-errors", "no") in pairs) == (tool == "memcheck")


def test_a_percent_sign_in_a_folder_is_not_replaced_by_the_tool(tmp_path: Path) -> None:
    folder = tmp_path / "50%p"
    run = run_fake(folder, "memcheck", body_of(CLEAN["memcheck"]))
    assert run.problems == ()
    assert (folder / "run" / "tool.log").is_file()


@pytest.mark.parametrize("symbol", ["a,regex=.*", "ns::kernel", "kernel<int>", "", "a b"])
def test_a_symbol_that_would_change_the_filter_is_refused(symbol: str) -> None:
    with pytest.raises(UsageError):
        tool_argv("memcheck", Path("cs"), [], log=Path("l"), xml=Path("x"), symbols=[symbol])


def test_a_run_records_what_the_tool_and_the_replay_said(tmp_path: Path) -> None:
    run = run_fake(tmp_path, "racecheck", body_of(CLEAN["racecheck"]))
    assert (run.exit_code, run.signal, run.timed_out, run.problems) == (0, None, False, ())
    assert (run.tool_version, run.xml_records, run.symbols, run.result) == ("2025.3.1.0", 0, (TARGET,), LAUNCHED)
    assert (run.log_file, run.xml_file) == ("tool.log", "tool.xml")
    assert run.wall_s > 0


def test_what_an_earlier_run_left_is_never_read_as_this_ones(tmp_path: Path) -> None:
    assert run_fake(tmp_path, "memcheck", body_of(CLEAN["memcheck"])).log is not None
    run = run_fake(tmp_path, "memcheck", "sys.exit(0)")
    assert (run.log, run.xml_records, run.result, run.log_file) == (None, None, None, None)
    assert len(run.problems) == 2


def test_a_tool_that_cannot_be_started_is_a_run_with_a_problem(tmp_path: Path) -> None:
    made = make_tool(tmp_path, "")
    made.path.chmod(0o644)
    run = run_tool("memcheck", ["p"], tool_path=made, folder=tmp_path / "run", symbols=[TARGET], timeout_s=5)
    assert run.log is None
    assert "could not be started" in run.problems[0]


@pytest.mark.usefixtures("short_grace")
def test_a_hang_is_killed_with_its_children_and_its_strays_and_the_partial_log_is_kept(tmp_path: Path) -> None:
    body = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"])
stray = subprocess.Popen(["sleep", "300"], start_new_session=True)
open({str(tmp_path / "pids")!r}, "w").write("%d %d %d" % (os.getpid(), child.pid, stray.pid))
log("========= COMPUTE-SANITIZER\\n")
log("========= Invalid __global__ write of size 4 bytes\\n=========     at moe_gemm+0x10\\n")
time.sleep(300)
"""
    begun = time.monotonic()
    run = run_fake(tmp_path, "memcheck", body, timeout_s=1.5)
    assert time.monotonic() - begun < 10
    assert (run.timed_out, run.exit_code) == (True, None)
    assert run.log is not None
    assert (run.log.banner, run.log.cut, run.log.findings[0].in_target) == (True, True, True)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert all(map(gone, pids))


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(PID + ".part", "w").write(str(os.getpid()))
        os.rename(PID + ".part", PID)
        if CLEARED:
            os.execve(sys.executable, [sys.executable, "-ISc", "import time; time.sleep(300)"], {})
        time.sleep(300)
    os._exit(0)
while not os.path.exists(PID):
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_daemon_of_the_program_is_killed_and_a_run_that_it_outlived_has_a_problem(
    tmp_path: Path, hangs: bool, cleared: bool
) -> None:
    """Left behind in a session of its own, and with an environment of its own."""
    pid = tmp_path / "pid"
    ending = "time.sleep(300)" if hangs else body_of(CLEAN["memcheck"])
    body = f"PID, CLEARED = {str(pid)!r}, {cleared}\n{DAEMON}\n{ending}"
    run = run_fake(tmp_path, "memcheck", body, timeout_s=1.5 if hangs else 20)
    assert gone(int(pid.read_text()))
    assert run.timed_out is hangs
    assert ("outlived it" in " ".join(run.problems)) is not hangs


def test_a_second_interrupt_gives_a_deaf_tool_no_more_time(tmp_path: Path) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        f"for _ in range(2): os.kill(int(os.environ['{LAUNCHER_VARIABLE}']), signal.SIGINT); time.sleep(0.3)\n"
        "time.sleep(300)"
    )
    output = tmp_path / "out"
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Interrupts():
        run_group([sys.executable, "-ISc", code], env=os.environ, output=output, timeout_s=60, bounds={}, grace_s=30)
    assert time.monotonic() - begun < 15
    assert gone(int(output.read_text()))


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_that_raises_still_kills(tmp_path: Path) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        f"for _ in range(2): os.kill(int(os.environ['{LAUNCHER_VARIABLE}']), signal.SIGINT); time.sleep(0.3)\n"
        "time.sleep(300)"
    )
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_group([sys.executable, "-ISc", code], env=os.environ, output=output, timeout_s=60, bounds={}, grace_s=30)
    assert gone(int(output.read_text()))


def test_a_child_that_outlives_the_program_is_killed(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True)"
    output = tmp_path / "out"
    ended = run_group(
        [sys.executable, "-ISc", code], env=os.environ, output=output, timeout_s=20, bounds={}, grace_s=0.1
    )
    assert (ended.exit_code, ended.timed_out, ended.outlived, ended.alive) == (0, False, 1, 0)
    assert gone(int(output.read_text()))


def test_an_interrupt_kills_what_runs(tmp_path: Path) -> None:
    code = (
        "import os, time; print(os.getpid(), flush=True)\n"
        f"os.kill(int(os.environ['{LAUNCHER_VARIABLE}']), 2); time.sleep(300)"
    )
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_group([sys.executable, "-ISc", code], env=os.environ, output=output, timeout_s=20, bounds={}, grace_s=0.5)
    assert gone(int(output.read_text()))


def test_a_program_that_a_signal_ended_has_its_name_and_no_exit_code(tmp_path: Path) -> None:
    run = run_fake(tmp_path, "memcheck", f"log({CLEAN['memcheck']!r}); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (run.exit_code, run.signal) == (None, signal.SIGSEGV.name)


def test_a_file_that_grows_past_its_bound_ends_the_run(tmp_path: Path) -> None:
    code = "while True: print('x' * 10_000)"
    output = tmp_path / "program.out"
    ended = run_group(
        [sys.executable, "-ISc", code],
        env=os.environ,
        output=output,
        timeout_s=30,
        bounds={output: 1 << 20},
        grace_s=0.1,
    )
    assert (ended.too_large, ended.timed_out, ended.signal) == ("program.out", False, None)


def test_the_kernels_under_test_are_those_that_the_program_names_where_every_kernel_is_watched(tmp_path: Path) -> None:
    text = f"{BANNER}========= Invalid __global__ write of size 4 bytes\n=========     at {{}}+0x10\n========= \n"
    for name, found in ((TARGET, True), ("ncclDevKernel", False)):
        run = run_fake(tmp_path, "memcheck", body_of(text.format(name), code=86, records=1), symbols=())
        assert run.log is not None
        assert run.log.findings[0].in_target is found
    run = run_fake(tmp_path, "memcheck", body_of(text.format(TARGET), code=86), symbols=(), result=None)
    assert run.log is not None
    assert run.log.findings[0].in_target is None


def test_injections_of_others_do_not_reach_the_program_and_its_start_is_told(tmp_path: Path) -> None:
    names = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_LAUNCH_BLOCKING")
    run = run_plain(
        [sys.executable, "-ISc", "import os; print(sorted(os.environ))"],
        folder=tmp_path,
        timeout_s=20,
        env={**dict.fromkeys(names, "x"), "KEPT": "1"},
    )
    text = (tmp_path / "program.out").read_text()
    assert run.exit_code == 0
    assert "KEPT" in text
    assert SPAWNED_VARIABLE in text
    assert not [name for name in names if name in text]


def test_the_xmls_findings_are_kept_where_they_are_not_those_of_the_log(tmp_path: Path) -> None:
    agreeing = body_of(CLEAN["memcheck"])
    differing = body_of(CLEAN["memcheck"], records=2)
    assert run_fake(tmp_path / "a", "memcheck", agreeing).xml_findings == ()
    (finding,) = run_fake(tmp_path / "b", "memcheck", differing).xml_findings
    assert finding.shown == 2
