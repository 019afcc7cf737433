"""Log histograms of durations: sparse, exact in counts, any quantile within one per cent.

Bins grow by the factor (1 + a) / (1 - a) with a = 0.0099, so that a bin's representative lies within 0.99 % of every
value in it (the DDSketch argument: Masson, Rim, Lee 2019). Bin 0 holds durations of 0 ns. Histograms add up, whatever
the filter, because every group uses the same bins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from alphamoe_dashboards.columns import Array, Columns

ACCURACY = 0.0099
GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GROWTH = float(np.log(GROWTH))
_MAX_GAP = 255

Ints = npt.NDArray[np.int64]


def bins_of(duration_ns: Ints) -> Ints:
    """Return [n] the bin of each duration: 0 for 0 ns, else 1 + ceil(log of it to the base GROWTH)."""
    positive = np.maximum(duration_ns, 1).astype(np.float64)
    return np.where(duration_ns <= 0, 0, 1 + np.ceil(np.log(positive) / _LOG_GROWTH - 1e-9)).astype(np.int64)


def value_of(bins: Array) -> npt.NDArray[np.float64]:
    """Return [n] the representative duration of each bin in ns."""
    exponent = np.asarray(bins, np.float64) - 1
    return np.where(np.asarray(bins) <= 0, 0.0, 2 * GROWTH**exponent / (GROWTH + 1))


def sparse(group: Ints, duration_ns: Ints, groups: int) -> tuple[Columns, Columns]:
    """Return the histograms of many groups.

    Args:
        group: [n] group of each timed kernel, 0 to groups - 1.
        duration_ns: [n].
        groups: how many groups there are.

    Returns:
        (by group: ``hist_entries``, how many entries each has; entries: ``gap`` to the entry before it in its group,
        the first from 0, and ``count``). A gap above 255 is cut by entries with count 0.
    """
    bins = bins_of(duration_ns)
    width = int(bins.max()) + 1 if len(bins) else 1
    keys, counts = np.unique(group * width + bins, return_counts=True)
    of, at = keys // width, keys % width
    before = np.where(np.concatenate([[True], of[1:] != of[:-1]]), 0, np.concatenate([[0], at[:-1]])) if len(at) else at
    gap = at - before
    # Each entry is preceded by as many empty ones as its gap needs.
    fill = np.maximum(gap - 1, 0) // _MAX_GAP
    repeat = fill + 1
    last = np.cumsum(repeat) - 1
    gaps = np.full(int(repeat.sum()), _MAX_GAP, np.int64)
    values = np.zeros(len(gaps), np.int64)
    if len(last):
        gaps[last] = gap - fill * _MAX_GAP
        values[last] = counts
    entries = np.bincount(of, weights=repeat, minlength=groups).astype(np.int64)
    return {"hist_entries": entries}, {"gap": gaps, "count": values}


def dense(entries: Array, gap: Array, count: Array, rows: Array) -> tuple[Ints, Ints]:
    """Return (bins, counts) of the sum of the histograms of some groups, ascending, without empty bins.

    Args:
        entries: [groups] ``hist_entries``. gap, count: [m] all entries.
        rows: the groups to add.
    """
    ends = np.cumsum(entries.astype(np.int64))
    total: dict[int, int] = {}
    for row in np.asarray(rows).tolist():
        own = slice(int(ends[row] - entries[row]), int(ends[row]))
        for at, number in zip(np.cumsum(gap[own].astype(np.int64)).tolist(), count[own].tolist(), strict=True):
            if number:
                total[at] = total.get(at, 0) + number
    bins = np.array(sorted(total), np.int64)
    return bins, np.array([total[at] for at in bins.tolist()], np.int64)


def quantile(bins: Ints, counts: Ints, q: float) -> float:
    """Return a quantile in ns (the lower of two neighbours, as numpy's ``lower``), NaN of an empty histogram."""
    total = int(counts.sum())
    if not total:
        return float("nan")
    rank = int(np.floor(q * (total - 1)))
    return float(value_of(bins[np.searchsorted(np.cumsum(counts), rank, side="right")]))
