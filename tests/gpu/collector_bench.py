"""What the collector costs, beside torch.profiler (CUDA activities only) in the same run; needs a GPU, takes 90 s.

    python tests/gpu/collector_bench.py [--json FILE]

A loop of eager and replayed small kernels runs unprofiled (before the tool was ever attached), then recorded. Each tool
has processes of its own, in the order ours, theirs, theirs, ours, twice. The unprofiled loop is the same in all of them
and its time moves by half between processes, so the median over all is what both are held against. Bars: slow-down at
most 1.1 times torch.profiler's, stop-to-disk at most 0.3 times its stop plus export, bytes on disk at most those of its
gzipped trace. Exit code 0 when all three hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tracers"))

EAGER, REPLAYS, NODES = 20_000, 400, 50
KERNELS = EAGER + REPLAYS * NODES
REPEATS = 2
ORDER = ("ours", "theirs", "theirs", "ours") * 2
BARS = {"slow_down": 1.1, "stop_s": 0.3, "bytes": 1.0}


def loop(torch: Any, x: Any, graph: Any) -> tuple[float, float]:
    """Run the workload to its end and return the seconds that its eager and its replayed half took."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(EAGER):
        x.add_(1)
    torch.cuda.synchronize()
    half = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return half - begun, time.perf_counter() - half


def captured(torch: Any, x: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NODES):
            x.add_(1)
    return graph


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def workload_kernels(out: Path, opened_ns: int, closed_ns: int) -> int:
    """Count the kernels of the loop: those of the window that are not the collector's own.

    Outside the window torch fills the two tensors of a captured graph's random generator.
    """
    import pyarrow.parquet as pq

    def rows(name: str) -> Any:
        return pq.ParquetFile(out / name / "rank=0" / "part-00000.parquet").read().to_pandas()

    kernels = rows("kernels").merge(rows("symbols"), on="symbol_id")
    inside = kernels["start_ns"].between(opened_ns, closed_ns)
    return int((inside & (kernels["class"] != "collector.sentinel")).sum())


def measure_ours(torch: Any, x: Any, out: Path) -> dict[str, float]:
    from alphamoe_tracers.cupti import Collector

    collector = Collector(out, 0)
    collector.start()
    graph = captured(torch, x)
    collector.open_window()
    recorded = loop(torch, x, graph)
    collector.close_window()
    begun = time.perf_counter()
    summary = collector.stop()
    stop_s = time.perf_counter() - begun
    return {
        "recorded_s": sum(recorded),
        "recorded_eager_s": recorded[0],
        "recorded_replay_s": recorded[1],
        "stop_s": stop_s,
        "bytes": size_of(out),
        "kernels": workload_kernels(out, summary.window_open_ns or 0, summary.window_close_ns or 0),
        "dropped": summary.dropped,
    }


def measure_theirs(torch: Any, x: Any, out: Path) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    recorded = loop(torch, x, captured(torch, x))
    begun = time.perf_counter()
    profiler.stop()
    out.mkdir(parents=True)
    profiler.export_chrome_trace(str(out / "trace.json.gz"))
    stop_s = time.perf_counter() - begun
    return {
        "recorded_s": sum(recorded),
        "recorded_eager_s": recorded[0],
        "recorded_replay_s": recorded[1],
        "stop_s": stop_s,
        "bytes": size_of(out),
    }


def child(tool: str, out: Path) -> int:
    if tool == "ours":
        from alphamoe_tracers.cupti import prepare_environment

        prepare_environment()
    import torch

    x = torch.zeros(1024, device="cuda")
    graph = captured(torch, x)
    loop(torch, x, graph)
    plain = [loop(torch, x, graph) for _ in range(3)]
    halves = {
        "plain_s": statistics.median(map(sum, plain)),
        "plain_eager_s": statistics.median(eager for eager, _ in plain),
        "plain_replay_s": statistics.median(replay for _, replay in plain),
    }
    measure = measure_ours if tool == "ours" else measure_theirs
    rows = [{**halves, **measure(torch, x, out / str(repeat))} for repeat in range(REPEATS)]
    sys.stdout.write("\n" + json.dumps(rows) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", choices=["ours", "theirs"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.out)
    work_dir = Path(tempfile.mkdtemp(prefix="collector-bench-"))
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for number, tool in enumerate(ORDER):
        command = [sys.executable, __file__, "--child", tool, "--out", str(work_dir / str(number))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
            return 2
        rows[tool] += json.loads(done.stdout.strip().splitlines()[-1])
    shutil.rmtree(work_dir, ignore_errors=True)
    plain_s = statistics.median(row["plain_s"] for repeats in rows.values() for row in repeats)
    for repeats in rows.values():
        for row in repeats:
            row["slow_down"] = row["recorded_s"] / plain_s
    medians = {
        tool: {key: statistics.median(row[key] for row in repeats) for key in repeats[0]}
        for tool, repeats in rows.items()
    }
    ratios = {key: medians["ours"][key] / medians["theirs"][key] for key in BARS}
    lines = [f"{'':18}{'ours':>12}{'torch':>12}{'ratio':>9}{'bar':>7}"]
    for key in medians["theirs"]:
        ratio = f"{ratios[key]:9.3f}{BARS[key]:7.1f}" if key in BARS else ""
        lines.append(f"{key:18}{medians['ours'][key]:12.4f}{medians['theirs'][key]:12.4f}{ratio}")
    counts = sorted({row["kernels"] for row in rows["ours"]})
    lines.append(f"kernels {counts} of {KERNELS}, dropped {medians['ours']['dropped']:.0f}")
    missed = [key for key in BARS if ratios[key] > BARS[key]] + ([] if counts == [KERNELS] else ["kernels"])
    lines.append("missed: " + ", ".join(missed) if missed else "all bars hold")
    sys.stdout.write("\n".join(lines) + "\n")
    document = json.dumps({"rows": rows, "medians": medians, "ratios": ratios, "bars": BARS, "missed": missed})
    if arguments.json:
        arguments.json.write_text(document + "\n")
    else:
        sys.stdout.write(document + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
