"""A second process that parses pieces of a trace.

Pieces go over in shared memory and only their places through a pipe: an executor's own threads would have to wait for
the interpreter lock of the process that parses, and the second process would idle.
"""

from __future__ import annotations

from collections import deque
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.kineto_split import Malformed, Outcome, parse_piece

Result = Outcome | Malformed
_SLOTS = 4
_JOIN_S = 5.0


def try_piece(data: bytes, first: bool, last: bool) -> Result:
    """Parse a piece; an error is a result too, since a wrong cut before it may have caused it."""
    try:
        return parse_piece(data, first=first, last=last)
    except Malformed as error:
        return error


class Ticket:
    """A piece that the other process is parsing."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.found: Result | None = None

    def result(self) -> Result:
        """Return what parsing the piece gave, when it is there."""
        while self.found is None:
            self._worker.receive()
        return self.found


class Worker:
    """The second process; use as a context manager."""

    def __init__(self, piece_bytes: int) -> None:
        self._slot_bytes = 2 * piece_bytes
        self._memory = SharedMemory(create=True, size=_SLOTS * self._slot_bytes)
        # Spawned, not forked: the reading thread may hold locks.
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._memory.name, self._slot_bytes)
        self._process = context.Process(target=_serve, args=arguments, name="parse trace", daemon=True)
        self._tickets: deque[Ticket] = deque()
        self._sent = 0
        try:
            self._process.start()
        except BaseException:
            self._memory.close()
            self._memory.unlink()
            raise
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._memory.close()
        self._memory.unlink()

    def submit(self, data: bytes, first: bool, last: bool) -> Ticket | None:
        """Hand over a piece; None when the process has enough to do or the piece is too large."""
        while self._tickets and self._connection.poll():
            self.receive()
        if len(self._tickets) >= _SLOTS or len(data) > self._slot_bytes:
            return None
        # Slots are freed in the order in which they were filled.
        slot = self._sent % _SLOTS
        at = slot * self._slot_bytes
        _view(self._memory)[at : at + len(data)] = data
        ticket = Ticket(self)
        self._tickets.append(ticket)
        self._sent += 1
        try:
            self._connection.send((slot, len(data), first, last))
        except OSError:
            raise _gone() from None
        return ticket

    def receive(self) -> None:
        """Wait for the next result; they come in the order of the pieces."""
        try:
            self._tickets[0].found = self._connection.recv()
        except (EOFError, OSError):
            raise _gone() from None
        self._tickets.popleft()


def _view(memory: SharedMemory) -> memoryview[int]:
    view = memory.buf
    if view is None:
        raise _gone()
    return view


def _gone() -> AlphaMoEError:
    return AlphaMoEError("the second parsing process ended early", hint="read with one process, or free some memory")


def _serve(connection: Connection, memory_name: str, slot_bytes: int) -> None:
    memory = SharedMemory(memory_name)
    try:
        while True:
            slot, size, first, last = connection.recv()
            at = slot * slot_bytes
            connection.send(try_piece(bytes(_view(memory)[at : at + size]), first, last))
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the reader has what it wants, or is gone
    finally:
        memory.close()
