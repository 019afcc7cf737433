"""Build a golden bundle and gate it: shared by the tests of the gate and its reports."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import golden
from golden import Damage

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.gate import Expected, evaluate
from alphamoe_profiler.gate_records import GateCell, GateReport
from alphamoe_profiler.policy_source import parse_policy

TODAY = datetime.date(2026, 6, 1)
SYMBOL = "kernel_alpha_moe_w8a8_up_down"
REQUIRE = f'[[require]]\nsymbol = "{SYMBOL}"\n'


def gate(
    path: Path,
    policy: str = REQUIRE,
    damage: Damage | None = None,
    expected: Expected | None = None,
    **settings: Any,
) -> GateReport:
    """Gate a golden run of two ranks, or of as many as are asked for."""
    built = golden.build(path / "run", damage, **{"world_size": 2, **settings})
    return evaluate(RunBundle.open(built), [parse_policy(policy, "policy.toml", (), "policy.toml")], expected, TODAY)


def cell(report: GateReport, title: str, rank: int | None, execution: str | None = None) -> GateCell:
    """Return one cell by the title of its rule."""
    return next(
        own
        for own in report.cells
        if (report.rules[own.rule].title, own.rank, own.execution) == (title, rank, execution)
    )
