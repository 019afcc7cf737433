"""Captures calls in a process that is not ours: switched on by environment variables, off without them.

``arm()`` is called by the ``sitecustomize`` of ``inject/`` at the start of every Python process that inherits the
environment, or by hand. It imports nothing heavy: torch is looked at when the host has imported it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from alphamoe_sanitizer_replays.hooks.import_watch import ImportWatch
from alphamoe_sanitizer_replays.hooks.op_override import OpOverride, RegistrationWatch
from alphamoe_sanitizer_replays.hooks.report import Board, say, summary
from alphamoe_sanitizer_replays.hooks.settings import ROOT, TOLD, HookSettings, from_environment, unknown_variables
from alphamoe_sanitizer_replays.hooks.tap import Tap
from alphamoe_sanitizer_replays.hooks.wrapping import Wrapped, wrap
from alphamoe_tracers.errors import AlphaMoEError, UsageError

_OWN_PROGRAMS = ("alphamoe_sanitizer_replays.replays.process", "alphamoe_profiler")
"""Programs of ours are never captured: a replay calls the very callable."""


class Hook:
    """Everything that one armed process has hooked."""

    def __init__(self, settings: HookSettings, root: str) -> None:
        """Prepare; nothing is hooked before :meth:`start`.

        Args:
            root: id of the process that reports at its end.
        """
        self.settings = settings
        self.root = root
        self.board = Board(settings.out, root, (*settings.callables, *settings.ops))
        self._taps = {target: Tap(target, "callable", settings, self.board) for target in settings.callables}
        self._taps |= {target: Tap(target, "torch_op", settings, self.board) for target in settings.ops}
        self._wrapped: dict[str, Wrapped] = {}
        self._overrides = {target: OpOverride(target, self._taps[target]) for target in settings.ops}
        self._waiting = set(settings.ops)
        self._installing = threading.local()
        modules = {target.partition(":")[0] for target in settings.callables}
        if settings.ops:
            modules.add("torch")
        self._imports = ImportWatch(sorted(modules), _harmless(self._loaded), _harmless(self._looked_up))
        self._registrations = RegistrationWatch(_harmless(self._registered))

    def start(self) -> None:
        """Hook imports, and whatever is loaded already."""
        self.board.save()
        self._imports.start()
        os.register_at_fork(after_in_child=_harmless(self._after_fork))

    def stop(self) -> None:
        """Take everything back that is still as it was put."""
        self._imports.stop()
        self._registrations.stop()
        for override in self._overrides.values():
            override.remove()
        for wrapped in reversed(self._wrapped.values()):  # two targets may be one function
            wrapped.restore()
        self._wrapped.clear()
        self._waiting.clear()

    def _after_fork(self) -> None:
        if _ARMED is self:
            self.board.after_fork()
            for tap in self._taps.values():
                tap.after_fork()

    def _loaded(self, name: str) -> None:
        if name == "torch" and self._overrides:
            try:
                self._registrations.start()
            except Exception as error:  # the host's import goes on
                say(f"operators registered from now on are not seen: {type(error).__name__}: {error}")
            self._looked_up()
        for target in self.settings.callables:
            module, _, path = target.partition(":")
            if module != name:
                continue
            status = self.board.targets[target]
            status.loaded = True
            previous = self._wrapped.pop(target, None)
            if previous is not None:  # a reload: the same function would be heard of twice
                previous.restore()
            try:
                self._wrapped[target] = wrap(sys.modules[module], path, self._taps[target])
                status.wrapped, status.refused = True, ""
            except Exception as error:  # the host's import goes on
                self._refuse(target, error)
            self.board.save()

    def _registered(self, name: str, key: str) -> None:
        if getattr(self._installing, "busy", False):
            return
        override = self._overrides.get(name)
        if override is not None and override.overridden_again(name, key):
            self._waiting.add(name)
        self._looked_up()

    def _looked_up(self) -> None:
        """Override operators that were registered since. Called at each import, so it is quick when none waits."""
        torch = sys.modules.get("torch")
        if not self._waiting or torch is None or getattr(self._installing, "busy", False):
            return
        if getattr(getattr(torch, "__spec__", None), "_initializing", True):
            return
        self._installing.busy = True
        try:
            for target in sorted(self._waiting):
                self._install(target)
        finally:
            self._installing.busy = False

    def _install(self, target: str) -> None:
        override, status = self._overrides[target], self.board.targets[target]
        try:
            if not override.install():
                return
        except Exception as error:  # the host's import or registration goes on
            self._waiting.discard(target)
            self._refuse(target, error)
            self.board.save()
            return
        tap = self._taps[target]
        if override.module is not None and override.module not in tap.imports:
            tap.imports = (*tap.imports, override.module)
        status.loaded = status.wrapped = True
        if override.complete:
            self._waiting.discard(target)
        self.board.save()

    def _refuse(self, target: str, error: Exception) -> None:
        hint = f" ({error.hint})" if isinstance(error, AlphaMoEError) and error.hint else ""
        name = "" if isinstance(error, AlphaMoEError) else f"{type(error).__name__}: "
        self.board.targets[target].refused = f"{name}{error}{hint}"


def _harmless(step: Callable[..., None]) -> Callable[..., None]:
    """Give a step of ours that the host's imports, registrations and forks run, and that never raises into them."""

    def run(*words: Any) -> None:
        try:
            step(*words)
        except Exception as error:
            say(f"a step of the hook failed: {type(error).__name__}: {error}")

    return run


_ARMED: Hook | None = None


def arm(environ: MutableMapping[str, str] | None = None) -> Hook | None:
    """Hook this process as the environment asks; null where it asks for nothing, or not in a way that can be followed.

    Never raises for what it is asked: a wrong variable is one line on stderr, and the host runs as without it.
    """
    global _ARMED
    environ = os.environ if environ is None else environ
    if any(_is_ours(word) for word in sys.orig_argv[1:4]):
        return None
    if not environ.get(ROOT):  # else the process that reports has told it
        _say_once(unknown_variables(environ), environ)
    try:
        settings = from_environment(environ)
    except (UsageError, OSError) as error:  # OSError: the working directory is gone
        hint = f" ({error.hint})" if isinstance(error, UsageError) and error.hint else ""
        _say_once(f"nothing will be captured: {error}{hint}", environ)
        return None
    if settings is None or _ARMED is not None:
        return None
    root = environ.get(ROOT, "")
    is_root = not root
    if is_root:
        root = environ[ROOT] = new_root()
    hook = Hook(settings, root)
    hook.start()
    _ARMED = hook
    atexit.register(_end, hook, os.getpid() if is_root else None)
    return hook


def _say_once(text: str, environ: MutableMapping[str, str]) -> None:
    """Say what no process above this one has said."""
    told = environ.get(TOLD, "")
    if text and text not in told:
        say(text)
        environ[TOLD] = f"{told}{text}\n"


def new_root() -> str:
    """Make the id of a process that reports at its end."""
    return f"{os.getpid()}-{time.time_ns()}"


def _is_ours(word: str) -> bool:
    return word.startswith(_OWN_PROGRAMS) or os.path.basename(word) == "alphamoe-trace"  # noqa: PTH119 -- a word, no path


def _end(hook: Hook, reporting_pid: int | None) -> None:
    hook.board.save()
    if reporting_pid == os.getpid():
        _harmless(_tell)(hook)


def _tell(hook: Hook) -> None:
    for line in summary(hook.settings, hook.root).lines:
        say(line)
