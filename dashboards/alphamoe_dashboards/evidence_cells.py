"""The M-bucket matrix of one rank: receipts against witnesses by execution, kernel M and layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphamoe_dashboards.columns import MISSING, Columns

if TYPE_CHECKING:
    from alphamoe_dashboards.coder import Coder
    from alphamoe_profiler.attributed_kernels import AttributedKernels
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.windows import WindowProof

COLUMNS = ("execution", "M", "layer", "symbol", "steps", "submissions", "witnesses", "shape_bad", "proven")
STATES = ("equal", "fewer", "more", "none", "unknown")
"""Of a cell: as many witnesses as submissions; some, but fewer; more than submitted (a contradiction); none in a window
that is proven complete; and not known, because nothing proves that a missing record means a missing kernel, or because
no receipt says what should have run."""


def bucket_cells(
    bundle: RunBundle, rank: int, own: AttributedKernels, proof: WindowProof, coder: Coder, coded: Columns
) -> Columns:
    """Return one row an execution, kernel M, layer and submitted symbol of witness steps.

    ``steps`` counts receipts, ``submissions`` what they submitted (MISSING where no receipt says), ``witnesses`` kernel
    records, ``shape_bad`` those whose launch shape contradicts that M, ``proven`` whether absence is proven there.
    ``symbol`` is a base name's text.
    """
    submitted = _submitted(bundle, rank)
    frame = own.frame
    chosen = frame["in_window"] & (frame["purpose"] == "witness") & frame["execution"].notna()
    if len(submitted):
        chosen &= frame["kernel_M"].notna()
    else:
        moe = frame["class"].astype(object).fillna("").str.startswith(("moe.", "alphamoe."))
        chosen &= moe
    part = frame.loc[chosen, ["execution", "layer", "base", "shape_ok"]]
    part = part.assign(M=coded["M"][chosen.to_numpy()], layer=part["layer"].fillna(MISSING).astype("int64"))
    part = part.astype({"execution": object, "base": object})
    bad = (part["shape_ok"] == False).fillna(False)  # noqa: E712 -- null means that no rule exists
    seen = part.assign(bad=bad.astype("int64")).groupby(["execution", "M", "layer", "base"])["bad"].agg(["size", "sum"])
    seen.columns = pd.Index(["witnesses", "shape_bad"])
    whole = submitted.join(seen, how="outer") if len(submitted) else seen.assign(steps=MISSING, submissions=MISSING)
    whole = whole.fillna({"witnesses": 0, "shape_bad": 0, "steps": 0, "submissions": 0}).reset_index()
    proven = {name: proof.complete(name) and proof.cut is None for name in bundle.run.executions}
    columns = {
        "execution": [coder.text(str(name)) for name in whole["execution"]],
        "symbol": [coder.text(str(name)) for name in whole["base"]],
        "proven": [bool(proven.get(name, False)) for name in whole["execution"]],
    } | {name: whole[name].tolist() for name in ("M", "layer", "steps", "submissions", "witnesses", "shape_bad")}
    return {name: np.array(columns[name], np.int64) for name in COLUMNS}


def _submitted(bundle: RunBundle, rank: int) -> pd.DataFrame:
    """Count receipts and submissions of witness steps by execution, kernel M, layer and symbol."""
    totals: dict[tuple[str, int, int, str], list[int]] = {}
    seen: set[int] = set()
    lists: dict[int, dict[tuple[int, int, str], int]] = {}
    for receipt in bundle.receipts(rank).receipts:
        if receipt.purpose != "witness" or receipt.step in seen:
            continue
        seen.add(receipt.step)
        counts = lists.get(id(receipt.kernels))
        if counts is None:
            counts = {}
            for item in receipt.kernels:
                key = (item.M, item.layer, item.symbol)
                counts[key] = counts.get(key, 0) + 1
            lists[id(receipt.kernels)] = counts
        for (m, layer, symbol), number in counts.items():
            own = totals.setdefault((receipt.execution, m, layer, symbol), [0, 0])
            own[0] += 1
            own[1] += number
    index = pd.MultiIndex.from_tuples(list(totals), names=["execution", "M", "layer", "base"]) if totals else None
    values = list(totals.values())
    return pd.DataFrame(values, index=index, columns=["steps", "submissions"]) if totals else pd.DataFrame()


def state(submissions: int, witnesses: int, proven: bool) -> str:
    """Return the state of one cell, see STATES."""
    if submissions < 0:
        return "unknown"
    if witnesses == submissions and submissions:
        return "equal"
    if witnesses > submissions:
        return "more"
    if witnesses:
        return "fewer"
    return "none" if proven and submissions else "unknown"
