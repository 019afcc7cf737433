"""Keys and values of the requests being served, in static storage that graph replays can address.

A request owns one slot. The last slot is scratch: rows that only pad a batch write there and attend there, so that
nothing of them reaches a real request.
"""

from __future__ import annotations

import torch

LENGTH_MULTIPLE = 64


class KVCache:
    """Keys and values by layer, each [slots + 1, kv_heads, max_len, head_dim].

    Attributes:
        slots: requests that can be held at once.
        scratch_slot: the slot of padding rows (= ``slots``).
        max_len: tokens a slot holds, rounded up to a multiple of 64.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the storage, zeroed: masked positions are multiplied by 0, and 0 * NaN would be NaN."""
        self.slots = slots
        self.scratch_slot = slots
        self.max_len = -(-max_len // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        shape = (layers, slots + 1, kv_heads, self.max_len, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._heads = torch.arange(kv_heads, device=device)[None, :]
        self._places = torch.arange(self.max_len, device=device)

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [T, kv_heads, head_dim] at (``slots`` [T], ``positions`` [T])."""
        where = (slots[:, None], self._heads, positions[:, None])
        self.keys[layer].index_put_(where, keys)
        self.values[layer].index_put_(where, values)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the keys and values of ``slots`` [B], each [B, kv_heads, max_len, head_dim]."""
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)

    def hidden_places(self, positions: torch.Tensor) -> torch.Tensor:
        """Give a mask [B, 1, 1, max_len], true where a token at ``positions`` [B] must not look."""
        return (self._places[None, :] > positions[:, None])[:, None, None, :]

    @property
    def size_bytes(self) -> int:
        """Bytes of device memory that keys and values take."""
        return 2 * self.keys.numel() * self.keys.element_size()
