"""What a capture says about itself: ``capture.json``, beside the safetensors files that hold its tensors.

A capture is one dispatch's real inputs and its output. Its directory holds ``capture.json`` and
``tensors.safetensors``; weights that are stored lie in a file of their own, which captures of the same layer and rank
share. Never pickle.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

CAPTURE_SCHEMA = "alphamoe-trace-capture-v1"

TensorRole = Literal["input", "weight", "output"]


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a capture."""

    name: str
    """Key in its safetensors file."""
    role: TensorRole
    """``output`` is what the dispatch left behind: a result, or an argument that it wrote into."""
    dtype: str
    """torch's name without the module: ``float8_e4m3fn``."""
    shape: tuple[int, ...]
    sha256: str
    """Of the contiguous bytes in C order."""
    file: str | None
    """Path relative to the capture's directory; null where only the hash is kept and the tensor is made again."""


class SeededWeightsFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How weights that are not stored are drawn again: the arguments of the backend's ``SeededWeights``."""

    model: str
    layers: int
    seed: int
    dtype: str
    device_kind: str
    """``cuda`` or ``cpu``: their generators differ, so weights belong to the kind of device that drew them."""


class LaunchInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launch as the captured process's rule gave it."""

    variant: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int


class GeometryRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shapes of one rank's routed experts."""

    E: int
    H: int
    I_local: int
    top_k: int
    block_m: int


class CapturedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Which call it was, and what it launched: what a report repeats of a capture."""

    plugin: str
    """Name of the replay plug-in that can launch it again: ``alphamoe_w8a8``, ``callable``, ``torch_op``, ..."""
    symbols: tuple[str, ...]
    """Base names of the kernels that the replay launches and the tool must watch. Empty: the plug-in does not know."""
    rank: int
    world_size: int | None = None
    layer: int | None = None
    M: int
    """Rows of the dispatch, padding included."""
    execution: Literal["eager"] = "eager"
    forward_mode: str | None = None
    step: int | None = None
    callable: str | None = None
    """Import path ``module:name`` or torch operator ``namespace::name`` that was wrapped; null for our own layers."""
    geometry: GeometryRecord | None = None
    launch: LaunchInfo | None = None
    bytes: int = 0
    """Of the tensors that are stored, the shared weight file included."""

    @property
    def label(self) -> str:
        """The call in a few words: ``rank 0 layer 0 M 1``."""
        where = f"layer {self.layer}" if self.layer is not None else (self.callable or self.plugin)
        return f"rank {self.rank} {where} M {self.M}"


class Capture(CapturedCall, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One captured dispatch."""

    schema: str = CAPTURE_SCHEMA
    run_id: str | None
    rank_source: str
    """Where the rank comes from: ``engine``, ``torch.distributed``, ``RANK`` (the variable's name), ``none``."""
    purpose: str | None = None
    request_ids: tuple[str, ...] = ()
    real_tokens: int | None = None
    batch_size: int | None = None
    call: int = 0
    """Number of this call among those of its callable, rank and M."""
    source_sha256: str | None = None
    """Of the kernel's CUDA source, headers in place; null where the plug-in does not know it."""
    cubin_sha256: str | None = None
    arguments: dict[str, Any] = {}
    """Plain values of the call by name. A generic call holds ``args`` and ``kwargs`` trees (see ``call_tree.py``)."""
    weights_from: SeededWeightsFrom | None = None
    tensors: tuple[TensorInfo, ...]
    gpu_name: str | None
    compute_capability: str | None
    sm_count: int | None = None
    versions: dict[str, str]
    created: str
    """UTC, ISO 8601."""
    wall_s: dict[str, float] = {}
    """``copy`` (device to host) and ``write``, seconds."""
    notes: tuple[str, ...] = ()

    def tensor(self, name: str) -> TensorInfo:
        """Give one tensor's description; raises KeyError when there is none of that name."""
        for info in self.tensors:
            if info.name == name:
                return info
        raise KeyError(name)
