"""The engine on one rank: passes, receipts, padding under replay, batches, faults and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from alphamoe_backend.capture_sizes import GraphKind
from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.engine import Engine, EngineConfig, NoObserver, Request
from alphamoe_backend.faults import parse_fault
from alphamoe_backend.graphs import CapturedForward, GraphRunner
from alphamoe_backend.inputs import StaticInputs
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.readback import Read, Readback
from alphamoe_backend.waves import Batch, wave_sizes
from alphamoe_tracers.errors import AlphaMoEError, UsageError
from alphamoe_tracers.records import EXECUTIONS, Receipt

CONFIG = EngineConfig(
    model="tiny",
    layers=1,
    rank=0,
    world_size=1,
    device="cpu",
    dtype="float32",
    moe_runner_backend="flashinfer_alphamoe",
    executions=("eager",),
    max_new_tokens=4,
    nvtx=False,
)


def request(name: str, length: int) -> Request:
    """Give a request of made-up tokens."""
    generator = torch.Generator().manual_seed(length)
    return Request(name, tuple(torch.randint(32768, (length,), generator=generator).tolist()))


class Watcher(NoObserver):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def on_phase(self, name: str) -> None:
        """Note the phase."""
        self.log.append(name)

    def step_boundary(self, step: int) -> None:
        """Note the step."""
        self.log.append(str(step))


@pytest.fixture(scope="module")
def loaded() -> tuple[Engine, list[Receipt], Watcher]:
    """An engine that was prepared for three short prompts, two at a time; its receipts and observer."""
    receipts: list[Receipt] = []
    watcher = Watcher()
    engine = Engine(CONFIG, DispatchRecorder("run", 0, receipts.append), watcher, TensorParallelGroup())
    engine.load()
    engine.warm_up()
    engine.capture([5, 9, 6], batch_size=2)
    return engine, receipts, watcher


REQUESTS = (request("a", 5), request("b", 9), request("c", 6))


def test_an_eager_pass_writes_one_receipt_a_forward_with_its_tokens(
    loaded: tuple[Engine, list[Receipt], Watcher],
) -> None:
    """Two waves: each prompt alone, then its wave together; M is the real tokens; step ids rise by one."""
    engine, receipts, watcher = loaded
    receipts.clear()
    watcher.log.clear()
    first_step = engine.next_step
    completions = engine.serve(REQUESTS, ("eager",))
    assert [completion.request_id for completion in completions] == ["a@eager", "b@eager", "c@eager"]
    assert all(len(c.token_ids) == 4 and c.finish_reason == "length" for c in completions)
    assert [r.M for r in receipts] == [r.real_tokens for r in receipts] == [5, 9, 2, 2, 2, 6, 1, 1, 1]
    assert [r.forward_mode for r in receipts[:3]] == ["EXTEND", "EXTEND", "DECODE"]
    assert receipts[2].request_ids == ("a@eager", "b@eager")
    assert [r.batch_size for r in receipts] == [1, 1, 2, 2, 2, 1, 1, 1, 1]
    assert [r.step for r in receipts] == list(range(first_step, first_step + 9))
    assert watcher.log == ["serve", *map(str, range(first_step, first_step + 9))]
    assert {(r.execution, r.purpose, r.attribution) for r in receipts} == {("eager", "witness", "direct_submissions")}
    assert [[(s.layer, s.M) for s in r.kernels] for r in receipts[:3]] == [[(0, 5)], [(0, 9)], [(0, 2)]]


def test_requests_decoded_together_get_the_tokens_that_they_get_alone(
    loaded: tuple[Engine, list[Receipt], Watcher],
) -> None:
    """Neither the other request of a wave nor what a slot held before is seen."""
    engine, _, _ = loaded
    together = {c.request_id: c.token_ids for c in engine.serve(REQUESTS, ("eager",))}
    for one in REQUESTS:
        assert engine.serve([one], ("eager",))[0].token_ids == together[f"{one.request_id}@eager"]
    assert len(set(together.values())) == 3


def test_phases_before_serving_are_told_apart_in_order_times_and_purpose() -> None:
    """Warm-up forwards are receipts of purpose warmup, and each phase has its own seconds."""
    receipts: list[Receipt] = []
    watcher = Watcher()
    engine = Engine(CONFIG, DispatchRecorder("run", 0, receipts.append), watcher, TensorParallelGroup())
    engine.load()
    engine.warm_up()
    assert {r.purpose for r in receipts} == {"warmup"}
    assert [r.M for r in receipts] == [8, 1, 1]
    engine.capture([3], 1)
    engine.serve([request("a", 3)], ("eager",), purpose="performance")
    assert receipts[-1].purpose == "performance"
    assert [entry for entry in watcher.log if not entry.isdigit()] == ["load", "warm_up", "capture", "serve"]
    assert set(engine.wall_s) == {"load", "warm_up", "capture", "prefill", "decode"}
    assert all(seconds > 0 for seconds in engine.wall_s.values())
    engine.close()


class WatchedReadback(Readback):
    """Writes down which reads follow which submissions."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.log = log
        self.begun = 0

    def begin(self, numbers: torch.Tensor, settle: Callable[[list[list[int]]], list[int]]) -> Read:
        """Note the submission, and later the read."""
        number = self.begun
        self.begun += 1
        self.log.append(f"submit {number}")
        read = super().begin(numbers, settle)

        def noted() -> list[int]:
            self.log.append(f"read {number}")
            return read()

        return noted


def test_decode_is_submitted_one_step_ahead_of_its_tokens(
    loaded: tuple[Engine, list[Receipt], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill is read at once, each decode after the next one was submitted, and the last one at the end."""
    engine, receipts, _ = loaded
    log: list[str] = []
    monkeypatch.setattr(engine, "_readback", WatchedReadback(log))
    receipts.clear()
    (completion,) = engine.serve(REQUESTS[:1], ("eager",))
    assert log == [
        *("submit 0", "read 0", "submit 1", "submit 2", "read 1", "submit 3", "read 2", "read 3"),
    ]
    assert len(completion.token_ids) == len(receipts) == 4


def test_running_ahead_changes_no_token_and_no_receipt(
    loaded: tuple[Engine, list[Receipt], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two waves of unequal prompts, against reading each step's tokens before the next is submitted."""
    engine, receipts, _ = loaded

    def served() -> tuple[list[tuple[int, ...]], list[tuple[object, ...]]]:
        receipts.clear()
        tokens = [completion.token_ids for completion in engine.serve(REQUESTS, ("eager",))]
        return tokens, [(r.request_ids, r.execution, r.M, r.real_tokens, len(r.kernels)) for r in receipts]

    assert engine.run_ahead
    ahead = served()
    monkeypatch.setattr(engine, "run_ahead", False)
    assert served() == ahead


def test_ranks_that_disagree_end_the_run_one_step_later(
    loaded: tuple[Engine, list[Receipt], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second decode differs: the third is submitted already, on every rank alike, and no fourth is."""
    engine, receipts, _ = loaded
    receipts.clear()
    group = engine._group

    def compare(token_ids: torch.Tensor) -> torch.Tensor:
        other = token_ids + (len(receipts) == 3)
        return torch.stack([torch.maximum(token_ids, other), torch.maximum(-token_ids, -other)])

    monkeypatch.setattr(group, "compare", compare)
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, max_new_tokens=9))
    with pytest.raises(AlphaMoEError, match="ranks disagree"):
        engine.serve(REQUESTS[:1], ("eager",))
    assert len(receipts) == 4
    monkeypatch.undo()
    assert len(engine.serve(REQUESTS[:1], ("eager",))[0].token_ids) == 4


def test_a_decode_goes_on_only_from_the_inputs_that_hold_its_tokens(
    loaded: tuple[Engine, list[Receipt], Watcher],
) -> None:
    """After a prefill, or a decode of another size, there is nothing on the device to go on from."""
    engine, _, _ = loaded
    engine.serve(REQUESTS[:1], ("eager",))
    with pytest.raises(AlphaMoEError, match="goes on from"):
        engine._submit(Batch("decode", ("a", "b"), None, [6, 10], [0, 1]), "witness")


def test_a_group_that_blocks_the_host_reads_first() -> None:
    """Under gloo, and where the configuration says so."""
    recorder = DispatchRecorder("run", 0)
    gloo = Engine(dataclasses.replace(CONFIG, world_size=2), recorder, NoObserver(), TensorParallelGroup(0, 2, "gloo"))
    asked = Engine(dataclasses.replace(CONFIG, run_ahead=False), recorder, NoObserver(), TensorParallelGroup())
    assert (gloo.run_ahead, asked.run_ahead) == (False, False)


class ReplayedForward:
    """Stands in for a graph: a replay computes the forward anew from the static inputs into the static outputs."""

    def __init__(self, engine: Engine, key: str, inputs: StaticInputs, run: Callable[[], Any]) -> None:
        self.output = run()
        self._run = run
        self.forward = CapturedForward(key, inputs, cast(Any, self), self.output)
        self._layers = [layer._moe for layer in engine._model.model.layers]  # type: ignore[union-attr]

    def replay(self) -> None:
        """Compute without the host-side submissions, which a real replay does not make."""
        held = [layer.recorder for layer in self._layers]
        for layer in self._layers:
            layer.recorder = None
        fresh = self._run()
        self.output.token_ids.copy_(fresh.token_ids)
        for layer, recorder in zip(self._layers, held, strict=True):
            layer.recorder = recorder


@pytest.fixture
def replaying() -> tuple[Engine, list[Receipt]]:
    """An engine with stand-in graphs for 16 prefill tokens and 4 decode rows, and none for a longer prompt."""
    receipts: list[Receipt] = []
    recorder = DispatchRecorder("run", 0, receipts.append)
    sizes = dataclasses.replace(CONFIG, cuda_graph_bs_decode=(4,), cuda_graph_bs_prefill=(16,))
    engine = Engine(sizes, recorder, NoObserver(), TensorParallelGroup())
    engine.load()
    engine.capture([5, 9, 20], batch_size=3)
    engine.config = dataclasses.replace(sizes, executions=EXECUTIONS)
    captured: dict[tuple[GraphKind, int], CapturedForward] = {}
    kinds: tuple[tuple[GraphKind, int], ...] = (("prefill", 16), ("decode", 4))
    with torch.inference_mode():
        for kind, rows in kinds:
            inputs = engine._inputs(kind, rows)
            with recorder.capture(kind):
                stand_in = ReplayedForward(engine, kind, inputs, lambda inputs=inputs: engine.forward(inputs))
            captured[kind, rows] = stand_in.forward
    engine._runner = cast(GraphRunner, type("Runner", (), {"captured": captured, "close": lambda self: None})())
    receipts.clear()
    return engine, receipts


def test_replayed_passes_are_padded_in_the_receipts_and_give_the_same_tokens(
    replaying: tuple[Engine, list[Receipt]],
) -> None:
    """The prompt of 20 fits no graph and runs eagerly in the graphs pass; decode replays 4 rows for 3 requests."""
    engine, receipts = replaying
    requests = [request("a", 5), request("b", 9), request("c", 20)]
    completions = engine.serve(requests, EXECUTIONS)
    assert [c.request_id for c in completions] == ["a@eager", "b@eager", "c@eager", "a@graphs", "b@graphs", "c@graphs"]
    assert [c.token_ids for c in completions[:3]] == [c.token_ids for c in completions[3:]]
    graphs = receipts[6:]
    assert [(r.execution, r.M, r.real_tokens) for r in graphs] == [
        ("prefill_graph_replay", 16, 5),
        ("prefill_graph_replay", 16, 9),
        ("eager", 20, 20),
        ("decode_graph_replay", 4, 3),
        ("decode_graph_replay", 4, 3),
        ("decode_graph_replay", 4, 3),
    ]
    assert graphs[3].graph_key == "decode"
    assert [(s.M, s.captured) for s in graphs[3].kernels] == [(4, True)]
    assert graphs[3].request_ids == ("a@graphs", "b@graphs", "c@graphs")


def test_only_the_replays_asked_for_are_made(replaying: tuple[Engine, list[Receipt]]) -> None:
    """With prefill graphs alone, decode runs eagerly in the same pass."""
    engine, receipts = replaying
    engine.serve([request("a", 5)], ("prefill_graph_replay",))
    assert [(r.execution, r.M) for r in receipts] == [("prefill_graph_replay", 16), *[("eager", 1)] * 3]
    engine.close()
    with pytest.raises(AlphaMoEError):
        engine.serve([request("a", 5)], ("eager",))


def test_a_prompt_that_outgrows_captured_graphs_is_refused(replaying: tuple[Engine, list[Receipt]]) -> None:
    """Growing the KV cache would leave the graphs with freed addresses."""
    engine, _ = replaying
    with pytest.raises(AlphaMoEError, match="does not fit the KV cache"):
        engine.serve([request("a", 500)], ("eager",))


def test_without_graphs_the_kv_cache_grows_with_the_prompt(loaded: tuple[Engine, list[Receipt], Watcher]) -> None:
    """A prompt longer than was announced is served all the same."""
    engine, _, _ = loaded
    assert len(engine.serve([request("a", 70)], ("eager",))[0].token_ids) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executions": EXECUTIONS}, "CUDA device"),
        ({"executions": ()}, "no execution"),
        ({"executions": ("turbo",)}, "turbo"),
        ({"model": "huge"}, "huge"),
        ({"dtype": "float16"}, "float16"),
        ({"max_new_tokens": 0}, "0 new tokens"),
        ({"layers": 0}, "0 layers"),
        ({"world_size": 3}, "3 ranks"),
        ({"cuda_graph_bs_decode": (0,)}, "--cuda-graph-bs-decode"),
        ({"inject_fault": "fallback:rank=1"}, "rank 1"),
        ({"inject_fault": "meteor"}, "meteor"),
        ({"inject_fault": "fallback:rank=0", "moe_runner_backend": "triton"}, "nothing to fall back"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_allocated(change: dict[str, Any], message: str) -> None:
    """One message each, as a usage error."""
    with pytest.raises(UsageError, match=message):
        Engine(
            dataclasses.replace(CONFIG, **change),
            DispatchRecorder("run", 0),
            NoObserver(),
            TensorParallelGroup(0, change.get("world_size", 1), "gloo"),
        )


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "no request"),
        ([Request("a", ())], "empty"),
        ([Request("a", (32768,))], "vocabulary"),
        ([Request("a", (-1,))], "vocabulary"),
        ([request("a", 3), request("a", 4)], "same id"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_refused(
    loaded: tuple[Engine, list[Receipt], Watcher], requests: list[Request], message: str
) -> None:
    """A wrong token would be a device-side assertion on a GPU."""
    with pytest.raises(UsageError, match=message):
        loaded[0].serve(requests, ("eager",))


def test_serving_an_execution_that_was_not_prepared_is_refused(
    loaded: tuple[Engine, list[Receipt], Watcher],
) -> None:
    """It would run eagerly under the name of graphs."""
    with pytest.raises(UsageError, match="decode_graph_replay"):
        loaded[0].serve([request("a", 3)], ("decode_graph_replay",))


@pytest.mark.parametrize(("rank", "name"), [(0, "flashinfer_alphamoe"), (1, "triton")])
def test_an_injected_fallback_gives_that_rank_the_stock_experts(rank: int, name: str) -> None:
    """Only the named rank falls back, and what it submits says so."""
    config = dataclasses.replace(CONFIG, rank=rank, world_size=2, inject_fault="fallback:rank=1")
    engine = Engine(config, DispatchRecorder("run", rank), NoObserver(), TensorParallelGroup(rank, 2, "gloo"))
    engine.load()
    experts = engine._model.model.layers[0]._moe.experts  # type: ignore[union-attr]
    assert experts.name == name
    assert ("fused_moe_kernel" in {s.symbol for s in experts.submissions(1)}) == (name == "triton")


def test_no_fault_is_no_fault() -> None:
    """The option left out injects nothing."""
    assert parse_fault(None, 4) is None


@pytest.mark.parametrize(("requests", "sizes"), [(1, (1,)), (4, (2, 2)), (5, (2, 2, 1))])
def test_waves_fill_the_slots_and_the_last_takes_the_rest(requests: int, sizes: tuple[int, ...]) -> None:
    """Two slots."""
    assert wave_sizes(requests, 2) == sizes
