"""The scribe: the process beside a traced one that decodes its activity buffers and writes them to disk.

Decoding in the traced process would take the interpreter lock from the program that is measured. A collector starts its
scribe as ``python -m alphamoe_tracers.scribe``; it ends when the recording is finished or when the traced process is
gone, however that ended, and then writes what it has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from alphamoe_tracers import compaction, tables
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.source import LoadedModule
from alphamoe_tracers.wire import (
    Answer,
    Ask,
    Begin,
    Blob,
    Buffer,
    Channel,
    Done,
    Failed,
    Finish,
    Message,
    Module,
    Nodes,
    Outcome,
    Ready,
    Walk,
    Write,
)
from alphamoe_tracers.writer import RecordWriter

_NICENESS = 5
_OOM_SCORE = "500"


class TracedFaultError(Exception):
    """The traced process could not answer."""


class TracedProcess:
    """The other end of the control channel."""

    def __init__(self, control: Channel) -> None:
        self._control = control

    def tell(self, message: Message, blob: Blob | bytes = b"") -> bool:
        """Send a message; False when nobody is there any more."""
        try:
            self._control.send(message, blob)
        except OSError:
            return False
        return True

    def texts(self, pointers: list[int]) -> list[bytes] | None:
        """Return the C strings at these addresses, or None when the process is gone."""
        answer = self._answer() if self.tell(Ask(pointers)) else None
        return answer.texts if answer is not None else None

    def record_starts(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Have the library walk a buffer; without the process its records stay unread."""
        answer = self._answer() if self.tell(Walk(), data) else None
        return np.array(answer.starts if answer is not None else [], np.int64)

    def _answer(self) -> Answer | None:
        frame = self._control.receive()
        if frame is None:
            return None
        answer = frame[0]
        if not isinstance(answer, Answer):
            raise TracedFaultError(f"{type(answer).__name__} came instead of an answer")
        if answer.error is not None:
            raise TracedFaultError(answer.error)
        return answer


class Scribe:
    """Takes frames in order and keeps what they say; after a failure it takes them and drops them."""

    def __init__(self, traced: TracedProcess) -> None:
        self.failure: str | None = None
        self._traced = traced
        self._writer: RecordWriter | None = None
        self._keep_raw: Path | None = None

    def take(self, message: Message, blob: Blob) -> bool:
        """Take one frame and say whether it was the last."""
        if isinstance(message, Finish):
            self._traced.tell(self._finished(message))
            return True
        try:
            if self.failure is None:
                self._handle(message, blob)
        except OSError as error:
            self._fail(f"recording ended early, {_why(error)}: rows up to the last closed part are kept")
        except TracedFaultError as error:
            self._fail(f"recording ended early by a fault of the collector, {error}")
        except Exception as error:  # a fault of ours must be told, and must not cost the traced program anything
            self._fail(f"recording ended early by a fault of the collector, {_named(error)}")
        if isinstance(message, Write) and message.number:
            self._traced.tell(Done(message.number))
        return False

    def abandoned(self) -> None:
        """Write what there is: the traced process ended without finishing."""
        if self.failure is None and self._writer is not None:
            self._writer.close()
            self._writer.write_parts()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._traced.tell(Failed(reason))

    def _handle(self, message: Message, blob: Blob) -> None:
        if isinstance(message, Begin):
            self._writer = RecordWriter(message, self._traced)
            self._keep_raw = Path(message.keep_raw) if message.keep_raw is not None else None
            return
        writer = self._writer
        if writer is None:
            raise TracedFaultError(f"{type(message).__name__} came before the beginning")
        if isinstance(message, Buffer):
            writer.add_buffer(blob)
        elif isinstance(message, Nodes):
            writer.add_nodes([GraphNode(*node) for node in message.nodes])
        elif isinstance(message, Module):
            writer.add_module(LoadedModule(blob.tobytes(), message.loaded_ns))
        else:
            writer.write_parts()

    def _finished(self, finish: Finish) -> Outcome:
        writer = self._writer
        if self.failure is not None or writer is None:
            return Outcome(failure=self.failure or "nothing was recorded")
        try:
            writer.close()
            if writer.raw is not None and self._keep_raw is not None:
                writer.raw.clock = list(finish.clock)
                writer.raw.strings = dict(writer.names.texts)
                writer.raw.save(self._keep_raw)
            writer.modules.finish(finish.known_sources, set(writer.symbols.strings))
            return compaction.compact(writer, finish)
        except OSError as error:
            kept = "rows up to the last closed part are kept"
            return Outcome(failure=f"the last rows could not be written, {_why(error)}: {kept}")
        except Exception as error:  # as above
            return Outcome(failure=f"the last rows were lost by a fault of the collector, {_named(error)}")


def serve(data: Channel, control: Channel) -> None:
    """Be the scribe of the process at the other ends, until it finishes or is gone."""
    _import_lazy_parts()
    traced = TracedProcess(control)
    traced.tell(Ready())
    scribe = Scribe(traced)
    while (frame := data.receive()) is not None:
        if scribe.take(*frame):
            return
    with contextlib.suppress(OSError):  # a full disk, and nobody to tell
        scribe.abandoned()


def _import_lazy_parts() -> None:
    """Load what is otherwise loaded by the first record or at the stop: demangler, compute functions, writer."""
    symbols = tables.symbols_table(["_Z1fv"], 0, {})
    pq.write_table(symbols.take([0]), pa.BufferOutputStream(), compression="zstd")


class _NoPandas:
    """Hides pandas: pyarrow imports it only to ask whether an array is one of its own, a third of the start-up."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Refuse pandas, leave everything else to others."""
        if name == "pandas":
            raise ModuleNotFoundError("the scribe has no use for pandas", name=name)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main(arguments: list[str]) -> None:
    """Run as a process.

    Args:
        arguments: file descriptors of the two sockets, and the process id of the traced process.
    """
    data_fd, control_fd, parent = map(int, arguments)
    sys.meta_path.insert(0, _NoPandas())
    # Ctrl-C is for the traced program; its end is what ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
        # Short of memory, the kernel shall take the scribe and not the program.
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")

    def gone() -> bool:
        return os.getppid() != parent

    serve(Channel(socket.socket(fileno=data_fd), gone), Channel(socket.socket(fileno=control_fd), gone))


if __name__ == "__main__":
    main(sys.argv[1:])
    # The stop of the traced program waits for this end: all files are closed, and tearing pyarrow down takes a while.
    os._exit(0)
