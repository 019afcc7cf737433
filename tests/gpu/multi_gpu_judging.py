"""What the report and the bundle of a run with one GPU a rank (or gloo on fewer) must say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_check import ALL, KERNEL, STOCK, passes

BACKENDS = {"flashinfer_alphamoe": (KERNEL, STOCK), "triton": (STOCK, KERNEL)}
"""Symbol that must run and symbol that must not, by backend."""
Report = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """One recorded run of ``qwen3-next-80b``."""

    name: str
    ranks: int
    gpus: int
    """How many GPUs it may see."""
    backend: str = "flashinfer_alphamoe"
    executions: tuple[str, ...] = ALL
    limit_s: float = 120.0

    @property
    def nccl(self) -> bool:
        """Whether each rank has a GPU of its own."""
        return self.ranks <= self.gpus


def report_problems(report: Report, traced: Traced, layers: int) -> list[str]:
    """Say what keeps a run's report from being what the bars ask for.

    Args:
        report: the JSON of ``alphamoe-trace trace``.
        traced: what was run.
        layers: decoder layers.
    """
    symbol, absent = BACKENDS[traced.backend]
    wrong = passes(symbol, absent, traced.executions)(report)
    for cell in report["cells"]:
        if cell["rule"] == "required" and (cell["kernels"] != cell["submissions"] or not cell["kernels"]):
            where = f"rank {cell['rank']} {cell['execution']}"
            wrong.append(f"{where}: {cell['kernels']} kernels, {cell['submissions']} submissions")
    expected = "nccl" if traced.nccl else "gloo"
    for rank in report["ranks"]:
        if (rank["communication"], rank["shared_gpu"]) != (expected, not traced.nccl):
            wrong.append(f"rank {rank['rank']}: {rank['communication']}, shared GPU {rank['shared_gpu']}")
    return wrong + skew_problems(report, traced, layers)


def skew_problems(report: Report, traced: Traced, layers: int) -> list[str]:
    """Say what of the skew and of the all-reduce kernels is not shown."""
    skew = report["skew"]
    shown = {(row["execution"], row["moment"]) for row in skew["spreads"]}
    moments = ("step start", "all-reduce start", "all-reduce end") if traced.nccl else ("step start",)
    due = [(execution, moment) for execution in traced.executions for moment in moments]
    wrong = [f"no skew of {execution} {moment}" for execution, moment in due if (execution, moment) not in shown]
    if not traced.nccl:
        told = any("gloo sums on the host" in note for note in skew["notes"])
        return wrong + ([] if told and skew["shared_gpu"] else ["it is not said that gloo summed on a shared GPU"])
    wrong += [f"skew: {note}" for note in skew["notes"]]
    steps = sum(row["compared"] for row in skew["spreads"] if row["moment"] == "step start")
    # Two sums a layer, and the comparison of the sampled tokens.
    expected = steps * (2 * layers + 1)
    for rank in range(traced.ranks):
        own = [row for row in skew["all_reduces"] if row["rank"] == rank]
        count = sum(row["kernels"] for row in own if "AllReduce" in row["symbol"])
        if count != expected:
            names = ", ".join(row["symbol"] for row in own)
            wrong.append(f"rank {rank}: {count} of {expected} all-reduce kernels ({names})")
    return wrong


def bundle_problems(path: Path, traced: Traced) -> list[str]:
    """Say what the rank files and receipts say beside the report: sentinels, GPUs, whole decode graphs."""
    wrong: list[str] = []
    uuids = set()
    for rank in range(traced.ranks):
        record = json.loads((path / "ranks" / f"{rank}.json").read_text())
        uuids.add(record["gpu_uuid"])
        sentinels = {item["kind"]: item for item in record["collector"]["sentinels"]}
        graphs = () if traced.executions == ("eager",) else ("graph_step",)
        for kind in ("open", "close", "graph_open", "graph_close", "step", *graphs):
            seen = sentinels.get(kind, {"launched": 0, "seen": 0})
            few = seen["seen"] < 1 if kind == "graph_step" else seen["seen"] != seen["launched"]
            if few or not seen["launched"]:
                wrong.append(f"rank {rank}: sentinels {kind}: {seen['seen']} of {seen['launched']} seen")
        receipts = (path / "receipts" / f"rank={rank}.jsonl").read_text()
        whole = ":full|decode_graph_replay" in receipts
        if "decode_graph_replay" in traced.executions and whole != traced.nccl:
            wrong.append(f"rank {rank}: decode graphs are {'whole' if whole else 'cut at the all-reduces'}")
    if len(uuids) != min(traced.ranks, traced.gpus):
        wrong.append(f"the ranks opened {len(uuids)} GPUs: {sorted(map(str, uuids))}")
    return wrong


def facts(report: Report) -> dict[str, Any]:
    """Pick the numbers that docs/measurements.md wants."""
    return {
        "verdict": report["verdict"],
        "reason": report["reason"],
        "skew": report["skew"],
        "cells": [cell for cell in report["cells"] if cell["rule"] == "required"],
        "kernels": {rank["rank"]: rank["kernels"] for rank in report["ranks"]},
        "wall_s": {rank["rank"]: rank["wall_s"] for rank in report["ranks"]},
        "requests": report["requests"],
    }
