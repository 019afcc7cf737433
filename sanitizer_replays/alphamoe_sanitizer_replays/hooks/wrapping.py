"""Let a function's calls pass by a tap, and end that again.

A function keeps being the object that it is: only its ``__code__`` is exchanged. So references in tables, closures,
``functools.partial`` and other modules are captured too, compare equal and can be pickled. What is no Python function
(C functions) is replaced wherever a loaded module holds it by name.

What cannot be followed without a change of behaviour is refused by name: classes (``isinstance``), Triton kernels
(``kernel[grid]``), coroutines, generators, objects that are called.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Protocol, cast

from alphamoe_tracers.errors import UsageError


class CallTap(Protocol):
    """What hears of calls. None of these methods raises an ``Exception``."""

    def before(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hear of a call that is about to be made; null where nothing more shall be heard of it."""

    def after(self, call: Any, result: Any) -> None:
        """Hear of its result; ``call`` is what :meth:`before` gave."""

    def raised(self, call: Any) -> None:
        """Hear that it raised an exception."""


# What a tapped function runs, one frame and no more. It knows the host's names, so it uses none of them, and a name
# that is free in the original is free here too. torch.compile folds the first test into a constant and traces the
# original and nothing else. At the limit of recursion even the calls of a tap raise.
_SOURCE = """
def around({cells}):
    def tapped(*args, **kwargs):
        if {slot}.is_compiling():
            return {slot}.original(*args, **kwargs)
        __call = None
        try:
            __call = {slot}.untraced({slot}.tap.before, {slot}.original, args, kwargs)
        except {slot}.failure:
            pass
        if __call is None:
            return {slot}.original(*args, **kwargs)
        try:
            __result = {slot}.original(*args, **kwargs)
        except:
            try:
                {slot}.untraced({slot}.tap.raised, __call)
            except {slot}.failure:
                pass
            raise
        try:
            {slot}.untraced({slot}.tap.after, __call, __result)
        except {slot}.failure:
            pass
        return __result
        {uses}
"""
_NUMBERS = itertools.count()


class Slot:
    """What the exchanged code of one function finds under one name among the function's globals."""

    def __init__(self, original: Callable[..., Any], tap: CallTap) -> None:
        """Keep both; ``original`` runs what the function ran."""
        from torch.compiler import is_compiling

        hide_from_dynamo(_untraced, callees=True)
        self.name = f"__alphamoe_capture_{next(_NUMBERS)}__"
        self.original = original
        self.tap = tap
        self.is_compiling = is_compiling
        self.untraced = _untraced
        self.failure = Exception

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one that hears nothing: a function that is pickled by value is not captured elsewhere."""
        return Slot, (self.original, _Deaf())


class _Deaf:
    def before(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None

    def after(self, call: Any, result: Any) -> None: ...

    def raised(self, call: Any) -> None: ...


@dataclass
class Exchanged:
    """A function whose code was exchanged."""

    function: FunctionType
    original: CodeType
    code: CodeType
    unwrapped: bool
    """Whether ``__wrapped__`` is ours."""

    def restore(self) -> None:
        """Give the function its code again, unless somebody else gave it another since."""
        if self.function.__code__ is self.code:
            self.function.__code__ = self.original
            if self.unwrapped:
                self.function.__dict__.pop("__wrapped__", None)


@dataclass
class Replaced:
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


Wrapped = Exchanged | Replaced


def wrap(module: ModuleType, path: str, tap: CallTap) -> Wrapped:
    """Let the calls of a function pass by a tap.

    Args:
        path: name in the module, or ``Class.name`` of a static method.
        tap: hears of every call, except while torch.compile traces: then the original is traced as if nothing had been
            wrapped.

    Raises:
        UsageError: the module has no such name, or what it has cannot be followed.
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
        return _exchange(original, tap) or _replace(original, tap)
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
    exchanged = _exchange(held.__func__, tap)
    if exchanged is not None:
        return exchanged
    wrapper = _wrapper(held.__func__, tap)
    setattr(owner, name, staticmethod(wrapper))
    return Replaced(held.__func__, wrapper, [(owner, name)])


def call_through(tap: CallTap, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``original`` and give its result, or its exception, while a tap hears of it."""
    call = None
    with contextlib.suppress(Exception):
        call = _untraced(tap.before, original, args, kwargs)
    if call is None:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException:
        with contextlib.suppress(Exception):
            _untraced(tap.raised, call)
        raise
    with contextlib.suppress(Exception):
        _untraced(tap.after, call, result)
    return result


def hide_from_dynamo(function: Any, *, callees: bool = False) -> None:
    """Have torch.compile never compile the frames of a function of ours: after a graph break it takes all that run.

    Args:
        callees: whether that holds for all that it calls.
    """
    import torch._C._dynamo.eval_frame as dynamo

    with contextlib.suppress(AttributeError):  # a torch of another age
        action = dynamo._FrameAction
        below = action.SKIP if callees else action.DEFAULT
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(action.SKIP, below))


def _untraced(step: Callable[..., Any], *words: Any) -> Any:
    """Run a step of ours; torch.compile looks away, see :class:`Slot`."""
    return step(*words)


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


def _exchange(function: Any, tap: CallTap) -> Exchanged | None:
    """Exchange a function's code; null where that cannot be done."""
    if not isinstance(function, FunctionType) or type(function.__globals__) is not dict:
        return None
    original = function.__code__
    twin = FunctionType(original, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    for name in functools.WRAPPER_ASSIGNMENTS:
        with contextlib.suppress(Exception):  # annotations may be worked out when asked for, and fail
            setattr(twin, name, getattr(function, name))
    slot = Slot(twin, tap)
    code = _tapped(slot.name, original)
    if code is None:
        return None
    # Never taken away again: a thread may be between the exchanged code's first instruction and this name.
    function.__globals__[slot.name] = slot
    unwrapped = not hasattr(function, "__wrapped__")
    if unwrapped:
        function.__wrapped__ = twin  # type: ignore[attr-defined]  # inspect.signature asks it for the parameters
    function.__code__ = code
    return Exchanged(function, original, code, unwrapped)


def _tapped(slot: str, original: CodeType) -> CodeType | None:
    """Compile the code of a tapped function, with the original's names, place and free variables; null if it cannot."""
    cells = original.co_freevars
    try:
        tree = ast.parse(_SOURCE.format(cells=", ".join(cells), uses="; ".join(cells), slot=slot))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.excepthandler):
            node.lineno = node.end_lineno = original.co_firstlineno
            node.col_offset = node.end_col_offset = 0
    whole = compile(tree, original.co_filename, "exec", dont_inherit=True)
    [around] = [constant for constant in whole.co_consts if isinstance(constant, CodeType)]
    [code] = [constant for constant in around.co_consts if isinstance(constant, CodeType)]
    # A free variable named as one of ours would be a local one here.
    if code.co_freevars != original.co_freevars:
        return None
    return code.replace(co_name=original.co_name, co_qualname=original.co_qualname)


def _wrapper(original: Any, tap: CallTap) -> Any:
    slot = Slot(original, tap)
    names = original.__globals__ if isinstance(original, FunctionType) else {}
    # With the original's own globals, whoever resolves names through the wrapper finds the right ones.
    names[slot.name] = slot
    code = cast("CodeType", _tapped(slot.name, hide_from_dynamo.__code__))  # any code without free variables
    return functools.update_wrapper(FunctionType(code, names), original)


def _replace(original: Any, tap: CallTap) -> Replaced:
    wrapper = _wrapper(original, tap)
    replaced = Replaced(original, wrapper)
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        # Not vars(): a module that loads itself lazily would do so for any attribute.
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")
        for name, value in names.copy().items():
            if value is original:
                names[name] = wrapper
                replaced.places.append((names, name))
    return replaced


def _function_of(held: Any) -> Any:
    return held.__func__ if isinstance(held, staticmethod) else held
