"""What a replay plug-in is, and how one is found by the name that a capture holds.

A plug-in launches one kind of call again from a capture. Its methods run on both sides: ``variants``, ``materialise``
and ``check`` in the parent, which may use any tensor operator; ``prepare`` and what it returns in the replay process,
which may run under a tool and therefore must launch nothing but the target, or say :class:`LaunchesOthers`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast, runtime_checkable

from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from alphamoe_sanitizer_replays.captures.records import Capture
    from alphamoe_sanitizer_replays.captures.store import StoredCapture
    from alphamoe_sanitizer_replays.results import OutputCheck

ENTRY_POINTS = "alphamoe_trace.replays"

_BUILT_IN = {
    name: f"alphamoe_sanitizer_replays.plugins.{module}:PLUGIN"
    for name, module in (
        ("alphamoe_w8a8", "alphamoe_w8a8"),
        ("triton_stock", "triton_stock"),
        ("callable", "callable_call"),
        ("torch_op", "torch_op"),
    )
}


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class PreparedReplay:
    """A call that is ready to be launched in the replay process: compiled, and its inputs on the device."""

    launch: Callable[[], None]
    """Launch the call once. No synchronisation is needed; errors are raised."""
    outputs: Callable[[], dict[str, Tensor]]
    """Bring the outputs of the last launch to the CPU, by the names that they have in the capture."""
    renew: Callable[[], None] = _nothing
    """Make what a launch writes into as it was before the first one; called before every launch. Copies from the host
    only."""
    again: Callable[[], None] | None = None
    """For timing without a tool: the target kernels alone, where :attr:`launch` also works on the host between them."""
    symbols: tuple[str, ...] = ()
    """Base names of the kernels that :attr:`launch` launches."""
    launches: int | None = 1
    """Kernels of those names that one :attr:`launch` starts; null where the plug-in cannot know."""
    variant: str | None = None
    source_sha256: str | None = None
    cubin_sha256: str | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """``compile`` and ``upload``, seconds that preparing took."""


class ReplayPlugin(Protocol):
    """Launches one kind of captured call again."""

    name: str

    def variants(self, capture: Capture) -> tuple[str, ...]:
        """List the variants that can be launched for it, the captured process's own first; empty: there is only one."""

    def materialise(self, stored: StoredCapture) -> dict[str, Tensor]:
        """Give every input and weight by name, on the CPU, each proven by its hash. In the parent.

        Raises:
            EvidenceError: a tensor is missing or is not what was captured.
        """

    def prepare(
        self,
        capture: Capture,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        variant: str | None,
        source: Path | None,
    ) -> PreparedReplay:
        """Make the call ready, in the replay process.

        On a GPU the inputs come by host-to-device copies (``torch.empty`` and ``copy_`` of contiguous tensors, or
        ``.to(device)``) and no torch kernel may be launched: initcheck takes memory that a kernel without
        instrumentation wrote for unwritten.

        Args:
            tensors: what :meth:`materialise` gave, mapped from files; not to be written into.
            variant: one of :meth:`variants`; null for the captured process's own.
            source: a file to compile instead of the kernel's own source.

        Raises:
            AlphaMoEError: it cannot be launched here.
        """

    def check(self, stored: StoredCapture, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> OutputCheck:
        """Compare a replay's outputs with the captured ones, by the kernel's own tolerance. In the parent."""


@runtime_checkable
class LaunchesOthers(Protocol):
    """A plug-in whose call may launch kernels besides the target, which the target may read from."""

    launches_others: Literal[True]


@runtime_checkable
class Validates(Protocol):
    """A plug-in that can tell from a capture's description whether its call is one that it made."""

    def validate(self, stored: StoredCapture) -> None:
        """Compare what the capture says of itself with its tensors' shapes. In the parent, before anything is loaded.

        Raises:
            EvidenceError: they contradict each other.
        """


class CompiledAhead(NamedTuple):
    """What was compiled before a replay: the replay must launch just that."""

    seconds: float = 0.0
    source_sha256: str | None = None
    """Null where nothing was compiled."""
    cubin_sha256: str | None = None


@runtime_checkable
class CompilesAhead(Protocol):
    """A plug-in that can fill the compilation cache in the parent, so that no tool waits for a compiler."""

    def compile_ahead(self, capture: Capture, variant: str | None, source: Path | None) -> CompiledAhead:
        """Compile what :meth:`ReplayPlugin.prepare` will load."""


def find_plugin(name: str) -> ReplayPlugin:
    """Look a plug-in up: built in, then an entry point of the group ``alphamoe_trace.replays``, then ``module:name``.

    The object found may be a plug-in or a class of plug-ins, which is called without arguments.

    Raises:
        UsageError: nothing of that name, or it has not what a plug-in must have.
    """
    if name in _BUILT_IN:
        return _checked(name, _import(name, _BUILT_IN[name]))
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return _checked(name, _import(name, point.value))
    if ":" not in name:
        known = ", ".join([*_BUILT_IN, *sorted(point.name for point in entry_points(group=ENTRY_POINTS))])
        raise UsageError(
            f"there is no replay plug-in named {name!r}",
            hint=f"known are {known}; another is named module:attribute, or by an entry point of {ENTRY_POINTS}",
        )
    return _checked(name, _import(name, name))


def _import(name: str, path: str) -> object:
    module, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the replay plug-in {name!r} cannot be loaded from {path}: {error}",
            hint="is its package installed, or its folder in PYTHONPATH?",
        ) from error
    return found


def _checked(name: str, found: object) -> ReplayPlugin:
    made = found() if isinstance(found, type) else found
    lacking = [part for part in ("name", "variants", "materialise", "prepare", "check") if not hasattr(made, part)]
    if lacking:
        raise UsageError(
            f"{name!r} is no replay plug-in: it has no {', '.join(lacking)}",
            hint="see alphamoe_sanitizer_replays.plugins.protocol.ReplayPlugin",
        )
    return cast(ReplayPlugin, made)
