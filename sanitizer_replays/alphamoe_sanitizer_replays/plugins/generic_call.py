"""Replays of calls that the hook captured: the same callable, the same arguments, in the same layout.

What a replay needs to know of any call is in its tree; what it must find is the callable. So ``callable`` and
``torch_op`` differ in nothing but that, and a plug-in of one's own may subclass :class:`GenericCall` to judge by a
tolerance of its own.
"""

from __future__ import annotations

import importlib
import os
import runpy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphamoe_sanitizer_replays.captures.call_tree import decode, encode_result, layouts
from alphamoe_sanitizer_replays.captures.tensors import raw_bytes
from alphamoe_sanitizer_replays.hooks.call_record import AFTER
from alphamoe_sanitizer_replays.plugins.materialise import load_stored
from alphamoe_sanitizer_replays.plugins.protocol import PreparedReplay
from alphamoe_sanitizer_replays.plugins.uploads import Placed, download
from alphamoe_sanitizer_replays.results import OutputCheck
from alphamoe_tracers.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from alphamoe_sanitizer_replays.captures.records import Capture
    from alphamoe_sanitizer_replays.captures.store import StoredCapture

IMPORT_VARIABLE = "ALPHAMOE_REPLAY_IMPORT"
"""Modules, or paths of Python files, that a replay imports first, separated by commas."""

_TOLERANCES = {
    "float64": 1e-7,
    "float32": 1e-5,
    "float16": 1e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.125,
    "float8_e5m2": 0.25,
}
"""Largest difference of an element, relative to its captured magnitude or the RMS of its row, whichever is greater."""
_OUTLIER = 1000.0
_TOLD = "largest difference from the captured output, relative to the element's magnitude or its row's RMS"


class GenericCall(ABC):
    """A replay plug-in for any callable; subclasses say how it is found."""

    name = "generic"
    launches_others: Literal[True] = True

    @abstractmethod
    def find(self, capture: Capture) -> Callable[..., Any]:
        """Give what is called; raises AlphaMoEError where it is not there."""

    def takes(self, target: str) -> bool:
        """Whether a call of this function or operator, as a capture names it, is of the kind that is found here."""
        return True

    def tolerance(self, output: str, dtype: str) -> float:
        """Give the largest difference that is allowed of an element of an output; 0 is bitwise.

        It is relative to the element's captured magnitude or the RMS of its row (the last dimension), whichever is
        greater.
        """
        return _TOLERANCES.get(dtype, 0.0)

    def variants(self, capture: Capture) -> tuple[str, ...]:
        """A call of others has one variant."""
        return ()

    def validate(self, stored: StoredCapture) -> None:
        """Hold what the capture says of itself to what the hook knows: no layer, no shapes of experts, M of a tensor.

        Raises:
            UsageError: it is of another kind of call.
            EvidenceError: it says more, or an M that no tensor has.
        """
        capture = stored.capture
        check_kind(self, self.name, capture.callable or "")
        claims = {"layer": capture.layer, "geometry": capture.geometry, "launch": capture.launch}
        for name, claim in claims.items():
            if claim is not None:
                raise EvidenceError(f"{stored.path}: a {name} is claimed, which the hook never knows", "capture again")
        sizes = {size for info in capture.tensors if info.role != "output" for size in info.shape or (1,)}
        if capture.M not in sizes:
            raise EvidenceError(f"{stored.path}: M {capture.M} is no size of any of its tensors", "capture again")

    def materialise(self, stored: StoredCapture) -> dict[str, Tensor]:
        """Read every input and weight, proven by its hash."""
        tensors = load_stored(stored)
        for info in stored.capture.tensors:
            if info.role != "output" and info.name not in tensors:
                raise EvidenceError(f"{stored.path}: of {info.name} only the hash was kept", "record again")
        return tensors

    def prepare(
        self,
        capture: Capture,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        variant: str | None,
        source: Path | None,
    ) -> PreparedReplay:
        """Find the callable and bring its arguments to the device, with the strides that they had."""
        import torch

        if source is not None:
            raise UsageError(f"the plug-in {self.name} compiles nothing, so it takes no --source")
        if variant is not None:
            raise UsageError(f"a call has no variants, and {variant!r} was asked for")
        trees = {part: capture.arguments.get(part) for part in ("args", "kwargs", "result")}
        if not isinstance(trees["args"], dict) or not isinstance(trees["kwargs"], dict):
            raise EvidenceError("the capture has no call tree", "it was not made by the capture hook")
        import_modules(capture)
        call = self.find(capture)
        strides = layouts(trees["args"]) | layouts(trees["kwargs"])
        on_host = _kept_on_host(trees["args"]) | _kept_on_host(trees["kwargs"])
        placed = {
            name: Placed(tensor, strides.get(name), torch.device("cpu") if name in on_host else device)
            for name, tensor in tensors.items()
        }
        views = {name: place.view for name, place in placed.items()}
        args = decode(trees["args"], views, device)
        kwargs = decode(trees["kwargs"], views, device)
        changed = [name for name in capture.arguments.get("changed", []) if name in placed]
        results: list[Any] = []

        def launch() -> None:
            results.clear()
            with torch.no_grad():
                results.append(call(*args, **kwargs))

        def outputs() -> dict[str, Tensor]:
            given = encode_result(results[0], views)
            found = {name: download(tensor) for name, tensor in given.tensors.items()}
            return found | {f"{AFTER}{name}": download(views[name]) for name in changed}

        def renew() -> None:
            for place in placed.values():
                place.renew()

        return PreparedReplay(launch, outputs, renew, symbols=capture.symbols, launches=None)

    def check(self, stored: StoredCapture, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> OutputCheck:
        """Compare every output with the captured one; nothing finite that was compared proves nothing."""
        import torch

        worst, compared, unjudged = 0.0, 0, ""
        phrases: list[str] = []
        for info in (info for info in stored.capture.tensors if info.role == "output"):
            recorded, replayed = stored.load(info.name), outputs.get(info.name)
            limit = self.tolerance(info.name, info.dtype)
            phrases.append(f"{info.name} {limit:g}" if limit else f"{info.name} bitwise")
            if replayed is None:
                return _told("INCONCLUSIVE", f"the replay gave no {info.name}", phrases)
            if replayed.shape != recorded.shape or replayed.dtype != recorded.dtype:
                found = f"{replayed.dtype} {list(replayed.shape)}"
                return _told("FAIL", f"{info.name} is {found}, captured was {info.dtype} {list(info.shape)}", phrases)
            if not limit and not torch.equal(raw_bytes(recorded), raw_bytes(replayed.contiguous())):
                return _told("FAIL", f"{info.name} differs from the captured bytes", phrases)
            usable = recorded.numel()
            if limit or info.dtype in _TOLERANCES:
                one, other = recorded.to(torch.float64), replayed.to(torch.float64)
                finite = torch.isfinite(one) & torch.isfinite(other)
                usable = int(finite.sum())
                unequal = ~finite & (one != other) & ~(torch.isnan(one) & torch.isnan(other))
                if bool(unequal.any()):
                    reason = f"{info.name} is not finite in {int(unequal.sum())} places where the two differ"
                    return _told("FAIL", reason, phrases)
                error = torch.where(finite, (one - other).abs(), 0.0)
                scale = torch.maximum(torch.where(finite, one.abs(), 0.0), _row_scale(one))
                worst = max(worst, float(error.max()) if usable else 0.0)
                outside = error > limit * scale
                if bool(outside.any()):
                    excess = float((error / scale).nan_to_num(posinf=torch.inf).max())
                    reason = (
                        f"{info.name} is off in {int(outside.sum())} of {recorded.numel()} elements, by {worst:.4g} at "
                        f"most, and {excess:.3g} of its scale"
                    )
                    return _told("FAIL", reason, phrases, worst)
            compared += usable
            if recorded.numel() and not usable:
                unjudged = f"{info.name} holds no finite element, so nothing of it can be compared"
        if not phrases:
            unjudged = "the call gave and changed no tensor"
        elif not compared and not unjudged:
            unjudged = "every output is empty, so there is nothing to compare"
        if unjudged:
            return _told("INCONCLUSIVE", unjudged, phrases)
        # relative_error stays null: it is that of a float64 oracle, which there is none of here.
        return _told("PASS", "", phrases, worst)


def check_kind(plugin: object, name: str, target: str) -> None:
    """Refuse a function for a plug-in that replays operators, and the other way round.

    Raises:
        UsageError: with the plug-ins that fit.
    """
    if isinstance(plugin, GenericCall) and not plugin.takes(target):
        kind, fitting = ("an operator", "torch_op") if "::" in target else ("a function", "callable")
        raise UsageError(
            f"the plug-in {name} cannot replay {target or 'a call without a name'}",
            f"{kind} needs --plugin {fitting}, or another one for such calls",
        )


def _row_scale(values: Tensor) -> Tensor:
    """Give the RMS of each row (last dimension) of float64 values, to be broadcast over them.

    Elements that are not finite are left out, and those beyond ``_OUTLIER`` times the median magnitude of the row's
    other elements than zero: one huge element must not make the tolerance of its neighbours.
    """
    import torch

    rows = values.reshape(1) if values.dim() == 0 else values
    sizes = torch.where(torch.isfinite(rows) & (rows != 0), rows.abs(), torch.nan)
    if sizes.numel() == 0:
        return torch.zeros_like(values)
    usual = sizes <= _OUTLIER * sizes.nanmedian(dim=-1, keepdim=True).values
    counted = torch.where(usual | (rows == 0), rows, 0.0)
    number = (usual | (rows == 0)).sum(dim=-1, keepdim=True).clamp(min=1)
    scale = (counted.square().sum(dim=-1, keepdim=True) / number).sqrt()
    return scale.reshape(()) if values.dim() == 0 else scale


def import_modules(capture: Capture) -> None:
    """Import what the capture and ``ALPHAMOE_REPLAY_IMPORT`` name.

    Raises:
        UsageError: a module is not there.
    """
    named = [str(name) for name in capture.arguments.get("imports", [])]
    asked = [word.strip() for word in os.environ.get(IMPORT_VARIABLE, "").split(",") if word.strip()]
    for name in [*asked, *named]:
        if name.endswith(".py"):
            if not Path(name).is_file():
                raise UsageError(f"{IMPORT_VARIABLE}: {name} is no file")
            _KEPT.append(runpy.run_path(name, run_name="alphamoe_replay_import"))
        else:
            import_module(name)


# What a file defined lives as long as the process: a torch library ends with its object.
_KEPT: list[dict[str, Any]] = []


def import_module(name: str) -> Any:
    """Import one module; raises UsageError with the way out where it cannot be."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} cannot be imported: {error}", "name its folder in PYTHONPATH, or replay where it is installed"
        ) from error


def _kept_on_host(tree: Any) -> set[str]:
    """Name the tensors that lay on the host in the captured process."""
    if not isinstance(tree, dict):
        return set()
    if "tensor" in tree:
        return {str(tree["tensor"])} if tree.get("device") == "cpu" else set()
    found: set[str] = set()
    for value in tree.values():
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            found |= _kept_on_host(item)
    return found


def _told(
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"], reason: str, phrases: list[str], worst: float | None = None
) -> OutputCheck:
    tolerance = f"{_TOLD}: {', '.join(phrases)}" if phrases else _TOLD
    return OutputCheck(verdict=verdict, reason=reason, max_abs_error=worst, tolerance=tolerance)
