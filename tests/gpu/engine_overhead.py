"""What recording costs the real engine: decode under graphs, bare and with each part of the instrumentation.

    python tests/gpu/engine_overhead.py [--layers 4] [--json FILE] [--ablate]

World size 1, geometry qwen3-next-80b, decode graph replays of one request and of three. Each mode runs in processes of
its own, in an order that is mirrored half-way, so that a drift of the machine hits all modes alike; the spread is what
the middle half of the repeats spans, in percent of their median. ``--ablate`` adds modes that tell what the cost is
made of: the collector alone, without step sentinels, with kernel records only, torch.profiler (CUDA activities only),
and decode that reads each step's tokens before it submits the next. Bar: everything on slows decode by at most 8 %
(aim: 3 %). Exits 1 when the bar is missed or a recording was not complete.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / room) for room in ("profiler", "backend", "tracers")]

NEW_TOKENS = 256
REPEATS = 10
"""Passes a process, of each batch; the first is not counted."""
TORCH_REPEATS = 4
"""torch.profiler keeps every event as an object: more would take minutes at its stop."""
BATCHES = (1, 3)
PROMPT_TOKENS = 300
BAR = 1.08


@dataclass(frozen=True)
class Mode:
    """Which parts of the instrumentation are on."""

    name: str
    nvtx: bool
    receipts: bool
    collector: bool
    step_sentinels: bool = True
    kernels_only: bool = False
    torch_profiler: bool = False
    run_ahead: bool = True


MODES = (
    Mode("bare", nvtx=False, receipts=False, collector=False),
    Mode("nvtx", nvtx=True, receipts=False, collector=False),
    Mode("receipts", nvtx=False, receipts=True, collector=False),
    Mode("all on", nvtx=True, receipts=True, collector=True),
)
ABLATIONS = (
    Mode("collector alone", nvtx=False, receipts=False, collector=True),
    Mode("no step sentinels", nvtx=False, receipts=False, collector=True, step_sentinels=False),
    Mode("kernel records only", nvtx=False, receipts=False, collector=True, step_sentinels=False, kernels_only=True),
    Mode("torch.profiler", nvtx=False, receipts=False, collector=False, torch_profiler=True),
    Mode("bare, reading first", nvtx=False, receipts=False, collector=False, run_ahead=False),
    Mode("all on, reading first", nvtx=True, receipts=True, collector=True, run_ahead=False),
)


def measure(mode: Mode, layers: int, out: Path) -> dict[str, Any]:
    """Serve in this process and give ms a decode step of each repeat, and what the collector says."""
    from alphamoe_tracers.cupti import Collector, prepare_environment

    if mode.collector:
        prepare_environment()
    import torch

    from alphamoe_backend.dispatch import DispatchRecorder
    from alphamoe_backend.engine import Engine, EngineConfig, NoObserver, Request, StepObserver
    from alphamoe_backend.parallel import TensorParallelGroup
    from alphamoe_tracers.receipts import ReceiptWriter

    source = None
    if mode.kernels_only:
        from alphamoe_tracers.cupti_source import CuptiSource

        source = CuptiSource(kernels_only=True)
    collector = Collector(out, 0, source=source)

    class Recording(NoObserver):
        def step_boundary(self, step: int) -> None:
            if mode.step_sentinels:
                collector.step_boundary(step)

        def graph_sentinel(self) -> None:
            collector.graph_sentinel()

    observer: StepObserver = NoObserver()
    if mode.collector:
        collector.start()
        observer = Recording()
    writer = ReceiptWriter(out / "receipts" / "rank=0.jsonl") if mode.receipts else None
    config = EngineConfig(
        model="qwen3-next-80b",
        layers=layers,
        rank=0,
        world_size=1,
        device="cuda:0",
        dtype="bfloat16",
        moe_runner_backend="flashinfer_alphamoe",
        executions=("decode_graph_replay",),
        max_new_tokens=NEW_TOKENS,
        nvtx=mode.nvtx,
        run_ahead=mode.run_ahead,
    )
    recorder = DispatchRecorder("overhead", 0, writer.write if writer else None)
    engine = Engine(config, recorder, observer, TensorParallelGroup())
    engine.load()
    engine.warm_up()
    # One more request than slots: its wave is the batch of one, so that graphs of both batches are captured.
    engine.capture([PROMPT_TOKENS] * (max(BATCHES) + 1), batch_size=max(BATCHES))
    prompt = torch.randint(32768, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    if mode.collector:
        collector.open_window()
    profiler = None
    if mode.torch_profiler:
        from torch.profiler import ProfilerActivity, profile

        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
    step_ms: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for index in range(TORCH_REPEATS if mode.torch_profiler else REPEATS):
        for batch in BATCHES:
            requests = [Request(f"r{index}.{place}", tuple(prompt)) for place in range(batch)]
            completion = engine.serve(requests, ("decode_graph_replay",), "performance")[0]
            step_ms[batch].append(completion.timings["decode_s"] * 1e3 / (NEW_TOKENS - 1))
    if profiler is not None:
        profiler.stop()
    result: dict[str, Any] = {
        "mode": mode.name,
        "step_ms": {batch: ms[1:] for batch, ms in step_ms.items()},
        "receipts": recorder.receipts,
    }
    if mode.collector:
        collector.close_window()
        summary = collector.stop()
        result |= {
            "state": summary.state,
            "reason": summary.reason,
            "dropped": summary.dropped,
            "kernels": summary.rows["kernels"],
        }
    return result


def run_child(mode: Mode, layers: int) -> dict[str, Any]:
    """Run one mode in a process of its own."""
    argv = [sys.executable, __file__, "--child", mode.name, "--layers", str(layers)]
    finished = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    if finished.returncode != 0:
        sys.exit(f"{mode.name} ended with {finished.returncode}:\n{finished.stdout[-2000:]}{finished.stderr[-4000:]}")
    document: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return document


def summarised(ms: list[float], bare_ms: float) -> dict[str, float]:
    """Give the median, the spread of the middle half around it, and the slow-down."""
    low, middle, high = statistics.quantiles(ms, n=4)
    return {"ms": middle, "spread_percent": 100 * (high - low) / middle, "against_bare": middle / bare_ms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[mode.name for mode in (*MODES, *ABLATIONS)], help=argparse.SUPPRESS)
    parser.add_argument("--ablate", action="store_true", help="also measure what the cost is made of")
    arguments = parser.parse_args()
    modes = {mode.name: mode for mode in (*MODES, *ABLATIONS)}
    if arguments.child:
        with tempfile.TemporaryDirectory(prefix="alphamoe-overhead-") as out:
            print(json.dumps(measure(modes[arguments.child], arguments.layers, Path(out))))
        return 0
    measured = (*MODES, *ABLATIONS) if arguments.ablate else MODES
    results = [run_child(mode, arguments.layers) for mode in (*measured, *reversed(measured))]
    failures = [
        f"the recording was not complete: {result}"
        for result in results
        if result.get("state", "on") != "on" or result.get("dropped")
    ]
    table: dict[str, dict[str, dict[str, float]]] = {}
    for batch in map(str, BATCHES):
        samples = {m.name: [ms for r in results if r["mode"] == m.name for ms in r["step_ms"][batch]] for m in measured}
        bare = statistics.median(samples["bare"])
        table[batch] = {name: summarised(ms, bare) for name, ms in samples.items()}
        print(f"\n{f'requests: {batch}':24} {'ms a step':>10} {'spread %':>9} {'against bare':>13}")
        for name, row in table[batch].items():
            print(f"{name:24} {row['ms']:10.4f} {row['spread_percent']:9.2f} {row['against_bare']:13.3f}")
        slowed = table[batch]["all on"]["against_bare"]
        if slowed > BAR:
            failures.append(f"all on slows decode of {batch} requests {slowed:.3f} times, more than {BAR}")
    print(*(f"FAIL {failure}" for failure in failures), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"table": table, "runs": results, "failures": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
