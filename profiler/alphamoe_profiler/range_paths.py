"""What the NVTX ranges say about a moment on a thread: step, layer, innermost phase and the whole path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.ranges import DOMAIN, enclosing

NONE = -1
"""Stands for null in the integer arrays of the passes; steps, layers and row numbers are never negative."""
Ints = npt.NDArray[np.int64]


def coded(codes: npt.ArrayLike, categories: Any) -> pd.Categorical:
    """Return a categorical from codes (-1 is null)."""
    return cast("pd.Categorical", pd.Categorical.from_codes(np.asarray(codes, np.int64), categories))


@dataclass(frozen=True)
class RangePaths:
    """One entry for each moment that was asked about."""

    step: Ints
    """Payload of the innermost range ``step``, NONE where there is none."""
    layer: Ints
    """Payload of the innermost range ``layer``, NONE where there is none."""
    path: pd.Categorical
    """Names from outermost to innermost, joined with ``>``: the same name in two phases stays two."""
    phase: pd.Categorical
    """Name of the innermost range."""
    any: npt.NDArray[np.bool_]
    """Some range was open."""

    def take(self, rows: Ints) -> RangePaths:
        """Return the entries of ``rows``, nothing for NONE."""
        hit = rows >= 0
        if not len(self.step):
            empty = np.full(len(rows), NONE, np.int64)
            codes = coded(empty, self.path.categories)
            return RangePaths(empty, empty, codes, coded(empty, self.phase.categories), hit & False)
        safe = np.where(hit, rows, 0)
        return RangePaths(
            step=np.where(hit, self.step[safe], NONE),
            layer=np.where(hit, self.layer[safe], NONE),
            path=coded(np.where(hit, self.path.codes[safe], NONE), self.path.categories),
            phase=coded(np.where(hit, self.phase.codes[safe], NONE), self.phase.categories),
            any=hit & self.any[safe],
        )


def range_paths(
    ranges: pa.Table, process: Ints, thread: Ints, times_ns: Ints, domain: str | None = DOMAIN
) -> RangePaths:
    """Look up the ranges of one domain that were open at each moment.

    Args:
        ranges: a RANGES table of one rank. Ranges of other domains and start/end ranges say nothing here.
        process: [n] process ids.
        thread: [n] thread ids.
        times_ns: [n] moments on the ranges' clock.
        domain: our own unless stated; None for the ranges of every domain, as in imported traces.
    """
    own = ranges
    if domain is not None:
        own = ranges.filter(pa.array(texts(ranges, "domain") == domain, pa.bool_()))
    rows = enclosing(own, process, thread, times_ns)
    names = pd.Categorical(texts(own, "name"))
    payload = column(own, "payload", null=NONE)
    count, depth = rows.shape
    step, layer = np.full(count, NONE, np.int64), np.full(count, NONE, np.int64)
    phase = np.full(count, NONE, np.int64)
    path = np.zeros(count, np.int64)  # numbers one distinct path each; 0 is no range
    paths: list[tuple[int, ...]] = [()]
    name_codes = names.codes.astype(np.int64)
    for level in range(depth):
        at = rows[:, level]
        open_here = at >= 0
        if not open_here.any():
            continue
        name = name_codes[at[open_here]]
        for wanted, target in (("step", step), ("layer", layer)):
            if wanted in names.categories:
                hits = np.flatnonzero(open_here)[name == names.categories.get_loc(wanted)]
                target[hits] = payload[at[hits]]
        phase[open_here] = name
        width = len(names.categories) + 1
        keys, dense = np.unique(path[open_here] * width + name, return_inverse=True)
        numbers = np.arange(len(paths), len(paths) + len(keys))
        paths += [(*paths[key // width], int(key % width)) for key in keys.tolist()]
        path[open_here] = numbers[dense.reshape(-1)]
    labels = pd.Categorical([">".join(str(names.categories[code]) for code in codes) or None for codes in paths])
    return RangePaths(
        step=step,
        layer=layer,
        path=coded(labels.codes[path], labels.categories),
        phase=coded(phase, names.categories),
        any=path > 0,
    )
