"""Build a golden bundle and judge it: shared by the tests of witnesses, integrity and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden
import msgspec
from golden import Damage, RankContent

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.integrity import Check
from alphamoe_profiler.verdicts import Verdict
from alphamoe_profiler.witness import summarise
from alphamoe_profiler.witness_records import Cell, WitnessSummary

OPEN, FAIL, PASS = Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.PASS


def judge(path: Path, damage: Damage | None = None, **settings: Any) -> WitnessSummary:
    """Judge a golden run of two ranks, or of as many as are asked for."""
    return summarise(RunBundle.open(golden.build(path / "run", damage, **{"world_size": 2, **settings})))


def cell(summary: WitnessSummary, rank: int, execution: str, symbol: str = ALPHAMOE_W8A8_SYMBOL) -> Cell:
    key = (rank, execution, symbol)
    return next(own for own in summary.cells if (own.rank, own.execution, own.symbol) == key)


def check(summary: WitnessSummary, name: str) -> Check:
    return next(own for own in summary.checks if own.name == name)


def only(rank: int, damage: Damage) -> Damage:
    def on_one(content: RankContent) -> None:
        if content.rank == rank:
            damage(content)

    return on_one


def fall_back(content: RankContent) -> None:
    """What a silent fallback looks like: the stock kernel runs and the receipts say so."""
    for kernel in content.of(ALPHAMOE_W8A8_SYMBOL):
        kernel["_base"] = STOCK_SYMBOL
    content.receipts = [
        msgspec.structs.replace(
            receipt, kernels=tuple(msgspec.structs.replace(item, symbol=STOCK_SYMBOL) for item in receipt.kernels)
        )
        for receipt in content.receipts
    ]


def no_cuda(content: RankContent) -> None:
    """A run on a CPU: receipts, and a collector that says why it is off."""
    content.kernels, content.launches, content.ranges, content.graph_nodes = [], [], [], []
    content.sentinels, content.modules = {}, []
    content.collector = {"state": "off", "reason": "no CUDA device", "window_open_ns": None, "window_close_ns": None}
    content.rank_file = {"device": "cpu", "gpu_name": None, "gpu_uuid": None, "sm_count": None}
