"""Tables of a digested run, for the figures and for notebooks: names instead of codes, units in column names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from alphamoe_dashboards.digest import RunDigest, text
from alphamoe_dashboards.evidence_cells import state
from alphamoe_dashboards.histograms import dense, quantile

WITNESS = "witness"


def named(digested: RunDigest, table: str) -> pd.DataFrame:
    """Return one table with texts and symbols instead of their codes; MISSING stays -1 in numbers."""
    columns: dict[str, Any] = dict(digested.tables[table])
    for name in ("traffic", "execution", "forward_mode", "requests", "name"):
        if name in columns:
            columns[name] = text(digested, columns[name])
    if "symbol" in columns:
        if table == "cells":
            columns["symbol"] = text(digested, columns["symbol"])
        else:
            symbols = digested.tables["symbols"]
            for form in ("full", "base", "class"):
                columns[form] = text(digested, symbols[form][columns["symbol"]])
    return pd.DataFrame(columns)


def cell_table(digested: RunDigest) -> pd.DataFrame:
    """Return the M-bucket matrix.

    Returns:
        execution, M, symbol, rank, submissions (-1: no receipt says), witnesses, shape_bad, state (see STATES).
    """
    cells = named(digested, "cells")
    rows = []
    for (execution, m, symbol, rank), own in cells.groupby(["execution", "M", "symbol", "rank"], dropna=False):
        unknown = bool((own["submissions"] < 0).all())
        submitted = -1 if unknown else int(own["submissions"].clip(lower=0).sum())
        witnesses = int(own["witnesses"].sum())
        states = {
            state(*values)
            for values in zip(
                own["submissions"].tolist(), own["witnesses"].tolist(), own["proven"].tolist(), strict=True
            )
        }
        if "more" in states or len(states) == 1:
            told = "more" if "more" in states else next(iter(states))
        else:
            told = "fewer" if witnesses else "unknown"
        bad = int(own["shape_bad"].sum())
        rows.append([execution, m, symbol, rank, submitted, witnesses, bad, told])
    columns = ["execution", "M", "symbol", "rank", "submissions", "witnesses", "shape_bad", "state"]
    return pd.DataFrame(rows, columns=columns)


def bucket_table(digested: RunDigest, base: str | None = None, traffic: str = WITNESS) -> pd.DataFrame:
    """Return M buckets of one base name (null: of every kernel), all ranks together.

    Returns:
        execution, M, calls, timed, sum_ns, mean_ns, low, q1, median, q3, high (2, 25, 50, 75 and 98 % in ns).
    """
    cube = named(digested, "cube")
    chosen = cube[(cube["traffic"] == traffic) & (cube["M"] >= 0)]
    chosen = chosen if base is None else chosen[chosen["base"] == base]
    entries, hist = digested.tables["cube"]["hist_entries"], digested.tables["hist"]
    rows = []
    for (execution, m), own in chosen.groupby(["execution", "M"], dropna=False):
        bins, counts = dense(entries, hist["gap"], hist["count"], own.index.to_numpy())
        timed, total = int(own["timed"].sum()), int(own["sum_ns"].sum())
        marks = [quantile(bins, counts, q) for q in (0.02, 0.25, 0.5, 0.75, 0.98)]
        rows.append([execution, m, int(own["calls"].sum()), timed, total, total / timed if timed else np.nan, *marks])
    columns = ["execution", "M", "calls", "timed", "sum_ns", "mean_ns", "low", "q1", "median", "q3", "high"]
    return pd.DataFrame(rows, columns=columns)


def point_table(digested: RunDigest, base: str | None = None, traffic: str = WITNESS) -> pd.DataFrame:
    """Return the exact durations of the sampled steps' kernels: execution, M, duration_ns."""
    kernels = named(digested, "kernels")
    chosen = kernels[(kernels["traffic"] == traffic) & (kernels["M"] >= 0) & (kernels["duration"] >= 0)]
    chosen = chosen if base is None else chosen[chosen["base"] == base]
    return chosen[["execution", "M", "duration"]].rename(columns={"duration": "duration_ns"}).reset_index(drop=True)


def token_table(digested: RunDigest, traffic: str = WITNESS) -> pd.DataFrame:
    """Return mean real tokens and dispatch M a step by bucket, of the first rank that did it.

    Returns:
        execution, M, real_tokens, dispatch_M (null where a step does not say), steps.
    """
    forwards = named(digested, "forwards")
    chosen = forwards[(forwards["traffic"] == traffic) & (forwards["M"] >= 0)]
    rows = []
    for (execution, m), own in chosen.groupby(["execution", "M"], dropna=False):
        first = own[own["rank"] == own["rank"].min()]
        steps = int(first["steps"].sum())
        means = []
        for name in ("real_tokens", "dispatch_M"):
            unknown = bool((first[name] < 0).any())
            means.append(np.nan if unknown else float((first[name] * first["steps"]).sum()) / steps)
        rows.append([execution, m, *means, steps])
    return pd.DataFrame(rows, columns=["execution", "M", "real_tokens", "dispatch_M", "steps"])


def roofline_table(digested: RunDigest, base: str, traffic: str = WITNESS) -> pd.DataFrame:
    """Return achieved rates of one symbol by bucket: execution, M, intensity, flop_per_s, bytes_per_s."""
    work = digested.tables["work"]
    known = dict(
        zip(
            zip(text(digested, work["base"]), work["M"].tolist(), strict=True),
            zip(work["flop"].tolist(), work["bytes"].tolist(), strict=True),
            strict=True,
        )
    )
    rows = []
    for row in bucket_table(digested, base, traffic).itertuples():
        own = known.get((base, int(str(row.M))))
        if own is None or not row.sum_ns:
            continue
        rate = float(str(row.timed)) / (float(str(row.sum_ns)) / 1e9)
        rows.append([row.execution, row.M, own[0] / own[1], own[0] * rate, own[1] * rate])
    return pd.DataFrame(rows, columns=["execution", "M", "intensity", "flop_per_s", "bytes_per_s"])


def layer_table(digested: RunDigest, base: str | None = None, traffic: str = WITNESS) -> pd.DataFrame:
    """Return mean durations by rank and layer: rank, layer, mean_ns."""
    cube = named(digested, "cube")
    chosen = cube[(cube["traffic"] == traffic) & (cube["layer"] >= 0) & (cube["timed"] > 0)]
    chosen = chosen if base is None else chosen[chosen["base"] == base]
    sums = chosen.groupby(["rank", "layer"])[["sum_ns", "timed"]].sum().reset_index()
    return sums.assign(mean_ns=sums["sum_ns"] / sums["timed"])[["rank", "layer", "mean_ns"]]


def step_table(digested: RunDigest, step: int) -> pd.DataFrame:
    """Return the kernels of one sampled step: rank, start_ns, duration_ns, class, base, layer."""
    kernels = named(digested, "kernels")
    slices = pd.DataFrame(digested.tables["slices"])
    parts = []
    for row in slices[slices["step"] == step].itertuples():
        first, count = int(str(row.first)), int(str(row.count))
        parts.append(kernels.iloc[first : first + count].assign(rank=int(str(row.rank))))
    whole = pd.concat(parts) if parts else kernels.iloc[:0].assign(rank=0)
    whole = whole[whole["duration"] >= 0].rename(columns={"start": "start_ns", "duration": "duration_ns"})
    return whole[["rank", "start_ns", "duration_ns", "class", "base", "layer"]].reset_index(drop=True)


def main_symbol(digested: RunDigest) -> str | None:
    """Return the submitted symbol with the most witnesses, None where no receipt names one."""
    cells = named(digested, "cells")
    if not len(cells):
        return None
    return str(cells.groupby("symbol")["witnesses"].sum().sort_values(ascending=False, kind="stable").index[0])
