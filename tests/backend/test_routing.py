"""Softmax top-k and the block-aligned plan against a brute-force oracle in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alphamoe_backend.routing import AlignedPlan, align_block_size, plan_capacity, topk_softmax


def brute_force_plan(topk_ids: list[list[int]], block_m: int, E: int) -> tuple[list[int], list[int], int]:
    """Build the plan as its definition reads: sorted_token_ids in use, expert_ids in use, rows in use."""
    top_k = len(topk_ids[0])
    sentinel = len(topk_ids) * top_k
    rows: list[int] = []
    experts: list[int] = []
    for expert in range(E):
        mine = [t * top_k + r for t, ids in enumerate(topk_ids) for r, chosen in enumerate(ids) if chosen == expert]
        mine += [sentinel] * (-len(mine) % block_m)
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts, len(rows)


def check_plan(plan: AlignedPlan, topk_ids: Tensor, block_m: int, E: int) -> None:
    """Compare the whole plan, tail included, with the brute-force one."""
    rows, experts, used = brute_force_plan(topk_ids.tolist(), block_m, E)
    capacity = plan_capacity(topk_ids.numel(), block_m, E)
    assert plan.num_tokens_post_padded.tolist() == [used]
    assert plan.sorted_token_ids.tolist() == rows + [topk_ids.numel()] * (capacity * block_m - used)
    assert plan.expert_ids.tolist() == experts + [-1] * (capacity - len(experts))
    assert all(part.dtype == torch.int32 for part in plan)


@pytest.mark.parametrize("block_m", [8, 16, 64])
@pytest.mark.parametrize(("M", "E", "top_k"), [(1, 16, 4), (2, 4, 4), (7, 16, 4), (64, 16, 4), (9, 512, 10)])
def test_the_plan_is_the_brute_force_plan(M: int, E: int, top_k: int, block_m: int) -> None:
    """Random routings give exactly the plan of the definition: experts and tokens ascending, sentinel, tail of -1."""
    generator = torch.Generator().manual_seed(M * 1000 + E)
    ids = torch.rand((M, E), generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)
    check_plan(align_block_size(ids, block_m, E), ids, block_m, E)


@pytest.mark.parametrize("expert", [0, 5, 15])
def test_all_tokens_to_one_expert(expert: int) -> None:
    """A routing that fills one expert only leaves the others without a block."""
    ids = torch.full((33, 2), expert, dtype=torch.int32)
    check_plan(align_block_size(ids, 8, 16), ids, 8, 16)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_routing_exceeds_the_capacity(data: st.DataObject) -> None:
    """Any routing, repeated experts in a token included, fits the static capacity and matches the definition."""
    E = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, E))
    block_m = data.draw(st.sampled_from([1, 2, 8]))
    token = st.lists(st.integers(0, E - 1), min_size=top_k, max_size=top_k)
    ids = torch.tensor(data.draw(st.lists(token, min_size=1, max_size=12)), dtype=torch.int32)
    check_plan(align_block_size(ids, block_m, E), ids, block_m, E)


def test_the_capacity_is_reached() -> None:
    """The capacity is tight: one token for each of E - 1 experts and the rest to the last needs every block."""
    E, block_m = 4, 8
    ids = torch.tensor([[0], [1], [2]] + [[3]] * 17, dtype=torch.int32)
    plan = align_block_size(ids, block_m, E)
    assert int(plan.num_tokens_post_padded[0]) // block_m == plan_capacity(20, block_m, E) == 6


def test_routing_weights_are_the_renormalised_softmax_of_the_best() -> None:
    """Weights are the softmax over all experts, cut to the top-k and renormalised, by falling weight."""
    logits = torch.randn((17, 16), generator=torch.Generator().manual_seed(3))
    weights, ids = topk_softmax(logits, 4)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    for row, (w, i) in enumerate(zip(weights, ids, strict=True)):
        best = sorted(range(16), key=lambda expert: -logits[row, expert].item())[:4]
        assert i.tolist() == best
        exponents = torch.exp(logits[row, best].double())
        torch.testing.assert_close(w.double(), exponents / exponents.sum(), rtol=1e-6, atol=1e-7)


def test_routing_keeps_float32_for_bfloat16_logits() -> None:
    """bfloat16 logits are widened before the softmax, so that weights sum to 1 in float32."""
    logits = torch.randn((8, 512), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    weights, _ = topk_softmax(logits, 10)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(8), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 7, 64, 911])
def test_routing_is_captured_and_replayed_on_new_logits(M: int) -> None:
    """Routing has no host synchronisation: a captured graph gives the right plan for logits written after capture."""
    E, top_k = 512, 10
    logits = torch.randn((M, E), device="cuda")
    align_block_size(topk_softmax(logits, top_k)[1], 8, E)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = topk_softmax(logits, top_k)
        plan = align_block_size(ids, 8, E)
    logits.copy_(torch.randn((M, E), generator=torch.Generator().manual_seed(M)))
    graph.replay()
    check_plan(AlignedPlan(*(part.cpu() for part in plan)), ids.cpu(), 8, E)
