"""What the launcher gives a rank, and what a rank tells the launcher while it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, Protocol

import msgspec

from alphamoe_backend.handover import HandoverSink
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import Execution

Communication = Literal["nccl", "gloo"]

STOP = b"stop"
"""The one word that the launcher sends: end in order, soon."""

EXIT_FAILED = 1
EXIT_STOPPED = 75
"""A rank that ended because the launcher told it to."""
EXIT_ORPHANED = 76
"""A rank that ended because its launcher was gone."""


@dataclass(frozen=True)
class RankRequest:
    """One request as every rank serves it."""

    request_id: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class RankTask:
    """Everything that one rank needs to know. It crosses to the new process by pickle, written and read by us only."""

    run_id: str
    out: str
    """Directory of the run bundle; run.json is there already."""
    rank: int
    world_size: int
    device: str
    """``cpu`` or ``cuda:N``."""
    gpu_uuid: str | None
    shared_gpu: bool
    communication: Communication
    """Of the whole group: ranks that chose for themselves would not meet where only some of them share a GPU."""
    rendezvous: str
    """``file:///...`` of a path that does not exist yet."""
    model: str
    layers: int
    dtype: str
    moe_runner_backend: str
    executions: tuple[Execution, ...]
    cuda_graph_bs_decode: tuple[int, ...] | None
    cuda_graph_bs_prefill: tuple[int, ...] | None
    max_new_tokens: int
    seed: int
    requests: tuple[RankRequest, ...]
    nvtx: bool
    receipts: bool
    collector_off: str | None
    """Why the collector must stay off, or null."""
    inject_fault: str | None
    launcher_pid: int
    spawned_ns: int
    """``time.monotonic_ns()`` when the launcher started the process."""
    threads: int
    """Threads that torch may use on the CPU."""
    timeout_s: float


@dataclass(frozen=True)
class RankDevice:
    """What torch says of the GPU that a rank opened; all null on a CPU."""

    gpu_name: str | None
    compute_capability: str | None
    sm_count: int | None


class RankCaptures(HandoverSink, Protocol):
    """Stores dispatches of one rank."""

    wall_s: float
    """Seconds that it took so far; the forwards were longer by them."""

    def notes(self) -> tuple[str, ...]:
        """List what could not be captured, one sentence each; asked once, when the rank has served everything."""


class CaptureFactory(Protocol):
    """Makes what stores dispatches of one rank, in that rank's process."""

    def __call__(self, task: RankTask, device: RankDevice) -> RankCaptures:
        """Make it; the device was opened."""


class ServedRequest(msgspec.Struct, frozen=True):
    """One completion, as rank 0 hands it to the launcher, which holds the tokenizer."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    executions: tuple[Execution, ...]
    timings_s: dict[str, float]


class RankMessage(msgspec.Struct, frozen=True):
    """One message of a rank."""

    kind: Literal["phase", "served", "failed", "done"]
    """``served``: rank 0 with the completions; any rank with notes."""
    rank: int
    at_ns: int
    """``time.monotonic_ns()``: one clock for all processes of a machine."""
    phase: str | None = None
    error: str | None = None
    """One line. For ``failed``."""
    served: tuple[ServedRequest, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the run must know, one sentence each."""


_decoder = msgspec.json.Decoder(RankMessage)


def send(connection: Connection, message: RankMessage) -> None:
    """Send one message; raises OSError when the launcher is gone."""
    connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection) -> RankMessage:
    """Receive one message; raises EOFError when the rank is gone."""
    return _decoder.decode(connection.recv_bytes())


def one_line(error: BaseException) -> str:
    """Return an exception as one line: its message, with its type where the message alone says too little."""
    text = " ".join(str(error).split())
    gloo = re.search(r"/gloo/\S+\] ([^.]+(?:\.\d[^.]*)*)", text)
    if gloo is not None:
        # gloo's own text is a source path, addresses, advice and a joke.
        reason = re.sub(r" \[[\d.]+\](?::\d+)?", "", gloo[1])
        return f"the connection to another rank was lost (gloo: {reason})"
    nccl = re.search(r"NCCL error in: [^,]+, ([^,]+?)(?: \(run with NCCL_DEBUG[^)]*\))?, NCCL version (\S+)", text)
    if nccl is not None:
        last = re.search(r"Last error: (.+)$", text)
        before, after = text[: nccl.start()], f"; {last[1][:150]}" if last is not None else ""
        text = f"{before[:120]}NCCL {nccl[2]}: {nccl[1]}{after}"
    if len(text) > 300:
        text = text[:300] + "..."
    if isinstance(error, AlphaMoEError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
