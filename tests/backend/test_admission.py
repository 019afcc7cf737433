"""What the fused experts refuse, each with its own message."""

from dataclasses import replace
from typing import Any

import pytest

from alphamoe_backend.admission import AdmissionRequest, check_admission, describe_validated, is_validated
from alphamoe_backend.geometry import LocalGeometry, MoEGeometry, preset
from alphamoe_tracers.errors import UsageError

GOOD = AdmissionRequest(geometry=preset("qwen3-next-80b").moe, world_size=4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["tiny", "qwen3-next-80b"])
def test_fp8_presets_are_admitted(name: str, world_size: int) -> None:
    """The FP8 presets are admitted at one, two and four ranks."""
    check_admission(AdmissionRequest(geometry=preset(name).moe, world_size=world_size))


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"ep_size": 2}, "expert parallelism of 2 ranks"),
    ({"all_to_all_backend": "deepep"}, "all-to-all backend 'deepep'"),
    ({"torch_compile": True}, r"torch\.compile"),
    ({"speculative_decoding": True}, "speculative decoding"),
    ({"fused_shared_experts": 1}, "1 shared experts fused"),
    ({"router_only": True}, "SGLANG_FLASHINFER_ALPHAMOE_ROUTER_ONLY"),
    ({"geometry": preset("glm-5.2").moe}, "NVFP4 experts are not supported: their kernels come in a later release"),
    ({"hidden_dtype": "float16"}, "hidden states of float16"),
    ({"hidden_dtype": "float32"}, "hidden states of float32"),
    ({"weight_dtype": "bfloat16"}, "expert weights of bfloat16"),
    ({"weight_block_shape": (64, 64)}, "weight scales by 64 x 64 blocks"),
    ({"weight_block_shape": None}, "weight scales by tensor"),
    ({"activation": "gelu"}, "activation 'gelu'"),
    ({"gated": False}, "without a gate"),
    ({"gate_limit": 7.0}, "clamp"),
    ({"bias": True}, "with a bias"),
    ({"router_weight_on_input": True}, "applied to the input"),
    ({"no_combine": True}, "uncombined"),
    ({"geometry": MoEGeometry(E=8, H=200, I=256, top_k=2), "world_size": 1}, "hidden size of 200"),
    ({"geometry": MoEGeometry(E=8, H=256, I=200, top_k=2), "world_size": 1}, "intermediate size of 200"),
    ({"geometry": MoEGeometry(E=32, H=256, I=256, top_k=17), "world_size": 1}, "top-k 17 is not supported"),
    ({"geometry": MoEGeometry(E=4, H=256, I=256, top_k=5), "world_size": 1}, "top-k 5 exceeds the 4 experts"),
    ({"geometry": MoEGeometry(E=8, H=256, I=256, top_k=2, block_m=16), "world_size": 1}, "block_m of 16"),
    ({"world_size": 3}, "cannot be cut over 3 ranks"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    """Each unsupported setting alone is refused with a message that names it and a hint."""
    with pytest.raises(UsageError, match=message) as refusal:
        check_admission(replace(GOOD, **change))
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)


def test_a_cpu_may_compute_in_float32() -> None:
    """The torch reference on a CPU accepts float32 hidden states, which a GPU refuses."""
    check_admission(replace(GOOD, hidden_dtype="float32", device="cpu"))


def test_admitted_and_validated_are_told_apart() -> None:
    """The four-rank slice of Qwen3-Next is validated; the tiny one is admitted and not validated."""
    assert is_validated(LocalGeometry(E=512, H=2048, I_local=128, top_k=10))
    assert not is_validated(preset("tiny").moe.local(1))
    assert "E512 H2048 I_local 128" in describe_validated()
