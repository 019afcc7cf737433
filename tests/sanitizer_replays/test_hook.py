"""The hook in processes of others: by the command and by hand, and everything that must be as without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alphamoe_profiler import cli
from alphamoe_sanitizer_replays.captures.store import find_captures, open_capture
from alphamoe_sanitizer_replays.plugins.protocol import find_plugin

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "captures"
INJECT = (
    Path(cli.__file__).resolve().parents[2] / "sanitizer_replays" / "alphamoe_sanitizer_replays" / "hooks" / "inject"
)
FOLDERS = [entry for entry in sys.path if entry and Path(entry).is_dir()]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ALPHAMOE_")}
    return (
        kept | {"PYTHONPATH": os.pathsep.join([*map(str, folders), *FOLDERS]), "CUDA_VISIBLE_DEVICES": ""} | variables
    )


def capture(tmp_path: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alphamoe_profiler", "capture", "--out", str(tmp_path / "out"), *words]
    return subprocess.run(
        command, env=env or environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_examples_are_captured_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stock path and a custom operator: captured by the command, replayed in a fresh process with equal output.

    Without a GPU the command names no verdict of sanitize, and the replay is none.
    """
    done = capture(
        tmp_path,
        "--callable",
        "moe_functions:stock_moe",
        "--op",
        "moe_example::add_residual",
        "--symbol",
        "fused_moe_kernel",
        "--M",
        "4",
        "--",
        sys.executable,
        str(EXAMPLES / "serve.py"),
    )
    assert done.returncode == 0, done.stderr
    assert "Captured 1 call of moe_functions:stock_moe (rank 0 M 4)" in done.stderr
    assert "These calls ran without a GPU" in done.stderr
    found = {open_capture(path).capture.plugin: path for path in find_captures(tmp_path / "out")}
    assert sorted(found) == ["callable", "torch_op"]
    operator = open_capture(found["torch_op"]).capture
    assert operator.arguments["imports"] == ["moe_operator"]
    assert operator.arguments["changed"] == ["args.0"]
    assert open_capture(found["callable"]).capture.symbols == ("fused_moe_kernel",)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), *FOLDERS]))
    monkeypatch.setenv("ALPHAMOE_CAPTURE_CALLABLE", "moe_functions:stock_moe")
    for path in found.values():
        assert cli.main(["replay", str(path), "--device", "cpu"]) == 3
        assert "output: that of the capture, largest difference 0 " in capsys.readouterr().out
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(FOLDERS))
    assert cli.main(["replay", str(found["torch_op"]), "--device", "cpu"]) == 3
    assert "failed: moe_operator cannot be imported: No module named 'moe_operator' (name its folder in PYTHONPATH" in (
        capsys.readouterr().out
    )
    assert cli.main(["replay", str(found["callable"]), "--plugin", "torch_op"]) == 2
    assert "cannot replay moe_functions:stock_moe (a function needs --plugin callable" in capsys.readouterr().err


def test_a_replay_of_changed_code_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same capture, replayed with a function that gives something else, is a FAIL."""
    (tmp_path / "product.py").write_text("import torch\ndef work(x):\n    return x * 2\n", encoding="utf-8")
    (tmp_path / "main.py").write_text("import torch, product\nproduct.work(torch.ones(3, 2))\n", encoding="utf-8")
    done = capture(tmp_path, "--callable", "product:work", "--", sys.executable, "main.py")
    assert done.returncode == 0, done.stderr
    (tmp_path / "product.py").write_text("import torch\ndef work(x):\n    return x * 2.01\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    [path] = find_captures(tmp_path / "out")
    stored, plugin = open_capture(path), find_plugin("callable")
    tensors = plugin.materialise(stored)
    try:
        prepared = plugin.prepare(stored.capture, tensors, torch.device("cpu"), None, None)
    finally:
        sys.modules.pop("product", None)
    prepared.launch()
    assert plugin.check(stored, tensors, prepared.outputs()).verdict == "FAIL"


WORKERS = """
import multiprocessing, os, sys, torch
import product

def work(rank):
    os.environ["RANK"] = str(rank)
    product.work(torch.ones(rank + 1, 2))
    os._exit(0)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        worker = context.Process(target=work, args=(0 if method == "fork" else 1,))
        worker.start()
        worker.join()
"""


def test_forked_and_spawned_workers_are_captured_by_hand_without_the_command(tmp_path: Path) -> None:
    """The environment alone arms workers of both kinds, even those that end without Python's exit functions."""
    (tmp_path / "product.py").write_text("def work(x):\n    return x * 2\n", encoding="utf-8")
    (tmp_path / "main.py").write_text(WORKERS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"],
        env=environment(
            INJECT,
            ALPHAMOE_CAPTURE_CALLABLE="product:work,product:unused",
            ALPHAMOE_CAPTURE_OUT=str(tmp_path / "out"),
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "captured 2 calls of product:work (rank 0 M 1, rank 1 M 2)" in done.stderr
    assert "nothing was captured: product:unused cannot be wrapped: product has no unused" in done.stderr
    assert done.stderr.count("\n") == 2
    assert sorted(open_capture(path).capture.rank for path in find_captures(tmp_path / "out")) == [0, 1]


@pytest.mark.parametrize(
    ("target", "program", "why"),
    [
        ("json:nope", ["-c", "import json"], "json:nope cannot be wrapped: json has no nope"),
        ("colorsys:rgb_to_hls", ["-c", "pass"], "the module of colorsys:rgb_to_hls was never imported"),
        ("json:JSONDecoder", ["-c", "import json"], "is a class"),
        ("json:dumps", ["-I", "-c", "import json"], "no Python process loaded the hook"),
        ("colorsys:rgb_to_hls", ["-c", "import colorsys"], "colorsys:rgb_to_hls was never called eagerly"),
    ],
)
def test_nothing_captured_is_told_with_the_reason(tmp_path: Path, target: str, program: list[str], why: str) -> None:
    """Silence is no success: exit code 3 and one line that says why."""
    done = capture(tmp_path, "--callable", target, "--symbol", "k", "--", sys.executable, *program)
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert line.startswith("Nothing was captured: ")
    assert why in line
    assert not (tmp_path / "out").exists()


def test_a_program_that_cannot_be_run_leaves_no_folder_and_a_folder_of_the_user_stays(tmp_path: Path) -> None:
    """Nothing that was refused leaves anything behind."""
    for there in (False, True):
        if there:
            (tmp_path / "out").mkdir()
        done = capture(tmp_path, "--callable", "json:dumps", "--symbol", "k", "--", str(tmp_path / "nothing"))
        assert done.returncode == 2
        assert (tmp_path / "out").exists() == there
    done = capture(tmp_path, "--out", "deep/a/b", "--callable", "json:dumps", "--", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("plugin", ["callable", "my_replay:Bitwise"])
def test_a_plug_in_that_fits_one_of_the_targets_alone_is_refused_before_the_program_runs(
    tmp_path: Path, plugin: str
) -> None:
    """It would be written into the captures of both."""
    targets = ["--callable", "moe_functions:stock_moe", "--op", "moe_example::add_residual"]
    words = [*targets, "--plugin", plugin, "--", sys.executable, "-c", "print('ran')"]
    done = capture(tmp_path, *words, env=environment(EXAMPLES))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the plug-in {plugin} cannot replay moe_" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variables", "lines", "told"),
    [
        ({"ALPHAMOE_CAPTURE_CALLABLES": "json:dumps"}, 1, "ignored: ALPHAMOE_CAPTURE_CALLABLES ("),
        (
            {"ALPHAMOE_CAPTURE_FRIST": "2", "ALPHAMOE_CAPTURE_CALLABLE": "colorsys:rgb_to_hls"},
            2,
            "ignored: ALPHAMOE_CAPTURE_FRIST (",
        ),
        ({"ALPHAMOE_CAPTURE_CALLABLE": "json"}, 1, "'json' is no import path"),
        ({"ALPHAMOE_CAPTURE_OUT": "elsewhere"}, 0, ""),
    ],
)
def test_a_wrong_variable_is_told_once(tmp_path: Path, variables: dict[str, str], lines: int, told: str) -> None:
    """By the first process, whose child is silent; a known one without a target is how the hook is off."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(INJECT, **variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.count("\n") == lines
    assert told in done.stderr


def test_the_command_tells_of_a_misspelt_variable_itself(tmp_path: Path) -> None:
    """The program that it runs is not given it."""
    env = environment(ALPHAMOE_CAPTURE_FRIST="2")
    done = capture(tmp_path, "--callable", "json:dumps", "--", sys.executable, "-c", "pass", env=env)
    assert done.stderr.count("no variable of the hook, and ignored: ALPHAMOE_CAPTURE_FRIST (") == 1


def test_an_operator_that_is_never_registered_is_told(tmp_path: Path) -> None:
    """A name that no process registers is told as such."""
    done = capture(tmp_path, "--op", "nowhere::op", "--", sys.executable, "-c", "import json")
    assert done.returncode == 3
    assert "no operator nowhere::op was registered" in done.stderr


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    """The one that ours hides is executed, stands in sys.modules, and our folder is off the path."""
    (tmp_path / "sitecustomize.py").write_text("marker = 'theirs'\n", encoding="utf-8")
    code = "import sys, sitecustomize; print(sitecustomize.marker, any(p.endswith('inject') for p in sys.path))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(INJECT, tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("theirs False\n", "")


def test_the_hook_imports_nothing_heavy_and_is_absent_when_off(tmp_path: Path) -> None:
    """Without a request not even the hook is imported; with one, neither torch nor msgspec."""
    code = (
        "import sys, json; print(json.dumps([sorted(sys.modules.keys() & {'torch', 'msgspec', 'numpy', "
        "'alphamoe_sanitizer_replays.hooks.hook'}), len(sys.meta_path)]))"
    )

    def loaded(**variables: str) -> tuple[list[str], int]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(INJECT, **variables),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        names, finders = json.loads(done.stdout)
        return names, finders

    off_names, off_finders = loaded()
    on_names, on_finders = loaded(ALPHAMOE_CAPTURE_CALLABLE="nowhere:f")
    assert off_names == []
    assert on_names == ["alphamoe_sanitizer_replays.hooks.hook"]
    assert on_finders == off_finders + 1


def test_a_wrong_variable_does_not_stop_the_host(tmp_path: Path) -> None:
    """The host runs as without the hook, with one line on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", "print('served')"],
        env=environment(INJECT, ALPHAMOE_CAPTURE_CALLABLE="no path"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "served\n"
    assert "nothing will be captured" in done.stderr


@pytest.mark.parametrize("failure", ["SyntaxError('match')", "TypeError('int | str')", "OSError(5, 'no disk')"])
def test_an_interpreter_that_cannot_load_the_hook_runs_as_without_it(tmp_path: Path, failure: str) -> None:
    """One that is too old fails by other exceptions than ImportError: nothing is printed, its sitecustomize runs."""
    package = tmp_path / "alphamoe_sanitizer_replays"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {failure}\n", encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text("marker = 'theirs'\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "import sitecustomize; print(sitecustomize.marker)"],
        env=environment(INJECT, tmp_path, ALPHAMOE_CAPTURE_CALLABLE="a:b", ALPHAMOE_CAPTURE_OUT=str(tmp_path / "out")),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("theirs\n", "")


def test_a_reloaded_module_is_captured_once_a_call(tmp_path: Path) -> None:
    """A reload that gives the same function again, or another, leaves one tap on it."""
    (tmp_path / "product.py").write_text(PRODUCT, encoding="utf-8")
    (tmp_path / "alias.py").write_text("from product import work\n", encoding="utf-8")
    (tmp_path / "main.py").write_text(
        "import importlib, torch, alias, product\nimportlib.reload(alias)\nold = alias.work\n"
        "alias.work(torch.ones(3, 2))\nimportlib.reload(product)\nimportlib.reload(alias)\n"
        "assert alias.work is product.work is not old\nalias.work(torch.ones(4, 2))\n",
        encoding="utf-8",
    )
    done = capture(tmp_path, "--callable", "alias:work", "--first", "9", "--", sys.executable, "main.py")
    assert "Captured 2 calls of alias:work (rank 0 M 3, rank 0 M 4)" in done.stderr
    assert len(find_captures(tmp_path / "out")) == 2


def test_an_interpreter_without_alphamoe_trace_is_told(tmp_path: Path) -> None:
    """Where the hook cannot be imported the host runs, and the report names the interpreter."""
    hidden = tmp_path / "hidden"
    (hidden / "alphamoe_sanitizer_replays").mkdir(parents=True)
    (hidden / "alphamoe_sanitizer_replays" / "__init__.py").write_text("raise ImportError('absent')", encoding="utf-8")
    code = f"import os, sys; sys.exit(os.spawnve(os.P_WAIT, sys.executable, ['python', '-c', 'pass'], dict(os.environ, PYTHONPATH={str(INJECT)!r} + os.pathsep + {str(hidden)!r})))"  # noqa: E501
    done = capture(tmp_path, "--callable", "json:dumps", "--", "/bin/sh", "-c", f'exec {sys.executable} -I -c "{code}"')
    assert done.returncode == 3
    assert "cannot import the hook: install alphamoe-trace there" in done.stderr


def test_the_programs_own_failure_and_signals_come_through(tmp_path: Path) -> None:
    """Its exit code is the command's; a SIGTERM to the command ends the program, which is no failure of its own."""
    failed = capture(tmp_path, "--callable", "json:nope", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert failed.returncode == 7
    code = "import signal, sys; print('up', flush=True); signal.pause()"
    command = [sys.executable, "-m", "alphamoe_profiler", "capture", "--out", str(tmp_path / "second")]
    process = subprocess.Popen(
        [*command, "--callable", "json:nope", "--", sys.executable, "-c", code],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "json has no nope" in error


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--callable", "a:b"], "no program to run"),
        (["--", "true"], "nothing to capture"),
        (["--callable", "a:b", "--", "/nowhere/program"], "cannot be run"),
        (["--callable", "a:b", "--max-bytes", "x", "--", "true"], "no number of bytes"),
        (["--callable", "a:b", "--plugin", "nope", "--", "true"], "no replay plug-in named 'nope'"),
        (["--callable", "a:b", "--plugin", "json:nope", "--", "true"], "cannot be loaded from json:nope"),
    ],
)
def test_usage_errors_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    """Each is one line and exit code 2."""
    assert cli.main(["capture", "--out", str(tmp_path / "out"), *words]) == 2
    assert why in capsys.readouterr().err


def test_captures_that_are_there_are_not_mixed_with_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that is not empty is refused unless captures shall be added to it."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert cli.main(["capture", "--out", str(tmp_path), "--callable", "a:b", "--", "true"]) == 2
    assert "is not empty" in capsys.readouterr().err


PRODUCT = "import torch\ndef work(x):\n    return x * 2\n"


def test_a_capture_that_got_nothing_does_not_block_the_next_try(tmp_path: Path) -> None:
    """The hook's own notes are no captures; what the first try left is used on."""
    (tmp_path / "product.py").write_text(PRODUCT, encoding="utf-8")
    (tmp_path / "main.py").write_text("import torch, product\nproduct.work(torch.ones(3, 2))\n", encoding="utf-8")
    for words, code in ((("--m-from", "nope:0"), 3), ((), 0), ((), 2)):
        done = capture(tmp_path, "--callable", "product:work", *words, "--", sys.executable, "main.py")
        assert done.returncode == code, done.stderr
    assert "is not empty" in done.stderr


def test_a_target_that_got_nothing_is_told_and_is_no_success(tmp_path: Path) -> None:
    """One of two was captured, and an M that no call had is named; so is the missing --symbol."""
    (tmp_path / "product.py").write_text(PRODUCT, encoding="utf-8")
    (tmp_path / "main.py").write_text("import torch, product\nproduct.work(torch.ones(3, 2))\n", encoding="utf-8")
    words = ("--callable", "product:work", "--op", "mine::nope", "--M", "3", "--M", "9", "--plugin", "no_such:Thing")
    done = capture(tmp_path, *words, "--", sys.executable, "main.py")
    assert done.returncode == 3, done.stderr
    assert "Captured 1 call of product:work" in done.stderr
    assert "Nothing was captured: no operator mine::nope" in done.stderr
    assert "No call of product:work with M 9 was captured" in done.stderr
    assert "no --symbol KERNEL was named" in done.stderr
    assert "no_such:Thing cannot be imported here" in done.stderr
