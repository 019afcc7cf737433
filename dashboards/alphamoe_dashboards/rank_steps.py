"""Steps of one rank: forwards by receipt (or by annotation), what ran in them, and the ranges around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphamoe_dashboards.columns import MISSING, Array, Columns
from alphamoe_tracers.columns import column, texts

if TYPE_CHECKING:
    from alphamoe_dashboards.coder import Coder
    from alphamoe_profiler.attributed_kernels import AttributedKernels
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_tracers.records import Receipt

MAX_STEP_ROWS = 8_000
"""Steps of one rank that a page lists; beyond it they are taken evenly spaced. Counts stay whole in ``forwards``."""
MAX_RANGE_ROWS = 12_000
_STEP_COLUMNS = (
    "step", "traffic", "execution", "forward_mode", "M", "dispatch_M", "real_tokens", "batch_size", "requests",
    "receipts", "submissions", "witnesses", "kernels", "busy_ns", "start", "end",
)  # fmt: skip


@dataclass
class StepTables:
    """Steps with their buckets."""

    steps: Columns
    """One row a step; times are ns of the rank's clock, MISSING where nothing timed ran in it."""
    forwards: Columns
    """Steps counted by traffic, execution, forward_mode, M, dispatch_M and real_tokens."""
    bucket_of: pd.Series
    """M of each step: the kernel M of its submissions, else its dispatch M."""

    def bucket(self, frame: pd.DataFrame, step: Array) -> Array:
        """Return [n] the M bucket of each kernel by its step, MISSING where there is none."""
        if "bucket" in frame and frame["bucket"].notna().any():
            names = frame["bucket"].cat.categories
            values = np.array([int(name) if str(name).isdecimal() else MISSING for name in names], np.int64)
            codes = frame["bucket"].cat.codes.to_numpy()
            return np.where(codes >= 0, values[codes], MISSING)
        at = self.bucket_of.index.get_indexer(pd.Index(step))
        values = self.bucket_of.to_numpy(np.int64)
        return np.where(at >= 0, values[at], MISSING) if len(values) else np.full(len(step), MISSING, np.int64)

    def ranges(self, bundle: RunBundle, rank: int, kept_steps: Array, coder: Coder) -> Columns:
        """Return push/pop ranges that opened while a kept step was launched: step, start, end, name, payload, depth."""
        table = bundle.table("ranges", rank)
        empty = {name: np.zeros(0, np.int64) for name in ("step", "start", "end", "name", "payload", "depth")}
        if not table.num_rows:
            return empty
        names = pd.Categorical(texts(table, "name"))
        start, end = column(table, "start_ns"), column(table, "end_ns")
        payload, thread = column(table, "payload"), column(table, "thread")
        is_step = np.asarray(names == "step") & np.isin(payload, np.unique(kept_steps))
        opened = np.flatnonzero(is_step & (end > start))
        if not len(opened):
            return empty
        # Steps of one thread follow one another: the last that opened before a range is the only one that can hold it.
        order = opened[np.lexsort((start[opened], thread[opened]))]
        span = int(start.max()) + 1
        threads = np.unique(thread, return_inverse=True)[1].reshape(-1).astype(object)
        key = threads * span + start.astype(object)
        at = np.searchsorted(np.array(key[order]), np.array(key), side="right") - 1
        holder = order[np.maximum(at, 0)]
        inside = (at >= 0) & (threads[holder] == threads) & (end <= end[holder]) & (end > 0)
        rows = np.flatnonzero(inside)
        rows = rows[np.lexsort((start[rows], column(table, "depth")[rows]))]
        rows = np.sort(rows[:MAX_RANGE_ROWS])
        labels = np.array([coder.text(str(name)) for name in names.categories], np.int64)
        depth = column(table, "depth").astype(np.int64)
        return {
            "step": payload[holder[rows]],
            "start": start[rows],
            "end": end[rows],
            "name": labels[names.codes[rows]],
            "payload": np.where(_null(table, "payload")[rows], MISSING, payload[rows]),
            "depth": depth[rows] - depth[holder[rows]],
        }


def _null(table: object, name: str) -> Array:
    values = table.column(name).combine_chunks()  # type: ignore[attr-defined]
    return np.asarray(values.is_null())


def step_tables(bundle: RunBundle, rank: int, own: AttributedKernels, coder: Coder) -> StepTables:
    """Return the steps of one rank, by receipt where it left any, else by what its kernels say."""
    receipts = bundle.receipts(rank).receipts
    ran = _ran(own.frame, {item.symbol for receipt in receipts for item in receipt.kernels})
    rows = _by_receipt(receipts, coder) if receipts else _by_kernels(own.frame, coder)
    steps = rows.join(ran, how="outer" if receipts else "left") if len(rows) else ran.reindex(columns=_STEP_COLUMNS[1:])
    steps = steps.fillna({"kernels": 0, "busy_ns": 0, "witnesses": 0, "receipts": 0, "submissions": 0})
    steps = steps.reindex(columns=_STEP_COLUMNS[1:]).fillna(MISSING).astype("int64").sort_index()
    steps.index.name = "step"
    named = steps[steps["M"] >= 0]["M"]
    flat = steps.reset_index()
    kept = flat if len(flat) <= MAX_STEP_ROWS else flat.iloc[np.linspace(0, len(flat) - 1, MAX_STEP_ROWS).astype(int)]
    keys = ["traffic", "execution", "forward_mode", "M", "dispatch_M", "real_tokens"]
    counted = flat[flat["receipts"] > 0] if receipts else flat
    forwards = counted[keys].assign(steps=1).groupby(keys)["steps"].sum().reset_index()
    return StepTables(_columns(kept, _STEP_COLUMNS), _columns(forwards, (*keys, "steps")), named)


def _columns(frame: pd.DataFrame, names: tuple[str, ...]) -> Columns:
    return {name: frame[name].to_numpy(np.int64) for name in names}


def _ran(frame: pd.DataFrame, submitted: set[str]) -> pd.DataFrame:
    """Return what ran in each step: kernels, busy_ns, witnesses, start, end."""
    step = frame["step"].fillna(MISSING).to_numpy(np.int64)
    rows = np.flatnonzero((step >= 0) & (frame["reason"] != "sentinel").to_numpy())
    known, of = np.unique(step[rows], return_inverse=True)
    of = of.reshape(-1)
    count = len(known)
    duration = frame["duration_ns"].fillna(MISSING).to_numpy(np.int64)[rows]
    timed = duration >= 0
    begin, finish = (frame[name].to_numpy(np.int64)[rows][timed] for name in ("start_ns", "end_ns"))
    witness = (frame["base"].isin(submitted) & frame["reason"].isna()).to_numpy()[rows]
    start = np.full(count, np.iinfo(np.int64).max)
    end = np.full(count, MISSING, np.int64)
    np.minimum.at(start, of[timed], begin)
    np.maximum.at(end, of[timed], finish)
    return pd.DataFrame(
        {
            "kernels": np.bincount(of, minlength=count),
            "busy_ns": np.bincount(of[timed], weights=duration[timed], minlength=count).astype(np.int64),
            "witnesses": np.bincount(of, weights=witness, minlength=count).astype(np.int64),
            "start": np.where(end >= 0, start, MISSING),
            "end": end,
        },
        index=pd.Index(known, name="step"),
    )


def _by_receipt(receipts: list[Receipt], coder: Coder) -> pd.DataFrame:
    rows: dict[int, dict[str, int]] = {}
    buckets: dict[int, int] = {}
    for item in receipts:
        if item.step in rows:
            rows[item.step]["receipts"] += 1  # contradictory receipts are a finding of the witness summary
            continue
        # Replays of one graph share one tuple of submissions.
        if id(item.kernels) not in buckets:
            buckets[id(item.kernels)] = max((own.M for own in item.kernels), default=MISSING)
        bucket = buckets[id(item.kernels)]
        dispatch = MISSING if item.M is None else item.M
        rows[item.step] = {
            "traffic": coder.text(item.purpose),
            "execution": coder.text(item.execution),
            "forward_mode": coder.text(item.forward_mode),
            "M": bucket if bucket >= 0 else dispatch,
            "dispatch_M": dispatch,
            "real_tokens": MISSING if item.real_tokens is None else item.real_tokens,
            "batch_size": MISSING if item.batch_size is None else item.batch_size,
            "requests": coder.text(", ".join(item.request_ids)),
            "receipts": 1,
            "submissions": len(item.kernels),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _by_kernels(frame: pd.DataFrame, coder: Coder) -> pd.DataFrame:
    """Return steps as an imported trace's annotations name them, taken from the first kernel of each."""
    chosen = frame.loc[frame["step"].notna() & (frame["reason"] != "sentinel")].drop_duplicates("step")
    rows = pd.DataFrame(index=pd.Index(chosen["step"].to_numpy(np.int64)))
    for name, source in (("traffic", "purpose"), ("execution", "execution"), ("forward_mode", "forward_mode")):
        rows[name] = coder.category(chosen[source])
    for name in ("dispatch_M", "real_tokens"):
        rows[name] = chosen[name].fillna(MISSING).to_numpy(np.int64)
    rows["M"] = rows["dispatch_M"]
    return rows
