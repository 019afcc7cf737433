"""Which batch sizes (decode) and token counts (prefill) get a CUDA graph.

A forward of n tokens replays the graph of the smallest captured size that holds n, and the difference is padding.
The default lists are those of the serving integration that this project reproduces (reference facts 3.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from alphamoe_tracers.errors import UsageError

GraphKind = Literal["decode", "prefill"]

DEFAULT_DECODE_SIZES: tuple[int, ...] = (1, 2, 4, 8, 12, 16, *range(24, 257, 8), *range(272, 513, 16))
"""Decode batch sizes, in requests (one token each)."""

DEFAULT_PREFILL_SIZES: tuple[int, ...] = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    1280,
    1536,
    1792,
    2048,
)
"""Prefill sizes, in tokens. A longer prompt is prefilled eagerly."""


def checked_sizes(sizes: Sequence[int] | None, default: tuple[int, ...], option: str) -> tuple[int, ...]:
    """Give the capture sizes to use, ascending and without repeats.

    Args:
        sizes: what the user asked for, or None for ``default``.
        default: :data:`DEFAULT_DECODE_SIZES` or :data:`DEFAULT_PREFILL_SIZES`.
        option: the option's name for the message.

    Raises:
        UsageError: for an empty list or a size below 1.
    """
    if sizes is None:
        return default
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"{option} needs at least one size, each 1 or more, not {list(sizes)}",
            f"Leave {option} out for the default sizes.",
        )
    return tuple(sorted(set(sizes)))


def bucket_for(n: int, sizes: Sequence[int]) -> int | None:
    """Give the smallest of the ascending ``sizes`` that holds ``n``, or None where all are smaller."""
    index = bisect_left(sizes, n)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True)
class CaptureSizes:
    """The sizes in use, ascending."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    @classmethod
    def of(cls, decode: Sequence[int] | None, prefill: Sequence[int] | None) -> CaptureSizes:
        """Take the user's lists, or the default where there is none.

        Raises:
            UsageError: see :func:`checked_sizes`.
        """
        return cls(
            checked_sizes(decode, DEFAULT_DECODE_SIZES, "--cuda-graph-bs-decode"),
            checked_sizes(prefill, DEFAULT_PREFILL_SIZES, "--cuda-graph-bs-prefill"),
        )

    def sizes(self, kind: GraphKind) -> tuple[int, ...]:
        """Give the sizes of one kind."""
        return self.decode if kind == "decode" else self.prefill

    def bucket(self, kind: GraphKind, n: int) -> int | None:
        """Give the size whose graph a forward of ``n`` replays, or None where it runs eagerly."""
        return bucket_for(n, self.sizes(kind))

    def needed(self, kind: GraphKind, counts: Iterable[int]) -> tuple[int, ...]:
        """Give the sizes that serving ``counts`` replays, ascending: only these are worth capturing."""
        found = {self.bucket(kind, count) for count in counts}
        return tuple(sorted(bucket for bucket in found if bucket is not None))

    def too_large(self, kind: GraphKind, counts: Iterable[int]) -> list[str]:
        """Say, one sentence each, which of ``counts`` fit no graph and run eagerly."""
        largest = self.sizes(kind)[-1]
        what = "a prefill of {} tokens" if kind == "prefill" else "a decode of {} requests"
        return [
            f"{what.format(count)} is larger than the largest captured size ({largest}) and runs eagerly"
            for count in sorted(set(counts))
            if count > largest
        ]
