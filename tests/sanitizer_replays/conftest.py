"""What tests of whole sessions share: captures, a GPU that is only believed in, a stand-in for the tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_captures import make_capture

from alphamoe_profiler import memory
from alphamoe_sanitizer_replays.plugins.protocol import CompiledAhead

FAKE = Path(__file__).with_name("session_tool.py")


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two captures, M 3 and M 5, of rank 2 and layer 1."""
    folder = tmp_path_factory.mktemp("captures")
    for M in (3, 5):
        make_capture(folder, M=M)
    return folder


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
