"""Runs that are unusual in one way, for the tests of the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import numpy as np

from alphamoe_dashboards.columns import Strings
from alphamoe_dashboards.digest import RunDigest, digest_run, merge
from alphamoe_dashboards.page import render
from alphamoe_dashboards.rank_digest import digest
from alphamoe_dashboards.sampling import choose_steps
from alphamoe_profiler.bundle import RunBundle

HOSTILE = (
    "</script><script>alert(1)</script>",
    "k<b>bold</b>",
    "pack<A>(x)",
    "pack<B>(x)",
    "a & b",
    "k<$1>$",
    "核函数_ядро_🚀",
    "<img src=x onerror=alert(2)>",
    "long_" + "x" * 4995,
)
MS = (1, 2, 3, 8, 16, 64, 100, 906, 4096, 16384)


def page_of(run: Path, target: Path, change: Callable[[RunDigest], None] | None = None) -> Path:
    """Write the page of a run whose digest a test may change."""
    digested = digest_run(run)
    if change is not None:
        change(digested)
    target.write_text(render([digested]), encoding="utf-8")
    return target


def hostile(content: Any) -> None:
    """Give the normalisation kernels hostile names, one after the other."""
    for number, row in enumerate(content.of(golden.NORM)):
        row["_base"] = HOSTILE[number % len(HOSTILE)]


def odd_times(content: Any) -> None:
    """Make some kernels of no width, one untimed and one that ends before it starts."""
    norms = content.of(golden.NORM)
    for row in norms[4:8]:
        row["end_ns"] = row["start_ns"]
    norms[8]["start_ns"] = norms[8]["end_ns"] = 0
    norms[9]["end_ns"] = norms[9]["start_ns"] - 5


def nothing(content: Any) -> None:
    """Leave neither kernels nor receipts."""
    content.kernels.clear()
    content.launches.clear()
    content.receipts.clear()


def many_m() -> tuple[Any, ...]:
    """Return steps from M 1 to 16384, eager, and graph replays at one M."""
    steps = [golden.Step(10 + number, "eager", "EXTEND", m, m) for number, m in enumerate(MS)]
    steps.append(golden.Step(40, "decode_graph_replay", "DECODE", 2, 1))
    return tuple(steps)


def zero_m(digested: RunDigest) -> None:
    """Say that the kernels of M 3 ran with M 0: an idle rank dispatches no token."""
    for name in ("cube", "kernels", "cells", "forwards", "steps"):
        m = digested.tables[name]["M"]
        digested.tables[name]["M"] = np.where(m == 3, 0, m)


def many_ranks(run: Path, count: int) -> RunDigest:
    """Return a digest of ``count`` ranks, the ranks of the run repeated."""
    bundle = RunBundle.open(run)
    digested = digest_run(run)
    parts = []
    for rank in range(count):
        own = digest(bundle, rank % bundle.world_size, choose_steps([], 0, 1))
        parts.append(dataclasses.replace(own, rank=rank))
    whole = RunDigest(run, digested.facts, Strings())
    merge(whole, parts)
    whole.tables["work"] = {name: values[:0] for name, values in digested.tables["work"].items()}
    facts = digested.facts["ranks"]
    digested.facts["ranks"] = [facts[rank % len(facts)] | {"rank": rank} for rank in range(count)]
    digested.facts["world_size"] = count
    return whole
