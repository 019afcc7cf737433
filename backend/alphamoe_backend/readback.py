"""Sampled tokens on their way to the host, read while the next step already runs.

A decode step that waits for its tokens before it submits the next one leaves the GPU idle for as long as the host takes
to submit, and whatever makes submitting dearer (a profiler does) is paid in full. So the copy to the host is queued
behind the step, and its bytes are read one step later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Read = Callable[[], list[int]]
"""Waits for a step's sampled tokens, one a request, and gives them; to be called once."""


class DeviceEvent(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Mark this place on the current stream."""

    def synchronize(self) -> None:
        """Wait until the stream passed the place that was marked last; at once when none was."""


class HostEvent:
    """The event of a device that has finished each operation when its call returns."""

    def record(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def device_event(device: torch.device) -> DeviceEvent:
    """Give an event for the streams of ``device``."""
    return torch.cuda.Event() if device.type == "cuda" else HostEvent()  # type: ignore[no-untyped-call]


class _Landing:
    """Pinned memory that one copy at a time lands in, and the event behind that copy."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.memory = torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.landed = device_event(device)


class Readback:
    """Copies to the host that are waited for later. A landing is reused only after it was read."""

    def __init__(self, device: torch.device) -> None:
        """Prepare; memory is pinned as it is needed, once for each shape and step in flight."""
        self._device = device
        self._free: dict[torch.Size, list[_Landing]] = {}

    def begin(self, numbers: torch.Tensor, settle: Callable[[list[list[int]]], list[int]]) -> Read:
        """Queue the copy of ``numbers`` behind the current stream's work.

        Args:
            numbers: int64 [k, n] on the device; what the stream does to them later does not matter.
            settle: makes the tokens of the numbers, see :meth:`TensorParallelGroup.settle`.
        """
        free = self._free.setdefault(numbers.shape, [])
        landing = free.pop() if free else _Landing(numbers.shape, self._device)
        landing.memory.copy_(numbers, non_blocking=True)
        landing.landed.record()

        def read() -> list[int]:
            landing.landed.synchronize()
            found = landing.memory.tolist()
            free.append(landing)
            return settle(found)

        return read
