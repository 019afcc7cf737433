"""Whether what a capture says of itself can be: its numbers lie in bounds, and those of our kernels fit their tensors.

A report's scope is a sentence of these labels, so a label that its tensors contradict is damage. No torch: descriptions
of tensors are compared, and every tensor is proven to be of its description when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alphamoe_sanitizer_replays.captures.records import Capture, GeometryRecord

SCALE_GROUP = 128
"""Values that share one scale, in both directions of a weight."""
_COUNT = 1 << 40
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "rank": (0, 1 << 20),
    "world_size": (1, 1 << 20),
    "layer": (0, 1 << 16),
    "M": (0, 1 << 31),
    "step": (0, _COUNT),
    "call": (0, _COUNT),
    "real_tokens": (0, 1 << 31),
    "batch_size": (0, 1 << 31),
    "sm_count": (1, 1 << 16),
    "bytes": (0, 1 << 50),
}
"""Least and most of each number of a capture; null is always allowed where the field has it."""
_PARTS: Mapping[str, tuple[str, ...]] = {
    "alphamoe_w8a8": ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"),
    "triton_stock": ("gate_up", "gate_up_scale", "down", "down_scale"),
}
"""The names that the plug-ins of our own layers give to gate and up, their scales, down, and its scales."""


def label_problems(capture: Capture) -> list[str]:
    """Say what cannot be, one phrase each, the first first."""
    told = [*_out_of_bounds(capture)]
    if capture.world_size is not None and capture.rank >= capture.world_size:
        told.append(f"it says rank {capture.rank} of {capture.world_size} ranks")
    if capture.weights_from is not None and not 0 <= (capture.layer or 0) < capture.weights_from.layers:
        told.append(f"it says layer {capture.layer} of a model of {capture.weights_from.layers}")
    if capture.plugin in _PARTS:
        told += _of_our_layers(capture, _PARTS[capture.plugin])
    return told


def _out_of_bounds(capture: Capture) -> Iterator[str]:
    numbers = {name: (getattr(capture, name), *bounds) for name, bounds in _BOUNDS.items()}
    for part in (capture.geometry, capture.launch):
        for field in part.__struct_fields__ if part is not None else ():
            value = getattr(part, field)
            for index, number in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(number, int):
                    name = f"{field}[{index}]" if isinstance(value, tuple) else field
                    numbers[name] = (number, 0 if field == "dynamic_smem_bytes" else 1, 1 << 31)
    for name, (number, least, most) in numbers.items():
        if number is not None and not least <= number <= most:
            yield f"it says {name} {number}"


def _of_our_layers(capture: Capture, weights: tuple[str, ...]) -> Iterator[str]:
    """Compare M, geometry and arguments with the shapes of a dispatch of our own layers."""
    own, M = capture.geometry, capture.M
    if not capture.symbols:
        yield f"it names no kernel, and the plug-in {capture.plugin} has one"
    if own is None or capture.world_size is None or capture.layer is None:
        yield "it does not say its layer, world size and geometry"
        return
    if M < 1:
        yield f"it says M {M}"
    for name in ("top_k", "block_m"):
        if capture.arguments.get(name) != getattr(own, name):
            yield f"its {name} is {getattr(own, name)}, and the call's argument {capture.arguments.get(name)!r}"
    found = {info.name: info.shape for info in capture.tensors}
    blocks = found.get("expert_ids", (0,))[:1] or (0,)
    for name, shape in _shapes(own, M, blocks[0], weights).items():
        if name not in found:
            yield f"it has no {name}"
        elif found[name] != shape:
            says = f"M{M}, H{own.H}, I{own.I_local}, E{own.E}, k{own.top_k}, BM{own.block_m}"
            yield f"{name} is {list(found[name])}, and {list(shape)} by what it says of itself ({says})"


def _shapes(own: GeometryRecord, M: int, blocks: int, weights: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    k_blocks, slices = -(-own.H // SCALE_GROUP), -(-own.I_local // SCALE_GROUP)
    gate_up, gate_up_scale, down, down_scale = weights
    return {
        "hidden_states": (M, own.H),
        "hidden_states_scale": (M, k_blocks),
        "topk_weights": (M, own.top_k),
        "topk_ids": (M, own.top_k),
        "expert_ids": (blocks,),
        "sorted_token_ids": (blocks * own.block_m,),
        "num_tokens_post_padded": (1,),
        gate_up: (own.E, 2 * own.I_local, own.H),
        gate_up_scale: (own.E, 2 * slices, k_blocks),
        down: (own.E, own.H, own.I_local),
        down_scale: (own.E, k_blocks, slices),
        "out": (M, own.H),
    }
