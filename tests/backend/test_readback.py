"""Copies to and from the device that are in flight, on a device whose every copy lands when its event is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from alphamoe_backend import inputs as inputs_module
from alphamoe_backend import readback as readback_module
from alphamoe_backend.inputs import StaticInputs
from alphamoe_backend.readback import Readback

CPU = torch.device("cpu")


class LateEvent:
    """Does what was left to do when it is waited for."""

    def __init__(self) -> None:
        self.waits = 0
        self.recorded = 0
        self.on_wait: Callable[[], None] = lambda: None

    def record(self) -> None:
        """Count."""
        self.recorded += 1

    def synchronize(self) -> None:
        """Let the copy land."""
        self.waits += 1
        self.on_wait()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[LateEvent]:
    """The events that are made, in order."""
    made: list[LateEvent] = []

    def make(_: torch.device) -> LateEvent:
        made.append(LateEvent())
        return made[-1]

    monkeypatch.setattr(readback_module, "device_event", make)
    monkeypatch.setattr(inputs_module, "device_event", make)
    return made


def first_row(numbers: list[list[int]]) -> list[int]:
    """Settle nothing."""
    return numbers[0]


def test_steps_in_flight_land_apart_and_landings_are_reused_once_read(events: list[LateEvent]) -> None:
    """Two steps in flight need two landings however many steps follow; each read waits for its own copy."""
    readback = Readback(CPU)
    unread = readback.begin(torch.tensor([[0, 1]]), first_row)
    for step in range(1, 20):
        read = readback.begin(torch.tensor([[step, step + 1]]), first_row)
        assert unread() == [step - 1, step]
        unread = read
    assert unread() == [19, 20]
    assert len(events) == 2
    assert [event.recorded for event in events] == [event.waits for event in events] == [10, 10]


def test_what_was_sampled_is_what_is_read_though_the_next_step_overwrites_it(events: list[LateEvent]) -> None:
    """A graph writes its static outputs anew at each replay."""
    output = torch.tensor([[4, 5]])
    readback = Readback(CPU)
    first = readback.begin(output, first_row)
    output.copy_(torch.tensor([[6, 7]]))
    second = readback.begin(output, first_row)
    assert (first(), second()) == ([4, 5], [6, 7])


def test_a_step_that_is_never_read_keeps_its_landing(events: list[LateEvent]) -> None:
    """A run that was interrupted leaves one behind, whose copy may still be on its way."""
    readback = Readback(CPU)
    readback.begin(torch.tensor([[1]]), first_row)
    assert readback.begin(torch.tensor([[2]]), first_row)() == [2]
    assert readback.begin(torch.tensor([[3]]), first_row)() == [3]
    assert len(events) == 2


def test_staging_is_not_overwritten_while_its_copy_is_in_flight(events: list[LateEvent]) -> None:
    """A second fill waits for the first one's copy before it touches the pinned memory."""
    inputs = StaticInputs(2, prefill=False, scratch_slot=3, device=CPU)
    (event,) = events
    seen: list[list[int]] = []
    event.on_wait = lambda: seen.append(inputs.input_ids.tolist())
    inputs.fill([7, 8], [0, 0], [0, 1])
    inputs.fill([9], [1], [0])
    assert seen == [[0, 0], [7, 8]]
    assert inputs.input_ids.tolist() == [9, 0]
