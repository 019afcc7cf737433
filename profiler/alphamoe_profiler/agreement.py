"""Receipts against witnesses: for each (step, layer, symbol) of a rank, as many kernels as submissions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from alphamoe_profiler.attributed_kernels import AttributedKernels
from alphamoe_profiler.submissions import submission_table
from alphamoe_tracers.records import Receipt

UNPLACED = -1
"""Layer of a kernel whose layer is unknown."""


@dataclass(frozen=True)
class Agreement:
    """How the dispatch evidence and the device evidence of one rank compare."""

    rank: int
    compared: int
    """(step, layer, symbol) triples that were compared."""
    differences: pd.DataFrame
    """step, layer (null: compared by step only), symbol, execution, submitted, witnessed."""
    unplaced: int
    """MoE kernels in witness steps whose layer is unknown: their steps were compared by step only."""
    orphans: int
    """MoE kernels inside the window in steps that left no receipt and captured nothing."""
    orphan_steps: tuple[int, ...]
    unattributed: int = 0
    """Kernels of the compared symbols inside the window whose step is unknown (no launch record, no range)."""

    @property
    def missing(self) -> int:
        """Submissions without a kernel."""
        gap = self.differences["submitted"] - self.differences["witnessed"]
        return int(gap.clip(lower=0).sum())

    @property
    def surplus(self) -> int:
        """Kernels without a submission, in steps that have a receipt."""
        gap = self.differences["witnessed"] - self.differences["submitted"]
        return int(gap.clip(lower=0).sum())

    def told(self, at_most: int = 3) -> str:
        """Name the first differences in one line."""
        first = self.differences.head(at_most).astype({"layer": object})
        lines = [
            f"step {step} {f'layer {layer}' if isinstance(layer, int) else 'all layers'} {symbol}: "
            f"{submitted} submitted, {witnessed} witnessed"
            for step, layer, symbol, submitted, witnessed in zip(
                *(first[name].tolist() for name in ("step", "layer", "symbol", "submitted", "witnessed")), strict=True
            )
        ]
        more = len(self.differences) - at_most
        return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def compare(kernels: AttributedKernels, receipts: list[Receipt], symbols: Iterable[str]) -> Agreement:
    """Compare the receipts of witness steps of one rank with the kernels that ran in those steps inside the window.

    Args:
        kernels: the rank's attributed kernels.
        receipts: the rank's receipts.
        symbols: base names to compare beside those that the receipts submit (a fallback kernel has no submission).
    """
    witness = submission_table([item for item in receipts if item.purpose == "witness"])
    known_steps = {item.step for item in receipts}
    names = sorted({*symbols, *witness.symbols})
    frame = kernels.frame
    named = frame["in_window"] & frame["base"].isin(names)
    own = frame.loc[named & frame["step"].notna(), ["step", "layer", "base"]]
    ran = pd.DataFrame(
        {
            "step": own["step"].to_numpy(np.int64),
            "layer": own["layer"].fillna(UNPLACED).to_numpy(np.int64),
            "symbol": own["base"].astype(object).to_numpy(),
        }
    )
    # A capture launches nothing of its own, but a step that captured may have run its layers once to warm up.
    orphan = ran[~ran["step"].isin(known_steps | kernels.capture_steps)]
    ran = ran[ran["step"].isin([item.step for item in witness.receipts])]
    steps = np.array([item.step for item in witness.receipts], np.int64)
    submitted = pd.DataFrame(
        {
            "step": steps[witness.rows["receipt"].to_numpy()] if len(witness.rows) else np.array([], np.int64),
            "layer": witness.rows["layer"].to_numpy(),
            "symbol": witness.rows["symbol"].to_numpy(),
        }
    )
    unplaced = ran["layer"] == UNPLACED
    by_step_only = set(ran.loc[unplaced, "step"].tolist())
    for table in (ran, submitted):
        table.loc[table["step"].isin(by_step_only), "layer"] = UNPLACED
    keys = ["step", "layer", "symbol"]
    counts = pd.merge(
        submitted.groupby(keys).size().rename("submitted").reset_index(),
        ran.groupby(keys).size().rename("witnessed").reset_index(),
        on=keys,
        how="outer",
    ).fillna({"submitted": 0, "witnessed": 0})
    counts = counts.astype({"submitted": np.int64, "witnessed": np.int64})
    different = counts[counts["submitted"] != counts["witnessed"]].sort_values(keys).reset_index(drop=True)
    execution = {item.step: item.execution for item in witness.receipts}
    different["execution"] = different["step"].map(execution)
    different["layer"] = different["layer"].astype("Int64").mask(different["layer"] == UNPLACED)
    return Agreement(
        rank=kernels.rank,
        compared=len(counts),
        differences=different,
        unplaced=int(unplaced.sum()),
        orphans=len(orphan),
        orphan_steps=tuple(sorted({int(step) for step in orphan["step"]})),
        unattributed=int((named & frame["step"].isna()).sum()),
    )
