"""What a run says of itself while it lasts."""

from __future__ import annotations

import errno
import io
import tracemalloc
from pathlib import Path

import pytest

from alphamoe_profiler.cli import main
from alphamoe_profiler.commands import trace
from alphamoe_profiler.progress import TerminalProgress
from alphamoe_profiler.rank_messages import RankMessage
from alphamoe_profiler.session import run_session
from alphamoe_profiler.trace_config import TraceConfig


def phase(rank: int, name: str) -> RankMessage:
    return RankMessage("phase", rank, 0, phase=name)


def test_each_phase_is_one_line_on_stderr_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks follow each other into a phase, and serving alternates: neither is told twice, and stdout stays empty."""
    with TerminalProgress(2) as progress:
        for name in ("start_up", "load", "warm_up", "capture", "prefill", "decode", "prefill", "decode", "collection"):
            for rank in (0, 1):
                progress(phase(rank, name))
        progress(RankMessage("done", 0, 0))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.rpartition(", ")[0] for line in captured.err.splitlines()] == [
        "starting up",
        "loading the model",
        "warming up",
        "preparing the cache, and CUDA graphs where they are asked for",
        "serving: prefill",
        "serving: decode",
        "collecting what was recorded",
    ]
    assert progress.line().startswith("done (1 rank), collecting what was recorded (1 rank), 0 s")


def test_a_terminal_has_its_moving_line_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once would tear each other."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with TerminalProgress(1) as progress:
        progress(phase(0, "load"))
    assert "loading the model, 0 s\n" not in terminal.getvalue()


def test_a_stderr_that_is_gone_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk behind a redirection, for example."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    with TerminalProgress(1) as progress:
        progress(phase(0, "load"))
    assert progress.line().startswith("loading the model (1 rank)")


class EndedError(Exception):
    """Ends a session before anything is written."""


@pytest.mark.parametrize(("model", "told"), [("qwen3-next-80b", 1), ("tiny", 0)])
def test_a_large_model_on_a_cpu_is_said_to_be_slow_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, told: int
) -> None:
    """Once, and of the quick model never."""

    def end(*_: object) -> None:
        raise EndedError

    with pytest.raises(EndedError):
        run_session(
            TraceConfig(prompts=("text:hi",), device="cpu", model=model, out=tmp_path / "run"),
            before=trace._before(end),
        )
    assert capsys.readouterr().err.count(f"note: {model} on a CPU is slow") == told
    assert not (tmp_path / "run").exists()


def test_ranks_that_have_not_spoken_take_no_memory() -> None:
    """Their number is not checked yet, or may be large."""
    tracemalloc.start()
    progress = TerminalProgress(10**6)
    line = progress.line()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line.startswith("starting (1000000 ranks), ")
    assert peak < 100_000


def test_a_number_that_cannot_be_is_refused_before_anything_is_made_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("alphamoe_profiler.progress.TerminalProgress", lambda ranks: pytest.fail("made"))
    assert main(["--prompt", "text:hi", "--ranks", "99999999"]) == 2
