"""Receipts: eager submissions, captured registrations, failed and repeated captures."""

from typing import Any

import pytest

from alphamoe_backend.dispatch import DispatchRecorder, graph_key
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import Receipt

SHAPE: dict[str, Any] = {"E": 16, "H": 256, "I_local": 128, "top_k": 4, "block_m": 8, "device": -1}
KEY = graph_key("flashinfer_alphamoe#0", "decode_graph_replay", 8, 5)


def recorder_and_receipts() -> tuple[DispatchRecorder, list[Receipt]]:
    """Give a recorder whose sink is a list."""
    receipts: list[Receipt] = []
    return DispatchRecorder("run", 2, receipts.append), receipts


def submit(recorder: DispatchRecorder, layer: int, M: int = 8, symbol: str = "kernel_a") -> None:
    """Submit one kernel."""
    recorder.submit(layer=layer, kernel="op", symbol=symbol, M=M, **SHAPE)


def submit_and_fail(recorder: DispatchRecorder) -> None:
    """Submit one kernel, then fail as a layer might."""
    submit(recorder, 0)
    raise ZeroDivisionError


def forward(step: int = 0, **changes: Any) -> dict[str, Any]:
    """Give the arguments of an eager forward."""
    arguments = {
        "step": step,
        "purpose": "witness",
        "request_ids": ("r0",),
        "forward_mode": "EXTEND",
        "execution": "eager",
        "M": 8,
        "real_tokens": 5,
        "batch_size": 1,
    }
    return {**arguments, **changes}


def replay(step: int = 0, key: str = KEY, **changes: Any) -> dict[str, Any]:
    """Give the arguments of a decode replay."""
    return forward(step, forward_mode="DECODE", execution="decode_graph_replay", graph_key=key, **changes)


def test_an_eager_forward_reports_its_own_submissions_in_order() -> None:
    """One receipt for the forward holds the submissions made inside, in order and not captured."""
    recorder, receipts = recorder_and_receipts()
    with recorder.forward(**forward(7)):
        submit(recorder, 0)
        submit(recorder, 1)
        assert receipts == []
    (receipt,) = receipts
    assert (receipt.rank, receipt.step, receipt.M, receipt.real_tokens) == (2, 7, 8, 5)
    assert receipt.attribution == "direct_submissions"
    assert [kernel.layer for kernel in receipt.kernels] == [0, 1]
    assert not any(kernel.captured for kernel in receipt.kernels)
    assert recorder.receipts == 1


def test_a_forward_that_fails_writes_no_receipt() -> None:
    """An exception inside the forward leaves no receipt, and the next forward starts afresh."""
    recorder, receipts = recorder_and_receipts()
    with pytest.raises(ZeroDivisionError), recorder.forward(**forward(0)):
        submit_and_fail(recorder)
    with recorder.forward(**forward(1)):
        submit(recorder, 3)
    assert [(receipt.step, len(receipt.kernels)) for receipt in receipts] == [(1, 1)]


def test_a_capture_is_no_execution_and_each_replay_reports_it() -> None:
    """A capture writes nothing; every replay of its key reports the registered submissions, marked as captured."""
    recorder, receipts = recorder_and_receipts()
    with recorder.capture(KEY):
        submit(recorder, 0)
        submit(recorder, 1)
    assert receipts == []
    for step in (10, 11):
        with recorder.forward(**replay(step)):
            pass
    assert [receipt.step for receipt in receipts] == [10, 11]
    for receipt in receipts:
        assert receipt.attribution == "capture_registration"
        assert receipt.graph_key == KEY
        assert [kernel.layer for kernel in receipt.kernels] == [0, 1]
        assert all(kernel.captured for kernel in receipt.kernels)


def test_a_failed_capture_registers_nothing() -> None:
    """After a failed capture a replay of the key is refused, also when an older capture had registered it."""
    recorder, receipts = recorder_and_receipts()
    with recorder.capture(KEY):
        submit(recorder, 0)
    with pytest.raises(ZeroDivisionError), recorder.capture(KEY):
        submit_and_fail(recorder)
    assert recorder.registered(KEY) is None
    with pytest.raises(AlphaMoEError, match="no successful capture registered"), recorder.forward(**replay()):
        pass
    assert receipts == []


def test_a_recapture_replaces() -> None:
    """A second capture of the key replaces the first one's submissions."""
    recorder, receipts = recorder_and_receipts()
    for symbol in ("kernel_a", "kernel_b"):
        with recorder.capture(KEY):
            submit(recorder, 0, symbol=symbol)
    with recorder.forward(**replay()):
        pass
    assert [kernel.symbol for kernel in receipts[0].kernels] == ["kernel_b"]


def test_keys_of_different_backend_objects_differ() -> None:
    """The same shape captured over another experts object is another graph."""
    first = graph_key("flashinfer_alphamoe#0", "decode_graph_replay", 8, 8)
    assert first != graph_key("flashinfer_alphamoe#1", "decode_graph_replay", 8, 8)
    assert first != graph_key("flashinfer_alphamoe#0", "prefill_graph_replay", 8, 8)
    recorder, _ = recorder_and_receipts()
    with recorder.capture(first):
        submit(recorder, 0)
    recorder.forget(first)
    assert recorder.registered(first) is None


def test_a_direct_submission_inside_a_replay_is_an_error() -> None:
    """A layer that runs on the host inside a replay contradicts the registration and is refused."""
    recorder, receipts = recorder_and_receipts()
    with recorder.capture(KEY):
        submit(recorder, 0)
    with pytest.raises(AlphaMoEError, match="layer 4 submitted kernel_a directly"), recorder.forward(**replay()):
        submit(recorder, 4)
    assert receipts == []


def test_submissions_outside_any_scope_are_counted_and_prove_nothing() -> None:
    """A layer used without a forward around it writes no receipt; the recorder counts what it could not place."""
    recorder, receipts = recorder_and_receipts()
    submit(recorder, 0)
    assert recorder.unscoped == 1
    with recorder.forward(**forward()):
        pass
    assert receipts[0].kernels == ()


@pytest.mark.parametrize(
    "arguments",
    [
        forward(graph_key=KEY),
        forward(execution="prefill_graph_replay"),
        forward(real_tokens=9),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any]) -> None:
    """A key on an eager forward, a replay without a key, and more real tokens than M write no receipt."""
    recorder, receipts = recorder_and_receipts()
    with pytest.raises(AlphaMoEError), recorder.forward(**arguments):
        pass
    assert receipts == []


def test_scopes_do_not_nest() -> None:
    """A capture inside a forward is refused, and the forward's scope is closed afterwards."""
    recorder, receipts = recorder_and_receipts()
    refused = pytest.raises(AlphaMoEError, match="inside the forward of step 0")
    with refused, recorder.forward(**forward()), recorder.capture(KEY):
        pass
    assert receipts == []
    with recorder.forward(**forward(1)):
        pass
    assert len(receipts) == 1


def test_unknown_numbers_stay_null() -> None:
    """Numbers that the caller does not know are null in the receipt."""
    recorder, receipts = recorder_and_receipts()
    with recorder.forward(**forward(M=None, real_tokens=None, batch_size=None)):
        pass
    assert (receipts[0].M, receipts[0].real_tokens, receipts[0].batch_size) == (None, None, None)


def test_without_a_sink_receipts_are_only_counted() -> None:
    """A recorder without a sink writes nothing and still counts."""
    recorder = DispatchRecorder("run", 0)
    with recorder.forward(**forward()):
        submit(recorder, 0)
    assert recorder.receipts == 1
