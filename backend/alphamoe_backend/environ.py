"""The environment variables that the backend and the profiler understand, read when asked, never cached.

The ``SGLANG_FLASHINFER_ALPHAMOE_*`` names are those of the SGLang integration and mean here what they mean there.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypedDict, TypeVar

from alphamoe_tracers.errors import UsageError

T = TypeVar("T", bool, str)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_overridden: list[str] = []


class EnvironmentEntry(TypedDict):
    """One variable as the run's metadata holds it."""

    value: bool | str
    default: bool | str
    source: str
    """``default``, ``environment`` or ``override``."""


class _EnvField(ABC, Generic[T]):
    def __init__(self, name: str, default: T, help_text: str) -> None:
        self.name = name
        self.default: T = default
        self.help_text = help_text

    @abstractmethod
    def parse(self, raw: str) -> T:
        """Turn the variable's text into a value."""

    def is_set(self) -> bool:
        """Say whether the variable holds anything; an empty one counts as not set."""
        return bool(os.environ.get(self.name, "").strip())

    def get(self) -> T:
        """Read the variable now.

        Raises:
            UsageError: its text is not a value of its type.
        """
        return self.parse(os.environ[self.name]) if self.is_set() else self.default

    def source(self) -> str:
        """Say where the value comes from."""
        if self.name in _overridden:
            return "override"
        return "environment" if self.is_set() else "default"

    @contextmanager
    def override(self, value: T | None) -> Iterator[None]:
        """Set the variable for the processes started inside, too; None unsets it. What was there before comes back."""
        before = os.environ.get(self.name)
        _overridden.append(self.name)
        try:
            if value is None:
                os.environ.pop(self.name, None)
            else:
                os.environ[self.name] = str(int(value)) if isinstance(value, bool) else value
            yield
        finally:
            _overridden.remove(self.name)
            if before is None:
                os.environ.pop(self.name, None)
            else:
                os.environ[self.name] = before


class EnvBool(_EnvField[bool]):
    """A switch: 1, true, yes, on or 0, false, no, off, in any case."""

    def parse(self, raw: str) -> bool:
        """Turn the switch's text into a bool; ``0`` is off."""
        word = raw.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise UsageError(f"{self.name}={raw!r} is neither on nor off", hint=f"set {self.name}=1 or {self.name}=0")


class EnvStr(_EnvField[str]):
    """A text, usually a path; empty means not set."""

    def parse(self, raw: str) -> str:
        """Give the text as it is."""
        return raw


ROUTER_ONLY = EnvBool("SGLANG_FLASHINFER_ALPHAMOE_ROUTER_ONLY", False, "use the AlphaMoE router without its experts")
TRACE_SHAPES = EnvBool("SGLANG_FLASHINFER_ALPHAMOE_TRACE_SHAPES", False, "write receipts in a serving process")
TRACE_ARM_FILE = EnvStr("SGLANG_FLASHINFER_ALPHAMOE_TRACE_ARM_FILE", "", "write receipts only while this file exists")
CACHE_DIR = EnvStr("ALPHAMOE_TRACE_CACHE_DIR", "", "where compiled kernels are kept")
NVTX = EnvBool("ALPHAMOE_TRACE_NVTX", True, "push NVTX ranges")
RECEIPTS = EnvBool("ALPHAMOE_TRACE_RECEIPTS", True, "write receipts in a traced run")
GSM8K = EnvStr("ALPHAMOE_GSM8K", "", "path of the GSM8K test set")

VARIABLES: tuple[EnvBool | EnvStr, ...] = (
    ROUTER_ONLY,
    TRACE_SHAPES,
    TRACE_ARM_FILE,
    CACHE_DIR,
    NVTX,
    RECEIPTS,
    GSM8K,
)


def registry() -> dict[str, EnvironmentEntry]:
    """Take a snapshot of every variable, sorted by name, for the run's metadata.

    Raises:
        UsageError: a variable holds text that is not a value of its type.
    """
    return {
        field.name: EnvironmentEntry(value=field.get(), default=field.default, source=field.source())
        for field in sorted(VARIABLES, key=lambda field: field.name)
    }


def receipts_armed(*, serving: bool = False) -> bool:
    """Say whether receipts are to be written now.

    Args:
        serving: asked by a serving process, where ``SGLANG_FLASHINFER_ALPHAMOE_TRACE_SHAPES`` switches them on; a
            traced run has them on unless ``ALPHAMOE_TRACE_RECEIPTS`` is off.

    Returns:
        True when they are on and the arm file, where one is named, exists.
    """
    if not (TRACE_SHAPES if serving else RECEIPTS).get():
        return False
    arm_file = TRACE_ARM_FILE.get()
    return not arm_file or Path(arm_file).exists()
