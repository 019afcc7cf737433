"""The arguments and results of a call as a JSON tree, with its tensors by name.

Plain values (null, booleans, text, integers of 63 bits, finite numbers) stand for themselves. Everything else is an
object with one key that says what it is: ``tensor``, ``list``, ``tuple``, ``size``, ``dict``, ``dtype``, ``device``,
``float`` (not finite) or ``int`` (wide). A value of any other type is refused with its type's name: a call that cannot
be made again whole is not captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alphamoe_tracers.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WIDE = 1 << 63
_MAX_DEPTH = 32


class RefusedValueError(UsageError):
    """A value of a call that a capture cannot hold; the message has its place and its type."""


@dataclass
class CallTree:
    """One call's arguments, or its result, taken apart."""

    tree: Any = None
    """Plain data, ready for JSON."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by name, not copied: ``args.0``, ``kwargs.x``, ``result``, ``result.1``. One that occurs twice has the
    name of its first place."""

    def shared(self) -> list[tuple[str, str]]:
        """List the pairs of names whose tensors are different views of one storage."""
        first: dict[int, str] = {}
        pairs = []
        for name, tensor in self.tensors.items():
            if tensor.numel() == 0:
                continue
            place = tensor.untyped_storage().data_ptr()
            if place in first:
                pairs.append((first[place], name))
            else:
                first[place] = name
        return pairs


def encode_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallTree, CallTree]:
    """Take the arguments of a call apart.

    Returns:
        The trees of ``args`` and ``kwargs``, which share one dictionary of tensors.

    Raises:
        RefusedValueError: an argument is of a type that no capture holds.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[Any, str] = {}
    positional = CallTree(_encode(tuple(args), "args", tensors, seen, 0), tensors)
    by_name = CallTree(_encode(dict(kwargs), "kwargs", tensors, seen, 0), tensors)
    return positional, by_name


def encode_result(result: Any, arguments: Mapping[str, Tensor]) -> CallTree:
    """Take the result of a call apart.

    Args:
        arguments: tensors of the call by name; a result that is one of them is given by that name.

    Returns:
        The tree; its tensors are only those that the call made.

    Raises:
        RefusedValueError: it holds a value of a type that no capture holds.
    """
    tensors: dict[str, Tensor] = {}
    seen = {_identity(tensor): name for name, tensor in arguments.items() if tensor.numel()}
    return CallTree(_encode(result, "result", tensors, seen, 0), tensors)


def decode(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Build the value of a tree again.

    Args:
        tree: what :func:`encode_call` or :func:`encode_result` gave, from JSON or not.
        tensors: by name, as they shall be used.
        device: what a captured device becomes, whatever its index was; null keeps it.

    Raises:
        EvidenceError: the tree is damaged, or a tensor of it is not there.
    """
    import torch

    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict) or not tree:
        raise EvidenceError(f"the call's tree holds {type(tree).__name__} where a value should be")
    builders: dict[str, Callable[[Any], Any]] = {
        "list": lambda items: [decode(item, tensors, device) for item in items],
        "tuple": lambda items: tuple(decode(item, tensors, device) for item in items),
        "size": torch.Size,
        "dict": lambda items: {key: decode(item, tensors, device) for key, item in items.items()},
        "dtype": lambda name: _dtype(str(name)),
        "device": lambda name: device if device is not None and name != "cpu" else torch.device(name),
        "float": float,
        "int": int,
    }
    if "tensor" in tree:
        name = tree["tensor"]
        if name not in tensors:
            raise EvidenceError(f"the call's tree names the tensor {name!r}, which is not there")
        return tensors[name]
    [kind] = list(tree) if len(tree) == 1 else [""]
    if kind not in builders:
        raise EvidenceError(f"the call's tree holds an unknown kind of value: {', '.join(map(str, tree))}"[:200])
    try:
        return builders[kind](tree[kind])
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise EvidenceError(f"the call's tree holds a damaged {kind}: {error}") from error


def layouts(tree: Any) -> dict[str, tuple[int, ...]]:
    """Give the strides of a tree's tensors by name, in elements, as the call had them."""
    found: dict[str, tuple[int, ...]] = {}
    _layouts(tree, found)
    return found


def refuse_unreadable(value: Tensor, place: str) -> None:
    """Refuse a tensor whose elements cannot be read: a read of freed memory would end the process.

    Args:
        place: what the message calls it.

    Raises:
        RefusedValueError: it is fake, functional, batched, sparse, quantised, distributed or on no device, or its
            storage is smaller than it (freed by ``resize_``, as FSDP and offloading do).
    """
    if not _plain(value):
        kind = _type_name(value) if str(value.layout) == "torch.strided" else str(value.layout)
        raise RefusedValueError(f"{place} is of type {kind} without plain memory of its own")
    if value.numel() == 0:
        return
    try:
        storage = value.untyped_storage()
        there_bytes = storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError as error:
        raise RefusedValueError(f"{place} has no memory of its own: {error}") from error
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    needed_bytes = (value.storage_offset() + last + 1) * value.element_size()
    if there_bytes < needed_bytes:
        raise RefusedValueError(f"{place} has no memory: {there_bytes} of {needed_bytes} bytes (freed, or offloaded)")


def _plain(value: Tensor) -> bool:
    import torch

    # Parameter subclasses of serving engines only change __torch_function__; who changes __torch_dispatch__ is no
    # plain memory.
    return (
        type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
        and not value.is_conj()
        and not value.is_neg()
        and not torch._is_functional_tensor(value)
    )


def _encode(value: Any, place: str, tensors: dict[str, Tensor], seen: dict[Any, str], depth: int) -> Any:
    import torch

    if depth > _MAX_DEPTH:
        raise RefusedValueError(f"{place} is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, place, tensors, seen)
    # Exact types: a subclass (IntEnum, NamedTuple, a config's dict) would come back as something else.
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_WIDE <= value < _WIDE else {"int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is torch.Size:
        return {"size": [int(size) for size in value]}
    if kind is list or kind is tuple:
        items = [_encode(item, f"{place}.{index}", tensors, seen, depth + 1) for index, item in enumerate(value)]
        return {kind.__name__: items}
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise RefusedValueError(f"{place} has a key of type {_type_name(key)}")
        return {"dict": {key: _encode(item, f"{place}.{key}", tensors, seen, depth + 1) for key, item in value.items()}}
    raise RefusedValueError(f"{place} is of type {_type_name(value)}")


def _encode_tensor(value: Tensor, place: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    refuse_unreadable(value, place)
    key = _identity(value)
    name = seen.get(key, place) if value.numel() else place
    if name == place:
        seen[key] = name
        tensors[name] = value
    return {"tensor": name, "stride": list(value.stride()), "device": value.device.type}


def _identity(tensor: Tensor) -> Any:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _layouts(tree: Any, found: dict[str, tuple[int, ...]]) -> None:
    if not isinstance(tree, dict):
        return
    if "tensor" in tree:
        found.setdefault(str(tree["tensor"]), tuple(int(step) for step in tree.get("stride", ())))
        return
    for value in tree.values():
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            _layouts(item, found)
