"""Which steps a page holds kernel by kernel. Everything else is there as counts, sums and histograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from alphamoe_dashboards.columns import Array

MAX_KERNELS = 160_000
"""Kernels that one page holds one by one, over all ranks: about 3 MB of it."""
MIN_STEPS = 1


@dataclass(frozen=True)
class Sample:
    """The steps whose kernels a page holds one by one."""

    everything: bool
    """Every kernel of the run is in the page, those outside any step too."""
    steps: frozenset[int]
    """Chosen steps where the ranks share step numbers (they left receipts)."""
    per_rank_rows: int
    """How many kernels a rank may give where its steps are its own (imported traces)."""


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return ``count`` items evenly spaced, the first and the last among them."""
    if count >= len(items):
        return list(items)
    if count <= 1:
        return [items[len(items) // 2]] if items else []
    places = np.unique(np.linspace(0, len(items) - 1, count).round().astype(int))
    return [items[place] for place in places.tolist()]


def choose_steps(steps: Iterable[tuple[int, str, int]], kernels: int, ranks: int) -> Sample:
    """Choose steps so that every bucket is shown and the page stays small.

    Args:
        steps: (step, bucket, weight) of each forward; a bucket is an execution with its M. Ranks share step numbers.
        kernels: kernels of the run, all ranks.
        ranks: how many ranks there are.
    """
    if kernels <= MAX_KERNELS:
        return Sample(True, frozenset(), MAX_KERNELS)
    by_bucket: dict[str, list[int]] = {}
    unique = sorted({step: bucket for step, bucket, _ in steps}.items())
    for step, bucket in unique:
        by_bucket.setdefault(bucket, []).append(step)
    chosen: set[int] = set()
    if unique:
        a_step = max(kernels // len(unique), 1)
        room = max(MAX_KERNELS // a_step, MIN_STEPS)
        share = max(room // len(by_bucket), 1)
        for own in by_bucket.values():
            if len(chosen) >= room:
                break
            chosen |= set(spread(own, min(share, room - len(chosen))))
    return Sample(False, frozenset(chosen), MAX_KERNELS // max(ranks, 1))


def own_steps(step: Array, rows: int) -> Array:
    """Return [n] which kernels of one rank to keep where its steps are its own: whole steps, evenly spaced.

    Args:
        step: [n] step of each kernel, in order of time, negative where there is none.
        rows: how many kernels to keep at most; one step is always kept whole unless it alone is larger.
    """
    known, counts = np.unique(step[step >= 0], return_counts=True)
    keep = np.zeros(len(step), bool)
    if not len(known):
        keep[:rows] = True
        return keep
    fits = max(int(rows // max(float(counts.mean()), 1.0)), 1)
    chosen = np.isin(step, np.array(spread(known.tolist(), fits), np.int64))
    keep[np.flatnonzero(chosen)[:rows]] = True
    return keep
