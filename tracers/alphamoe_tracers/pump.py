"""Between CUPTI's callbacks and the scribe: what the traced process does with completed records, which is little."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from alphamoe_tracers.activity import BrokenBufferError, record_offsets
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.scribe_process import ScribeProcess
from alphamoe_tracers.source import ActivitySource, LoadedModule, RawBuffer
from alphamoe_tracers.wire import (
    Answer,
    Ask,
    Begin,
    Blob,
    Buffer,
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

_NODES_A_FRAME = 4096
BARRIER_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 30.0
"""Beyond these a scribe hangs (a dead network disk): the traced program goes on without it."""

_KEPT = "rows up to the last closed part are kept"

_Item = RawBuffer | GraphNode | LoadedModule | Write | Finish | None


class Pump:
    """The sink of a source: queues what is handed over and sends it to the scribe from a thread of its own.

    The thread sleeps in system calls without the interpreter lock nearly all the time. A second thread answers the
    scribe, which knows names only as addresses in this process.
    """

    def __init__(self, source: ActivitySource, period_s: float) -> None:
        self.failure: str | None = None
        """Why recording ended early; what the scribe wrote before is kept."""
        self.lost_records = 0
        """Records that were handed over and could not be sent."""
        self.notes: dict[str, None] = {}
        """What went wrong without ending the recording, each once, in order."""
        self._source = source
        self._period_s = period_s
        # SimpleQueue.put may be interrupted by another callback on the same thread; Queue.put may not.
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, threading.Event] = {}
        self._outcome: Outcome | None = None
        self._ready, self._over = threading.Event(), threading.Event()
        self._nodes: list[GraphNode] = []
        self._source_stopped = False
        self._scribe: ScribeProcess | None = None
        self._begin: Begin
        self._threads = [
            threading.Thread(target=self._run, name="alphamoe-collector", daemon=True),
            threading.Thread(target=self._listen, name="alphamoe-names", daemon=True),
        ]

    def put_buffer(self, buffer: RawBuffer) -> None:
        """Queue a completed buffer."""
        self._queue.put(buffer)

    def put_node(self, node: GraphNode) -> None:
        """Queue a graph node."""
        self._queue.put(node)

    def put_module(self, module: LoadedModule) -> None:
        """Queue a module image."""
        self._queue.put(module)

    @property
    def scribe_id(self) -> int | None:
        """Process id of the scribe."""
        return self._scribe.process_id if self._scribe is not None else None

    def start(self, scribe: ScribeProcess, begin: Begin) -> None:
        """Send to a scribe from now on, ``begin`` before everything that is queued already."""
        self._scribe, self._begin = scribe, begin
        for thread in self._threads:
            thread.start()

    def wait_until_ready(self) -> None:
        """Wait until the scribe is up, or ended; one that takes too long is given up, and the recording with it."""
        until = time.monotonic() + READY_TIMEOUT_S
        while not self._ready.wait(0.05) and not self._over.is_set():
            if time.monotonic() > until:
                self._fail(f"the process that writes the records was not up after {READY_TIMEOUT_S:g} s")
                if self._scribe is not None:
                    self._scribe.kill()
                return

    def barrier(self) -> None:
        """Wait until everything queued so far is written as parts."""
        number, done = next(self._numbers), threading.Event()
        self._waiting[number] = done
        self._queue.put(Write(number))
        until = time.monotonic() + BARRIER_TIMEOUT_S
        while not done.wait(0.2) and not self._over.is_set():
            if time.monotonic() > until:
                self.notes.setdefault(f"a flush was not on disk after {BARRIER_TIMEOUT_S:g} s")
                break
        self._waiting.pop(number, None)

    def finish(self, finish: Finish) -> Outcome:
        """Have the scribe compact the recording, and end with it. The source is stopped already."""
        self._queue.put(finish)
        self._queue.put(None)
        if not self._over.wait(FINISH_TIMEOUT_S) and self._scribe is not None:
            self.failure = f"the scribe did not finish in {FINISH_TIMEOUT_S:g} s: {_KEPT}"
            self._scribe.kill()
        if self._scribe is not None:
            self._scribe.close()
        for thread in self._threads:
            thread.join()
        outcome = self._outcome or Outcome(failure=self.failure)
        self.failure = self.failure or outcome.failure
        return outcome

    # ---- the thread that sends

    def _run(self) -> None:
        self._frame(self._begin)
        next_flush = time.monotonic() + self._period_s
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, next_flush - time.monotonic()))
                if isinstance(item, GraphNode):
                    self._nodes.append(item)
                    if self._queue.empty() or len(self._nodes) >= _NODES_A_FRAME:
                        self._send_nodes()
                    continue
                self._send_nodes()
                if item is None:
                    return
                self._send(item)
            except queue.Empty:
                pass
            if self.failure is not None and not self._source_stopped:
                self._source_stopped = True
                self._guarded("stop", self._source.stop)
            if time.monotonic() >= next_flush:
                # Records that arrive meanwhile are queued before the order to write.
                if self.failure is None:
                    self._guarded("periodic flush", lambda: self._source.flush(forced=False))
                self._queue.put(Write(0))
                next_flush = time.monotonic() + self._period_s

    def _send(self, item: RawBuffer | LoadedModule | Write | Finish) -> None:
        if isinstance(item, RawBuffer):
            try:
                if not self._frame(Buffer(), item.data):
                    self.lost_records += self._records_of(item.data)
            finally:
                item.release()
        elif isinstance(item, LoadedModule):
            self._frame(Module(item.loaded_ns), item.image)
        else:
            self._frame(item)

    def _send_nodes(self) -> None:
        if self._nodes:
            self._frame(Nodes([(*node,) for node in self._nodes]))
            self._nodes.clear()

    def _frame(self, message: Message, blob: Blob | bytes = b"") -> bool:
        """Send a frame; after a failure only what the scribe answers is still sent."""
        if self._scribe is None or (self.failure is not None and not isinstance(message, Write | Finish)):
            return False
        try:
            self._scribe.data.send(message, blob)
        except OSError:  # the scribe is gone, which the other thread learns too and tells
            return False
        return True

    def _records_of(self, data: Blob) -> int:
        try:
            return len(record_offsets(data.view(np.uint32), self._source.layouts.sizes))
        except BrokenBufferError:
            return 1

    def _guarded(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever CUPTI says, the traced program goes on
            self.notes.setdefault(f"{what}: {error}")

    # ---- the thread that answers

    def _listen(self) -> None:
        scribe = self._scribe
        if scribe is None:
            return
        try:
            while self._outcome is None and (frame := scribe.control.receive()) is not None:
                self._take(scribe, *frame)
        except (OSError, msgspec.DecodeError) as error:
            self.notes.setdefault(f"scribe: {error}")
        if self._outcome is None:
            self._fail(f"the scribe that writes the records is gone, {scribe.how_it_ended()}: {_KEPT}")
        self._over.set()

    def _take(self, scribe: ScribeProcess, message: Message, blob: Blob) -> None:
        if isinstance(message, Ask | Walk):
            scribe.control.send(self._answer(message, blob))
        elif isinstance(message, Ready):
            self._ready.set()
        elif isinstance(message, Done):
            done = self._waiting.get(message.number)
            if done is not None:
                done.set()
        elif isinstance(message, Failed):
            self._fail(message.reason)
        elif isinstance(message, Outcome):
            self._outcome = message

    def _answer(self, question: Ask | Walk, blob: Blob) -> Answer:
        try:
            if isinstance(question, Walk):
                return Answer(starts=self._source.record_starts(blob).tolist())
            return Answer(texts=[self._source.resolve(pointer) for pointer in question.pointers])
        except Exception as error:  # told to the scribe, whose recording ends with it
            return Answer(error=f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._queue.put(Write(0))  # wakes the thread that stops the source
