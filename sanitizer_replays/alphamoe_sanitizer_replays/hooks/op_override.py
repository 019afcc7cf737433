"""Override a torch operator's CUDA and CPU kernels by one that captures and calls the original.

The override sits at the backend's own dispatch key: autograd, fake tensors, torch.compile and every caller, from Python
or C++, see the same operator with the same schema. A composite kernel that autograd looks through is refused, since a
backend kernel would end that.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from alphamoe_sanitizer_replays.hooks.wrapping import CallTap, call_through, hide_from_dynamo
from alphamoe_tracers.errors import UsageError

_KEYS = ("CUDA", "CPU")


class OpOverride:
    """The override of one operator; installed key by key as kernels of it are registered."""

    def __init__(self, name: str, tap: CallTap) -> None:
        """Prepare; nothing is overridden before :meth:`install`.

        Args:
            name: ``namespace::name`` or ``namespace::name.overload``.
            tap: hears of every call of the kernel.
        """
        self.name = name
        self.module: str | None = None
        """The module that registered the operator, as far as the stack tells; a replay imports it."""
        self._tap = tap
        self._libraries: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Whether no further kernel is waited for."""
        return len(self._libraries) == len(_KEYS)

    def install(self) -> bool:
        """Override the kernels that are registered by now and are not overridden yet.

        Returns:
            Whether there was one.

        Raises:
            UsageError: this operator, or this torch, allows no override.
        """
        import torch

        namespace, _, rest = self.name.partition("::")
        if not _is_registered(self.name):
            return False
        if not hasattr(torch.library, "get_kernel"):
            raise UsageError(f"torch {torch.__version__} cannot give an operator's kernel", "wrap the function instead")
        if torch._C._dispatch_has_kernel_for_dispatch_key(self.name, "CompositeImplicitAutograd"):
            raise UsageError("is made of other operators: name one of those, or the function around it")
        added = False
        for key in _KEYS:
            if key in self._libraries or not _has_kernel(self.name, key):
                continue
            kernel = torch.library.get_kernel(self.name, key)
            library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that a kernel is overridden, which is the purpose
                # Not by ``library.impl``: its list of what Python registered would refuse this override, or a later
                # registration of the host's (torch 2.11).
                dispatcher: Any = library.m
                dispatcher.impl(rest, key, _calling(kernel, self._tap), True)
            self._libraries[key] = library
            added = True
        if added and self.module is None:
            self.module = calling_module()
        return added

    def overridden_again(self, name: str, key: str) -> bool:
        """Take note of another registration; true where it lies over ours, which is then installed anew, on top."""
        if key not in self._libraries or name != self.name:
            return False
        self._libraries.pop(key)._destroy()
        return True

    def remove(self) -> None:
        """Give the original kernels back."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()


class RegistrationWatch:
    """Hears of kernels that are registered from Python or come with a library."""

    def __init__(self, heard: Callable[[str, str], None]) -> None:
        """Prepare.

        Args:
            heard: called after each registration with the operator's name and dispatch key, both empty after a library
                was loaded; must not raise.
        """
        self._heard = heard
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> None:
        """Follow ``torch.library.Library.impl`` and ``torch.ops.load_library``."""
        import torch

        if self._undo:
            return
        heard = self._heard
        implement, load = torch.library.Library.impl, type(torch.ops).load_library

        @functools.wraps(implement)
        def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> None:
            implement(self, op_name, fn, dispatch_key, **kwargs)  # type: ignore[no-untyped-call]
            heard(_full_name(self.ns, op_name), dispatch_key or self.dispatch_key)

        @functools.wraps(load)
        def load_library(self: Any, path: Any) -> None:
            load(self, path)  # type: ignore[no-untyped-call]
            heard("", "")

        for owner, name, original, follower in (
            (torch.library.Library, "impl", implement, impl),
            (type(torch.ops), "load_library", load, load_library),
        ):
            setattr(owner, name, follower)
            self._undo.append((owner, name, original, follower))

    def stop(self) -> None:
        """Put back what was followed."""
        while self._undo:
            owner, name, original, follower = self._undo.pop()
            if vars(owner).get(name) is follower:
                setattr(owner, name, original)


def calling_module() -> str | None:
    """Name the module outside torch, the import system and this package that is running; null for a script."""
    ours = __name__.partition(".")[0]
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        root = name.partition(".")[0]
        if root not in (
            "torch",
            "importlib",
            "_frozen_importlib",
            "_frozen_importlib_external",
        ) and not name.startswith(f"{ours}."):
            return None if name == "__main__" or not name else name
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _calling(kernel: Any, tap: CallTap) -> Any:
    def dispatched(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        def original(*args: Any, **kwargs: Any) -> Any:
            return kernel.call_boxed(keyset, *args, **kwargs)

        return call_through(tap, original, args, kwargs)

    hide_from_dynamo(dispatched)
    hide_from_dynamo(call_through)
    return dispatched


def _full_name(namespace: str, op: Any) -> str:
    name = op if isinstance(op, str) else getattr(op, "_name", "")
    return name if "::" in name else f"{namespace}::{name}"


def _is_registered(name: str) -> bool:
    import torch

    try:
        return bool(torch._C._dispatch_has_kernel(name))
    except RuntimeError:
        return False


def _has_kernel(name: str, key: str) -> bool:
    import torch

    # A backend fallback is no kernel of the operator.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(name, key) or has(name, "CompositeExplicitAutograd"))
