"""Bring a capture's inputs together in the parent: what is stored is read, what came from a seed is drawn again.

Every tensor is proven by the hash in the capture before a replay may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from alphamoe_sanitizer_replays.captures.store import StoredCapture
from alphamoe_sanitizer_replays.captures.tensors import tensor_sha256
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

    from alphamoe_backend.quantization.fp8 import ExpertWeights

_STORE = "record again with --capture-weights"
# Only the latest: captures come sorted by rank and layer, and one layer's experts are hundreds of megabytes.
_drawn: dict[object, dict[str, Tensor]] = {}
_hashes: dict[object, dict[str, str]] = {}
_lock = threading.Lock()


def load_stored(stored: StoredCapture) -> dict[str, Tensor]:
    """Read every input and weight of which the capture holds more than the hash.

    Raises:
        EvidenceError: a file is missing, cut or changed.
    """
    return {
        info.name: stored.load(info.name)
        for info in stored.capture.tensors
        if info.role != "output" and info.file is not None
    }


def materialise_experts(
    stored: StoredCapture, names: Callable[[ExpertWeights], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Give every input and weight of a captured dispatch of one of our layers, on the CPU.

    Args:
        stored: the capture.
        names: lays canonical weights out as the kernel reads them, by the capture's names.

    Raises:
        EvidenceError: a tensor is missing, or the weights drawn again are not the captured ones.
    """
    tensors = load_stored(stored)
    lacking = [info for info in stored.capture.tensors if info.role != "output" and info.name not in tensors]
    if not lacking:
        return tensors
    if other := next((info.name for info in lacking if info.role != "weight"), None):
        raise EvidenceError(f"{stored.path}: of the input {other} only the hash was kept", "record again")
    with _lock:
        key = _draw(stored, names)
        for info in lacking:
            found = _hashes[key].get(info.name)
            if found != info.sha256:
                raise EvidenceError(
                    f"{stored.path}: {info.name} drawn again has the hash {str(found)[:12]}, "
                    f"the captured one {info.sha256[:12]}: the seed, the kind of device or torch differ",
                    _STORE,
                )
            tensors[info.name] = _drawn[key][info.name]
    return tensors


def _draw(stored: StoredCapture, names: Callable[[ExpertWeights], dict[str, Tensor]]) -> object:
    """Draw one layer's experts, unless they are the ones drawn last, and give their key."""
    capture, origin = stored.capture, stored.capture.weights_from
    if origin is None or capture.layer is None or capture.world_size is None:
        raise EvidenceError(f"{stored.path}: its weights are not stored, and no seed is known", _STORE)
    key = (origin, capture.layer, capture.rank, capture.world_size, capture.plugin)
    if key in _drawn:
        return key
    import torch

    from alphamoe_backend.geometry import preset
    from alphamoe_backend.weights import SeededWeights

    if origin.device_kind == "cuda" and not torch.cuda.is_available():
        raise EvidenceError(
            f"{stored.path}: its weights were drawn on a GPU, and a CPU draws others from the same seed",
            f"replay on a machine with a GPU, or {_STORE}",
        )
    dtype = getattr(torch, origin.dtype, None)
    if not isinstance(dtype, torch.dtype) or origin.device_kind not in ("cuda", "cpu"):
        raise EvidenceError(f"{stored.path}: weights of {origin.dtype} on {origin.device_kind!r} are not known", _STORE)
    try:
        weights = SeededWeights(
            preset(origin.model),
            layers=origin.layers,
            seed=origin.seed,
            dtype=dtype,
            device=torch.device(origin.device_kind),
        ).experts(capture.layer, capture.rank, capture.world_size)
    except AlphaMoEError as error:
        raise EvidenceError(f"{stored.path}: its weights cannot be drawn again: {error}", _STORE) from error
    _drawn.clear()
    _hashes.clear()
    _drawn[key] = {name: tensor.cpu() for name, tensor in names(weights).items()}
    _hashes[key] = {name: tensor_sha256(tensor) for name, tensor in _drawn[key].items()}
    return key
