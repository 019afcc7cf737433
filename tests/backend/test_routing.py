"""Softmax top-k and the block-aligned plan against a brute-force oracle in plain Python."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alphamoe_backend.routing import AlignedPlan, align_block_size, align_block_size_torch, plan_capacity, topk_softmax


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


INTERPRETED = """
import torch
from test_routing import check_plan
from alphamoe_backend.routing import AlignedPlan, plan_capacity, topk_softmax
from alphamoe_backend.routing_triton import align_block_size, topk_softmax as kernel

for M, E, top_k, block_m in ((1, 16, 4, 8), (9, 16, 4, 16), (64, 512, 10, 8), (150, 7, 3, 8)):
    logits = torch.randn((M, E), generator=torch.Generator().manual_seed(M))
    weights, ids = kernel(logits, top_k)
    expected, expected_ids = topk_softmax(logits, top_k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    capacity = plan_capacity(ids.numel(), block_m, E)
    check_plan(AlignedPlan(*align_block_size(ids, block_m, E, capacity)), ids, block_m, E)
one = torch.full((33, 2), 5, dtype=torch.int32)
check_plan(AlignedPlan(*align_block_size(one, 8, 16, plan_capacity(66, 8, 16))), one, 8, 16)
assert kernel(torch.zeros(1, 16), 4)[1].tolist() == [[0, 1, 2, 3]]
logits[3, 2] = float("nan")
weights, ids = kernel(logits, 3)
assert torch.isnan(weights[3]).all() and not torch.isnan(weights[:3]).any()
assert 0 <= ids.min() and ids.max() < 7
print("agree")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_routing_interpreted_on_a_cpu_gives_the_same_plan() -> None:
    """The two Triton kernels give torch's experts and the definition's plan; ties go to the lower expert, NaN shows."""
    # A process of its own: triton decides at import whether kernels are interpreted.
    paths = [os.path.dirname(__file__), *sys.path]  # noqa: PTH120
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agree"


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 7, 64, 911, 16384])
def test_the_gpu_routes_as_the_cpu(M: int) -> None:
    """Both GPU forms, Triton and torch, give the CPU's experts and plan, balanced and with all tokens in one expert."""
    logits = torch.randn((M, 512), generator=torch.Generator().manual_seed(M))
    weights, ids = topk_softmax(logits, 10)
    gpu_weights, gpu_ids = topk_softmax(logits.cuda(), 10)
    # Equal probabilities may be ordered otherwise; none is equal in this seeded draw but for rounding.
    assert (gpu_ids.cpu() == ids).float().mean() > 0.9999
    torch.testing.assert_close(gpu_weights.cpu(), weights, rtol=1e-4, atol=1e-6)
    for chosen in (ids, torch.full_like(ids, 77)):
        expected = align_block_size_torch(chosen, 8, 512)
        for plan in (align_block_size(chosen.cuda(), 8, 512), align_block_size_torch(chosen.cuda(), 8, 512)):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(plan, expected, strict=True))


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
