"""Rank processes for tests of the supervisor: they behave or misbehave without torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from alphamoe_profiler.rank_messages import RankMessage, RankTask, send
from alphamoe_profiler.supervisor import Supervisor
from alphamoe_profiler.watchdog import Watchdog, die_with_launcher


def task(rank: int, out: str = "", world_size: int = 2) -> RankTask:
    """A task with the fields that a fake rank reads; ``out`` is a folder that ranks leave their process number in."""
    return RankTask(
        run_id="run",
        out=out,
        rank=rank,
        world_size=world_size,
        device="cpu",
        gpu_uuid=None,
        shared_gpu=False,
        communication="gloo",
        rendezvous="",
        model="tiny",
        layers=2,
        dtype="float32",
        moe_runner_backend="triton",
        executions=("eager",),
        cuda_graph_bs_decode=None,
        cuda_graph_bs_prefill=None,
        max_new_tokens=1,
        seed=0,
        requests=(),
        nvtx=False,
        receipts=False,
        collector_off="a test",
        inject_fault=None,
        launcher_pid=os.getpid(),
        spawned_ns=time.monotonic_ns(),
        threads=1,
        timeout_s=60.0,
    )


def _begin(task: RankTask, connection: Connection) -> Watchdog:
    die_with_launcher(task.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watchdog = Watchdog(connection, task.launcher_pid)
    watchdog.start()
    if task.out:
        mark = Path(task.out) / f"{task.rank}.tmp"
        mark.write_text(str(os.getpid()))
        mark.rename(Path(task.out) / f"{task.rank}.pid")
    _phase(task, connection, "decode")
    return watchdog


def _phase(task: RankTask, connection: Connection, name: str) -> None:
    send(connection, RankMessage("phase", task.rank, time.monotonic_ns(), phase=name))


def _fail(task: RankTask, connection: Connection, error: str) -> None:
    send(connection, RankMessage("failed", task.rank, time.monotonic_ns(), error=error))


def finishes(task: RankTask, connection: Connection) -> None:
    """End well."""
    _begin(task, connection)
    send(connection, RankMessage("done", task.rank, time.monotonic_ns()))


def hangs(task: RankTask, connection: Connection) -> None:
    """Wait for ever, as in a collective whose peer is dead; the watchdog listens."""
    _begin(task, connection)
    threading.Event().wait()


def rank_1_is_killed(task: RankTask, connection: Connection) -> None:
    """Rank 1 dies by SIGKILL; rank 0 hangs."""
    _begin(task, connection)
    if task.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def rank_0_reports_the_loss_of_its_peer_first(task: RankTask, connection: Connection) -> None:
    """Rank 0 reports a lost connection before rank 1, which caused it, is seen to exit."""
    _begin(task, connection)
    if task.rank == 0:
        _fail(task, connection, "RuntimeError: Connection closed by peer [127.0.0.1]:1")
        threading.Event().wait()
    # Long enough for the launcher to have read rank 0's message, far less than it waits for others to report.
    threading.Event().wait(0.2)
    os._exit(3)


def rank_1_raises(task: RankTask, connection: Connection) -> None:
    """Rank 1 fails with an exception and rank 0 then loses its peer."""
    _begin(task, connection)
    error = "ValueError: a planted mistake" if task.rank == 1 else "RuntimeError: Connection reset by peer"
    _fail(task, connection, error)
    os._exit(1)


def rank_1_is_deaf(task: RankTask, connection: Connection) -> None:
    """Rank 0 exits with a code; rank 1 is stopped by a signal and hears nothing."""
    _begin(task, connection)
    if task.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(4)


def main() -> None:
    """Be a launcher of two hanging ranks, for tests that kill or interrupt it."""
    tasks = [task(rank, sys.argv[1]) for rank in range(2)]
    ended = Supervisor(hangs, tasks, 60.0, lambda message: None).run()
    sys.stdout.write(f"{ended.error}; {[end.exit_code for end in ended.ends]}\n")


if __name__ == "__main__":
    main()
