"""Hear of modules once they were imported, without touching what an import gives.

A finder at the front of ``sys.meta_path`` asks the other finders for the module and has its loader call back after
``exec_module``. The loader stays the object that it was (its own type, its ``get_data`` and ``get_source``); what was
added to it is taken off before the module runs.
"""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls back when one of some modules was imported, or imported again by ``importlib.reload``."""

    def __init__(self, names: Sequence[str], loaded: Callable[[str], None], looked_up: Callable[[], None]) -> None:
        """Prepare; nothing is watched before :meth:`start`.

        Args:
            names: full names of modules.
            loaded: called with the name after the module ran, in the importing thread; must not raise.
            looked_up: called at the start of each look-up of any module; must not raise.
        """
        self._names = frozenset(names)
        self._loaded = loaded
        self._looked_up = looked_up
        self._local = threading.local()

    def start(self) -> None:
        """Watch from now on; modules that are loaded already are told of at once."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            # A module that is still running is told of by nobody later: its loader was asked before the watch began.
            if module is not None and not getattr(spec, "_initializing", False):
                self._loaded(name)

    def stop(self) -> None:
        """Watch no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Give what the other finders give, its loader prepared; null for modules that are not watched."""
        self._looked_up()
        busy: set[str] = self._local.__dict__.setdefault("busy", set())
        # Another finder of this kind may ask all finders in its turn.
        if fullname not in self._names or fullname in busy:
            return None
        busy.add(fullname)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
                if spec is not None:
                    self._prepare(spec.loader)
                    return spec
        finally:
            busy.discard(fullname)
        return None

    def _prepare(self, loader: Any) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None or isinstance(loader, type) or "exec_module" in getattr(loader, "__dict__", {}):
            return

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            original(module)
            name = getattr(module.__spec__, "name", module.__name__)
            if name in self._names:
                self._loaded(name)

        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            return  # a loader without a dictionary: the report says that the module was never seen
