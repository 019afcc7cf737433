"""Taking calls: which ones, what is stored of them, and that the host never notices a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from alphamoe_sanitizer_replays.captures import store as capture_store
from alphamoe_sanitizer_replays.captures.store import StoredCapture, find_captures, open_capture
from alphamoe_sanitizer_replays.hooks import call_record
from alphamoe_sanitizer_replays.hooks.report import Board, TargetStatus, say, summary
from alphamoe_sanitizer_replays.hooks.settings import HookSettings, from_environment
from alphamoe_sanitizer_replays.hooks.tap import Tap
from alphamoe_sanitizer_replays.hooks.wrapping import call_through
from alphamoe_sanitizer_replays.plugins.generic_call import Placed, download
from alphamoe_sanitizer_replays.plugins.protocol import find_plugin
from alphamoe_tracers.errors import EvidenceError, UsageError

TARGET = "tap_functions:work"


def make(tmp_path: Path, **asked: Any) -> tuple[Tap, TargetStatus]:
    settings = HookSettings(callables=(TARGET,), out=tmp_path / "out", **asked)
    board = Board(settings.out, "root", (TARGET,))
    return Tap(TARGET, "callable", settings, board), board.targets[TARGET]


def captures(tmp_path: Path) -> list[StoredCapture]:
    out = tmp_path / "out"
    return [open_capture(path) for path in find_captures(out)] if out.is_dir() else []


def add_into(out: Tensor, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return out.add_(x, alpha=scale)


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.delenv("RANK", raising=False)
        yield


def test_inputs_are_stored_as_they_were_and_changes_as_outputs(tmp_path: Path) -> None:
    """An argument that the call writes into is an input by its old bytes and an output by its new ones."""
    tap, _ = make(tmp_path)
    out, x = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert call_through(tap, add_into, (out, x), {"scale": 0.5}) is out
    [stored] = captures(tmp_path)
    assert torch.equal(stored.load("args.0"), torch.ones(2, 3))
    assert torch.equal(stored.load("after.args.0"), torch.full((2, 3), 2.0))
    assert [info.name for info in stored.capture.tensors if info.role == "output"] == ["after.args.0"]
    assert stored.capture.arguments["result"]["tensor"] == "args.0"
    assert (stored.capture.M, stored.capture.rank_source, stored.capture.callable) == (2, "none", TARGET)


def test_one_element_of_a_longer_tensor_is_captured(tmp_path: Path) -> None:
    """It is contiguous to torch whatever its stride is, also where a call changes it."""
    tap, _ = make(tmp_path)
    call_through(tap, add_into, (torch.ones(10)[::2][:1], torch.ones(3)[:1]), {})
    [stored] = captures(tmp_path)
    assert stored.load("after.args.0").tolist() == [2.0]


def test_the_first_calls_of_each_m_are_taken(tmp_path: Path) -> None:
    """With first=2, five calls of M 1 and one of M 7 give two and one."""
    tap, status = make(tmp_path, first=2)
    for rows in (1, 1, 7, 1, 1, 1):
        call_through(tap, torch.neg, (torch.ones(rows, 2),), {})
    assert status.captured == {"rank 0 M 1": 2, "rank 0 M 7": 1}
    assert sorted((stored.capture.M, stored.capture.call) for stored in captures(tmp_path)) == [(1, 0), (1, 1), (7, 0)]


def test_m_comes_from_the_argument_and_dimension_asked_for(tmp_path: Path) -> None:
    """A named argument is found by position and by keyword, and a negative dimension counts from the end."""
    tap, _ = make(tmp_path, m_from=("x", -1))
    call_through(tap, add_into, (torch.ones(2, 5), torch.ones(2, 5)), {})
    call_through(tap, lambda out, x: add_into(out, x), (torch.ones(2, 4),), {"x": torch.ones(2, 4)})
    assert sorted(stored.capture.M for stored in captures(tmp_path)) == [4, 5]


def test_m_of_an_operator_comes_from_its_schema(tmp_path: Path) -> None:
    """An operator's argument is found by the name that its schema gives it."""
    settings = HookSettings(ops=("aten::mm",), out=tmp_path / "out", m_from=("mat2", 1))
    tap = Tap("aten::mm", "torch_op", settings, Board(settings.out, "root", ("aten::mm",)))
    call_through(tap, torch.mm, (torch.ones(2, 3), torch.ones(3, 5)), {})
    assert [stored.capture.M for stored in captures(tmp_path)] == [5]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"only_m": (3,)}, "M 2 was not asked for"),
        ({"ranks": "1+2"}, "rank 0 was not asked for"),
        ({"when": Path("never-there")}, "never-there did not exist"),
    ],
)
def test_calls_that_were_not_asked_for_pass(tmp_path: Path, asked: dict[str, Any], why: str) -> None:
    """M, rank and the file that arms the hook are filters, each with its reason in the report."""
    tap, status = make(tmp_path, **asked)
    call_through(tap, torch.neg, (torch.ones(2),), {})
    assert status.not_asked == [why]
    assert captures(tmp_path) == []


def test_the_rank_is_that_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE name the rank, and ``last`` is that of the world."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    tap, _ = make(tmp_path, ranks="last")
    call_through(tap, torch.neg, (torch.ones(2),), {})
    [stored] = captures(tmp_path)
    assert (stored.capture.rank, stored.capture.rank_source, stored.capture.world_size) == (3, "RANK", 4)
    assert stored.path.parent.name == "rank=3"


def test_traced_calls_are_not_taken(tmp_path: Path) -> None:
    """Under a fake-tensor mode nothing is captured, and the report says why."""
    tap, status = make(tmp_path)
    with FakeTensorMode():
        call_through(tap, torch.neg, (torch.ones(2),), {})
    assert status.not_eager == ["a torch dispatch mode was active"]
    assert captures(tmp_path) == []


def test_exceptions_of_the_call_are_the_hosts_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The very exception object reaches the caller, nothing is written, and the next call is taken."""
    tap, status = make(tmp_path)
    theirs = ValueError("theirs")

    def fails(x: Tensor) -> Tensor:
        raise theirs

    with pytest.raises(ValueError, match="theirs") as raised:
        call_through(tap, fails, (torch.ones(2),), {})
    assert raised.value is theirs
    assert captures(tmp_path) == []
    call_through(tap, torch.neg, (torch.ones(2),), {})
    assert status.captured == {"rank 0 M 2": 1}
    assert "raised an exception" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["check_room", "write_capture", "encode_result", "_to_host"])
def test_a_failure_of_ours_is_one_line_and_the_result_passes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Whatever breaks, before or after the call, the host gets its own result and stderr one line."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call_record, where, broken)
    tap, status = make(tmp_path)
    x = torch.ones(2)
    for _ in range(3):
        assert torch.equal(call_through(tap, torch.neg, (x,), {}), -x)
    assert captures(tmp_path) == []
    assert status.captured == {}
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left on device" in error


def test_an_argument_that_cannot_be_held_is_told_by_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object among the arguments refuses that capture; after sixteen such calls no more are tried."""
    tap, status = make(tmp_path)
    for _ in range(20):
        assert call_through(tap, lambda x, config: x, (torch.ones(2), object()), {}) is not None
    assert status.failures == ["args.1 is of type object"]
    assert status.calls == 16
    assert "no more are tried" in capsys.readouterr().err


def test_what_would_exceed_the_bytes_allowed_is_refused(tmp_path: Path) -> None:
    """The bytes of all captures of a process are bounded."""
    tap, status = make(tmp_path, max_bytes=1000, first=9)
    for _ in range(3):
        call_through(tap, torch.neg, (torch.ones(100),), {})
    assert status.captured == {"rank 0 M 100": 1}
    assert status.failures == ["a call of 400 bytes does not fit into what --max-bytes leaves (200 bytes)"]


def test_our_own_copies_are_not_taken(tmp_path: Path) -> None:
    """A tap on the very operator that copies tensors sees the host's calls only."""
    tap, status = make(tmp_path, first=100)
    original = call_record._to_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_record, "_to_host", lambda tensor: call_through(tap, original, (tensor,), {}))
        call_through(tap, torch.neg, (torch.ones(2),), {})
    assert status.calls == 1


def test_threads_take_no_more_than_was_asked_for(tmp_path: Path) -> None:
    """Eight threads that call at once give exactly the calls asked for."""
    tap, status = make(tmp_path, first=3)
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        for _ in range(5):
            call_through(tap, torch.neg, (torch.ones(4, 4),), {})

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert status.captured == {"rank 0 M 4": 3}
    assert len(captures(tmp_path)) == 3


def test_parameters_are_weights_in_a_file_that_captures_share(tmp_path: Path) -> None:
    """Two calls with the same layer's parameters store them once."""
    tap, _ = make(tmp_path, first=2)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    for _ in range(2):
        call_through(tap, lambda x, w: x @ w, (torch.ones(1, 4), weight), {})
    assert [stored.capture.tensor("args.1").role for stored in captures(tmp_path)] == ["weight", "weight"]
    assert len(list((tmp_path / "out" / "rank=0").glob("weights-*.safetensors"))) == 1


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def too_short(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


@pytest.mark.parametrize("shorten", [freed, too_short])
@pytest.mark.parametrize("make_tensor", [torch.ones, lambda size: torch.nn.Parameter(torch.ones(size))])
def test_memory_that_is_not_there_is_never_read(
    tmp_path: Path, shorten: Callable[[Tensor], Tensor], make_tensor: Callable[[int], Tensor]
) -> None:
    """An argument that was freed or offloaded, before the call or by it, refuses the capture; the call goes on."""
    tap, status = make(tmp_path)
    x, size = torch.ones(2), 1 << 20

    def frees(x: Tensor, big: Tensor) -> Tensor:
        shorten(big)
        return x

    assert call_through(tap, lambda x, unread: x, (x, shorten(make_tensor(size))), {}) is x
    assert call_through(tap, frees, (x, make_tensor(size)), {}) is x
    before, after = status.failures
    there = 0 if shorten is freed else 4 * size - 1
    assert before == f"args.1 has no memory: {there} of {4 * size} bytes (freed, or offloaded)"
    assert after == f"args.1, after the call, has no memory: {there} of {4 * size} bytes (freed, or offloaded)"
    assert captures(tmp_path) == []


def test_tensors_without_memory_of_their_own_are_refused(tmp_path: Path) -> None:
    """Meta, fake and functional tensors, and those of a torch.func transform, have nothing to copy."""
    tap, status = make(tmp_path)
    with FakeTensorMode():
        fake = torch.ones(2)
    for tensor in (torch.ones(2, device="meta"), fake, torch._to_functional_tensor(torch.ones(2))):
        assert call_through(tap, lambda x: x, (tensor,), {}) is tensor
    assert status.calls == 3
    torch.vmap(lambda x: call_through(tap, torch.neg, (x,), {}))(torch.ones(2, 2))
    assert len(status.failures) == 3
    assert status.failures[-1].startswith("args.0 has no memory of its own: ")
    assert status.captured == {}


def test_the_hosts_function_modes_see_nothing_of_ours(tmp_path: Path) -> None:
    """A mode that counts, or refuses, operations of torch meets those of the call alone."""
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    tap, status = make(tmp_path)
    x = torch.ones(2, 3)
    with Mode():
        call_through(tap, lambda x: x.neg(), (x,), {})
    assert seen == ["neg"]
    assert status.captured == {"rank 0 M 2": 1}


def test_a_stream_of_the_hosts_may_raise_what_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stderr that fails while a failure is told is no failure of the call."""

    class Stream:
        def write(self, text: str) -> None:
            raise KeyError("no logger yet")

    monkeypatch.setattr("sys.stderr", Stream())
    say("also where no call is around it, as at an import")
    tap, status = make(tmp_path)
    x = torch.ones(2)
    assert call_through(tap, lambda x, config: x, (x, object()), {}) is x
    assert status.failures == ["args.1 is of type object"]


def test_ctrl_c_while_a_call_is_copied_is_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes out of the call as it would a moment earlier, and the next call is taken."""

    def interrupted(tensor: Tensor) -> Tensor:
        raise KeyboardInterrupt

    tap, status = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(call_record, "_to_host", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call_through(tap, torch.neg, (torch.ones(2),), {})
    call_through(tap, torch.neg, (torch.ones(2),), {})
    assert (status.captured, status.failures) == ({"rank 0 M 2": 1}, [])


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "sliced": lambda: torch.arange(24.0).reshape(4, 6)[::2, 1:4],
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.empty(0, 4),
    "bool": lambda: torch.tensor([True, False]),
    "fp8": lambda: torch.arange(8.0).to(torch.float8_e4m3fn).reshape(2, 4).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_gets_the_layout_that_the_call_had(layout: str) -> None:
    """Values and strides of any view come back, in memory that is restored before each launch."""
    tensor = LAYOUTS[layout]()
    place = Placed(tensor.contiguous(), tensor.stride(), torch.device("cpu"))
    assert place.view.stride() == tensor.stride()
    raw = download(place.view).view(torch.uint8) if tensor.numel() and tensor.dim() else download(place.view)
    wanted = tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor
    assert torch.equal(raw, wanted)
    if tensor.dtype == torch.float32 and layout not in ("expanded", "empty"):
        place.view.zero_()
        place.renew()
        assert torch.equal(place.view, tensor)


def test_strides_that_cannot_be_are_damaged_evidence() -> None:
    """A capture.json that was changed asks for no terabytes."""
    with pytest.raises(EvidenceError, match="strides"):
        Placed(torch.ones(2, 2), (1 << 60, 1), torch.device("cpu"))


def test_the_check_of_a_replay_can_fail(tmp_path: Path) -> None:
    """Equal bytes pass; a value off, a NaN, another shape fail; an output that is missing proves nothing."""
    tap, _ = make(tmp_path)
    call_through(tap, torch.neg, (torch.ones(4, 4),), {})
    [stored] = captures(tmp_path)
    plugin = find_plugin("callable")
    right = stored.load("result")
    off, nan = right.clone(), right.clone()
    off[0, 0] += 1e-3
    nan[1, 1] = torch.nan
    verdicts = [
        plugin.check(stored, {}, {"result": result}).verdict for result in (right, off, nan, right[:2], right.double())
    ]
    assert verdicts == ["PASS", "FAIL", "FAIL", "FAIL", "FAIL"]
    assert plugin.check(stored, {}, {}).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(
    "wrong",
    [
        {"ALPHAMOE_CAPTURE_CALLABLE": "no-path"},
        {"ALPHAMOE_CAPTURE_CALLABLE": "__main__:f"},
        {"ALPHAMOE_CAPTURE_OP": "aten.mm"},
        {"ALPHAMOE_CAPTURE_CALLABLE": "a:b", "ALPHAMOE_CAPTURE_FIRST": "0"},
        {"ALPHAMOE_CAPTURE_CALLABLE": "a:b", "ALPHAMOE_CAPTURE_M": "1,x"},
        {"ALPHAMOE_CAPTURE_CALLABLE": "a:b", "ALPHAMOE_CAPTURE_RANK": "first"},
        {"ALPHAMOE_CAPTURE_CALLABLE": "a:b", "ALPHAMOE_CAPTURE_M_FROM": "x"},
        {"ALPHAMOE_CAPTURE_CALLABLE": "a:b", "ALPHAMOE_CAPTURE_MAX_BYTES": "much"},
    ],
)
def test_a_wrong_variable_is_a_usage_error(wrong: dict[str, str]) -> None:
    """Each variable is checked before anything is hooked."""
    with pytest.raises(UsageError):
        from_environment(wrong)


def test_settings_survive_the_environment(tmp_path: Path) -> None:
    """What the command writes is what the process reads, and nothing named means off."""
    settings = HookSettings(
        callables=("a.b:c",),
        ops=("n::f", "n::g.out"),
        out=tmp_path,
        first=3,
        only_m=(1, 8),
        m_from=("x", -1),
        ranks="0+3",
        plugin="mine:P",
        symbols=("k1", "k2"),
        imports=("m",),
        when=tmp_path / "go",
        max_bytes=1 << 20,
    )
    assert from_environment(settings.to_environment()) == settings
    assert from_environment({}) is None


def test_the_report_of_a_process_that_was_killed_is_still_there(tmp_path: Path) -> None:
    """Status files are replaced as things happen, so the summary needs no process to end well."""
    tap, _ = make(tmp_path)
    call_through(tap, torch.neg, (torch.ones(2),), {})
    settings = HookSettings(callables=(TARGET, "other:f"), out=tmp_path / "out")
    told = summary(settings, "root")
    lines, count = told.lines, told.captured
    assert lines[0] == f"captured 1 call of {TARGET} (rank 0 M 2) in {settings.out}"
    assert lines[1].startswith("nothing was captured: ")
    assert (count, told.missing) == (1, ("other:f",))
    assert summary(settings, "another run").captured == 0
    assert capture_store.find_captures(settings.out) != []
