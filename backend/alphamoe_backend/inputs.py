"""What goes into a forward and what comes out, in storage that a graph replay can address."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alphamoe_backend.readback import device_event


class StaticInputs:
    """The inputs of one forward, of a fixed number of rows, filled by one host-to-device copy.

    A decode ends by :meth:`advance`: the next step of the same requests then needs nothing from the host.

    Attributes:
        rows: tokens of the forward, padding included.
        input_ids, positions, slots: int64 [rows] on the device.
        logits_rows: int64 on the device: [1] for a prefill (its last real token), [rows] for a decode.
        prefill: which attention is wanted.
    """

    def __init__(self, rows: int, *, prefill: bool, scratch_slot: int, device: torch.device) -> None:
        """Make inputs that are all padding."""
        self.rows = rows
        self.prefill = prefill
        self._scratch_slot = scratch_slot
        self._host = torch.zeros((5, rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host_array = self._host.numpy()
        # On the CPU the "device" side is the host's own memory.
        self._device = self._host if device.type == "cpu" else torch.zeros((5, rows), dtype=torch.int64, device=device)
        self._copied = device_event(device)
        self.input_ids, self.positions, self.slots = self._device[0], self._device[1], self._device[2]
        self.logits_rows = self._device[3, :1] if prefill else self._device[3]
        self._is_real = self._device[4]
        self.fill([], [], [])

    def fill(self, input_ids: list[int], positions: list[int], slots: list[int]) -> None:
        """Set the first rows and make padding of the rest: token 0 at position 0 of the scratch slot.

        The host buffer is pinned and read asynchronously: this waits for the copy of the fill before, if that is still
        in flight.
        """
        self._copied.synchronize()
        count = len(input_ids)
        array = self._host_array
        array[0, :count], array[1, :count], array[2, :count] = input_ids, positions, slots
        array[0, count:], array[1, count:], array[2, count:] = 0, 0, self._scratch_slot
        array[4, :count], array[4, count:] = 1, 0
        if self.prefill:
            array[3, 0] = max(count - 1, 0)
        else:
            array[3] = range(self.rows)
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()

    def advance(self, token_ids: torch.Tensor) -> None:
        """Make the sampled ``token_ids`` [rows] the inputs of the next decode, one place further; padding stays as is.

        Device work only, so that a graph of the forward may hold it.
        """
        torch.mul(token_ids, self._is_real, out=self.input_ids)
        self.positions.add_(self._is_real)


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward leaves on the device, for each row of ``logits_rows``."""

    token_ids: torch.Tensor
    """Greedy choice, int64 [R]."""
    logits: torch.Tensor
    """float32 [R, vocabulary]."""
