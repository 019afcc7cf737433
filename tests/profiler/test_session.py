"""The launcher and its ranks: whoever dies, the run ends soon, the right one is named and no process is left."""

from __future__ import annotations

import errno
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fake_ranks
import pytest

from alphamoe_profiler import supervisor
from alphamoe_profiler.rank_messages import EXIT_ORPHANED, EXIT_STOPPED, STOP, RankTask
from alphamoe_profiler.supervisor import Supervision, Supervisor, Target
from alphamoe_profiler.watchdog import Watchdog


def supervise(target: Target, timeout_s: float = 60.0) -> Supervision:
    return Supervisor(target, [fake_ranks.task(rank) for rank in range(2)], timeout_s, lambda message: None).run()


@pytest.fixture(autouse=True)
def no_rank_left() -> Iterator[None]:
    yield
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("alphamoe-rank")]


def test_ranks_that_end_well_make_a_complete_run() -> None:
    ended = supervise(fake_ranks.finishes)
    assert ended.error is None
    assert [(end.rank, end.exit_code, end.signal) for end in ended.ends] == [(0, 0, None), (1, 0, None)]
    assert "decode" in ended.phase_ns


def test_a_killed_rank_is_named_with_its_signal_and_phase_and_its_peer_is_told_to_stop() -> None:
    began = time.monotonic()
    ended = supervise(fake_ranks.rank_1_is_killed)
    assert ended.error == "rank 1 was killed by SIGKILL in decode"
    assert [end.exit_code for end in ended.ends] == [EXIT_STOPPED, -signal.SIGKILL]
    assert time.monotonic() - began < 30


def test_the_rank_that_caused_a_failure_is_named_and_not_the_one_that_reported_first() -> None:
    assert (
        supervise(fake_ranks.rank_0_reports_the_loss_of_its_peer_first).error == "rank 1 exited with code 3 in decode"
    )


def test_an_exception_is_named_before_the_lost_connections_that_follow_from_it() -> None:
    assert supervise(fake_ranks.rank_1_raises).error == "rank 1 failed in decode: ValueError: a planted mistake"


def test_a_rank_that_hears_nothing_is_killed_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.2)
    ended = supervise(fake_ranks.rank_1_is_deaf)
    assert ended.error == "rank 0 exited with code 4 in decode"
    assert [end.signal for end in ended.ends] == [None, "SIGKILL"]


def test_a_run_that_does_not_end_is_stopped_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    ended = supervise(fake_ranks.hangs, timeout_s=0.5)
    assert ended.error is not None
    assert ended.error.startswith("not finished after 0.5 s (rank 0 in ")


def start_launcher(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a launcher of two hanging ranks; returns it with a pidfd of each rank."""
    launcher = subprocess.Popen(
        [sys.executable, fake_ranks.__file__, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    deadline = time.monotonic() + 30
    pids: list[int] = []
    while len(pids) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        assert launcher.poll() is None
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        select.select([], [], [], 0.02)
    return launcher, [os.pidfd_open(pid) for pid in pids]


def wait_for_ends(pidfds: list[int]) -> None:
    """Wait until the processes are gone; a pidfd is readable from then on."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 10)[0], "a rank outlived its launcher"
        os.close(pidfd)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher, pidfds = start_launcher(tmp_path)
    launcher.kill()
    launcher.communicate()
    wait_for_ends(pidfds)


def test_an_interrupted_launcher_ends_its_ranks_in_order(tmp_path: Path) -> None:
    launcher, pidfds = start_launcher(tmp_path)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=20)
    wait_for_ends(pidfds)
    assert out == f"interrupted by SIGINT; [{EXIT_STOPPED}, {EXIT_STOPPED}]\n"


def watch(word: bytes | None, *, ending: bool = False) -> tuple[list[int], list[str]]:
    """Run a watchdog to its end over a pipe that brings one word, or its end; returns exit codes and saves."""
    ours, theirs = multiprocessing.Pipe()
    left: list[int] = []
    saved: list[str] = []
    dog = Watchdog(theirs, os.getppid(), leave=left.append)
    dog.save = lambda: saved.append("saved")
    if ending:
        dog.ending.set()
    if word is not None:
        ours.send_bytes(word)
    ours.close()
    dog.run()
    return left, saved


def test_the_watchdog_ends_a_rank_whose_launcher_closed_its_end() -> None:
    assert watch(None) == ([EXIT_ORPHANED], [])


def test_the_watchdog_saves_before_it_ends_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphamoe_profiler.watchdog.STOP_GRACE_S", 0.01)
    assert watch(STOP) == ([EXIT_STOPPED], ["saved"])


def test_the_watchdog_leaves_a_rank_alone_that_is_ending_by_itself() -> None:
    # What ends it here is the closed pipe, after the word was heard and ignored.
    assert watch(STOP, ending=True) == ([EXIT_ORPHANED], [])


def test_a_rank_that_cannot_be_started_ends_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(supervisor: Supervisor, task: RankTask) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Supervisor, "_start_rank", refuse)
    assert supervise(fake_ranks.finishes).error == "rank 0 could not be started: Too many open files"
