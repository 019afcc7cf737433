"""Takes the first eager calls of one callable or operator: inputs before the call, results and changes after it.

The host comes first. Whatever goes wrong here is one line on stderr; the call's own result and exceptions pass through
untouched, and no memory is taken on the device except for tensors with gaps.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphamoe_sanitizer_replays.hooks.report import Board
from alphamoe_sanitizer_replays.hooks.settings import HookSettings
from alphamoe_tracers.errors import AlphaMoEError, UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.hooks.call_record import OpenCall

_MAX_FAILURES = 16
"""After so many calls that could not be taken, no more are tried."""


class Tap:
    """The calls of one target in this process."""

    def __init__(self, target: str, kind: str, settings: HookSettings, board: Board) -> None:
        """Prepare.

        Args:
            kind: ``callable`` or ``torch_op``, which is also the replay plug-in unless another was asked for.
        """
        self.target = target
        self.kind = kind
        self.imports: tuple[str, ...] = settings.imports
        self._settings = settings
        self._board = board
        self._status = board.targets[target]
        self._budget = settings.max_bytes
        self._parameters: tuple[str, ...] | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: locks of other threads are not held in a child, and its calls are its own."""
        self._lock = threading.RLock()
        self._local = threading.local()
        self._seen: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._failures = 0
        self._spent = False

    def before(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        """Open a call that is wanted; null where it is not, or could not be opened."""
        if self._spent or getattr(self._local, "busy", False):
            return None
        found: OpenCall | None = self._guarded(lambda: self._begin(original, args, kwargs))
        return found

    def after(self, call: OpenCall, result: Any) -> None:
        """Write the capture of a call that was opened."""
        if self._guarded(lambda: self._end(call, result)) is None:
            self._give_back(call.M)

    def raised(self, call: OpenCall) -> None:
        """Forget a call that raised an exception, which is the host's own."""
        self._give_back(call.M)
        self._guarded(lambda: self._failed("the call itself raised an exception"))

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """Run one step of ours; null where it failed. Our own tensor operations are neither captured nor seen.

        What is no ``Exception`` (KeyboardInterrupt, SystemExit) comes from the host's signals and is passed on.
        """
        self._local.busy = True
        try:
            import torch

            with torch._C.DisableTorchFunction():
                return step()
        except Exception as error:  # ours to report, never the host's to see
            with contextlib.suppress(Exception):
                name = "" if isinstance(error, AlphaMoEError) else f"{type(error).__name__}: "
                self._failed(f"{name}{error}")
            return None
        finally:
            self._local.busy = False

    def _begin(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        status = self._status
        with self._lock:
            status.calls += 1
            first = status.calls == 1
        if first:
            self._board.save()
        if (reason := _not_eager()) is not None:
            self._board.add(self.target, "not_eager", reason)
            return None
        M = self._m_of(original, args, kwargs)
        with self._lock:
            number = self._seen.get(M, 0)
            self._seen[M] = number + 1
            if self._taken.get(M, 0) >= self._settings.first:
                return None
        if (reason := self._not_asked(M)) is not None:
            self._board.add(self.target, "not_asked", reason)
            return None
        with self._lock:
            if self._taken.get(M, 0) >= self._settings.first:
                return None
            self._taken[M] = self._taken.get(M, 0) + 1
        try:
            from alphamoe_sanitizer_replays.hooks.call_record import begin

            return begin(args, kwargs, M=M, number=number, room_bytes=self._budget, out=self._settings.out)
        except BaseException:
            self._give_back(M)
            raise

    def _end(self, call: OpenCall, result: Any) -> Path:
        from alphamoe_sanitizer_replays.hooks.call_record import finish

        rank, source, world_size = current_rank()
        path, stored_bytes = finish(
            call,
            result,
            target=self.target,
            plugin=self._settings.plugin or self.kind,
            symbols=self._settings.symbols,
            imports=self.imports,
            rank=(rank, source, world_size),
            out=self._settings.out,
        )
        with self._lock:
            self._budget -= stored_bytes
            place = f"rank {rank} M {call.M}"
            self._status.captured[place] = self._status.captured.get(place, 0) + 1
            only = self._settings.only_m
            self._spent = bool(only) and all(self._taken.get(M, 0) >= self._settings.first for M in only)
        self._board.save()
        return path

    def _not_asked(self, M: int) -> str | None:
        settings = self._settings
        if settings.only_m and M not in settings.only_m:
            return f"M {M} was not asked for"
        rank, _, world_size = current_rank()
        if not settings.wants_rank(rank, world_size):
            return f"rank {rank} was not asked for"
        if settings.when is not None and not settings.when.exists():
            return f"{settings.when} did not exist"
        return None

    def _m_of(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        import torch

        if self._settings.m_from is None:
            tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if tensor is None:
                raise UsageError("no argument is a tensor, so M is unknown: name it with --m-from ARG:DIM")
            return int(tensor.shape[0]) if tensor.dim() else 1
        name, dim = self._settings.m_from
        value = kwargs.get(name)
        if value is None:
            names = self._names(original)
            index = int(name) if name.isdecimal() else names.index(name) if name in names else len(args)
            value = args[index] if index < len(args) else None
        if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
            raise UsageError(f"--m-from {name}:{dim} names no dimension of a tensor of this call")
        return int(value.shape[dim])

    def _names(self, original: Callable[..., Any]) -> tuple[str, ...]:
        if self._parameters is None:
            if self.kind == "torch_op":
                import torch

                name, _, overload = self.target.partition(".")
                schema = torch._C._get_schema(name, overload)
                self._parameters = tuple(argument.name for argument in schema.arguments)
            else:
                self._parameters = tuple(inspect.signature(original).parameters)
        return self._parameters

    def _give_back(self, M: int) -> None:
        with self._lock:
            self._taken[M] = max(self._taken.get(M, 0) - 1, 0)

    def _failed(self, reason: str) -> None:
        reason = " ".join(reason.split())[:300]
        with self._lock:
            self._failures += 1
            self._spent = self._spent or self._failures >= _MAX_FAILURES
        if self._board.add(self.target, "failures", reason):
            self._board.warn(f"{self.target}: a call was not captured: {reason}")
        if self._failures == _MAX_FAILURES:
            self._board.warn(f"{self.target}: {_MAX_FAILURES} calls could not be captured; no more are tried")


def current_rank() -> tuple[int, str, int | None]:
    """Tell this process's rank, where that comes from, and the world size: torch.distributed, else ``RANK``, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), "torch.distributed", int(distributed.get_world_size())
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal():
        return int(rank), "RANK", int(world) if world.isdecimal() else None
    return 0, "none", None


def _not_eager() -> str | None:
    """Why this call is no plain eager one; null where it is."""
    import torch

    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "torch.compile or a tracer was at work"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return "a CUDA graph was being captured"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a torch dispatch mode was active"
    return None
