"""The launch rule gives one launch for a geometry and an M, and refuses what the kernel was not written for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.kernels.launch import (
    MAX_H,
    RESERVED_SMEM_BYTES,
    SM_SMEM_BYTES,
    check_geometry,
    choose_variant,
    launch_shape,
    plan_blocks,
    variant,
    variants,
)
from alphamoe_backend.routing import align_block_size
from alphamoe_tracers.errors import UsageError

QWEN = LocalGeometry(E=512, H=2048, I_local=128, top_k=10)
GLM = LocalGeometry(E=256, H=6144, I_local=512, top_k=8)
SMALL = LocalGeometry(E=16, H=256, I_local=128, top_k=4)


@pytest.mark.parametrize("geometry", [QWEN, GLM, SMALL])
@pytest.mark.parametrize("M", [1, 2, 7, 64, 130])
def test_the_rule_counts_the_blocks_that_the_plan_has(geometry: LocalGeometry, M: int) -> None:
    """The capacity that the grid is made from is the length of the plan's expert_ids."""
    generator = torch.Generator().manual_seed(M)
    ids = torch.rand((M, geometry.E), generator=generator).argsort(dim=-1)[:, : geometry.top_k].to(torch.int32)
    assert plan_blocks(geometry, M) == align_block_size(ids, geometry.block_m, geometry.E).expert_ids.numel()


@pytest.mark.parametrize("geometry", [QWEN, GLM, SMALL])
@pytest.mark.parametrize("M", [1, 8, 64, 512, 911, 4096, 16384])
def test_the_grid_covers_the_plan_in_whole_clusters(geometry: LocalGeometry, M: int) -> None:
    """Windows cover every block, the last one is not empty, and the grid is a multiple of the cluster."""
    shape = launch_shape(geometry, M)
    chosen = variant(shape.variant)
    windows, rest = divmod(shape.grid[0], shape.cluster[0])
    blocks = plan_blocks(geometry, M)
    assert rest == 0
    assert (windows - 1) * chosen.tokens < blocks * geometry.block_m <= windows * chosen.tokens
    assert shape.grid[1:] == (geometry.I_local // 128, 1)
    assert shape.block == (256, 1, 1)


@pytest.mark.parametrize("counts", [range(1, 33), range(40, 1025, 8)])
def test_the_grid_tells_token_counts_apart(counts: range) -> None:
    """No two small token counts, nor two capture sizes, share a launch shape, so a recorded launch tells its M."""
    shapes = [launch_shape(QWEN, M) for M in counts]
    assert len(set(shapes)) == len(shapes)


def test_a_wrong_token_count_of_a_large_batch_gives_another_grid() -> None:
    """Padding 911 tokens to 1024, or dropping a rank's worth of 4096, changes the launch shape."""
    assert launch_shape(QWEN, 911) != launch_shape(QWEN, 1024)
    assert launch_shape(QWEN, 4096) != launch_shape(QWEN, 4088)


@pytest.mark.parametrize("candidate", variants(), ids=lambda candidate: candidate.name)
def test_the_stated_ctas_fit_on_a_multiprocessor(candidate: object) -> None:
    """At the largest hidden size the shared memory of the stated CTAs, with what the system reserves, fits."""
    chosen = variant(candidate.name)  # type: ignore[attr-defined]
    assert chosen.ctas_per_sm * (chosen.dynamic_smem_bytes(MAX_H) + RESERVED_SMEM_BYTES) <= SM_SMEM_BYTES


@pytest.mark.parametrize("sm_count", [78, 132])
def test_every_variant_is_some_batch_s_choice(sm_count: int) -> None:
    """No variant is compiled for nothing, the narrowest window serves one token and the widest the largest batch."""
    chosen = [choose_variant(QWEN, M, sm_count) for M in range(1, 4097)]
    assert set(chosen) == set(variants())
    assert (chosen[0].tokens, chosen[-1].tokens) == (8, 64)


@pytest.mark.parametrize(
    ("M", "name"),
    [(1, "t8_c8"), (16, "t8_c8"), (32, "t16_c4"), (64, "t32_c2"), (128, "t32_c2"), (256, "t16_c4"), (512, "t64_w")],
)
def test_the_measured_crossings_are_the_rule(M: int, name: str) -> None:
    """On 132 multiprocessors each token count that was measured gets the variant that was fastest or near it."""
    assert launch_shape(QWEN, M, 132).variant == name


def test_fewer_multiprocessors_are_loaded_sooner() -> None:
    """The choice depends on the device: 32 tokens give 78 multiprocessors the load that 64 give 132."""
    assert launch_shape(QWEN, 32, 78).variant == launch_shape(QWEN, 64, 132).variant == "t32_c2"
    assert launch_shape(QWEN, 32, 132).variant != launch_shape(QWEN, 32, 78).variant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 16}, "block_m is 16"),
        ({"H": 200}, "H is 200"),
        ({"H": 8192}, "H is 8192"),
        ({"I_local": 64}, "I_local is 64"),
        ({"top_k": 17}, "top_k is 17"),
        ({"E": 1024}, "E is 1024"),
        ({"E": 4}, "E is 4"),
    ],
)
def test_a_geometry_outside_the_limits_is_refused_by_name(changes: dict[str, int], message: str) -> None:
    """Each limit has its own message."""
    with pytest.raises(UsageError, match=message):
        check_geometry(dataclasses.replace(QWEN, **changes))


def test_no_tokens_are_no_launch() -> None:
    """M = 0 has no launch shape."""
    with pytest.raises(UsageError, match="M=0"):
        launch_shape(QWEN, 0)
