"""Kernels by name and launch shape: one name in two launch configurations is two rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle

_SHAPE = {
    "grid": ("grid_x", "grid_y", "grid_z"),
    "block": ("block_x", "block_y", "block_z"),
    "cluster": ("cluster_x", "cluster_y", "cluster_z"),
}
COLUMNS = ("symbol", *_SHAPE, "dynamic_smem_bytes")
"""What a row stands for; one column of counts a rank follows, named by the rank."""


def kernels_by_launch_shape(bundle: RunBundle) -> pd.DataFrame:
    """Count the kernels of each symbol and launch shape on each rank.

    All recorded kernels count, whatever their purpose and also outside the window: the table says what was recorded.

    Args:
        bundle: a recorded or imported run.

    Returns:
        Columns of :data:`COLUMNS`, then one int64 column for each rank; sorted by symbol and shape.
    """
    ranks = list(range(bundle.world_size))
    counted = [_of_rank(bundle, rank) for rank in ranks]
    whole = pd.concat(counted, axis=1).fillna(0).astype("int64").sort_index().reset_index()
    shown = pd.DataFrame({"symbol": whole["symbol"]})
    for name, parts in _SHAPE.items():
        shown[name] = ["x".join(str(size) for size in row) for row in whole[list(parts)].itertuples(index=False)]
    shown["dynamic_smem_bytes"] = whole["dynamic_smem_bytes"]
    for rank in ranks:
        shown[str(rank)] = whole[str(rank)]
    return shown


def _of_rank(bundle: RunBundle, rank: int) -> pd.Series[int]:
    columns = [part for parts in _SHAPE.values() for part in parts] + ["dynamic_smem_bytes"]
    frame = bundle.table("kernels", rank).select(["symbol_id", *columns]).to_pandas()
    names = bundle.table("symbols", rank).select(["symbol_id", "base"]).to_pandas().set_index("symbol_id")["base"]
    frame.insert(0, "symbol", frame.pop("symbol_id").map(names).fillna("<unknown>"))
    return frame.groupby(["symbol", *columns], observed=True).size().rename(str(rank))
