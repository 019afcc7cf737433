"""Dispatch evidence: which kernels the layers submitted in each forward, written as receipts.

Submissions made while a graph is captured are that graph's contents, never executions: they are registered under the
graph's complete key and reported by each replay of it. A failed capture registers nothing; a re-capture replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alphamoe_backend.handover import DispatchHandover, HandoverSink, OpenForward
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import Execution, ForwardMode, Purpose, Receipt, ReceiptAttribution, Submission


def graph_key(identity: str, execution: Execution, M: int, batch_size: int) -> str:
    """Give the complete key of a captured graph.

    Args:
        identity: the identity string of the experts object (or of the objects joined with ``+``) that was captured.
        execution: the replay mode that the graph serves.
        M: tokens that it was captured with, padding included.
        batch_size: requests that it was captured for.
    """
    return f"{identity}|{execution}|M={M}|bs={batch_size}"


class DispatchRecorder:
    """Collects the submissions of one rank and hands finished receipts to a sink. For one thread.

    Args:
        run_id: the run that the receipts belong to.
        rank: tensor-parallel rank, never derived from a device index.
        sink: called with each receipt in order; None keeps count and writes nothing.
        handover: is offered each dispatch of an eager forward; None wants none.
    """

    def __init__(
        self,
        run_id: str,
        rank: int,
        sink: Callable[[Receipt], None] | None = None,
        handover: HandoverSink | None = None,
    ) -> None:
        self.run_id = run_id
        self.rank = rank
        self.receipts = 0
        """Receipts made so far."""
        self.unscoped = 0
        """Submissions made outside any forward and any capture; they are evidence of nothing."""
        self._sink = sink
        self._handover = handover
        self._open: list[Submission] | None = None
        self._scope: str | None = None
        self._capturing = False
        self._forward: OpenForward | None = None
        self._registered: dict[str, tuple[Submission, ...]] = {}

    @property
    def open_forward(self) -> OpenForward | None:
        """The eager forward that is open; None in a replay, while a graph is captured, and outside any forward."""
        return self._forward

    def wanted(self, layer: int, M: int) -> OpenForward | None:
        """Give the open forward if it is eager and somebody wants the layer's dispatch of M rows in it, else None."""
        forward = self._forward
        if self._handover is None or forward is None or not self._handover.wants(layer, M, forward):
            return None
        return forward

    def hand_over(self, handover: DispatchHandover) -> None:
        """Pass on a dispatch that :meth:`wanted` named the forward of."""
        if self._handover is not None:
            self._handover.take(handover)

    def registered(self, key: str) -> tuple[Submission, ...] | None:
        """Give the submissions registered under a graph key, or None."""
        return self._registered.get(key)

    def forget(self, key: str) -> None:
        """Drop the registration of a graph that was destroyed."""
        self._registered.pop(key, None)

    def submit(
        self,
        *,
        layer: int,
        kernel: str,
        symbol: str,
        M: int,
        E: int,
        H: int,
        I_local: int,
        top_k: int,
        block_m: int,
        device: int,
    ) -> None:
        """Note one kernel submission of a layer in the forward or capture that is open.

        Raises:
            AlphaMoEError: the open forward replays a graph, in which no layer runs on the host.
        """
        if self._open is None:
            if self._scope is not None:
                raise AlphaMoEError(
                    f"layer {layer} submitted {symbol} directly inside {self._scope}, which replays a graph",
                    hint="run the layer inside the graph's capture, or call the forward eager",
                )
            self.unscoped += 1
            return
        self._open.append(
            Submission(
                layer=layer,
                kernel=kernel,
                symbol=symbol,
                M=M,
                E=E,
                H=H,
                I_local=I_local,
                top_k=top_k,
                block_m=block_m,
                captured=self._capturing,
                device=device,
            )
        )

    @contextmanager
    def _enter(self, scope: str, submissions: list[Submission] | None, capturing: bool) -> Iterator[None]:
        if self._scope is not None:
            raise AlphaMoEError(f"{scope} was opened inside {self._scope}")
        self._scope, self._open, self._capturing = scope, submissions, capturing
        try:
            yield
        finally:
            self._scope, self._open, self._capturing, self._forward = None, None, False, None

    @contextmanager
    def capture(self, graph_key: str) -> Iterator[None]:
        """Register the submissions made inside as the contents of the graph ``graph_key``.

        When the capture fails, nothing is registered and an older registration of the key is dropped with the graph.
        """
        submissions: list[Submission] = []
        # The graph that held this key is gone as soon as its successor's capture begins.
        self._registered.pop(graph_key, None)
        with self._enter(f"the capture of {graph_key}", submissions, capturing=True):
            yield
        self._registered[graph_key] = tuple(submissions)

    @contextmanager
    def forward(
        self,
        *,
        step: int,
        purpose: Purpose,
        request_ids: tuple[str, ...],
        forward_mode: ForwardMode,
        execution: Execution,
        M: int | None,
        real_tokens: int | None,
        batch_size: int | None,
        graph_key: str | None = None,
    ) -> Iterator[None]:
        """Write one receipt for the forward run inside, once it was submitted without an exception.

        Raises:
            AlphaMoEError: a graph key without a replay or the reverse, a key that no successful capture registered, or
                numbers that contradict each other.
        """
        replay = execution != "eager"
        if replay != (graph_key is not None):
            raise AlphaMoEError(f"step {step}: execution {execution} with graph key {graph_key}")
        if graph_key is not None and graph_key not in self._registered:
            raise AlphaMoEError(
                f"step {step} replays {graph_key}, which no successful capture registered",
                hint="capture the graph inside DispatchRecorder.capture with the same key",
            )
        submissions: list[Submission] = []
        with self._enter(f"the forward of step {step}", None if replay else submissions, capturing=False):
            if not replay:
                self._forward = OpenForward(
                    step=step,
                    purpose=purpose,
                    request_ids=tuple(request_ids),
                    execution=execution,
                    forward_mode=forward_mode,
                    real_tokens=real_tokens,
                    batch_size=batch_size,
                )
            yield
        attribution: ReceiptAttribution = "capture_registration" if replay else "direct_submissions"
        receipt = Receipt(
            run_id=self.run_id,
            rank=self.rank,
            purpose=purpose,
            request_ids=tuple(request_ids),
            step=step,
            forward_mode=forward_mode,
            execution=execution,
            M=M,
            real_tokens=real_tokens,
            batch_size=batch_size,
            attribution=attribution,
            graph_key=graph_key,
            kernels=self._registered[graph_key] if graph_key is not None else tuple(submissions),
        )
        if problems := receipt.problems():
            raise AlphaMoEError(f"contradictory receipt: {problems[0]}")
        self.receipts += 1
        if self._sink is not None:
            self._sink(receipt)
