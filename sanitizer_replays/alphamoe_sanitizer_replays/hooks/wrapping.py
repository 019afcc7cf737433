"""Put a function that captures in the place of another, wherever loaded modules hold it, and take it back.

What cannot be replaced without a change of behaviour is refused by name: classes (``isinstance``), Triton kernels
(``kernel[grid]``), coroutines, generators, objects that are called.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from alphamoe_tracers.errors import UsageError

Invoke = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called as ``invoke(original, args, kwargs)`` in the place of ``original(*args, **kwargs)``."""


@dataclass
class Wrapped:
    """One function that was replaced, and every place where it was."""

    original: Any
    wrapper: Any
    places: list[tuple[Any, str]] = field(default_factory=list)
    """Module dictionaries, or a class, and the name in them."""

    def restore(self) -> None:
        """Put the original back wherever the wrapper still is."""
        for owner, name in self.places:
            if isinstance(owner, dict):
                if owner.get(name) is self.wrapper:
                    owner[name] = self.original
            elif _function_of(vars(owner).get(name)) is self.wrapper:
                setattr(owner, name, staticmethod(self.original))


def wrap(module: ModuleType, path: str, invoke: Invoke) -> Wrapped:
    """Replace a function of a module by one that calls ``invoke``.

    Args:
        path: name in the module, or ``Class.name`` of a static method.
        invoke: gets every call, except while torch.compile traces: then the original is called, and traced, as if
            nothing had been wrapped.

    Raises:
        UsageError: the module has no such name, or what it has cannot be replaced.
    """
    parent, _, name = path.rpartition(".")
    if not parent:
        if name not in vars(module):
            lazily = (
                " (it may be made on demand: name the module that defines it)" if "__getattr__" in vars(module) else ""
            )
            raise UsageError(f"{module.__name__} has no {name}{lazily}")
        original = vars(module)[name]
        _check(original)
        wrapper = _wrapper(original, invoke)
        return Wrapped(original, wrapper, _replace(original, wrapper))
    owner: Any = module
    for part in parent.split("."):
        owner = vars(owner).get(part)
        if owner is None:
            raise UsageError(f"{module.__name__} has no {part}")
    held = vars(owner).get(name)
    if not isinstance(owner, type) or held is None:
        raise UsageError(f"{module.__name__} has no {path}")
    if not isinstance(held, staticmethod):
        raise UsageError("is a method: its object cannot be captured", "name a function, or a static method")
    _check(held.__func__)
    wrapper = _wrapper(held.__func__, invoke)
    setattr(owner, name, staticmethod(wrapper))
    return Wrapped(held.__func__, wrapper, [(owner, name)])


def _check(value: Any) -> None:
    """Refuse what is no plain function; raises UsageError."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, type):
        raise UsageError("is a class, and classes are not wrapped")
    if kind.startswith("torch._ops.") or type(value).__name__ == "CustomOpDef":
        raise UsageError("is a torch operator: name it with --op NAMESPACE::NAME")
    if kind.startswith("triton."):
        raise UsageError("is a Triton kernel: name the function that launches it")
    if not isinstance(value, FunctionType | BuiltinFunctionType):
        raise UsageError(f"is of type {kind}, and only functions are wrapped")
    if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value) or inspect.isgeneratorfunction(value):
        raise UsageError("is a coroutine or generator: its call ends before its work")


def _wrapper(original: Any, invoke: Invoke) -> Any:
    from torch.compiler import is_compiling

    def captured(*args: Any, **kwargs: Any) -> Any:
        # torch.compile folds this test into a constant, so that it traces the original and nothing else.
        if is_compiling():
            return original(*args, **kwargs)
        return invoke(original, args, kwargs)

    if isinstance(original, FunctionType):
        # The wrapper reads no globals: with the original's own, whoever resolves names through it finds the right ones.
        captured = FunctionType(captured.__code__, original.__globals__, original.__name__, None, captured.__closure__)
    return functools.update_wrapper(captured, original)


def _replace(original: Any, wrapper: Any) -> list[tuple[Any, str]]:
    places: list[tuple[Any, str]] = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        # Not vars(): a module that loads itself lazily would do so for any attribute.
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")
        for name, value in names.copy().items():
            if value is original:
                names[name] = wrapper
                places.append((names, name))
    return places


def _function_of(held: Any) -> Any:
    return held.__func__ if isinstance(held, staticmethod) else held
