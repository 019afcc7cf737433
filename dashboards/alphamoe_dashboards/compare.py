"""Two runs side by side: the ratio of mean durations by bucket and symbol with its interval, and symbols that differ.

Kernels of one step are no independent observations, so the unit is the step: the variance of a mean is that of a ratio
estimator over steps (the ranks of one step together), and the interval of the ratio is 95 % on the logarithm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from alphamoe_dashboards.columns import MISSING, Columns
from alphamoe_dashboards.digest import RunDigest, text

ALL_RANKS = -1
_T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 1 to 10 degrees of freedom; above, 1.96 + 2.5 / df is within 0.5 %."""
_KEYS = ["rank", "execution", "M", "full"]
MAX_ROWS = 40_000
WHOLE_STEP, MOE_STEP = "all kernels of a step", "MoE kernels of a step"
"""Names of rows that compare sums over a step instead of one symbol."""


def compare(baseline: RunDigest, candidate: RunDigest) -> dict[str, Any]:
    """Compare real requests of two runs that were digested with clusters into one string table.

    Returns:
        ``rows`` (a table: rank with ALL_RANKS for the union, execution, M, symbol name, steps, calls and mean of both,
        ratio, low, high: candidate over baseline, NaN where nothing can be said), ``appeared`` and ``vanished`` (full
        names), ``differs`` ([what, baseline, candidate]: what was asked that is not equal).
    """
    left, right = (_means(_rows(run)) for run in (baseline, candidate))
    both = left.merge(right, left_index=True, right_index=True, suffixes=("_a", "_b")).reset_index()
    ratio = both["mean_b"] / both["mean_a"]
    error = (both["rel_var_a"] + both["rel_var_b"]).to_numpy(np.float64) ** 0.5
    freedom = both[["steps_a", "steps_b"]].min(axis=1) - 1
    width = np.array([_t(int(value)) for value in freedom.tolist()]) * error
    both["ratio"], both["low"], both["high"] = ratio, ratio * np.exp(-width), ratio * np.exp(width)
    both = both.sort_values(["sum_b", *_KEYS], ascending=[False, True, True, True, True]).head(MAX_ROWS)
    integers = ("rank", "execution", "M", "full", "steps_a", "steps_b", "calls_a", "calls_b")
    rows = {name: both[name].to_numpy(np.int64) for name in integers}
    rows |= {name: both[name].to_numpy(np.float64) for name in ("mean_a", "mean_b", "ratio", "low", "high")}
    names_a, names_b = _names(baseline), _names(candidate)
    return {
        "rows": rows,
        "sums": [MOE_STEP, WHOLE_STEP],
        "appeared": sorted(names_b - names_a),
        "vanished": sorted(names_a - names_b),
        "differs": _differences(baseline.facts, candidate.facts),
    }


def _t(freedom: int) -> float:
    if freedom < 1:
        return math.nan
    return _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.5 / freedom


def _rows(run: RunDigest) -> pd.DataFrame:
    table: Columns = run.tables["clusters"]
    frame = pd.DataFrame(table)
    frame = frame[frame["traffic"] == run.strings.add("witness")]
    full = run.tables["symbols"]["full"]
    if run.facts["kind"] == "imported":  # such ranks number their steps each for itself
        frame["step"] = frame["step"] * run.facts["world_size"] + frame["rank"]
    frame["full"] = full[frame["symbol"].to_numpy()] if len(frame) else MISSING
    kinds = text(run, run.tables["symbols"]["class"])
    is_moe = np.array([(name or "").startswith(("moe.", "alphamoe.")) for name in kinds], bool)
    moe = frame[is_moe[frame["symbol"].to_numpy()]] if len(frame) else frame
    # Two backends share no symbol: what one step costs can be compared all the same. One such sum is one call.
    sums = [_a_step(part, run.strings.add(name)) for name, part in ((WHOLE_STEP, frame), (MOE_STEP, moe))]
    return pd.concat([frame[["rank", *_KEYS[1:], "step", "n", "sum_ns"]], *sums], ignore_index=True)


def _a_step(frame: pd.DataFrame, name: int) -> pd.DataFrame:
    """Return the kernel time of each rank's step as one observation."""
    keys = ["rank", "execution", "step"]
    whole = frame.groupby(keys).agg(sum_ns=("sum_ns", "sum"), M=("M", "max")).reset_index()
    return whole.assign(full=name, n=1)


def _means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return calls, steps, mean and relative variance of the mean, of each rank and of all."""
    union = frame.assign(rank=ALL_RANKS)
    whole = pd.concat([union, frame], ignore_index=True)
    by_step = whole.groupby([*_KEYS, "step"])[["n", "sum_ns"]].sum().reset_index()
    groups = by_step.groupby(_KEYS)
    total = groups[["n", "sum_ns"]].sum()
    steps = groups.size()
    mean = total["sum_ns"] / total["n"]
    at = pd.MultiIndex.from_frame(by_step[_KEYS])
    residual = by_step["sum_ns"].to_numpy() - by_step["n"].to_numpy() * mean.reindex(at).to_numpy()
    squares = pd.Series(residual**2, index=at).groupby(level=_KEYS).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = squares / total["n"] ** 2 * steps / (steps - 1).where(steps > 1)
        relative = variance / mean.where(mean > 0) ** 2
    return pd.DataFrame(
        {"calls": total["n"], "sum": total["sum_ns"], "steps": steps, "mean": mean, "rel_var": relative}
    )


def _names(run: RunDigest) -> set[str]:
    cube = run.tables["cube"]
    witness = cube["traffic"] == run.strings.add("witness")
    used = np.unique(cube["symbol"][witness])
    return {name for name in text(run, run.tables["symbols"]["full"][used]) if name is not None}


def _differences(left: dict[str, Any], right: dict[str, Any]) -> list[list[str]]:
    a, b = dict(left["asked"]), dict(right["asked"])
    same = ("Recorded", "Imported", "Command")
    rows = [[name, a.get(name, ""), b.get(name, "")] for name in dict.fromkeys([*a, *b]) if name not in same]
    rows.append(["Ranks share a GPU", _yes(left["shared_gpu"]), _yes(right["shared_gpu"])])
    return [row for row in rows if row[1] != row[2]]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
