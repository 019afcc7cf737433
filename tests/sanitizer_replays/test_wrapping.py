"""Putting a capturing function in another's place: everywhere, only where that changes nothing, and back again."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from alphamoe_sanitizer_replays.hooks.import_watch import ImportWatch
from alphamoe_sanitizer_replays.hooks.op_override import OpOverride, RegistrationWatch
from alphamoe_sanitizer_replays.hooks.wrapping import wrap
from alphamoe_tracers.errors import UsageError

HOME = '''
"""A module under test."""
import functools
import torch

def double(x, *, by=2):
    """Double."""
    return x * by

def calls_double(x):
    return double(x)

class Tools:
    @staticmethod
    def triple(x):
        return x * 3

    def method(self):
        return 1

async def later():
    return 1

cached = functools.lru_cache(double)
'''


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """A module, and one that took a function from it by name."""
    (tmp_path / "wrap_home.py").write_text(HOME, encoding="utf-8")
    (tmp_path / "wrap_user.py").write_text("from wrap_home import double as renamed\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("wrap_home"), importlib.import_module("wrap_user")
    for name in ("wrap_home", "wrap_user"):
        sys.modules.pop(name, None)


class Calls:
    """Counts what passes through."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += 1
        return original(*args, **kwargs)


def test_every_module_that_holds_the_function_gets_the_wrapper_and_loses_it_again(
    modules: tuple[ModuleType, ModuleType],
) -> None:
    """A name imported elsewhere is replaced too, and restoring leaves the very objects that were there."""
    home, user = modules
    original, calls = home.double, Calls()
    wrapped = wrap(home, "double", calls)
    assert user.renamed is home.double is not original
    assert (user.renamed(3), home.calls_double(4), home.double(5, by=3)) == (6, 8, 15)
    assert calls.count == 3
    wrapped.restore()
    assert user.renamed is home.double is original


def test_a_wrapper_passes_for_the_function(modules: tuple[ModuleType, ModuleType]) -> None:
    """Name, documentation, signature, globals and pickling are those of the original."""
    home, _ = modules
    wrapped = wrap(home, "double", Calls())
    assert (home.double.__name__, home.double.__module__, home.double.__doc__) == ("double", "wrap_home", "Double.")
    assert home.double.__globals__ is vars(home)
    assert pickle.loads(pickle.dumps(home.double)) is home.double  # noqa: S301 -- our own bytes
    wrapped.restore()


def test_what_somebody_else_put_there_since_stays(modules: tuple[ModuleType, ModuleType]) -> None:
    """Restoring touches only places that still hold our wrapper."""
    home, user = modules
    wrapped = wrap(home, "double", Calls())
    user.renamed = theirs = functools.partial(home.double)
    wrapped.restore()
    assert user.renamed is theirs


def test_a_static_method_is_wrapped_in_its_class(modules: tuple[ModuleType, ModuleType]) -> None:
    """``Class.name`` of a static method works, and is restored."""
    home, _ = modules
    calls = Calls()
    wrapped = wrap(home, "Tools.triple", calls)
    assert (home.Tools.triple(2), home.Tools().triple(3), calls.count) == (6, 9, 2)
    wrapped.restore()
    assert home.Tools.triple(2) == 6
    assert calls.count == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "has no absent"),
        ("Tools", "is a class"),
        ("Tools.method", "is a method"),
        ("later", "coroutine"),
        ("cached", "only functions are wrapped"),
    ],
)
def test_what_cannot_be_replaced_unnoticed_is_refused(
    modules: tuple[ModuleType, ModuleType], name: str, why: str
) -> None:
    """Classes, methods, coroutines and objects that are called are refused by what they are."""
    with pytest.raises(UsageError, match=why):
        wrap(modules[0], name, Calls())


def test_torch_compile_traces_the_original_without_a_graph_break(modules: tuple[ModuleType, ModuleType]) -> None:
    """A function compiled as one whole graph compiles with the wrapper in it, and no call is seen."""
    home, _ = modules
    calls = Calls()
    wrapped = wrap(home, "double", calls)
    try:
        compiled = torch.compile(lambda x: home.double(x) + 1, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        wrapped.restore()
        torch._dynamo.reset()
    assert calls.count == 0


def test_an_import_is_told_of_once_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module, its spec and its loader are as without the watch; a reload is told of again."""
    (tmp_path / "watched_module.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[str] = []
    watch = ImportWatch(["watched_module"], told.append, lambda: None)
    watch.start()
    try:
        module = importlib.import_module("watched_module")
        assert told == ["watched_module"]
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(module.__loader__)
        assert module.__spec__ is not None
        assert module.__spec__.loader is module.__loader__
        importlib.reload(module)
        assert told == ["watched_module", "watched_module"]
    finally:
        watch.stop()
        sys.modules.pop("watched_module", None)
    assert watch not in sys.meta_path


def test_two_finders_that_ask_each_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another finder that asks all finders, as coverage tools do, meets ours without recursion."""
    (tmp_path / "watched_twice.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[str] = []
    watches = [ImportWatch(["watched_twice"], told.append, lambda: None) for _ in range(2)]
    for watch in watches:
        watch.start()
    try:
        assert importlib.import_module("watched_twice").value == 1
    finally:
        for watch in watches:
            watch.stop()
        sys.modules.pop("watched_twice", None)
    assert told


def test_a_module_that_fails_to_import_fails_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of a module is its own, and nothing is told."""
    (tmp_path / "watched_broken.py").write_text("raise KeyError('theirs')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[str] = []
    watch = ImportWatch(["watched_broken"], told.append, lambda: None)
    watch.start()
    try:
        with pytest.raises(KeyError, match="theirs"):
            importlib.import_module("watched_broken")
    finally:
        watch.stop()
    assert told == []


@pytest.fixture
def library() -> Iterator[Any]:
    made = torch.library.Library("hook_test", "FRAGMENT")
    yield made
    made._destroy()


def test_an_operator_is_overridden_and_given_back(library: Any) -> None:
    """Results, in-place changes and defaults pass through; after removal nothing is seen any more."""
    library.define("scale_(Tensor(a!) x, float by=2.0) -> Tensor(a!)")
    library.impl("scale_", lambda x, by=2.0: x.mul_(by), "CPU")
    calls = Calls()
    override = OpOverride("hook_test::scale_", calls)
    assert override.install()
    x = torch.ones(2)
    assert torch.ops.hook_test.scale_(x) is x
    assert torch.equal(torch.ops.hook_test.scale_(x, by=3.0), torch.full((2,), 6.0))
    assert calls.count == 2
    override.remove()
    torch.ops.hook_test.scale_(x)
    assert calls.count == 2


def test_gradients_go_through_an_overridden_operator_as_before() -> None:
    """The override lies below autograd: an operator with a formula of its own keeps it."""
    calls = Calls()

    @torch.library.custom_op("hook_test_grad::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_autograd(lambda ctx, g: g * ctx.x * 2, setup_context=lambda ctx, inputs, output: _keep(ctx, inputs))
    override = OpOverride("hook_test_grad::square", calls)
    assert override.install()
    x = torch.tensor([3.0], requires_grad=True)
    square(x).backward()
    override.remove()
    assert x.grad is not None
    assert (x.grad.item(), calls.count) == (6.0, 1)


def _keep(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.x = inputs[0]


def test_a_composite_operator_is_refused(library: Any) -> None:
    """A backend kernel would take autograd's way through it, so it is not overridden."""
    library.define("both(Tensor x) -> Tensor")
    library.impl("both", lambda x: x + 1, "CompositeImplicitAutograd")
    with pytest.raises(UsageError, match="made of other operators"):
        OpOverride("hook_test::both", Calls()).install()


def test_registrations_are_heard_until_the_watch_ends(library: Any) -> None:
    """An operator defined later is told of by its full name, and torch's own methods come back."""
    before = torch.library.Library.impl
    heard: list[tuple[str, str]] = []
    watch = RegistrationWatch(lambda name, key: heard.append((name, key)))
    watch.start()
    try:
        library.define("late(Tensor x) -> Tensor")
        library.impl("late", lambda x: x, "CPU")
    finally:
        watch.stop()
    assert heard == [("hook_test::late", "CPU")]
    assert torch.library.Library.impl is before
