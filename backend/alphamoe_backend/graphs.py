"""CUDA graphs of whole forwards: in one piece, or cut at the collectives that a capture cannot hold.

A captured forward is a list of graph segments with eager steps between them. All segments of all graphs of one runner
share one memory pool and are captured on one side stream, so that a tensor written by one segment is where the next
one (and the collective between them) reads it. The runner owns pool, stream, static inputs and outputs; they live as
long as the runner.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from alphamoe_backend.capture_sizes import GraphKind
from alphamoe_backend.dispatch import DispatchRecorder, graph_key
from alphamoe_backend.inputs import ForwardOutput, StaticInputs
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.workspaces import Workspaces
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.ranges import RangeDomain
from alphamoe_tracers.records import Execution, ForwardMode

FORWARD_MODES: dict[GraphKind, ForwardMode] = {"prefill": "EXTEND", "decode": "DECODE"}
REPLAYS: dict[GraphKind, Execution] = {"prefill": "prefill_graph_replay", "decode": "decode_graph_replay"}


class Graph(Protocol):
    """What is used of ``torch.cuda.CUDAGraph``; a test puts a recording fake in its place."""

    def capture_begin(self, pool: Any = ..., capture_error_mode: str = ...) -> None:
        """Begin to capture the current stream."""

    def capture_end(self) -> None:
        """End the capture and instantiate the graph."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""


@dataclass(frozen=True)
class EagerStep:
    """Work between two segments that is done anew at each replay."""

    name: str
    layer: int | None
    run: Callable[[], None]


class BreakableGraph:
    """One forward captured as segments; see the module.

    Attributes:
        steps: segments and eager steps in the order of the forward.
    """

    def __init__(self, ranges: RangeDomain, *, pool: Any = None, make_graph: Callable[[], Graph] | None = None) -> None:
        """Make an empty graph.

        Args:
            ranges: where the eager steps of a replay are announced.
            pool: memory pool handle that all segments allocate from.
            make_graph: ``torch.cuda.CUDAGraph`` unless a test says otherwise.
        """
        self.steps: list[Graph | EagerStep] = []
        self._ranges = ranges
        self._pool = pool
        self._make_graph: Callable[[], Graph] = make_graph or torch.cuda.CUDAGraph
        self._open: Graph | None = None

    @contextmanager
    def capture(self, group: TensorParallelGroup, *, breakable: bool) -> Iterator[None]:
        """Capture what the current (side) stream is given inside.

        An exception inside ends the capture, leaves :attr:`steps` empty and goes on.

        Args:
            group: its all-reduces become eager steps when ``breakable``, nodes of the graph otherwise.
            breakable: cut at collectives.
        """
        with _garbage_kept(), group.cutting(self) if breakable else nullcontext():
            self._begin()
            try:
                yield
            except BaseException:
                self._abandon()
                raise
            self._end()

    def cut(self, name: str, layer: int | None, step: Callable[[], None]) -> None:
        """End the segment, remember ``step`` for the replays (nothing is summed now), and begin the next segment."""
        self._end()
        self.steps.append(EagerStep(name, layer, step))
        self._begin()

    def replay(self) -> None:
        """Launch the segments on the current stream and do the eager steps between them."""
        for step in self.steps:
            if not isinstance(step, EagerStep):
                step.replay()
            elif step.layer is None:
                with self._ranges.range(step.name):
                    step.run()
            else:
                with self._ranges.range("layer", step.layer), self._ranges.range(step.name):
                    step.run()

    @property
    def segments(self) -> int:
        """Graphs that one replay launches."""
        return sum(not isinstance(step, EagerStep) for step in self.steps)

    def _begin(self) -> None:
        graph = self._make_graph()
        # Other threads (the collector's flush, a watchdog) may call CUDA meanwhile; only this one is held to the rules.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def _end(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            raise AlphaMoEError("a graph segment was ended that had not begun")
        graph.capture_end()
        self.steps.append(graph)

    def _abandon(self) -> None:
        graph, self._open = self._open, None
        self.steps.clear()
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture was invalidated by the error that is being raised; this call took the stream out of it.
            return


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep Python from freeing device memory of older cycles in the middle of a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_padding(
    inputs: StaticInputs,
    *,
    forward: Callable[[StaticInputs], object],
    recorder: DispatchRecorder,
    ranges: RangeDomain,
    take_step: Callable[[], int],
) -> None:
    """Run what is about to be captured, on the capture's stream, twice, as eager forwards of padding alone."""
    for _ in range(2):
        step = take_step()
        with (
            ranges.range("step", step),
            recorder.forward(
                step=step,
                purpose="capture",
                request_ids=(),
                forward_mode=FORWARD_MODES["prefill" if inputs.prefill else "decode"],
                execution="eager",
                M=inputs.rows,
                real_tokens=0,
                batch_size=0,
            ),
        ):
            forward(inputs)


@dataclass(frozen=True)
class CapturedForward:
    """A captured forward with its static inputs and outputs."""

    key: str
    """Runner and complete key, for example ``runner0:full|decode_graph_replay|M=1|bs=1``; the same on all ranks."""
    inputs: StaticInputs
    graph: BreakableGraph
    output: ForwardOutput


class GraphRunner:
    """Captures forwards by kind and size, and finds the one to replay.

    Attributes:
        name: identity of this runner, part of every graph key.
        captured: forwards by (kind, rows).
    """

    def __init__(
        self,
        name: str,
        *,
        forward: Callable[[StaticInputs], ForwardOutput],
        group: TensorParallelGroup,
        recorder: DispatchRecorder,
        workspaces: Workspaces,
        ranges: RangeDomain,
        device: torch.device,
        graph_sentinel: Callable[[], None],
    ) -> None:
        """Take a memory pool and a side stream on ``device`` (a CUDA device).

        Args:
            name: see above.
            forward: what is captured.
            group: collectives of this rank.
            recorder: where the submissions made during capture are registered.
            workspaces: owner of the buffers that a graph writes; they are released with the graph by the caller.
            ranges: NVTX domain.
            device: where the graphs live.
            graph_sentinel: launches the collector's sentinel kernel, once at the beginning of every captured forward.
        """
        self.name = name
        self.captured: dict[tuple[GraphKind, int], CapturedForward] = {}
        self._forward = forward
        self._group = group
        self._recorder = recorder
        self._workspaces = workspaces
        self._ranges = ranges
        self._graph_sentinel = graph_sentinel
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(
        self,
        kind: GraphKind,
        inputs: StaticInputs,
        *,
        breakable: bool,
        warm_up: Callable[[StaticInputs], None],
        take_step: Callable[[], int],
    ) -> CapturedForward:
        """Run ``warm_up`` on the side stream, then capture the forward over ``inputs``; replaces an earlier capture.

        Args:
            kind: ``decode`` or ``prefill``.
            inputs: static inputs, all padding; the graph keeps them.
            breakable: cut at collectives instead of capturing them.
            warm_up: eager forwards that load modules and settle workspaces of the side stream.
            take_step: gives the id that the capture's ranges carry.

        Raises:
            AlphaMoEError: when CUDA refuses the capture; nothing is registered then.
        """
        identity = f"{self.name}:{'breakable' if breakable else 'full'}"
        key = graph_key(identity, REPLAYS[kind], inputs.rows, 1 if kind == "prefill" else inputs.rows)
        graph = BreakableGraph(self._ranges, pool=self._pool)
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream), self._workspaces.graph(key):
                warm_up(inputs)
                torch.cuda.synchronize()
                with (
                    self._recorder.capture(key),
                    self._ranges.range("step", take_step()),
                    graph.capture(self._group, breakable=breakable),
                ):
                    self._graph_sentinel()
                    output = self._forward(inputs)
        except RuntimeError as error:
            raise AlphaMoEError(
                f"capture of {key} failed: {error}",
                "Run with --executions eager to go without graphs; a call that synchronises cannot be captured.",
            ) from error
        torch.cuda.current_stream().wait_stream(self._stream)
        forward = CapturedForward(key, inputs, graph, output)
        self.captured[kind, inputs.rows] = forward
        return forward

    def close(self) -> None:
        """Free the graphs, their inputs and outputs."""
        self.captured.clear()
