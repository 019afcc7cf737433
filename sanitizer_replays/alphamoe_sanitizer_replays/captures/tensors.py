"""Tensors as the bytes of a capture: hashed, counted and saved, whatever their dtype. Never pickle."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_sanitizer_replays.captures.records import TensorInfo, TensorRole

if TYPE_CHECKING:
    from torch import Tensor

# Everything else is stored as plain bytes; capture.json has the dtype and shape.
NATIVE_DTYPES = frozenset(
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    ]
)


def bytes_of(tensors: Mapping[str, Tensor | tuple[TensorRole, Tensor]]) -> int:
    """Return the bytes that the tensors of a capture take on disk, headers left out."""
    values = [value[1] if isinstance(value, tuple) else value for value in tensors.values()]
    return sum(value.numel() * value.element_size() for value in values)


def on_host(tensor: Tensor) -> Tensor:
    """Give a tensor on the CPU, contiguous, without gradients or lazy conjugation; itself where it is that."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def typed(tensor: Tensor, info: TensorInfo) -> Tensor:
    """Give what :func:`save_tensors` wrote as plain bytes its recorded dtype and shape; any other tensor as it is."""
    import torch

    dtype = getattr(torch, info.dtype, None)
    if info.dtype in NATIVE_DTYPES or tensor.dtype != torch.uint8 or not isinstance(dtype, torch.dtype):
        return tensor
    fits = tensor.dim() == 1 and tensor.numel() == dtype.itemsize * math.prod(info.shape)
    return tensor.view(dtype).reshape(info.shape) if fits else tensor


def tensor_sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in C order, in hexadecimal; the tensor may be on a device."""
    return hashlib.sha256(raw_bytes(on_host(tensor)).numpy().data).hexdigest()


def raw_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes, uint8 [n]: any dtype, and a NaN is equal to itself."""
    import torch

    flat = tensor.reshape(-1)
    # A tensor of one element is contiguous whatever its stride is; a view as bytes needs 1.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, whole or not at all.

    Tensors are on the host. Those that share memory are told apart first, as the format asks; dtypes that it
    does not have are written as plain bytes.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        native = str(tensor.dtype).removeprefix("torch.") in NATIVE_DTYPES
        value = tensor.detach().contiguous()
        value = value if native else raw_bytes(value)
        place = value.untyped_storage().data_ptr()
        ready[name] = value.clone() if place in seen else value
        seen.add(place)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        save_file(ready, temporary)
        with Path(temporary).open("rb") as stream:
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        # safetensors tells a full disk in an exception of its own.
        if type(failure).__name__ == "SafetensorError":
            raise OSError(f"{path.name} could not be written: {failure}") from failure
        raise
