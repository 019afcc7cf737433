"""What the collector costs ranks that have a GPU each, beside torch.profiler: decode under full graphs, over NCCL.

    python tests/gpu/multi_gpu_cost.py --ranks 2 [--layers 4] [--limit 170] [--json FILE]

Every mode (bare, everything on, torch.profiler with CUDA activities) runs in processes of its own, one a rank, in an
order that is mirrored half-way. Bars, as in collector_bench.py: slow-down at most 1.1 times torch.profiler's, stop to
disk at most 0.3 times its stop plus export, bytes at most those of its gzipped traces. The numbers are written after
every mode; exits 1 when a bar is missed, a recording was not complete or a mode did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / room) for room in ("profiler", "backend", "tracers")]

MODES = ("bare", "ours", "theirs")
NEW_TOKENS = 128
REPEATS = 5
"""Passes a process; the first is not counted."""
PROMPT_TOKENS = 300
BARS = {"slow_down": 1.1, "stop_s": 0.3, "bytes": 1.0}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(mode: str, rank: int, ranks: int, layers: int, meeting: str, out: Path) -> dict[str, Any]:
    """Be one rank: serve and give ms a decode step of each repeat, and what recording took."""
    from alphamoe_tracers.cupti import Collector, prepare_environment

    if mode == "ours":
        prepare_environment()
    import torch

    from alphamoe_backend.dispatch import DispatchRecorder
    from alphamoe_backend.engine import Engine, EngineConfig, NoObserver, Request, StepObserver
    from alphamoe_backend.parallel import TensorParallelGroup
    from alphamoe_tracers.receipts import ReceiptWriter

    collector = Collector(out, rank)

    class Recording(NoObserver):
        def step_boundary(self, step: int) -> None:
            collector.step_boundary(step)

        def graph_sentinel(self) -> None:
            collector.graph_sentinel()

    observer: StepObserver = NoObserver()
    writer = None
    if mode == "ours":
        collector.start()
        observer = Recording()
        writer = ReceiptWriter(out / "receipts" / f"rank={rank}.jsonl")
    torch.cuda.set_device(rank)
    group = TensorParallelGroup.connect(rank, ranks, "nccl", meeting, timeout_s=60)
    config = EngineConfig(
        model="qwen3-next-80b",
        layers=layers,
        rank=rank,
        world_size=ranks,
        device=f"cuda:{rank}",
        dtype="bfloat16",
        moe_runner_backend="flashinfer_alphamoe",
        executions=("decode_graph_replay",),
        max_new_tokens=NEW_TOKENS,
        nvtx=mode == "ours",
    )
    engine = Engine(config, DispatchRecorder("cost", rank, writer.write if writer else None), observer, group)
    engine.load()
    engine.warm_up()
    engine.capture([PROMPT_TOKENS], batch_size=1)
    prompt = tuple(torch.randint(32768, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist())
    group.barrier()
    profiler = None
    if mode == "ours":
        collector.open_window()
    elif mode == "theirs":
        from torch.profiler import ProfilerActivity, profile

        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
    step_ms = []
    for repeat in range(REPEATS):
        served = engine.serve([Request(f"r{repeat}", prompt)], ("decode_graph_replay",), "performance")
        step_ms.append(served[0].timings["decode_s"] * 1e3 / (NEW_TOKENS - 1))
    result: dict[str, Any] = {"step_ms": step_ms[1:]}
    if mode == "ours":
        collector.close_window()
    begun = time.perf_counter()
    if mode == "ours":
        summary = collector.stop()
        result |= {"state": summary.state, "reason": summary.reason, "dropped": summary.dropped}
    elif profiler is not None:
        profiler.stop()
        out.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(out / f"rank={rank}.json.gz"))
    result["stop_s"] = time.perf_counter() - begun
    group.barrier()
    return result


def run_mode(mode: str, ranks: int, layers: int, limit_s: float) -> dict[str, Any]:
    """Run all ranks of one mode; raises RuntimeError when one of them fails or the time is up."""
    with tempfile.TemporaryDirectory(prefix="alphamoe-cost-") as place, contextlib.ExitStack() as stack:
        out = Path(place, "out")
        out.mkdir()
        common = ["--child", mode, "--ranks", str(ranks), "--layers", str(layers), "--place", place]
        processes = []
        for rank in range(ranks):
            log = stack.enter_context(Path(place, f"{rank}.log").open("wb"))
            argv = [sys.executable, __file__, *common, "--rank", str(rank)]
            processes.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT))
        try:
            _wait(processes, time.monotonic() + limit_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed:
            rank = next((rank for rank in failed if processes[rank].returncode != -9), failed[0])
            text = Path(place, f"{rank}.log").read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{mode}: rank {rank} ended with {processes[rank].returncode}: {text}")
        rows = [json.loads(Path(place, f"{rank}.json").read_text()) for rank in range(ranks)]
        return {"mode": mode, "ranks": rows, "bytes": size_of(out)}


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> None:
    """Wait until all ended well, one failed (its peers then hang in a collective), or the time is up."""
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if any(process.returncode for process in processes):
            return
        time.sleep(0.1)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Give medians by mode, over ranks and processes, ratios against torch.profiler, and what missed its bar."""
    medians: dict[str, dict[str, float]] = {}
    for mode in MODES:
        own = [run for run in runs if run["mode"] == mode]
        if own:
            rows = [row for run in own for row in run["ranks"]]
            medians[mode] = {
                "step_ms": statistics.median(ms for row in rows for ms in row["step_ms"]),
                "stop_s": statistics.median(row["stop_s"] for row in rows),
                "bytes": statistics.median(run["bytes"] for run in own),
            }
    missed = [f"{mode} did not run" for mode in MODES if mode not in medians]
    rows = [row for run in runs if run["mode"] == "ours" for row in run["ranks"]]
    missed += [f"a recording was not complete: {row}" for row in rows if row["state"] != "on" or row["dropped"]]
    ratios: dict[str, float] = {}
    if len(medians) == len(MODES):
        for mode in ("ours", "theirs"):
            medians[mode]["slow_down"] = medians[mode]["step_ms"] / medians["bare"]["step_ms"]
        ratios = {key: medians["ours"][key] / medians["theirs"][key] for key in BARS}
        missed += [f"{key}: {ratios[key]:.3f}, more than {bar}" for key, bar in BARS.items() if ratios[key] > bar]
    return {"medians": medians, "ratios": ratios, "bars": BARS, "missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds that all modes may take together")
    parser.add_argument("--json", type=Path)
    for hidden in ("--child", "--place"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        place = Path(arguments.place)
        meeting = (place / "meeting").as_uri()
        row = measure(arguments.child, arguments.rank, arguments.ranks, arguments.layers, meeting, place / "out")
        (place / f"{arguments.rank}.json").write_text(json.dumps(row))
        sys.stdout.flush()
        os._exit(0)  # captured graphs hold the communicator: leaving it in order would hang
    until = time.monotonic() + arguments.limit
    runs: list[dict[str, Any]] = []
    problems: list[str] = []
    for mode in (*MODES, *reversed(MODES)):
        left_s = until - time.monotonic()
        if left_s < 15:
            problems.append(f"{mode}: not run, the time was up")
            continue
        try:
            runs.append(run_mode(mode, arguments.ranks, arguments.layers, min(60.0, left_s)))
        except (RuntimeError, OSError, ValueError) as error:
            problems.append(str(error))
        said = summarise(runs)
        if arguments.json:
            arguments.json.write_text(json.dumps({**said, "runs": runs, "problems": problems}, indent=1) + "\n")
    said = summarise(runs)
    for mode, row in said["medians"].items():
        print(f"{mode:8}", *(f"{key} {value:.4f}" for key, value in row.items()))
    print("ratios  ", *(f"{key} {value:.3f} (bar {BARS[key]})" for key, value in said["ratios"].items()))
    print(*(f"WRONG {text}" for text in [*said["missed"], *problems]), sep="\n")
    return 1 if said["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
