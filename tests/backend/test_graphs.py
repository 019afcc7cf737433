"""Capture in segments, with a recording fake in the place of CUDA graphs."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphamoe_backend import graphs
from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.graphs import BreakableGraph, EagerStep, GraphRunner
from alphamoe_backend.inputs import ForwardOutput, StaticInputs
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.workspaces import Workspaces
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.ranges import RangeDomain

CPU = torch.device("cpu")


class Ranges(RangeDomain):
    """Writes ranges down."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(enabled=False)
        self.log = log

    def push(self, name: str, payload: int | None = None) -> None:
        """Note the range's beginning."""
        self.log.append(f"+{name}" if payload is None else f"+{name} {payload}")

    def pop(self) -> None:
        """Note a range's end."""
        self.log.append("-")


class FakeGraph:
    """A graph that writes down what is done with it."""

    capturing: FakeGraph | None = None

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.work: list[str] = []
        self.pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Refuse nested captures, as CUDA does."""
        assert FakeGraph.capturing is None
        FakeGraph.capturing, self.pool, self.mode = self, pool, capture_error_mode

    def capture_end(self) -> None:
        """End the capture."""
        assert FakeGraph.capturing is self
        FakeGraph.capturing = None

    def replay(self) -> None:
        """Do what was captured."""
        self.log += self.work


class FakeGroup(TensorParallelGroup):
    """A group of gloo whose sum is written down."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(0, 4, "gloo")
        self.log = log

    def _sum(self, tensor: torch.Tensor) -> None:
        where = FakeGraph.capturing.work if FakeGraph.capturing else self.log
        where.append("sum")


def forward(group: TensorParallelGroup) -> None:
    """Act as two layers with one collective each, and a head."""
    for layer in range(2):
        assert FakeGraph.capturing is not None
        FakeGraph.capturing.work.append(f"kernels {layer}")
        group.all_reduce(torch.zeros(1), layer)
    assert FakeGraph.capturing is not None
    FakeGraph.capturing.work.append("head")


def test_a_breakable_capture_is_cut_at_collectives_which_each_replay_makes_anew() -> None:
    """Three segments of one pool; nothing is summed during capture; a replay alternates under the layers' ranges."""
    log: list[str] = []
    group = FakeGroup(log)
    graph = BreakableGraph(Ranges(log), pool="pool", make_graph=lambda: FakeGraph(log))
    with graph.capture(group, breakable=True):
        forward(group)
    assert log == []
    assert graph.segments == 3
    segments = [step for step in graph.steps if isinstance(step, FakeGraph)]
    assert {(segment.pool, segment.mode) for segment in segments} == {("pool", "thread_local")}
    assert [(s.name, s.layer) for s in graph.steps if isinstance(s, EagerStep)] == [
        ("all_reduce", 0),
        ("all_reduce", 1),
    ]
    graph.replay()
    once = ["kernels 0", "+layer 0", "+all_reduce", "sum", "-", "-"]
    once += ["kernels 1", "+layer 1", "+all_reduce", "sum", "-", "-", "head"]
    assert log == once
    graph.replay()
    assert log == once * 2
    group.all_reduce(torch.zeros(1))
    assert log[-1] == "sum"


def test_a_full_capture_holds_the_collectives() -> None:
    """One segment, the sums inside it."""
    log: list[str] = []
    group = FakeGroup(log)
    graph = BreakableGraph(Ranges(log), make_graph=lambda: FakeGraph(log))
    with graph.capture(group, breakable=False):
        forward(group)
    graph.replay()
    assert log == ["kernels 0", "sum", "kernels 1", "sum", "head"]


def test_a_failed_capture_leaves_nothing_behind() -> None:
    """The stream is taken out of capture, the steps are dropped, collectives work again, and so does the collector."""
    log: list[str] = []
    group = FakeGroup(log)
    graph = BreakableGraph(Ranges(log), make_graph=lambda: FakeGraph(log))

    def fail() -> None:
        group.all_reduce(torch.zeros(1), 0)
        raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="not permitted"), graph.capture(group, breakable=True):
        fail()
    assert FakeGraph.capturing is None
    assert graph.steps == []
    assert gc.isenabled()
    group.all_reduce(torch.zeros(1))
    assert log == ["sum"]


def test_static_inputs_pad_with_token_0_of_the_scratch_slot() -> None:
    """What an earlier, longer fill left is overwritten; a prefill wants the logits of its last real token."""
    inputs = StaticInputs(4, prefill=True, scratch_slot=9, device=CPU)
    inputs.fill([5, 6, 7], [0, 1, 2], [3, 3, 3])
    assert inputs.logits_rows.tolist() == [2]
    inputs.fill([8], [0], [3])
    assert inputs.input_ids.tolist() == [8, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 0, 0, 0]
    assert inputs.slots.tolist() == [3, 9, 9, 9]
    assert inputs.logits_rows.tolist() == [0]
    assert StaticInputs(3, prefill=False, scratch_slot=1, device=CPU).logits_rows.tolist() == [0, 1, 2]


def test_static_inputs_advance_real_rows_and_leave_padding() -> None:
    """Sampled tokens become the next inputs one place further; padding would otherwise route to more experts."""
    inputs = StaticInputs(4, prefill=False, scratch_slot=9, device=CPU)
    inputs.fill([5, 6], [10, 20], [0, 1])
    for sampled in ([7, 8, 100, 101], [3, 2, 1, 4]):
        inputs.advance(torch.tensor(sampled))
    assert inputs.input_ids.tolist() == [3, 2, 0, 0]
    assert inputs.positions.tolist() == [12, 22, 0, 0]
    assert inputs.slots.tolist() == [0, 1, 9, 9]


@pytest.fixture
def runner_on_fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[GraphRunner, DispatchRecorder, Workspaces, list[str]]:
    """A runner whose every CUDA call is a fake."""
    log: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def on_stream(_: object) -> Any:
        log.append("side stream")
        yield
        log.append("main stream")

    fake_cuda = SimpleNamespace(
        CUDAGraph=lambda: FakeGraph(log),
        graph_pool_handle=lambda: "pool",
        Stream=lambda device: stream,
        current_stream=lambda: stream,
        stream=on_stream,
        synchronize=lambda: None,
    )
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=fake_cuda, device=torch.device))
    recorder, workspaces = DispatchRecorder("run", 0), Workspaces()

    def forward(inputs: StaticInputs) -> ForwardOutput:
        if inputs.rows == 13:
            raise RuntimeError("operation would make the legacy stream depend on a capturing stream")
        shape = {"M": inputs.rows, "E": 1, "H": 1, "I_local": 1, "top_k": 1, "block_m": 8, "device": 0}
        recorder.submit(layer=0, kernel="k", symbol="s", **shape)
        workspaces.get("out", (inputs.rows,), torch.float32, CPU)
        return ForwardOutput(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2))

    runner = GraphRunner(
        "runner0",
        forward=forward,
        group=TensorParallelGroup(),
        recorder=recorder,
        workspaces=workspaces,
        ranges=Ranges(log),
        device=CPU,
        graph_sentinel=lambda: log.append(f"sentinel in capture: {FakeGraph.capturing is not None}"),
    )
    return runner, recorder, workspaces, log


def test_a_runner_registers_a_capture_under_its_own_key(
    runner_on_fakes: tuple[GraphRunner, DispatchRecorder, Workspaces, list[str]],
) -> None:
    """Warm-up on the side stream, then one sentinel first thing in the captured step, then the key on all records."""
    runner, recorder, workspaces, log = runner_on_fakes
    inputs = StaticInputs(2, prefill=False, scratch_slot=1, device=CPU)
    captured = runner.capture(
        "decode", inputs, breakable=False, warm_up=lambda _: log.append("warm-up"), take_step=lambda: 7
    )
    assert log == ["side stream", "warm-up", "+step 7", "sentinel in capture: True", "-", "main stream"]
    assert captured.key == "runner0:full|decode_graph_replay|M=2|bs=2"
    assert runner.captured["decode", 2] is captured
    submissions = recorder.registered(captured.key)
    assert submissions is not None
    assert [(submission.M, submission.captured) for submission in submissions] == [(2, True)]
    assert workspaces.held_bytes()[captured.key] == 8


def test_a_runner_that_cannot_capture_registers_nothing(
    runner_on_fakes: tuple[GraphRunner, DispatchRecorder, Workspaces, list[str]],
) -> None:
    """One clear error that names the graph; no registration, no workspace, no graph to replay."""
    runner, recorder, workspaces, log = runner_on_fakes
    inputs = StaticInputs(13, prefill=True, scratch_slot=1, device=CPU)
    with pytest.raises(AlphaMoEError, match="M=13"):
        runner.capture("prefill", inputs, breakable=True, warm_up=lambda _: None, take_step=lambda: 0)
    assert log[-1] == "-"
    assert runner.captured == {}
    assert recorder.registered("runner0:breakable|prefill_graph_replay|M=13|bs=1") is None
    assert workspaces.held_bytes() == {"eager": 0}
    assert FakeGraph.capturing is None
    assert gc.isenabled()
