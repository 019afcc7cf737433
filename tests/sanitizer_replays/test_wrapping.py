"""Putting a capturing function in another's place: everywhere, only where that changes nothing, and back again."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from alphamoe_sanitizer_replays.hooks.import_watch import ImportWatch
from alphamoe_sanitizer_replays.hooks.op_override import OpOverride, RegistrationWatch
from alphamoe_sanitizer_replays.hooks.wrapping import call_through, wrap
from alphamoe_tracers.errors import UsageError

HOME = '''
"""A module under test."""
import functools
import sys
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
partial = functools.partial(double, by=3)
TABLE, CONFIG = {"double": double}, {double: "config"}
callers = []

def made(callers=callers):
    count = 0
    def counting(step):
        nonlocal count
        callers.append(dict(sys._getframe(1).f_locals))
        count += step
        return count
    return counting

counting = made()

def deep(n):
    return n if n == 0 else deep(n - 1) + 1
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

    def before(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.count += 1

    def after(self, call: Any, result: Any) -> None:
        raise AssertionError("no call was opened")

    raised = after


def test_a_function_is_heard_of_wherever_it_is_held_and_stays_itself(modules: tuple[ModuleType, ModuleType]) -> None:
    """A name imported elsewhere, a table, a key, a partial: one object, captured from each, until it is restored."""
    home, user = modules
    before, code, held = home.double, home.double.__code__, dict(vars(home.double))
    calls = Calls()
    wrapped = wrap(home, "double", calls)
    assert user.renamed is home.double is home.TABLE["double"] is before
    assert home.CONFIG[home.double] == "config"
    assert (user.renamed(3), home.calls_double(4), home.double(5, by=3)) == (6, 8, 15)
    assert (home.TABLE["double"](6), home.partial(7), calls.count) == (12, 21, 5)
    wrapped.restore()
    assert (home.double(1), calls.count, home.double.__code__) == (2, 5, code)
    assert vars(home.double) == held


def test_a_tapped_function_passes_for_itself(modules: tuple[ModuleType, ModuleType]) -> None:
    """Name, place, documentation, defaults, signature and source are those that were; every reference pickles."""
    home, user = modules
    wrapped = wrap(home, "double", Calls())
    double, code = home.double, home.double.__code__
    assert (double.__name__, double.__module__, double.__doc__) == ("double", "wrap_home", "Double.")
    assert (double.__kwdefaults__, double.__globals__) == ({"by": 2}, vars(home))
    assert (code.co_name, code.co_qualname, Path(code.co_filename).name) == ("double", "double", "wrap_home.py")
    assert str(inspect.signature(double)) == "(x, *, by=2)"
    assert inspect.getsource(double).startswith("def double(x, *, by=2):")
    for held in (double, user.renamed, home.TABLE["double"]):
        assert pickle.loads(pickle.dumps(held)) is double  # noqa: S301 -- our own bytes
    assert pickle.loads(pickle.dumps(home.partial))(2) == 6  # noqa: S301
    wrapped.restore()


def test_free_variables_stay_the_functions_own(modules: tuple[ModuleType, ModuleType]) -> None:
    """A closure is tapped too: it counts on in its own cell, and its locals can be looked at from the frame."""
    home, _ = modules
    calls = Calls()
    wrapped = wrap(home, "counting", calls)
    assert (home.counting(1), home.counting(1), calls.count) == (1, 2, 2)
    assert home.counting.__code__.co_freevars == ("callers", "count")
    assert set(home.callers[0]) >= {"callers", "count", "args"}
    wrapped.restore()
    assert (home.counting(1), calls.count) == (3, 2)


def test_one_frame_is_added_and_none_at_the_limit_of_recursion_fails(modules: tuple[ModuleType, ModuleType]) -> None:
    """A function that calls itself goes half as deep as before, and a tap that cannot run is passed by."""
    home, _ = modules
    wrapped = wrap(home, "deep", Calls())
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack(0)) + 120)
        assert home.deep(50) == 50
    finally:
        sys.setrecursionlimit(limit)
        wrapped.restore()


def test_two_taps_of_one_function_hear_of_it_and_come_off_again(modules: tuple[ModuleType, ModuleType]) -> None:
    """Two names for one function are two targets."""
    home, user = modules
    one, two = Calls(), Calls()
    taps = [wrap(home, "double", one), wrap(user, "renamed", two)]
    assert (home.double(1), one.count, two.count) == (2, 1, 1)
    for wrapped in reversed(taps):
        wrapped.restore()
    assert (home.double(1), one.count, two.count) == (2, 1, 1)
    assert not hasattr(home.double, "__wrapped__")


def test_a_tap_that_raises_is_not_the_hosts(modules: tuple[ModuleType, ModuleType]) -> None:
    """Exceptions of a tap end there; what is none (Ctrl-C while it works) goes on."""
    home, _ = modules

    class Broken:
        error: BaseException = RuntimeError("ours")

        def before(self, *words: Any) -> Any:
            raise self.error

        after = raised = before

    broken = Broken()
    wrapped = wrap(home, "double", broken)
    try:
        assert home.double(2) == 4
        assert call_through(broken, abs, (-1,), {}) == 1
        broken.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            home.double(2)
    finally:
        wrapped.restore()


def test_a_function_in_c_is_replaced_where_modules_hold_it(modules: tuple[ModuleType, ModuleType]) -> None:
    """It has no code to exchange: names in modules get a wrapper, and restoring leaves the very object."""
    home, user = modules
    home.root, user.renamed_root = math.sqrt, math.sqrt
    original, calls = math.sqrt, Calls()
    wrapped = wrap(math, "sqrt", calls)
    try:
        assert user.renamed_root is home.root is math.sqrt is not original
        assert (home.root(4.0), math.sqrt(9.0), calls.count) == (2.0, 3.0, 2)
        assert pickle.loads(pickle.dumps(math.sqrt)) is math.sqrt  # noqa: S301
        user.renamed_root = theirs = functools.partial(math.sqrt)
    finally:
        wrapped.restore()
    assert home.root is math.sqrt is original
    assert user.renamed_root is theirs


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


@pytest.mark.parametrize("direct", [False, True], ids=["called by it", "it itself"])
def test_torch_compile_traces_the_original_without_a_graph_break(
    modules: tuple[ModuleType, ModuleType], direct: bool
) -> None:
    """A function compiled as one whole graph compiles with the tap in it, once for two sizes, and no call is seen."""
    home, _ = modules
    calls, graphs = Calls(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    wrapped = wrap(home, "double", calls)
    try:
        compiled = torch.compile(
            home.double if direct else lambda x: home.double(x), backend=backend, fullgraph=True, dynamic=True
        )
        for size in (2, 2, 3, 4):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
    finally:
        wrapped.restore()
        torch._dynamo.reset()
    assert (calls.count, len(graphs)) == (0, 1)


def test_torch_compile_never_compiles_our_own_code(modules: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    """A function that torch.compile shall leave alone is called after a graph break: heard of, and no more frames."""
    from torch._dynamo.utils import counters

    home, _ = modules
    calls, frames = Calls(), []
    home.left_alone = torch.compiler.disable(home.double)
    for tapped in (False, True):
        torch._dynamo.reset()
        counters.clear()
        wrapped = wrap(home, "left_alone", calls) if tapped else None
        compiled = torch.compile(lambda x: home.left_alone(x) + 1, backend="eager")
        for size in (2, 3, 4):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 3.0))
        frames.append(counters["frames"]["total"])
        if wrapped is not None:
            wrapped.restore()
    torch._dynamo.reset()
    assert calls.count == 3
    assert frames[1] <= frames[0] + 1


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


def test_an_override_is_not_counted_among_what_python_registered() -> None:
    """A strict registration, torch 2.11's default, is refused where Python registered before, and ours is no such."""
    override = OpOverride("aten::erfinv", Calls())
    assert override.install()
    host = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host.impl("erfinv", lambda x: x, "CPU", allow_override=False)
    host._destroy()
    override.remove()
    assert torch.erfinv(torch.zeros(1)).item() == 0.0


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
