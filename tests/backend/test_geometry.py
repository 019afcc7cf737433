"""Shapes of experts and models, and the rank counts they can be cut into."""

import os
import subprocess
import sys

import pytest

from alphamoe_backend.geometry import PRESETS, LocalGeometry, MoEGeometry, preset
from alphamoe_tracers.errors import UsageError


@pytest.mark.parametrize(("world_size", "I_local"), [(1, 512), (2, 256), (4, 128)])
def test_qwen3_next_is_cut_as_the_served_model_is(world_size: int, I_local: int) -> None:
    """Qwen3-Next's experts keep 512, 256 and 128 columns at one, two and four ranks."""
    local = preset("qwen3-next-80b").moe.local(world_size)
    assert local == LocalGeometry(E=512, H=2048, I_local=I_local, top_k=10, block_m=8)
    assert local.I_local * 2 == local.N


def test_glm_keeps_512_columns_at_four_ranks() -> None:
    """GLM-5.2's experts keep 512 columns a rank at four ranks."""
    assert preset("glm-5.2").moe.local(4) == LocalGeometry(E=256, H=6144, I_local=512, top_k=8)


@pytest.mark.parametrize("world_size", [0, -1, 3, 8])
def test_a_slice_that_is_no_multiple_of_128_is_refused_with_the_sizes_that_work(world_size: int) -> None:
    """The hint of a refused cut names the rank counts that work."""
    with pytest.raises(UsageError) as refusal:
        preset("qwen3-next-80b").moe.local(world_size)
    assert refusal.value.hint == "use --ranks with one of: 1, 2, 4"


def test_an_intermediate_size_below_a_group_fits_nobody() -> None:
    """An intermediate size of 64 has no cut at all, and the hint says so."""
    with pytest.raises(UsageError) as refusal:
        MoEGeometry(E=4, H=128, I=64, top_k=2).local(1)
    assert refusal.value.hint.endswith("none")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_can_be_cut_into_each_size_that_it_lists(name: str) -> None:
    """What world_sizes lists, check_world_size and local accept, and one and four ranks are among it."""
    model = preset(name)
    assert {1, 2, 4} <= set(model.world_sizes())
    for size in model.world_sizes():
        model.check_world_size(size)
        assert model.moe.local(size).I_local * size == model.moe.I


def test_heads_limit_the_ranks_too() -> None:
    """A model whose heads cannot be shared out is refused although its experts could be cut."""
    glm = preset("glm-5.2")
    assert 16 in glm.moe.world_sizes()
    with pytest.raises(UsageError, match=r"glm-5\.2 cannot be cut over 5 ranks"):
        glm.check_world_size(5)


def test_an_unknown_preset_names_the_known_ones() -> None:
    """A mistyped model is one line with the known names."""
    with pytest.raises(UsageError) as refusal:
        preset("qwen")
    assert "tiny" in refusal.value.hint
    assert "qwen3-next-80b" in refusal.value.hint


def test_shapes_and_symbols_are_known_without_torch() -> None:
    """Geometry, admission, environment and the backend registry import no torch."""
    modules = ("geometry", "admission", "environ", "experts.registry")
    lines = [f"import alphamoe_backend.{name}" for name in modules]
    code = "; ".join(["import sys", *lines, "sys.exit('torch' in sys.modules)"])
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False
        ).returncode
        == 0
    )
