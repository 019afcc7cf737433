"""What a page keeps of one rank: counts, sums and histograms of every kernel, the kernels of the sampled steps.

Ranks are digested one after another (two at a time for large runs): all their kernels are never in memory together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphamoe_dashboards.coder import Coder
from alphamoe_dashboards.columns import MISSING, Array, Columns
from alphamoe_dashboards.evidence_cells import bucket_cells
from alphamoe_dashboards.histograms import Ints, sparse
from alphamoe_dashboards.rank_steps import StepTables, step_tables
from alphamoe_dashboards.sampling import Sample, own_steps

if TYPE_CHECKING:
    from alphamoe_profiler.attributed_kernels import AttributedKernels
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.rank_skew import RankMarks

NO_EXECUTION, UNATTRIBUTED, OUTSIDE, SENTINEL = "", "unattributed", "outside the window", "sentinel"
MAX_SHAPE_ROWS = 4_000
"""Launch shapes of one rank that are kept; MoE kernels' come first."""


@dataclass
class RankDigest:
    """One rank, small. Text columns hold indices into ``texts`` of this rank."""

    rank: int
    texts: list[str] = field(default_factory=list)
    symbols: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(full, base, class); symbol columns point here."""
    tables: dict[str, Columns] = field(default_factory=dict)
    """cube, hist, shapes, steps, kernels, ranges, cells, clusters."""
    marks: RankMarks | None = None
    """What is compared between ranks; stays off the page."""
    facts: dict[str, Any] = field(default_factory=dict)
    """kernels, attributed, reasons, window (failed conditions), untimed, invalid, duplicates, shapes_left_out."""


def digest_rank(path: Path, rank: int, sample: Sample, with_clusters: bool) -> RankDigest:
    """Read, attribute and digest one rank of a bundle; a function of its own for worker processes."""
    from alphamoe_profiler.bundle import RunBundle

    return digest(RunBundle.open(path), rank, sample, with_clusters)


def digest(bundle: RunBundle, rank: int, sample: Sample, with_clusters: bool = False) -> RankDigest:
    """Digest one rank.

    Args:
        bundle: the run.
        rank: which rank.
        sample: what to keep kernel by kernel.
        with_clusters: keep sums by step, bucket and symbol too: intervals of a comparison need them.
    """
    from alphamoe_profiler.attribution import attribute
    from alphamoe_profiler.rank_skew import rank_marks
    from alphamoe_profiler.windows import prove_window

    own = attribute(bundle, rank)
    own.check()
    frame = own.frame
    coder = Coder(frame)
    result = RankDigest(rank, coder.texts, coder.symbols, marks=rank_marks(own))
    steps = step_tables(bundle, rank, own, coder)
    coded = _coded(frame, coder, steps)
    proof = prove_window(bundle, rank, frame)
    result.tables["cube"], result.tables["hist"] = cube(coded)
    result.tables["shapes"], left_out = shapes(frame, coded)
    result.tables["cells"] = bucket_cells(bundle, rank, own, proof, coder, coded)
    kept = _kept(coded, sample)
    result.tables["kernels"] = _kernels(coded, kept)
    result.tables["steps"] = steps.steps
    result.tables["forwards"] = steps.forwards
    result.tables["ranges"] = steps.ranges(bundle, rank, coded["step"][kept], coder)
    if with_clusters:
        result.tables["clusters"] = clusters(coded)
    result.facts = _facts(own, proof.failures("decode_graph_replay"), proof.cut) | {"shapes_left_out": left_out}
    return result


def integers(values: pd.Series) -> Ints:
    """Return a nullable integer column with MISSING for null."""
    known = values.fillna(MISSING) if values.isna().any() else values
    return np.asarray(known.to_numpy(np.int64), np.int64)


def _coded(frame: pd.DataFrame, coder: Coder, steps: StepTables) -> Columns:
    """Return the columns that everything below groups by, all as integers."""
    step = integers(frame["step"])
    purpose = coder.category(frame["purpose"])
    traffic = np.where(purpose >= 0, purpose, coder.text(UNATTRIBUTED))
    traffic = np.where(frame["in_window"].to_numpy(), traffic, coder.text(OUTSIDE))
    # Warm-up and capture are what they are, inside the window or not.
    early = [coder.text("warmup"), coder.text("capture")]
    traffic = np.where(np.isin(purpose, early), purpose, traffic)
    sentinel = (frame["reason"] == "sentinel").to_numpy()
    traffic = np.where(sentinel, coder.text(SENTINEL), traffic)
    kernel_M = integers(frame["kernel_M"])
    return {
        "traffic": traffic.astype(np.int64),
        "execution": coder.category(frame["execution"]),
        "step": step,
        "layer": integers(frame["layer"]),
        "kernel_M": kernel_M,
        "M": np.where(kernel_M >= 0, kernel_M, steps.bucket(frame, step)),
        "symbol": coder.symbol,
        "start": frame["start_ns"].to_numpy(np.int64),
        "duration": integers(frame["duration_ns"]),
        "stream": frame["stream"].to_numpy(np.int64),
    }


def group_keys(columns: list[Array]) -> tuple[Ints, Ints]:
    """Return (one key a row, the sizes that :func:`ungroup` needs); every column is at least MISSING."""
    sizes = np.array([int(column.max()) + 2 if len(column) else 1 for column in columns], np.int64)
    if float(np.prod(sizes.astype(float))) > 2**62:
        # Wide columns (M up to millions, many steps) are made dense first.
        columns = [np.unique(column, return_inverse=True)[1].reshape(-1) - 1 for column in columns]
        return group_keys(columns)
    key = np.zeros(len(columns[0]), np.int64)
    for column, size in zip(columns, sizes.tolist(), strict=True):
        key = key * size + column + 1
    return key, sizes


def grouped(coded: Columns, names: tuple[str, ...]) -> tuple[Columns, Ints]:
    """Return (the distinct combinations of some columns in order, [n] which of them each row is)."""
    key, _ = group_keys([coded[name] for name in names])
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return {name: coded[name][first] for name in names}, inverse.reshape(-1)


def cube(coded: Columns) -> tuple[Columns, Columns]:
    """Return (counts, sums, extremes by traffic, execution, M, layer and symbol; entries of their histograms).

    Untimed and invalid kernels count as calls and stay out of every time.
    """
    table, of = grouped(coded, ("traffic", "execution", "M", "layer", "symbol"))
    groups = len(table["symbol"])
    timed = coded["duration"] >= 0
    time, own = coded["duration"][timed], of[timed]
    table["calls"] = np.bincount(of, minlength=groups)
    table["timed"] = np.bincount(own, minlength=groups)
    table["sum_ns"] = np.bincount(own, weights=time, minlength=groups).astype(np.int64)
    low, high = np.full(groups, np.iinfo(np.int64).max), np.full(groups, MISSING, np.int64)
    np.minimum.at(low, own, time)
    np.maximum.at(high, own, time)
    table["min_ns"] = np.where(high >= 0, low, MISSING)
    table["max_ns"] = high
    by_group, entries = sparse(own, time, groups)
    return table | by_group, entries


def shapes(frame: pd.DataFrame, coded: Columns) -> tuple[Columns, int]:
    """Return (launch shapes by execution, M and symbol of real requests, how many combinations were left out)."""
    names = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "cluster_x", "cluster_y", "cluster_z",
             "dynamic_smem_bytes")  # fmt: skip
    columns = {name: frame[name].to_numpy(np.int64) for name in names}
    for name in names[6:9]:
        columns[name] = np.maximum(columns[name], 1)  # a cluster of 0 is no cluster, which is one block
    whole = {name: coded[name] for name in ("traffic", "execution", "M", "symbol")} | columns
    table, of = grouped(whole, tuple(whole))
    count = len(table["symbol"])
    timed = coded["duration"] >= 0
    table["calls"] = np.bincount(of, minlength=count)
    table["timed"] = np.bincount(of[timed], minlength=count)
    table["sum_ns"] = np.bincount(of[timed], weights=coded["duration"][timed], minlength=count).astype(np.int64)
    if count <= MAX_SHAPE_ROWS:
        return table, 0
    moe = frame["class"].astype(object).fillna("").str.startswith(("moe.", "alphamoe.")).to_numpy()
    is_moe = np.bincount(of, weights=moe, minlength=count) > 0
    order = np.lexsort((np.arange(count), -table["calls"], ~is_moe))[:MAX_SHAPE_ROWS]
    chosen = np.sort(order)
    return {name: values[chosen] for name, values in table.items()}, count - MAX_SHAPE_ROWS


def clusters(coded: Columns) -> Columns:
    """Return timed calls and their sum by step, execution, M and symbol of all traffic in steps."""
    timed = (coded["duration"] >= 0) & (coded["step"] >= 0)
    rows = {name: coded[name][timed] for name in ("traffic", "execution", "M", "symbol", "step")}
    table, of = grouped(rows, ("traffic", "execution", "M", "symbol", "step"))
    groups = len(table["symbol"])
    table["n"] = np.bincount(of, minlength=groups)
    table["sum_ns"] = np.bincount(of, weights=coded["duration"][timed], minlength=groups).astype(np.int64)
    return table


def _kept(coded: Columns, sample: Sample) -> Array:
    order: Array = np.lexsort((coded["start"], coded["step"]))
    if sample.everything:
        return order
    if sample.steps:
        keep = np.isin(coded["step"], np.array(sorted(sample.steps), np.int64))
    else:
        keep = np.empty(len(order), bool)
        keep[order] = own_steps(coded["step"][order], sample.per_rank_rows)
    kept: Array = order[keep[order]]
    return kept


def _kernels(coded: Columns, rows: Array) -> Columns:
    names = ("step", "start", "duration", "symbol", "layer", "kernel_M", "M", "stream", "traffic", "execution")
    return {name: coded[name][rows] for name in names}


def _facts(own: AttributedKernels, failures: tuple[str, ...], cut: str | None) -> dict[str, Any]:
    return {
        "kernels": len(own.frame),
        "attributed": own.attributed,
        "reasons": dict(sorted(own.reasons.items())),
        "window": [*([cut] if cut else []), *failures],
        "untimed": int(own.frame["untimed"].sum()),
        "invalid": int(own.frame["invalid"].sum()),
        "duplicates": own.duplicates,
    }
