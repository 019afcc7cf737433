"""Digest a whole run: all ranks, merged into one set of tables with one string table."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alphamoe_dashboards.columns import MISSING, Array, Columns, Strings, concat
from alphamoe_dashboards.rank_digest import RankDigest, digest, digest_rank
from alphamoe_dashboards.run_facts import read_facts, work_table
from alphamoe_dashboards.sampling import Sample, choose_steps
from alphamoe_dashboards.verdict_facts import witness_facts
from alphamoe_profiler.bundle import RunBundle

PARALLEL_FROM = 600_000
"""Kernels from which ranks are digested two at a time in processes of their own."""
WORKERS = 2
_TEXTS = {
    "cube": ("traffic", "execution"),
    "shapes": ("traffic", "execution"),
    "clusters": ("traffic", "execution"),
    "kernels": ("traffic", "execution"),
    "cells": ("execution", "symbol"),
    "steps": ("traffic", "execution", "forward_mode", "requests"),
    "forwards": ("traffic", "execution", "forward_mode"),
    "ranges": ("name",),
}
_SYMBOLS = ("cube", "shapes", "clusters", "kernels")

Progress = Callable[[str], object]


@dataclass
class RunDigest:
    """Everything that a page or a figure shows of one run."""

    path: Path
    facts: dict[str, Any]
    """Plain data: what was asked, verdicts, ranks, requests, memory, what is missing."""
    strings: Strings
    tables: dict[str, Columns] = field(default_factory=dict)
    """cube, hist, shapes, steps, forwards, cells, slices, kernels, ranges, symbols, work; clusters for comparisons.
    Every one of a rank's has ``rank``; text columns point into ``strings``, symbol columns into ``symbols``."""


def digest_run(path: Path, strings: Strings | None = None, clusters: bool = False, told: Progress = str) -> RunDigest:
    """Digest one run bundle.

    Args:
        path: the bundle.
        strings: string table to add to.
        clusters: keep what :mod:`alphamoe_dashboards.compare` needs.
        told: called with one line for each rank that is done.

    Raises:
        UsageError: it is no bundle, or its files contradict each other (nothing of it is shown then).
        EvidenceError: it is damaged beyond reading.
    """
    bundle = RunBundle.open(path)
    sizes = {rank: _rows(bundle, "kernels", rank) for rank in bundle.ranks}
    total = sum(sizes.values())
    sample = choose_steps(_forwards(bundle), total, bundle.world_size)
    parts, (verdict, problems) = _digested(bundle, sample, clusters, total, told)
    result = RunDigest(path, {}, strings or Strings())
    merge(result, parts)
    result.tables["work"] = work_table(bundle, result.strings)
    result.facts = read_facts(bundle, parts)
    result.facts["problems"] = [*problems, *result.facts["problems"]]
    result.facts["verdicts"] = [*result.facts.pop("reports"), verdict]
    shown = len(result.tables["kernels"]["start"])
    steps = len(np.unique(result.tables["slices"]["step"][result.tables["slices"]["step"] >= 0]))
    result.facts["sample"] = {"everything": sample.everything, "kernels": shown, "of": total, "steps": steps}
    return result


def _digested(
    bundle: RunBundle, sample: Sample, clusters: bool, total: int, told: Progress
) -> tuple[list[RankDigest], tuple[dict[str, Any], list[str]]]:
    if total < PARALLEL_FROM:
        judgement = witness_facts(bundle.path)
        parts = []
        for rank in bundle.ranks:
            parts.append(digest(bundle, rank, sample, clusters))
            told(f"rank {rank}")
        return parts, judgement
    context = multiprocessing.get_context("spawn")  # threads of Arrow do not survive a fork
    with ProcessPoolExecutor(WORKERS, context) as pool:
        judged = pool.submit(witness_facts, bundle.path)  # first: it refuses contradictory bundles
        futures = [pool.submit(digest_rank, bundle.path, rank, sample, clusters) for rank in bundle.ranks]
        parts = []
        for rank, future in zip(bundle.ranks, futures, strict=True):
            parts.append(future.result())
            told(f"rank {rank}")
        return parts, judged.result()


def _rows(bundle: RunBundle, table: str, rank: int) -> int:
    """Count rows by the parts' metadata alone; a damaged part counts nothing here and is told when it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    folder = bundle.path / table / f"rank={rank}"
    for part in sorted(folder.glob("part-*.parquet")) if folder.is_dir() else []:
        try:
            count += pq.read_metadata(part).num_rows if part.is_file() and not part.is_symlink() else 0
        except (OSError, pa.ArrowException, ValueError):
            continue
    return count


def _forwards(bundle: RunBundle) -> list[tuple[int, str, int]]:
    return [
        (item.step, f"{item.execution} {item.M}", 1)
        for rank in bundle.ranks
        for item in bundle.receipts(rank).receipts
        if item.purpose == "witness"
    ]


def merge(target: RunDigest, parts: list[RankDigest]) -> None:
    """Put the ranks' tables below one another, with one string table and one symbol table."""
    symbols: dict[tuple[str, str, str | None], int] = {}
    merged: dict[str, list[Columns]] = {}
    slices: list[Columns] = []
    first, first_range = 0, 0
    for part in parts:
        text = np.array([*(target.strings.add(value) for value in part.texts), MISSING], np.int64)
        symbol = np.array([symbols.setdefault(name, len(symbols)) for name in part.symbols] or [MISSING], np.int64)
        tables = {name: dict(columns) for name, columns in part.tables.items()}
        for name, own in _TEXTS.items():
            for column in own if name in tables else ():
                tables[name][column] = text[tables[name][column]]
        for name in _SYMBOLS:
            if name in tables and len(tables[name]["symbol"]):
                tables[name]["symbol"] = symbol[tables[name]["symbol"]]
        cut = _slices(tables, part.rank, first, first_range)
        first, first_range = first + len(tables["kernels"]["start"]), first_range + len(tables["ranges"]["start"])
        slices.append(cut)
        for name, columns in tables.items():
            if name != "hist":
                columns["rank"] = np.full(len(next(iter(columns.values()))), part.rank, np.int64)
            merged.setdefault(name, []).append(columns)
    target.tables = {name: concat(columns) for name, columns in merged.items()}
    target.tables["slices"] = concat(slices)
    target.tables["kernels"].pop("rank", None)  # slices say it
    target.tables["ranges"].pop("rank", None)
    target.tables["symbols"] = {
        "full": target.strings.column(full for full, _, _ in symbols),
        "base": target.strings.column(base for _, base, _ in symbols),
        "class": target.strings.column(kind for _, _, kind in symbols),
    }


def _slices(tables: dict[str, Columns], rank: int, first: int, first_range: int) -> Columns:
    """Cut a rank's kernels and ranges by step, and make their times relative: JavaScript cannot hold ns since 1970.

    ``origin_ns`` of a slice counts from the rank's first time; clocks of different ranks are never compared.
    """
    kernels, ranges, steps = tables["kernels"], tables["ranges"], tables["steps"]
    timed = kernels["duration"] >= 0
    times = [kernels["start"][timed], steps["start"][steps["start"] >= 0], ranges["start"]]
    zero = min((int(values.min()) for values in times if len(values)), default=0)
    order = np.argsort(ranges["step"], kind="stable")
    tables["ranges"] = ranges = {name: values[order] for name, values in ranges.items()}
    known, at, count = np.unique(kernels["step"], return_index=True, return_counts=True)
    origin = np.zeros(len(known), np.int64)
    relative = np.zeros(len(kernels["start"]), np.int64)
    range_first, range_count = (np.searchsorted(ranges["step"], known, side=side) for side in ("left", "right"))
    for number in range(len(known)):
        own = slice(int(at[number]), int(at[number] + count[number]))
        around = slice(int(range_first[number]), int(range_count[number]))
        starts = [kernels["start"][own][timed[own]], ranges["start"][around]]
        origin[number] = min((int(values.min()) for values in starts if len(values)), default=zero)
        relative[own] = np.where(timed[own], kernels["start"][own] - origin[number], MISSING)
        ranges["end"][around] -= origin[number]
        ranges["start"][around] = ranges["start"][around] - origin[number]
    kernels["start"] = relative
    del kernels["step"], ranges["step"]
    for name in ("start", "end"):
        steps[name] = np.where(steps[name] >= 0, steps[name] - zero, MISSING)
    return {
        "rank": np.full(len(known), rank, np.int64),
        "step": known,
        "first": at + first,
        "count": count,
        "origin_ns": origin - zero,
        "range_first": range_first + first_range,
        "range_count": range_count - range_first,
    }


def text(digested: RunDigest, indices: Array) -> list[str | None]:
    """Return the texts behind a text column."""
    values = digested.strings.values
    return [values[index] if index >= 0 else None for index in indices.tolist()]
