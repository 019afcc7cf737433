"""Plug-ins that go wrong in the replay process, each in its own way."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from alphamoe_sanitizer_replays.captures.store import StoredCapture
from alphamoe_sanitizer_replays.plugins.alphamoe_w8a8 import AlphaMoEW8A8
from alphamoe_sanitizer_replays.plugins.protocol import PreparedReplay
from alphamoe_tracers.errors import EvidenceError


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Faulty(AlphaMoEW8A8):
    """The fused kernel's plug-in, with the prepared launch changed."""

    def __init__(self, name: str, change: Callable[[PreparedReplay], PreparedReplay]) -> None:
        self.name = name
        self.change = change

    def prepare(self, *args: Any, **kwargs: Any) -> PreparedReplay:
        """Prepare as the real one does, then break it."""
        return self.change(super().prepare(*args, **kwargs))


def _collect(prepared: PreparedReplay) -> PreparedReplay:
    sys.modules["cupti"] = types.ModuleType("cupti")
    return prepared


DIES = Faulty("dies", lambda prepared: replace(prepared, launch=_die))
RAISES = Faulty("raises", lambda prepared: replace(prepared, launch=_raise))
WRONG = Faulty(
    "wrong",
    lambda prepared: replace(prepared, outputs=lambda: {"out": prepared.outputs()["out"] * 1.05}),
)
COLLECTS = Faulty("collects", _collect)


class Refusing(AlphaMoEW8A8):
    """The fused kernel's plug-in, which wants other captures."""

    def validate(self, stored: StoredCapture) -> None:
        """Refuse the capture by what it says of itself."""
        raise EvidenceError(f"M {stored.capture.M} is not mine")


REFUSES = Refusing()
