"""What tests of whole sessions share: captures, a GPU that is only believed in, a stand-in for the tool."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_captures import make_capture

from alphamoe_profiler import memory
from alphamoe_sanitizer_replays.plugins.protocol import CompiledAhead
from alphamoe_sanitizer_replays.tool.process_group import INTERRUPTED, KILL_NOW

FAKE = Path(__file__).with_name("session_tool.py")


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute with one thread here and in replay processes: two of them that spin starve each other on two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_left_hooked() -> Iterator[None]:
    """No test may leave its way to be stopped to those after it."""

    def hooked() -> tuple[object, ...]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        return *map(signal.getsignal, numbers), INTERRUPTED.is_set(), KILL_NOW.is_set()

    before = hooked()
    yield
    after = hooked()
    INTERRUPTED.clear()
    KILL_NOW.clear()
    assert after == before
    assert before[3:] == (False, False)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what is told to end less time for it: programs that are deaf to it take all of it."""
    monkeypatch.setattr("alphamoe_sanitizer_replays.tool.sanitizer.GRACE_S", 0.2)


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two captures, M 3 and M 5, of rank 2 and layer 1."""
    folder = tmp_path_factory.mktemp("captures")
    for M in (3, 5):
        make_capture(folder, M=M)
    return folder


@pytest.fixture
def folder(captures: Path, tmp_path: Path) -> Path:
    """Two captures, M 3 and M 5, to be tampered with."""
    return shutil.copytree(captures, tmp_path / "captures")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the session believe that there is a GPU; nothing is compiled for it."""
    seen = SimpleNamespace(gpus=(SimpleNamespace(info=SimpleNamespace(name="Fake H200")),), reason=None)
    monkeypatch.setattr(memory, "survey_gpus", lambda: seen)
    monkeypatch.setattr(
        "alphamoe_sanitizer_replays.replays.job.ReplayInputs.compile_ahead", lambda *_: CompiledAhead(0.5)
    )


@pytest.fixture
def tool(tmp_path: Path) -> Callable[..., str]:
    """Give the path of a stand-in that misbehaves as asked."""

    def made(**behaviour: Any) -> str:
        folder = tmp_path / "tool"
        folder.mkdir()
        (folder / "behaviour.json").write_text(json.dumps(behaviour))
        path = folder / "compute-sanitizer"
        path.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        path.chmod(0o755)
        return str(path)

    return made
