"""The command line: quick, one line for every mistake, and no traceback for a user."""

from __future__ import annotations

import errno
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alphamoe_profiler import doctor
from alphamoe_profiler.bundle_writer import BundleWriter
from alphamoe_profiler.cli import COMMANDS, main

HEAVY = ("torch", "pandas", "numpy", "rich", "pyarrow", "plotly", "msgspec", "mistral_common", "triton", "cupti")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, on a machine without a visible GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import json, sys\nfrom alphamoe_profiler.cli import main\n"
        "code = main(sys.argv[1:])\nsys.stdout.flush()\n"
        f"sys.stderr.write(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))"
    )
    done = python(code, *words)
    assert done.stderr.endswith("[0, []]" if words else "[2, []]")


def test_help_answers_within_three_times_the_start_of_python() -> None:
    code = "import sys\nfrom alphamoe_profiler.cli import main\nsys.exit(main(['--help']))"
    bare, helped = [], []
    for _ in range(25):
        for source, times in (("pass", bare), (code, helped)):
            began = time.perf_counter()
            assert python(source).returncode == 0
            times.append(time.perf_counter() - began)
    assert statistics.median(helped) <= 3 * statistics.median(bare)


def test_the_help_lists_every_command_with_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert "alphamoe-trace --ranks 4 --prompt gsm8k:17" in out
    assert "exit codes" in out


def test_a_first_word_that_is_no_command_means_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "2", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: alphamoe-trace trace ")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failure leaves on stderr, with nothing on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("alphamoe-trace: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


PROMPT = ["--prompt", "text:hi"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shwo"], "did you mean 'show'"),
        (
            ["xyzzy"],
            "the commands are trace, show, import, gate, selftest, dashboard, capture, replay, sanitize, doctor",
        ),
        (["--ranks", "4"], "a run needs a prompt"),
        (["--json", "doctor"], "a command comes first: alphamoe-trace doctor --json)"),
        (["--ranks", "4", "gate", "a b"], "a command comes first: alphamoe-trace gate --ranks 4 'a b')"),
        (["--out", "gate", "--ranks", "2"], "prompt (for example --prompt gsm8k:17, or --prompt text:Hello)\n"),
        ([*PROMPT, "--out", "show", "--ranks", "0"], "not 0 (for example --ranks 4)"),
        (["--ranks", "0", *PROMPT], "--ranks must be at least 1, not 0"),
        (["--ranks", "-2", *PROMPT], "--ranks must be at least 1, not -2"),
        (["--ranks", "many", *PROMPT], "'many' is not a whole number"),
        (["--ranks", "3", *PROMPT], "tiny cannot be cut over 3 ranks (use --ranks with one of: 1, 2, 4)"),
        (["--prompt", "gsm8k:1319"], "rows are 0 to 1318"),
        (["--prompt", "gsm8k:-1"], "rows are 0 to 1318"),
        (["--prompt", "text:"], "is empty"),
        (["--prompt", "hello"], "a prompt is gsm8k:ROW, text:WORDS or file:PATH"),
        (["--prompt", "text:" + "a b " * 9000], "at most 16384 can be served"),
        (["--prompt-file", "absent.txt"], "absent.txt: No such file or directory"),
        ([*PROMPT, "--model", "tiny2"], "did you mean tiny?"),
        ([*PROMPT, "--model", "llama"], "the presets are tiny, qwen3-next-80b, glm-5.2"),
        ([*PROMPT, "--model", "glm-5.2"], "NVFP4 experts are not supported"),
        ([*PROMPT, "--model", "glm-5.2", "--moe-runner-backend", "triton"], "nvfp4 experts are not supported"),
        ([*PROMPT, "--moe-runner-backend", "alphamoe"], "one of: flashinfer_alphamoe, triton"),
        ([*PROMPT, "--layers", "0"], "--layers must be at least 1, not 0"),
        ([*PROMPT, "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
        ([*PROMPT, "--executions", "eagre"], "did you mean eager?"),
        ([*PROMPT, "--executions", ","], "--executions is empty"),
        ([*PROMPT, "--executions", "eager,decode_graph_replay"], "CUDA graphs need a CUDA device"),
        ([*PROMPT, "--device", "tpu"], "it is auto, cpu or cuda"),
        ([*PROMPT, "--device", "cuda"], "--device cuda: "),
        ([*PROMPT, "--dtype", "int8"], "it takes bfloat16, float32"),
        ([*PROMPT, "--seed", "-1"], "--seed must be between"),
        ([*PROMPT, "--timeout", "0"], "--timeout must be above 0"),
        ([*PROMPT, "--timeout", "nan"], "--timeout must be above 0"),
        ([*PROMPT, "--timeout", "inf"], "at most 1000000 seconds"),
        ([*PROMPT, "--ranks", "99999999"], "--ranks must be at most 4096"),
        ([*PROMPT, "--layers", "1000000"], "--layers must be at most 512"),
        ([*PROMPT, "--max-new-tokens", "99999999999"], "--max-new-tokens must be at most 32768"),
        (["show", "a\x1b[31mb\u202ec"], "a\\x1b[31mb\\u202ec: no run.json"),
        ([*PROMPT, "--cuda-graph-bs-decode", "0,1"], "--cuda-graph-bs-decode needs"),
        ([*PROMPT, "--inject-fault", "fallback:rank=2"], "the ranks are 0 to 0"),
        ([*PROMPT, "--inject-fault", "fallback:rank=0", "--moe-runner-backend", "triton"], "changes nothing"),
        ([*PROMPT, "--rank", "2"], "unrecognized arguments: --rank 2"),
        (["show"], "required: RUN"),
        (["show", "absent"], "not a run bundle"),
        ([*PROMPT, "--json", "."], "--json . is a directory"),
        ([*PROMPT, "--json", "/dev/null/report.json"], "there is no folder /dev/null"),
        (["show", "--json", "report.json"], "required: RUN"),
    ],
)
def test_a_usage_error_is_one_line_with_exit_2_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert main(words) == 2
    assert expected in one_line(capsys)
    assert list(here.iterdir()) == []


def test_an_existing_output_directory_is_left_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("years of work")
    for words in (["--out", "mine", *PROMPT], ["--out", "mine", "--force", *PROMPT]):
        assert main(words) == 2
        assert "mine" in one_line(capsys)
    assert (here / "mine" / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in here.iterdir()] == ["mine"]


def test_a_full_disk_before_the_ranks_start_leaves_no_directory(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(writer: BundleWriter, run: object) -> None:
        (writer.path / ".run.json.tmp").touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(writer.path / "run.json"))

    monkeypatch.setattr(BundleWriter, "write_run", full)
    assert main(["--out", "full", *PROMPT]) == 1
    assert "No space left on device" in one_line(capsys)
    assert list(here.iterdir()) == []


def test_a_bug_is_told_in_one_line_that_says_where_its_traceback_is(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(doctor, "diagnose", broken)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    assert main(["doctor"]) == 1
    line = one_line(capsys)
    assert "unexpected KeyError: 'a bug'" in line
    path = next(here.glob("*.traceback"))
    assert str(path) in line
    assert "in broken" in path.read_text()
    monkeypatch.setenv("ALPHAMOE_TRACE_DEBUG", "1")
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from alphamoe_profiler.cli import main; sys.exit(main(['--help']))"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_launcher_checks_and_tokenises_without_importing_torch() -> None:
    code = (
        "import sys\nimport alphamoe_profiler.session as s\n"
        "s._tokenise(['text:hi'], s.ChatTokenizer())\nsys.exit('torch' in sys.modules)"
    )
    assert python(code).returncode == 0
