"""Ask a real GPU whether the collector's assumptions hold; run as a program, exit code 0 when all checks pass.

    python tests/gpu/collector_probe.py

It records eager launches and graph replays whose exact counts it knows, restarts the collector, kills a recording child
with SIGKILL, and puts torch.profiler before and inside a recording. With ``OUT`` set in the environment a small
recording of raw buffers is written there.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tracers"))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from alphamoe_tracers import libcupti  # noqa: E402
from alphamoe_tracers.cupti import Collector, prepare_environment  # noqa: E402
from alphamoe_tracers.ranges import RangeDomain, enclosing  # noqa: E402
from alphamoe_tracers.records import TABLES, CollectorSummary, check_table  # noqa: E402

STEPS, LAYERS, ADDS = 20, 4, 3
REPLAYS = 50
CAPTURE_STEP, REPLAY_STEP = 900, 1000
PROBE_SOURCE = 'extern "C" __global__ void collector_probe_kernel() {}'
PROBE_SHAPE = (3, 2, 1, 64, 1, 1)
failures: list[str] = []


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check(what: str, found: object, expected: object) -> None:
    good = found == expected
    if not good:
        failures.append(what)
    say(f"  {'ok  ' if good else 'FAIL'} {what}: {found}" + ("" if good else f", expected {expected}"))


class Workload:
    """Layers of torch adds and one kernel of our own, eagerly and as a captured graph."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver, nvrtc

        self.torch, self.driver = torch, driver
        self.x = torch.zeros(1024, device="cuda")
        torch.cuda.synchronize()
        major, minor = torch.cuda.get_device_capability()
        program = nvrtc.nvrtcCreateProgram(PROBE_SOURCE.encode(), b"probe.cu", 0, [], [])[1]
        option = f"--gpu-architecture=sm_{major}{minor}".encode()
        status = nvrtc.nvrtcCompileProgram(program, 1, [option])[0]
        if int(status):
            raise RuntimeError(f"NVRTC: {status}")
        self.cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, self.cubin)
        self.module = driver.cuModuleLoadData(self.cubin)[1]
        self.function = driver.cuModuleGetFunction(self.module, b"collector_probe_kernel")[1]
        self.ranges = RangeDomain()

    def layers(self) -> None:
        stream = self.driver.CUstream(self.torch.cuda.current_stream().cuda_stream)
        for layer in range(LAYERS):
            with self.ranges.range("layer", layer), self.ranges.range("experts"):
                for _ in range(ADDS):
                    self.x.add_(1)
                status = self.driver.cuLaunchKernel(self.function, *PROBE_SHAPE, 0, stream, 0, 0)[0]
                if int(status):
                    raise RuntimeError(str(status))

    def capture(self, collector: Collector, flush: bool = False) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        with self.ranges.range("step", CAPTURE_STEP), self.torch.cuda.graph(graph):
            collector.graph_sentinel()
            self.layers()
            if flush:  # the periodic flush of a real run may fall into a capture
                collector.flush()
                self.layers()
        return graph


def tables(out: Path, rank: int = 0) -> dict[str, pa.Table]:
    found = {}
    for name, schema in TABLES.items():
        files = sorted((out / name / f"rank={rank}").glob("part-*.parquet"))
        parts = [pq.read_table(file, schema=schema, partitioning=None) for file in files]
        found[name] = pa.concat_tables(parts).unify_dictionaries() if parts else schema.empty_table()
    return found


def record(out: Path, keep_raw: Path | None, small: bool) -> tuple[CollectorSummary, Workload]:
    steps, replays = (2, 3) if small else (STEPS, REPLAYS)
    collector = Collector(out, 0, flush_period_s=0.5, step_sentinel_period_s=0.0, keep_raw=keep_raw)
    collector.start()
    say(f"  collector: {'recording' if collector.recording else collector.reason}")
    work = Workload()
    say(f"  NVTX reaches CUPTI: {work.ranges.listening}")
    work.layers()  # warm-up outside the window
    graph = work.capture(collector, flush=small)
    graph.replay()
    collector.open_window()
    for step in range(steps):
        collector.step_boundary(step)
        with work.ranges.range("step", step):
            work.layers()
    for replay in range(replays):
        with work.ranges.range("step", REPLAY_STEP + replay):
            graph.replay()
    work.torch.cuda.synchronize()
    work.torch.cuda.nvtx.range_push("torch.cuda.nvtx range")
    work.torch.cuda.nvtx.range_pop()
    if not small:
        deadline = time.monotonic() + 3
        while not list(out.glob("kernels/rank=0/part-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        parts = len(list(out.glob("kernels/rank=0/part-*")))
        check("parts on disk while running", parts > 0, True)
    collector.close_window()
    begun = time.perf_counter()
    summary = collector.stop({hashlib.sha256(work.cubin).hexdigest(): "source-hash"})
    say(f"  stop to disk: {time.perf_counter() - begun:.3f} s")
    return summary, work


def check_recording(out: Path, summary: CollectorSummary, work: Workload) -> None:
    say("Counts")
    found = tables(out)
    for name, table in found.items():
        for problem in check_table(name, table):
            check(f"schema of {name}", problem, None)
    kernels = found["kernels"].to_pandas()
    symbols = found["symbols"].to_pandas().set_index("symbol_id")
    kernels["base"] = kernels["symbol_id"].map(symbols["base"])
    window = kernels[kernels["start_ns"].between(summary.window_open_ns, summary.window_close_ns)]
    probe = window[window["base"] == "collector_probe_kernel"]
    graph_nodes = probe["graph_node_id"].notna()
    check("eager probe kernels", int((~graph_nodes).sum()), STEPS * LAYERS)
    check("replayed probe kernels", int(graph_nodes.sum()), REPLAYS * LAYERS)
    adds = window[
        ~window["base"].str.startswith("alphamoe_trace_sentinel") & (window["base"] != "collector_probe_kernel")
    ]
    check("torch kernels", len(adds), (STEPS + REPLAYS) * LAYERS * ADDS)
    say(f"       torch kernels are {dict(adds['base'].value_counts())}")
    shape = probe[[f"{part}_{axis}" for part in ("grid", "block") for axis in "xyz"]].drop_duplicates()
    check("shape of the probe kernel", [tuple(row) for row in shape.to_numpy().tolist()], [PROBE_SHAPE])
    say(f"       its cluster: {probe[['cluster_x', 'cluster_y', 'cluster_z']].drop_duplicates().to_numpy().tolist()}")
    check("kernels without times", summary.untimed, 0)
    check("kernels that end before they start", summary.invalid_times, 0)
    check("dropped", summary.dropped, 0)
    check("duplicates", summary.duplicates, 0)
    check("unresolved names", summary.unresolved_names, 0)
    check("range problems", summary.range_problems, ())
    say("Launches")
    launches = found["launches"].to_pandas()
    say(f"       by name: {dict(launches['api'].value_counts())}")
    known = set(launches["correlation_id"].dropna().astype(int))
    orphans = kernels[~kernels["correlation_id"].isin(known)]
    check("kernels without a launch", len(orphans), 0)
    say(f"       of {dict(orphans['base'].value_counts())}" if len(orphans) else "")
    inside = launches[launches["start_ns"].between(summary.window_open_ns, summary.window_close_ns)]
    graph_launches = int((inside["api"] == "cudaGraphLaunch").sum())
    check("cudaGraphLaunch in the window", graph_launches, REPLAYS)
    check("skipped API ids", summary.skipped_api_ids, ())
    check("launch threads", sorted(set(launches["thread"])), [os.getpid()])
    check_paths(found, kernels, launches, summary)
    check_sentinels(summary, kernels)
    check_modules(out, work)


def check_paths(found: dict[str, pa.Table], kernels: Any, launches: Any, summary: CollectorSummary) -> None:
    say("Ranges and graph nodes")
    ranges = found["ranges"].to_pandas()
    say(f"       {dict(ranges.groupby(['domain', 'name', 'kind'], observed=True).size())}")
    bare = ranges[ranges["name"] == "experts"]["payload"]
    check("experts ranges have no payload", int(bare.notna().sum()), 0)
    layers = ranges[ranges["name"] == "layer"]
    check("payloads of layers", sorted(set(layers["payload"].dropna())), list(range(LAYERS)))
    nodes = found["graph_nodes"].to_pandas()
    originals = nodes.dropna(subset=["original_node_id"]).drop_duplicates("graph_node_id").set_index("graph_node_id")
    created = nodes[nodes["original_node_id"].isna()].drop_duplicates("graph_node_id").set_index("graph_node_id")
    say(f"       {len(created)} nodes created, {len(originals)} cloned; threads {sorted(set(nodes['thread']))}")
    replayed = kernels[kernels["graph_node_id"].notna() & (kernels["base"] == "collector_probe_kernel")]
    original = replayed["graph_node_id"].map(originals["original_node_id"])
    check("replayed kernels whose node is a known clone", int(original.notna().sum()), len(replayed))
    time_ns = original.map(created["created_ns"]).fillna(-1).astype(np.int64).to_numpy()
    path = enclosing(found["ranges"], os.getpid(), os.getpid(), time_ns)
    names, payloads = ranges["name"].to_numpy(), ranges["payload"].to_numpy()
    readable = collections.Counter(
        " > ".join(f"{names[row]}={payloads[row]:g}" if payloads[row] == payloads[row] else names[row] for row in rows)
        for rows in ([row for row in line if row >= 0] for line in path.tolist())
    )
    expected = {f"step={CAPTURE_STEP} > layer={layer} > experts": REPLAYS + 1 for layer in range(LAYERS)}
    check("capture-time path of replayed kernels", dict(readable), expected)
    by_id = launches.drop_duplicates("correlation_id").set_index("correlation_id")
    start = replayed["correlation_id"].map(by_id["start_ns"]).fillna(-1).astype(np.int64).to_numpy()
    outer = enclosing(found["ranges"], os.getpid(), os.getpid(), start)[:, 0]
    steps = collections.Counter(int(payloads[row]) for row in outer.tolist() if row >= 0)
    check("steps of replays", dict(steps), {REPLAY_STEP + replay: LAYERS for replay in range(REPLAYS)})


def check_sentinels(summary: CollectorSummary, kernels: Any) -> None:
    say("Sentinels")
    counts = {count.kind: (count.launched, count.seen) for count in summary.sentinels}
    check(
        "launched and seen",
        counts,
        {
            "open": (1, 1),
            "close": (1, 1),
            "step": (STEPS, STEPS),
            "graph_open": (1, 1),
            "graph_close": (1, 1),
            "graph_step": (1, REPLAYS + 1),
        },
    )
    steps = kernels[kernels["base"] == "alphamoe_trace_sentinel_step"]
    check("numbers of step sentinels", (steps["block_x"] - 1).tolist(), list(range(STEPS)))


def check_modules(out: Path, work: Workload) -> None:
    say("Modules")
    import json

    records = [json.loads(line) for line in (out / "modules" / "rank=0.jsonl").read_text().splitlines()]
    sizes = sorted(record["size_bytes"] for record in records)
    say(f"       {len(records)} modules, {sizes[:1]} to {sizes[-1:]} bytes, {sum(sizes)} in all")
    say(f"       without kernels: {sum(not record['kernels'] for record in records)}")
    holders = [record for record in records if "collector_probe_kernel" in record["kernels"]]
    check("modules that hold the probe kernel", len(holders), 1)
    digest = hashlib.sha256(work.cubin).hexdigest()
    for record in holders:
        check("the image is the cubin that was loaded", record["sha256"], digest)
        if record["sha256"] != digest:
            say(f"       the image has {record['size_bytes']} bytes, the cubin {len(work.cubin)}")
        check("its source", record["source_sha256"], "source-hash")


def child_endless(out: Path) -> int:
    prepare_environment()
    collector = Collector(out, 0, flush_period_s=0.3)
    collector.start()
    work = Workload()
    collector.open_window()
    while True:
        with work.ranges.range("step", 1):
            work.layers()
        work.torch.cuda.synchronize()


def child_profiler(out: Path, first: bool) -> int:
    prepare_environment()
    from torch.profiler import ProfilerActivity, profile

    collector = Collector(out, 0, flush_period_s=0.3)
    if first:
        collector.start()
    work = Workload()
    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.__enter__()
    if not first:
        collector.start()
    collector.open_window()
    for _ in range(10):
        work.layers()
    work.torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    for _ in range(10):
        work.layers()
    collector.close_window()
    summary = collector.stop()
    events = sum("collector_probe_kernel" in event.name for event in profiler.events() or ())
    say(f"       torch.profiler saw {events} of {10 * LAYERS} probe kernels")
    say(f"       collector {summary.state}: {summary.reason}")
    sentinels = [(count.kind, count.launched, count.seen) for count in summary.sentinels]
    say(f"       collector rows {summary.rows}, dropped {summary.dropped}, {sentinels}")
    say(f"       notes {summary.notes}")
    return 0


def start_child(kind: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", kind, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_children(work_dir: Path) -> None:
    children = {kind: start_child(kind, work_dir / kind) for kind in ("endless", "profiler-inside", "profiler-before")}
    say("A recording child killed with SIGKILL")
    endless = children["endless"]
    deadline = time.monotonic() + 40
    parts = work_dir / "endless" / "kernels" / "rank=0"
    while len(list(parts.glob("part-*"))) < 3 and time.monotonic() < deadline and endless.poll() is None:
        time.sleep(0.2)
    endless.kill()
    output = endless.communicate(timeout=20)[0]
    kept = {name: table.num_rows for name, table in tables(work_dir / "endless").items()}
    check(
        "its kernels, launches and ranges are readable",
        min(kept[n] for n in ("kernels", "launches", "ranges")) > 0,
        True,
    )
    say(f"       {kept} {output.strip()[-300:]}")
    for kind in ("profiler-inside", "profiler-before"):
        say(f"torch.profiler: {kind}")
        output = children[kind].communicate(timeout=60)[0]
        check("exit code", children[kind].returncode, 0)
        say("\n".join(output.strip().splitlines()[-8:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", choices=["endless", "profiler-inside", "profiler-before"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.child == "endless":
        return child_endless(arguments.out)
    if arguments.child:
        return child_profiler(arguments.out, first=arguments.child == "profiler-inside")
    begun = time.perf_counter()
    work_dir = Path(tempfile.mkdtemp(prefix="collector-probe-"))
    say("Environment")
    say(f"  NVTX injection: {prepare_environment()}")
    import torch

    say(f"  Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    say(f"  libcupti mapped: {libcupti.mapped_libraries()}, cupti-python {libcupti.python_version()}")
    exposed = {name: dtype.itemsize for name, dtype in libcupti.exposed_kernel_dtypes().items()}
    say(f"  kernel layouts of cupti-python: {exposed}")
    if not torch.cuda.is_available():
        say("There is no CUDA device: nothing was checked.")
        return 1
    say("Recording")
    summary, work = record(work_dir / "first", None, small=False)
    say(f"  {torch.cuda.get_device_name()}; {summary}")
    if summary.state == "on":
        check_recording(work_dir / "first", summary, work)
        say("A second recording in the same process")
        raw = work_dir / "collector-recording.npz"
        again, _ = record(work_dir / "second", raw, small=True)
        check("state", again.state, "on")
        seen = {count.kind: (count.launched, count.seen) for count in again.sentinels}
        check("sentinels", seen.get("close"), (1, 1))
        say(f"  {again.rows}, {raw.stat().st_size if raw.exists() else 0} bytes of raw recording")
        if os.environ.get("OUT") and raw.exists():
            shutil.copy(raw, Path(os.environ["OUT"]) / raw.name)
        check_children(work_dir)
    else:
        failures.append("the collector is off")
    shutil.rmtree(work_dir, ignore_errors=True)
    say(f"{len(failures)} checks failed: {failures}" if failures else "All checks passed.")
    say(f"{time.perf_counter() - begun:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
