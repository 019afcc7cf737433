"""The hand-over of real dispatches: in eager forwards only, of what was wanted, with the layer's own tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alphamoe_backend.dispatch import DispatchRecorder, graph_key
from alphamoe_backend.experts.factory import create_experts
from alphamoe_backend.geometry import preset
from alphamoe_backend.handover import DispatchHandover, OpenForward
from alphamoe_backend.layer import AlphaMoELayer
from alphamoe_backend.weights import SeededWeights
from alphamoe_tracers.records import Receipt

TINY = preset("tiny")
KEY = graph_key("flashinfer_alphamoe#0", "decode_graph_replay", 2, 2)


class Taker:
    """Wants dispatches of chosen M and keeps what it got."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.asked: list[tuple[int, int, int]] = []
        self.taken: list[DispatchHandover] = []

    def wants(self, layer: int, M: int, forward: OpenForward) -> bool:
        """Want the chosen M."""
        self.asked.append((layer, M, forward.step))
        return M in self.sizes

    def take(self, handover: DispatchHandover) -> None:
        """Keep it."""
        self.taken.append(handover)


@pytest.fixture
def parts() -> tuple[AlphaMoELayer, DispatchRecorder, Taker, list[Receipt]]:
    """A layer whose recorder hands dispatches of M = 2 to a taker."""
    taker = Taker(2)
    receipts: list[Receipt] = []
    recorder = DispatchRecorder("run", 1, receipts.append, taker)
    weights = SeededWeights(TINY, layers=1, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    experts = create_experts("flashinfer_alphamoe", TINY.moe.local(4), weights.experts(0, 1, 4))
    router = torch.randn((TINY.moe.E, TINY.moe.H), generator=torch.Generator().manual_seed(1)) / 16
    return AlphaMoELayer(0, router, experts, recorder=recorder), recorder, taker, receipts


def hidden(M: int) -> torch.Tensor:
    """Give seeded hidden states."""
    return torch.randn((M, TINY.moe.H), generator=torch.Generator().manual_seed(M))


def eager(step: int, M: int, **changes: Any) -> dict[str, Any]:
    """Give the arguments of an eager forward."""
    return {
        "step": step,
        "purpose": "witness",
        "request_ids": ("r",),
        "forward_mode": "DECODE",
        "execution": "eager",
        "M": M,
        "real_tokens": M,
        "batch_size": M,
    } | changes


def test_a_wanted_dispatch_is_handed_over_with_its_forward_and_the_tensors_that_ran(
    parts: tuple[AlphaMoELayer, DispatchRecorder, Taker, list[Receipt]],
) -> None:
    """The inputs that are handed over give the output that is handed over, and the forward is the receipt's."""
    layer, recorder, taker, receipts = parts
    with recorder.forward(**eager(7, 2)):
        out = layer(hidden(2))
    (taken,) = taker.taken
    assert (taken.layer, taken.M, taken.forward.step, taken.forward.request_ids) == (0, 2, 7, ("r",))
    assert (taken.forward.forward_mode, taken.forward.purpose, taken.forward.execution) == (
        receipts[0].forward_mode,
        receipts[0].purpose,
        receipts[0].execution,
    )
    assert torch.equal(taken.output, out)
    again = layer.experts.run(taken.q, taken.q_scale, taken.plan, taken.topk_weights, torch.float32)
    assert torch.equal(again, out)
    assert torch.equal(layer.experts.plan(taken.topk_ids).expert_ids, taken.plan.expert_ids)


def test_what_is_not_wanted_is_asked_for_and_not_handed_over(
    parts: tuple[AlphaMoELayer, DispatchRecorder, Taker, list[Receipt]],
) -> None:
    """Another M is offered and left."""
    layer, recorder, taker, _ = parts
    with recorder.forward(**eager(3, 5)):
        layer(hidden(5))
    assert taker.asked == [(0, 5, 3)]
    assert taker.taken == []


def test_nothing_is_offered_while_a_graph_is_captured_or_replayed_or_outside_any_forward(
    parts: tuple[AlphaMoELayer, DispatchRecorder, Taker, list[Receipt]],
) -> None:
    """A capture has run nothing yet, a replay runs no layer, and what no receipt describes is no evidence."""
    layer, recorder, taker, receipts = parts
    with recorder.capture(KEY):
        layer(hidden(2))
    with recorder.forward(**eager(4, 2, execution="decode_graph_replay", graph_key=KEY)):
        assert recorder.open_forward is None
    layer(hidden(2))
    assert len(receipts) == 1
    assert (taker.asked, taker.taken) == ([], [])


def test_a_failed_forward_leaves_no_open_one_behind(
    parts: tuple[AlphaMoELayer, DispatchRecorder, Taker, list[Receipt]],
) -> None:
    """After an exception inside a forward, nothing is offered until the next one opens."""
    layer, recorder, taker, _ = parts
    with pytest.raises(ZeroDivisionError), recorder.forward(**eager(1, 2)):
        raise ZeroDivisionError
    layer(hidden(2))
    assert taker.asked == []
