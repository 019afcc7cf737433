"""The recorded example: what the README shows a reader without a GPU."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from alphamoe_backend.kernels.jit import source_text
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.inspection import inspect_run
from alphamoe_profiler.run_identity import same_launch_rule
from alphamoe_profiler.verdicts import Verdict

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "h200-tp4"
MOST_BYTES = 3_000_000
KERNELS = {"eager": 128, "prefill_graph_replay": 4, "decode_graph_replay": 124}
"""Four layers: one prefill and 31 decodes eagerly, one prefill replay, 31 decode replays."""


@pytest.fixture(scope="module")
def bundle() -> RunBundle:
    return RunBundle.open(EXAMPLE)


def test_example_is_a_pass_with_every_kernel_where_it_belongs(bundle: RunBundle) -> None:
    """Four ranks, three executions, the counts that the model's shape gives, and nothing of the MoE unattributed."""
    report = inspect_run(bundle)
    assert (report.witness.verdict, report.problems) == (Verdict.PASS, ())
    cells = [cell for cell in report.witness.cells if cell.required]
    assert {(cell.rank, cell.execution, cell.kernels) for cell in cells} == {
        (rank, execution, count) for rank in range(4) for execution, count in KERNELS.items()
    }
    assert [(rank.moe_kernels, rank.moe_attributed, rank.dropped) for rank in report.ranks] == [(256, 256, 0)] * 4


def test_example_is_small() -> None:
    """A clone does not pay for it."""
    assert sum(path.stat().st_size for path in EXAMPLE.rglob("*") if path.is_file()) <= MOST_BYTES


def test_example_was_recorded_with_the_kernel_and_launch_rule_of_this_tree(bundle: RunBundle) -> None:
    """Stale when it fails: record it again on a GPU (see docs/measurements.md), so that what it shows is this code."""
    current = hashlib.sha256(source_text("alphamoe_w8a8_up_down")).hexdigest()
    sources = {record.source_sha256 for rank in range(4) for record in bundle.modules(rank)} - {None}
    assert sources == {current}
    assert same_launch_rule(bundle.run)


@pytest.mark.parametrize(
    "left_behind",
    [
        "alphamoe-runs/20260131T120000Z-text-1f2e3d/run.json",
        "examples/captures/alphamoe-runs/20260131T120000Z-text-1f2e3d/run.json",
        "examples/captures/alphamoe-captures/rank=0/capture.json",
        "examples/captures/sanitizer-report/report.json",
        "examples/h200-tp4/reports/dashboard.html",
    ],
)
def test_what_the_documented_commands_leave_in_a_checkout_is_ignored_by_git(left_behind: str) -> None:
    """Nobody should commit a run by accident, or wonder what is new in the folder."""
    root = EXAMPLE.parents[1]
    if not (root / ".git").exists():
        pytest.skip("this is no git checkout")
    command = ["git", "-C", str(root), "check-ignore", "--quiet", "--no-index", left_behind]
    assert subprocess.run(command, check=False).returncode == 0
