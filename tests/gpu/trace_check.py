"""Run the main command on a GPU in every way that its bars name, and check what the bundles say.

    python tests/gpu/trace_check.py [--results DIR] [--layers 4] [--only ranks4 ranks1]

Each case is one call of the command in a process of its own; its bundle is read back through the command's JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = dict[str, Any]
KERNEL = "kernel_alpha_moe_w8a8_up_down"
STOCK = "fused_moe_kernel"
ALL = ("eager", "prefill_graph_replay", "decode_graph_replay")


@dataclass(frozen=True)
class Case:
    """One call of the command and what its report must say."""

    name: str
    argv: tuple[str, ...]
    check: Callable[[Report], list[str]]
    exit_code: int = 0


def _kernels(report: Report, symbol: str) -> dict[tuple[int, str], int]:
    counts: dict[tuple[int, str], int] = {}
    for row in report["moe_kernels"]:
        if row["symbol"] == symbol and row["execution"]:
            key = (row["rank"], row["execution"])
            counts[key] = counts.get(key, 0) + row["kernels"]
    return counts


def _complete(report: Report) -> list[str]:
    """Say what keeps the recording from being complete and fully attributed."""
    wrong = [f"problem: {problem}" for problem in report["problems"]]
    for rank in report["ranks"]:
        name = f"rank {rank['rank']}"
        if rank["ended"] != "complete":
            wrong.append(f"{name} ended {rank['ended']}")
        if rank["dropped"] != 0:
            wrong.append(f"{name} dropped {rank['dropped']}")
        wrong += [f"{name} window: {failure}" for failure in rank["window_failures"]]
        if not rank["moe_kernels"] or rank["moe_attributed"] != rank["moe_kernels"]:
            wrong.append(f"{name}: {rank['moe_attributed']} of {rank['moe_kernels']} MoE kernels attributed")
    wrong += [f"check {check['name']}: {check['reason']}" for check in report["checks"] if check["verdict"] != "PASS"]
    wrong += [f"check {check['name']} compared nothing" for check in report["checks"] if not check["compared"]]
    return wrong


def passes(symbol: str, absent: str, executions: tuple[str, ...] = ALL) -> Callable[[Report], list[str]]:
    """Require a PASS in which the symbol ran on every rank and execution, and the other ran nowhere."""

    def check(report: Report) -> list[str]:
        wrong = _complete(report)
        if report["verdict"] != "PASS":
            wrong.append(f"verdict {report['verdict']}: {report['reason']}")
        counts = _kernels(report, symbol)
        for rank in range(report["run"]["world_size"]):
            wrong += [
                f"rank {rank} {execution}: no {symbol}" for execution in executions if not counts.get((rank, execution))
            ]
        if _kernels(report, absent):
            wrong.append(f"{absent} ran: {_kernels(report, absent)}")
        if symbol == KERNEL and not any(
            identity["symbol"] == symbol and identity["source_sha256"] for identity in report["identities"]
        ):
            wrong.append(f"{symbol} is not tied to its source")
        return wrong

    return check


def fails_naming_rank(rank: int) -> Callable[[Report], list[str]]:
    """Require a FAIL whose reason names the rank."""

    def check(report: Report) -> list[str]:
        wrong = []
        if report["verdict"] != "FAIL":
            wrong.append(f"verdict {report['verdict']}: {report['reason']}")
        if f"rank {rank}" not in str(report["reason"]):
            wrong.append(f"the reason does not name rank {rank}: {report['reason']}")
        return wrong

    return check


def silent(report: Report) -> list[str]:
    """Require that a run without receipts and ranges is not called a PASS and still shows the kernel."""
    shown = sum(row["kernels"] for row in report["moe_kernels"] if row["symbol"] == KERNEL)
    wrong = [] if shown else [f"{KERNEL} is not shown"]
    if report["verdict"] == "PASS":
        wrong.append("PASS without receipts and ranges")
    return wrong


def cut_short(killed: int) -> Callable[[Report], list[str]]:
    """Require that a killed rank is named, that its witnesses up to the last flush are there, and no PASS."""

    def check(report: Report) -> list[str]:
        wrong = ["PASS of a run that was cut short"] if report["verdict"] == "PASS" else []
        rank = report["ranks"][killed]
        if rank["ended"] != "cut short" or not rank["kernels"] or not rank["receipts"]:
            wrong.append(f"rank {killed}: {rank['ended']}, {rank['kernels']} kernels, {rank['receipts']} receipts")
        return wrong

    return check


def cases(layers: int) -> tuple[Case, ...]:
    base = ("--prompt", "gsm8k:17", "--model", "qwen3-next-80b", "--layers", str(layers))
    return (
        Case("ranks4", ("--ranks", "4", *base), passes(KERNEL, STOCK)),
        Case("ranks1", ("--ranks", "1", *base), passes(KERNEL, STOCK)),
        Case("stock", ("--ranks", "1", "--moe-runner-backend", "triton", *base), passes(STOCK, KERNEL)),
        Case("fallback", ("--ranks", "4", "--inject-fault", "fallback:rank=2", *base), fails_naming_rank(2)),
        Case("batch3", ("--ranks", "1", *base, "--prompt", "gsm8k:18", "--prompt", "gsm8k:19"), passes(KERNEL, STOCK)),
        Case(
            "killed", ("--ranks", "4", "--inject-fault", "kill:rank=1,phase=decode", *base), cut_short(1), exit_code=1
        ),
        Case("silent", ("--ranks", "1", "--no-receipts", "--no-nvtx", *base), silent),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("gpu-check"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="+")
    arguments = parser.parse_args()
    results: Path = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    failed = 0
    table = []
    for case in cases(arguments.layers):
        if arguments.only and case.name not in arguments.only:
            continue
        run = results / f"run-{case.name}"
        shutil.rmtree(run, ignore_errors=True)
        report_file = results / f"trace-{case.name}.json"
        began = time.monotonic()
        finished = subprocess.run(
            [sys.executable, "-m", "alphamoe_profiler", *case.argv, "--out", str(run), "--json", str(report_file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        wall_s = time.monotonic() - began
        print(f"--- {case.name}: {' '.join(case.argv)}\n{finished.stdout[-6000:]}{finished.stderr[-4000:]}")
        if finished.returncode != case.exit_code or not report_file.is_file():
            wrong = [f"exit {finished.returncode}"]
            report: Report = {}
        else:
            report = json.loads(report_file.read_text())
            wrong = case.check(report)
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        witnessed = (
            {f"{rank}:{execution}": n for (rank, execution), n in _kernels(report, KERNEL).items()} if report else {}
        )
        table.append((case.name, report.get("verdict", "-"), wall_s, size, witnessed))
        failed += bool(wrong)
        for line in wrong[:12]:
            print(f"    WRONG {case.name}: {line}")
    print(f"\n{'case':10} {'verdict':13} {'wall s':>7} {'bundle MB':>10}  {KERNEL} by rank:execution")
    for name, verdict, wall_s, size, witnessed in table:
        print(f"{name:10} {verdict:13} {wall_s:7.1f} {size / 1e6:10.2f}  {witnessed}")
    return 1 if failed or not table else 0


if __name__ == "__main__":
    raise SystemExit(main())
