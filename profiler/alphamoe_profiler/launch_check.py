"""Check the launch shape of each kernel against the backend's own launch rule for the M that its receipt gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.run_identity import same_launch_rule
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    from alphamoe_profiler.range_paths import Ints
    from alphamoe_profiler.run_records import RankFile
    from alphamoe_profiler.submissions import SubmissionTable

RULED_SYMBOL = "kernel_alpha_moe_w8a8_up_down"
"""The one symbol whose launch rule is written down (alphamoe_backend.kernels.launch), for compute capability 9.0."""
_RULED_CAPABILITY = "9.0"
_IMPOSSIBLE = (-1,) * 10
SHAPE_COLUMNS = (
    "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "cluster_x", "cluster_y", "cluster_z",
    "dynamic_smem_bytes",
)  # fmt: skip


def launch_shapes_ok(
    bundle: RunBundle, rank: int, frame: pd.DataFrame, submissions: SubmissionTable, matched: Ints
) -> pd.arrays.BooleanArray:
    """Compare grid, block, cluster and dynamic shared memory with the launch rule.

    Args:
        bundle: the run.
        rank: which rank; its rank file gives the number of multiprocessors.
        frame: its kernels with ``base`` and the launch shape.
        submissions: its receipts.
        matched: [n] row of ``submissions.rows`` for each kernel, negative where it has none.

    Returns:
        [n] true or false where a rule exists, is the recording's own, and a submission was matched; null elsewhere.
    """
    unknown = np.ones(len(frame), bool)
    ok = np.zeros(len(frame), bool)
    record = readable_rank_file(bundle, rank)
    if record is None or record.sm_count is None or not same_launch_rule(bundle.run):
        return pd.arrays.BooleanArray(ok, unknown)
    if _capability(bundle, record) not in (None, _RULED_CAPABILITY):
        return pd.arrays.BooleanArray(ok, unknown)
    rows = np.flatnonzero((frame["base"] == RULED_SYMBOL).to_numpy() & (matched >= 0))
    if not len(rows):
        return pd.arrays.BooleanArray(ok, unknown)
    recorded = frame.iloc[rows][list(SHAPE_COLUMNS)].to_numpy(np.int64, copy=True)
    # CUPTI gives a cluster of 0 where a kernel was launched without one.
    recorded[:, 6:9] = np.maximum(recorded[:, 6:9], 1)
    shape = submissions.rows["shape"].to_numpy()[matched[rows]]
    for number in np.unique(shape).tolist():
        here = shape == number
        expected = expected_shape(submissions, number, record.sm_count)
        if expected is None:
            continue
        unknown[rows[here]] = False
        ok[rows[here]] = (recorded[here] == np.array(expected)).all(axis=1)
    return pd.arrays.BooleanArray(ok, unknown)


def _capability(bundle: RunBundle, record: RankFile) -> str | None:
    """Return the compute capability that the rank file gives, or run.json for its GPU; None where nothing says."""
    known = {gpu.uuid: gpu.compute_capability for gpu in bundle.run.gpus if gpu.uuid is not None}
    return record.compute_capability or known.get(record.gpu_uuid or "")


def expected_shape(submissions: SubmissionTable, number: int, sm_count: int) -> tuple[int, ...] | None:
    """Return the launch that the backend's rule gives for one submitted shape, in the order of SHAPE_COLUMNS.

    A geometry that the kernel cannot run has no launch: whatever was recorded contradicts such a receipt.
    """
    from alphamoe_backend.geometry import LocalGeometry
    from alphamoe_backend.kernels.launch import launch_shape

    item = submissions.geometries[number]
    geometry = LocalGeometry(item.E, item.H, item.I_local, item.top_k, item.block_m)
    if item.M < 1:
        return None
    try:
        rule = launch_shape(geometry, item.M, sm_count)
    except UsageError:
        return _IMPOSSIBLE
    return (*rule.grid, *rule.block, *rule.cluster, rule.dynamic_smem_bytes)
