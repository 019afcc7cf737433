"""Measure ``alphamoe-trace gate`` on a bundle of 8 ranks x 1,000,000 kernels: wall time and peak memory.

Builds a bundle like a recording's (48 layers of 20 kernels; half of the steps eager with one launch a kernel, half
decode-graph replays with node ids), gates it in a fresh process with the built-in policy, and prints one line.

    .venv/bin/python tests/benchmarks/gate_bench.py
    .venv/bin/python tests/benchmarks/gate_bench.py --ranks 2 --kernels 100000 --repeat 1
    .venv/bin/python tests/benchmarks/gate_bench.py --bundle DIR       # keeps the bundle there, and uses it again
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parents[2]
for room in ("tests/profiler", "profiler", "tracers", "backend"):
    sys.path.insert(0, str(ROOT / room))

LAYERS, PER_LAYER = 48, 20
MOE_AT = 7
LIMIT_S, LIMIT_MIB = 5.0, 1536
SYMBOL, STOCK = "kernel_alpha_moe_w8a8_up_down", "fused_moe_kernel"
NODE, CLONE = 1 << 40, 1 << 41
SENTINELS = ("open", "graph_open", "graph_close", "close")


def build(path: Path, ranks: int, kernels: int) -> None:
    """Write a sound bundle with about ``kernels`` kernels on each rank."""
    import golden
    from golden_rank import RUN_ID

    from alphamoe_profiler.bundle import BundleWriter, RankEnd, RunOutcome

    steps = max(kernels // (LAYERS * PER_LAYER), 2)
    writer = BundleWriter(path)
    run = golden._run(ranks, ("eager", "decode_graph_replay"), "flashinfer_alphamoe")
    geometry = msgspec.structs.replace(run.geometry, layers=LAYERS) if run.geometry else None
    writer.write_run(msgspec.structs.replace(run, geometry=geometry))
    for record in golden._requests():
        writer.append_request(record)
    for rank in range(ranks):
        _rank(writer, rank, ranks, steps, RUN_ID)
    ends = tuple(RankEnd(rank=rank, exit_code=0) for rank in range(ranks))
    writer.write_outcome(RunOutcome(run_id=RUN_ID, complete=True, ranks=ends))


def _rank(writer: Any, rank: int, ranks: int, steps: int, run_id: str) -> None:
    from golden_rank import CUBIN, SM_COUNT, SOURCE

    from alphamoe_backend.geometry import PRESETS
    from alphamoe_backend.kernels.launch import launch_shape
    from alphamoe_profiler.bundle import RankFile
    from alphamoe_tracers.records import TABLES, CollectorSummary, ModuleRecord, SentinelCount
    from alphamoe_tracers.symbols import symbol_class

    names = [f"void ns::kernel_{number}<float>(float*)" for number in range(PER_LAYER)]
    names[MOE_AT] = SYMBOL
    bases = [name if name == SYMBOL else name.split("::")[1].split("<")[0] for name in names]
    sentinels = [f"alphamoe_trace_sentinel_{kind}" for kind in SENTINELS]
    names, bases = names + sentinels, bases + sentinels
    width = LAYERS * PER_LAYER
    pid, thread, tick = 100 + rank, 700, 2_000
    count = steps * width
    eager = np.arange(steps) % 2 == 0
    step_of = np.repeat(np.arange(steps), width)
    place = np.tile(np.arange(width), steps)
    base_ns = 1_000_000_000 + 17 * rank
    window = base_ns + 10_000_000
    host = window + 10_000 + np.arange(count) * tick  # one slot a kernel
    first_of_step = host[step_of * width]
    is_eager = eager[step_of]
    correlation = np.where(is_eager, 1000 + np.arange(count), 1000 + step_of * width)
    node = np.where(is_eager, 0, CLONE + place)
    open_at, close_at = window + 1000, int(host[-1]) + 100_000
    ends_at = {"open": open_at, "graph_open": open_at + 500, "graph_close": close_at, "close": close_at + 500}
    jitter = np.random.default_rng(rank).integers(0, 400, (2, count))  # real times do not compress
    kernel_start = np.concatenate([host + 500 + jitter[0], [t + 300 for t in ends_at.values()]])
    lasted = np.concatenate([500 + jitter[1], np.full(len(SENTINELS), 100)])
    n = count + len(SENTINELS)
    extra = np.arange(len(SENTINELS))
    correlation = np.concatenate([correlation, 10 + extra])
    node = np.concatenate([node, np.where([kind.startswith("graph") for kind in SENTINELS], CLONE * 2 + extra, 0)])
    symbol = np.concatenate([place % PER_LAYER, PER_LAYER + extra]).astype(np.int32)
    local = PRESETS["qwen3-next-80b"].moe.local(4)  # one rank's share of the validated geometry
    M = np.where(eager, 13, 16)
    shapes = {int(m): launch_shape(local, int(m), SM_COUNT) for m in (13, 16)}
    columns: dict[str, Any] = {name: np.ones(n, np.int32) for name in TABLES["kernels"].names}
    moe = np.concatenate([place % PER_LAYER == MOE_AT, np.zeros(len(SENTINELS), bool)])
    m_of = np.concatenate([M[step_of], np.zeros(len(SENTINELS), np.int64)])
    for m, shape in shapes.items():
        own = moe & (m_of == m)
        for kind, values in (("grid", shape.grid), ("block", shape.block), ("cluster", shape.cluster)):
            for axis, value in zip("xyz", values, strict=True):
                columns[f"{kind}_{axis}"] = np.where(own, value, columns[f"{kind}_{axis}"])
        columns["dynamic_smem_bytes"] = np.where(own, shape.dynamic_smem_bytes, columns["dynamic_smem_bytes"])
    columns |= {
        "process": np.full(n, pid), "start_ns": kernel_start, "end_ns": kernel_start + lasted,
        "device": np.zeros(n), "stream": np.full(n, 7), "correlation_id": correlation, "symbol_id": symbol,
        "graph_id": pa.array(np.where(node > 0, 5, 0), pa.int64(), mask=node == 0),
        "graph_node_id": pa.array(node, pa.int64(), mask=node == 0), "registers": np.full(n, 64),
    }  # fmt: skip
    _write(writer, "kernels", rank, columns)
    launched = np.flatnonzero(is_eager | (place == 0))
    api = np.where(is_eager[launched], "cuLaunchKernelEx", "cudaGraphLaunch").tolist()
    ends = list(ends_at.values())
    starts = np.concatenate([host[launched], ends])
    _write(writer, "launches", rank, {
        "process": np.full(len(starts), pid), "thread": np.full(len(starts), thread), "start_ns": starts,
        "end_ns": starts + 100, "correlation_id": np.concatenate([correlation[launched], 10 + extra]),
        "api": api + ["cudaGraphLaunch" if kind.startswith("graph") else "cuLaunchKernel" for kind in SENTINELS],
    })  # fmt: skip
    _write(writer, "ranges", rank, _ranges(pid, thread, tick, width, eager, first_of_step[::width], base_ns))
    created = base_ns + 1_000 + np.arange(width) * 100
    ids = np.concatenate([NODE + np.arange(width), CLONE + np.arange(width)])
    _write(writer, "graph_nodes", rank, {
        "graph_node_id": ids,
        "original_node_id": pa.array(np.tile(NODE + np.arange(width), 2), pa.int64(), mask=ids < CLONE),
        "process": np.full(2 * width, pid), "thread": np.full(2 * width, thread),
        "created_ns": np.concatenate([created, created + 500_000]),
    })  # fmt: skip
    rows = [
        {"symbol_id": number, "mangled": name, "full": name, "base": base, "class": symbol_class(base, name),
         "module_sha256": CUBIN if base == SYMBOL else None}
        for number, (name, base) in enumerate(zip(names, bases, strict=True))
    ]  # fmt: skip
    writer.write_table("symbols", rank, pa.Table.from_pylist(rows, TABLES["symbols"]))
    writer.write_table("transfers", rank, TABLES["transfers"].empty_table())
    writer.write_modules(rank, [ModuleRecord(CUBIN, 4096, 900, (SYMBOL,), SOURCE)])
    _receipts(writer, rank, eager, M, local, run_id)
    rank_file = RankFile(
        run_id=run_id, rank=rank, world_size=ranks, host="bench", pid=pid, device="cuda:0", gpu_name="NVIDIA H200",
        gpu_uuid=f"GPU-{rank}", sm_count=SM_COUNT, shared_gpu=False, receipts=steps, sha256={}, memory=(), wall_s={},
        ended="complete", error=None, clock="cuptiGetTimestamp", compute_capability="9.0",
        collector=CollectorSummary(
            state="on", reason=None, cupti_library=None, cupti_version=None, cupti_python_version=None,
            kernel_record=None, window_open_ns=window, window_close_ns=close_at + 10_000,
            rows={name: writer_rows(writer, name, rank) for name in TABLES}, dropped=0, duplicates=0, invalid_times=0,
            untimed=0, unresolved_names=0, skipped_api_ids=(), range_problems=(),
            sentinels=tuple(SentinelCount(kind, 1, 1) for kind in SENTINELS),  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    writer.write_rank(rank_file)


def writer_rows(writer: Any, name: str, rank: int) -> int:
    """Return how many rows a table of a rank has."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in writer.table_dir(name, rank).glob("*.parquet"))


def _ranges(pid: int, thread: int, tick: int, width: int, eager: Any, begins: Any, base_ns: int) -> dict[str, Any]:
    """Return one range a step, and one a layer in eager steps and in the capture."""
    layer_ns, capture_at = PER_LAYER * tick, base_ns + 900
    rows: list[tuple[int, int, str, int, int]] = [(capture_at, base_ns + width * 100 + 1_500, "step", 1, 0)]
    rows += [(capture_at + 50 + at * 2000, capture_at + 2040 + at * 2000, "layer", at, 1) for at in range(LAYERS)]
    for number, begin in enumerate(begins.tolist()):
        rows.append((begin - 200, begin + width * tick - 400, "step", 10 + number, 0))
        if eager[number]:
            rows += [
                (begin - 100 + at * layer_ns, begin - 300 + (at + 1) * layer_ns, "layer", at, 1) for at in range(LAYERS)
            ]
    start, end, name, payload, depth = (list(values) for values in zip(*rows, strict=True))
    n = len(rows)
    return {
        "process": np.full(n, pid), "thread": np.full(n, thread), "start_ns": start, "end_ns": end,
        "domain": ["alphamoe"] * n, "name": name, "payload": payload, "depth": depth, "kind": ["push_pop"] * n,
    }  # fmt: skip


def _write(writer: Any, name: str, rank: int, columns: dict[str, Any]) -> None:
    from alphamoe_tracers.records import TABLES

    schema = TABLES[name]
    arrays = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        values = columns[field.name]
        arrays.append(values if isinstance(values, pa.Array) else pa.array(values).cast(kind))
    writer.write_table(name, rank, pa.table(arrays, names=schema.names).cast(schema))


def _receipts(writer: Any, rank: int, eager: Any, M: Any, local: Any, run_id: str) -> None:
    from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_KERNEL
    from alphamoe_tracers.receipts import ReceiptWriter
    from alphamoe_tracers.records import Receipt, Submission

    lists = {
        is_eager: tuple(
            Submission(
                layer=layer, kernel=ALPHAMOE_W8A8_KERNEL, symbol=SYMBOL, M=13 if is_eager else 16, E=local.E, H=local.H,
                I_local=local.I_local, top_k=local.top_k, block_m=local.block_m, captured=not is_eager, device=0,
            )
            for layer in range(LAYERS)
        )
        for is_eager in (True, False)
    }  # fmt: skip
    receipts = ReceiptWriter(writer.receipts_path(rank))
    for number, own in enumerate(eager.tolist()):
        receipts.write(
            Receipt(
                run_id=run_id, rank=rank, purpose="witness", request_ids=("gsm8k-17",), step=10 + number,
                forward_mode="EXTEND" if own else "DECODE", execution="eager" if own else "decode_graph_replay",
                M=int(M[number]), real_tokens=13, batch_size=1, graph_key=None if own else "decode|16",
                attribution="direct_submissions" if own else "capture_registration", kernels=lists[own],
            )
        )  # fmt: skip
    receipts.close()


def measure(bundle: Path) -> tuple[int, float, float]:
    """Gate the bundle in a fresh process: exit code, seconds, peak MiB of the process (children's included)."""
    command = [sys.executable, "-m", "alphamoe_profiler", "gate", str(bundle), "--require-backend"]
    # Modules must be compiled once, as in any installed environment.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "flashinfer_alphamoe"], cwd=ROOT, check=False, env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1, 3):
        print(done.stdout, done.stderr)
    return done.returncode, seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def main() -> int:
    """Build, gate, print; the exit code says whether the limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bundle", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = args.bundle or Path(folder) / "run"
        if not (bundle / "run.json").is_file():
            build(bundle, args.ranks, args.kernels)
        size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
        runs = [measure(bundle) for _ in range(args.repeat)]
    seconds, peak = min(run[1] for run in runs), max(run[2] for run in runs)
    verdicts = {0: "PASS", 1: "FAIL", 3: "INCONCLUSIVE"}
    print(
        f"gate on {args.ranks} ranks x {args.kernels:,} kernels ({size / 2**20:.0f} MiB): "
        f"{verdicts.get(runs[0][0], 'error')}, best of {len(runs)} {seconds:.2f} s (limit {LIMIT_S} s), "
        f"peak {peak:.0f} MiB (limit {LIMIT_MIB} MiB)"
    )
    return 0 if runs[0][0] == 0 and seconds <= LIMIT_S and peak <= LIMIT_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
