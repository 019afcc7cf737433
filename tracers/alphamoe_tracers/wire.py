"""What the traced process and its scribe say to each other, and the sockets that carry it.

Two stream sockets: one carries what was recorded to the scribe, in order; on the other the scribe asks and is answered.
A frame is a header, a message (MessagePack) and a blob of raw bytes, which is never copied into a message.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from alphamoe_tracers.records import SentinelCount, SentinelKind

_HEADER = struct.Struct("<IQ")
_POLL_MS = 500
_SEND_BUFFER_BYTES = 1 << 20
# A traced program may have restored the default action of SIGPIPE: a scribe that died must not end it.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)

Blob = npt.NDArray[np.uint8]
FieldList = list[tuple[str, str, int]]


class Begin(msgspec.Struct, tag=True, frozen=True):
    """First of all: where to write, and how to read the records of this process."""

    out: str
    rank: int
    process: int
    version: int | None
    sizes: dict[int, int]
    fields: dict[int, tuple[int, FieldList]]
    """Record length and fields by kind, see :meth:`alphamoe_tracers.activity.Layouts.described`."""
    kernel_record: str
    api_names: list[tuple[int, int, str]]
    keep_raw: str | None


class Buffer(msgspec.Struct, tag=True, frozen=True):
    """The blob is a completed activity buffer."""


class Nodes(msgspec.Struct, tag=True, frozen=True):
    """Graph nodes: id, original's id, thread, time."""

    nodes: list[tuple[int, int, int, int]]


class Module(msgspec.Struct, tag=True, frozen=True):
    """The blob is the image of a module."""

    loaded_ns: int


class Write(msgspec.Struct, tag=True, frozen=True):
    """Make everything so far durable, and say :class:`Done` with this number."""

    number: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """The recording is over: compact it and answer with the :class:`Outcome`."""

    launched: dict[SentinelKind, int]
    started_ns: int
    known_sources: dict[str, str]
    clock: list[int]
    """For a recording that is kept: what the clock said each time that it was asked."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The scribe is up: what it needs is imported."""


class Ask(msgspec.Struct, tag=True, frozen=True):
    """The scribe wants the texts at these char pointers."""

    pointers: list[int]


class Walk(msgspec.Struct, tag=True, frozen=True):
    """The scribe cannot walk the buffer in the blob and wants the library to do it."""


class Answer(msgspec.Struct, tag=True, frozen=True):
    """Texts in the order of the pointers, or the byte offsets of a buffer's records, or why there is neither."""

    texts: list[bytes] = []
    starts: list[int] = []
    error: str | None = None


class Done(msgspec.Struct, tag=True, frozen=True):
    """A :class:`Write` was carried out."""

    number: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The scribe cannot go on writing; it takes the rest and drops it."""

    reason: str


class Outcome(msgspec.Struct, tag=True, frozen=True):
    """What a finished recording amounts to."""

    failure: str | None = None
    rows: dict[str, int] = {}
    duplicates: int = 0
    invalid_times: int = 0
    untimed: int = 0
    unresolved_names: int = 0
    sentinels: tuple[SentinelCount, ...] = ()
    range_problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Message = Begin | Buffer | Nodes | Module | Write | Finish | Ask | Ready | Walk | Answer | Done | Failed | Outcome
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of a stream socket that carries frames. One thread sends and one receives."""

    def __init__(self, end: socket.socket, gone: Callable[[], bool] = lambda: False) -> None:
        """Wrap a connected socket.

        Args:
            end: the socket; closed by :meth:`close`.
            gone: asked twice a second while nothing comes: whether the peer is gone though the socket is open (a forked
                child of the peer may hold it open).
        """
        self._socket = end
        self._gone = gone
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def send(self, message: Message, blob: Blob | bytes = b"") -> None:
        """Send one frame; blocks without the interpreter lock. Raises OSError when the peer is gone."""
        body = msgspec.msgpack.encode(message)
        view = memoryview(blob)  # type: ignore[arg-type]  # numpy arrays have no __buffer__ before 3.12
        rest = [memoryview(_HEADER.pack(len(body), view.nbytes) + body), view]
        while rest:
            sent = self._socket.sendmsg(rest, [], _FLAGS)
            while rest and sent >= rest[0].nbytes:
                sent -= rest.pop(0).nbytes
            if rest:
                rest[0] = rest[0][sent:]

    def receive(self) -> tuple[Message, Blob] | None:
        """Return the next frame, its blob in memory of its own, or None when the peer is gone.

        A frame that was cut short by the peer's end is dropped.

        Raises:
            msgspec.DecodeError: the peer speaks another version.
        """
        header = self._take(_HEADER.size)
        if header is None:
            return None
        body_bytes, blob_bytes = _HEADER.unpack(header.tobytes())
        body, blob = self._take(body_bytes), self._take(blob_bytes)
        if body is None or blob is None:
            return None
        return _DECODER.decode(memoryview(body)), blob  # type: ignore[arg-type]  # as above

    def close(self) -> None:
        """Close the socket; a peer that waits on it wakes up."""
        with contextlib.suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, count: int) -> Blob | None:
        memory = np.empty(count, np.uint8)
        view = memoryview(memory)  # type: ignore[arg-type]  # as above
        while len(view):
            try:
                if not self._poll.poll(_POLL_MS):
                    if self._gone():
                        return None
                    continue
                got = self._socket.recv_into(view)
            except OSError:
                return None
            if not got:
                return None
            view = view[got:]
        return memory
