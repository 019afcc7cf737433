"""Check runs that have one GPU a rank: NCCL, full decode graphs, skew, gate, dashboard, sanitizer replays, cost.

    python tests/gpu/multi_gpu_check.py [--results DIR] [--layers 4] [--limit 540] [--only smoke h200-tp2 ...]

Takes 2, 4 or 8 GPUs; with fewer than two it says so and exits 77. Every step is a process group of its own that is
ended at its limit, and is tried whatever became of those before it; all of them end within ``--limit`` seconds. After
each step ``DIR/multi_gpu.json`` is written anew and a line printed. Recorded runs are packed into
``DIR/bundles.tar.gz``; with four GPUs ``DIR/h200-tp4.tar.gz`` is what replaces examples/h200-tp4. NVLink multicast
stays off in everything that is started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_judging import Traced, bundle_problems, facts, report_problems

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE_ROOTS = ("profiler", "tracers", "sanitizer_replays", "dashboards", "backend")
SKIPPED = 77
DEFAULT_LAYERS = 4
"""What the command takes on a GPU when it is not told."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PROMPT = ("--prompt", "gsm8k:17")
RUNS = "examples"
"""Folder of the bundles, so that the example's own command is what run.json holds."""
MOST_PACKED_BYTES = 15 << 20


@dataclass(frozen=True)
class Bench:
    """Where everything lies, how many GPUs there are and how much time."""

    work: Path
    results: Path
    gpus: tuple[str, ...]
    """What ``CUDA_VISIBLE_DEVICES`` may name, in order."""
    layers: int
    deadline: float
    """Monotonic seconds."""

    def left_s(self, most: float) -> float:
        """Give the seconds that a command may take: ``most``, or what is left."""
        return max(1.0, min(most, self.deadline - time.monotonic()))


@dataclass
class Outcome:
    """What one step came to."""

    name: str
    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0


def environment(gpus: Sequence[str]) -> dict[str, str]:
    """Give the environment of a command that may see these GPUs."""
    roots = [str(ROOT / folder) for folder in PACKAGE_ROOTS]
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {**os.environ, **NO_MULTICAST, **shown, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run(argv: Sequence[str], log: Path, limit_s: float, env: dict[str, str], cwd: Path) -> int | None:
    """Run a program in a process group of its own and give its exit code; null when it was ended at its limit."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *argv], stdout=stream, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # asked first, so that it keeps what there is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(8)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def product(bench: Bench, argv: Sequence[str], name: str, limit_s: float, gpus: int | None = None) -> int | None:
    """Run ``alphamoe-trace``, with the first ``gpus`` GPUs (all by default)."""
    env = environment(bench.gpus[:gpus])
    argv = ["-m", "alphamoe_profiler", *argv]
    return run(argv, bench.work / f"{name}.log", bench.left_s(limit_s), env, bench.work)


def tail(path: Path, characters: int = 1200) -> str:
    """Give the end of a file."""
    return path.read_text(errors="replace")[-characters:] if path.is_file() else ""


def trace(bench: Bench, outcome: Outcome, traced: Traced) -> None:
    """Record one run, judge it with its gate too, and print what the issue asks to see."""
    path, report_file = bench.work / RUNS / traced.name, bench.work / f"{traced.name}.json"
    argv = ["--ranks", str(traced.ranks), *PROMPT]
    if bench.layers != DEFAULT_LAYERS:
        argv += ["--layers", str(bench.layers)]
    if traced.backend == "triton":
        argv += ["--moe-runner-backend", "triton"]
    argv += ["--out", f"{RUNS}/{traced.name}"]
    code = product(bench, argv, traced.name, traced.limit_s, traced.gpus)
    if code != 0:
        outcome.problems.append(f"exit {code}: {tail(bench.work / f'{traced.name}.log')}")
        outcome.numbers["logs"] = {log.name: tail(log) for log in sorted(path.glob("reports/logs/*.log"))}
        outcome.problems += [f"{name}: {text[-500:]}" for name, text in outcome.numbers["logs"].items()]
    shown = product(bench, ["show", str(path), "--json", str(report_file)], f"{traced.name}-show", 30)
    if not report_file.is_file():
        outcome.problems.append(f"show: exit {shown}: {tail(bench.work / f'{traced.name}-show.log', 500)}")
        return
    report = json.loads(report_file.read_text())
    outcome.numbers |= facts(report)
    outcome.problems += report_problems(report, traced, bench.layers) + bundle_problems(path, traced)
    for row in report["skew"]["spreads"]:
        label = f"{row['execution']:21} {row['moment']:17} {row['compared']:5}"
        outcome.lines.append(f"{label} {row['median_ns'] / 1e3:9.2f} {row['worst_ns'] / 1e3:10.2f} us {row['last']}")
    for row in report["skew"]["all_reduces"]:
        label = f"rank {row['rank']} {row['symbol']:44} {row['kernels']:6}"
        outcome.lines.append(f"{label} {row['total_ns'] / 1e6:9.3f} ms, median {row['median_ns'] / 1e3:7.2f} us")
    outcome.lines.append(f"clocks off by {report['skew']['clock_error_ns']} ns at least")
    gate(bench, outcome, traced)


def gate(bench: Bench, outcome: Outcome, traced: Traced) -> None:
    """Require a PASS of the built-in policy of the backend."""
    file = bench.work / f"{traced.name}-gate.json"
    argv = ["gate", f"{RUNS}/{traced.name}", "--require-backend", traced.backend, "--json", str(file)]
    code = product(bench, argv, f"{traced.name}-gate", 30)
    verdict = json.loads(file.read_text())["verdict"] if file.is_file() else "none"
    outcome.numbers["gate"] = verdict
    if (code, verdict) != (0, "PASS"):
        outcome.problems.append(f"gate: exit {code}, {verdict}: {tail(bench.work / f'{traced.name}-gate.log', 500)}")


def smoke(bench: Bench, outcome: Outcome) -> None:
    """Run a tiny model on two GPUs: whatever is wrong with NCCL shows here, cheaply, and is then told apart."""
    argv = ["trace", "--ranks", "2", "--prompt", "text:hello", "--model", "tiny", "--max-new-tokens", "4"]
    if product(bench, [*argv, "--out", "smoke"], "smoke", 90, 2) == 0:
        return
    outcome.problems.append(tail(bench.work / "smoke.log"))
    outcome.problems += [f"{log.name}: {tail(log)}" for log in sorted(bench.work.glob("smoke/reports/logs/*.log"))]
    code = product(bench, [*argv, "--executions", "eager", "--out", "smoke-eager"], "smoke-eager", 60, 2)
    outcome.problems.append(f"the same without graphs: exit {code}")


def dashboard(bench: Bench, outcome: Outcome) -> None:
    """Write the page of the largest NCCL run and look into it."""
    sys.path[:0] = [str(ROOT / folder) for folder in PACKAGE_ROOTS]
    from alphamoe_dashboards.page_data import read_page

    runs = [bench.work / RUNS / name for name in ("h200-tp8", "h200-tp4", "h200-tp2")]
    chosen = next((path for path in runs if (path / "outcome.json").is_file()), None)
    if chosen is None:
        outcome.problems.append("no run to show")
        return
    page = bench.results / "dashboard.html"
    code = product(bench, ["dashboard", str(chosen), "-o", str(page), "--force"], "dashboard", 60)
    if code != 0 or not page.is_file():
        outcome.problems.append(f"exit {code}: {tail(bench.work / 'dashboard.log')}")
        return
    told = read_page(page.read_text(encoding="utf-8"))["runs"][0]["facts"]
    skew = told["rank_skew"] or {"spreads": [], "all_reduces": []}
    outcome.problems += [f"no {name} on the page" for name in ("spreads", "all_reduces") if not skew[name]]
    outcome.problems += ["the page says that GPUs are shared"] if told["shared_gpu"] else []
    outcome.lines.append(f"{chosen.name}: {page.stat().st_size / 1e6:.2f} MB")


def sanitize(bench: Bench, outcome: Outcome) -> None:
    """Record captures of the first and the last rank eagerly, and replay them under every tool."""
    ranks = min(4, len(bench.gpus))
    argv = ["trace", "--ranks", str(ranks), *PROMPT, "--model", "qwen3-next-80b", "--layers", str(bench.layers)]
    argv += ["--executions", "eager", "--max-new-tokens", "3", "--out", "captured"]
    argv += ["--capture", "layer=0,M=1,rank=0+last", "--capture", "layer=0,M=prefill,rank=0+last"]
    code = product(bench, argv, "captured", 90)
    found = sorted((bench.work / "captured" / "captures").glob("rank=*/layer=*/capture.json"))
    outcome.lines.append(f"captures: {', '.join('/'.join(path.parts[-3:-1]) for path in found)}")
    ranks_found = {path.parts[-3] for path in found}
    if code != 0 or len(found) != 4 or ranks_found != {"rank=0", f"rank={ranks - 1}"}:
        outcome.problems.append(f"exit {code}, {len(found)} of 4 captures: {tail(bench.work / 'captured.log', 500)}")
    if not found:
        return
    file = bench.work / "sanitize.json"
    argv = ["sanitize", "captured", "--tool", "all", "--jobs", "12", "--timeout", "90", "--json", str(file), "--force"]
    code = product(bench, argv, "sanitize", 170)
    if not file.is_file():
        outcome.problems.append(f"sanitize: exit {code} and no report: {tail(bench.work / 'sanitize.log', 600)}")
        return
    said = json.loads(file.read_text())
    outcome.numbers = {"verdict": said["verdict"], "wall_s": said["wall_s"], "replays": len(said["entries"])}
    outcome.lines.append(f"{said['verdict']}: {len(said['entries'])} replays in {said['wall_s']:.1f} s")
    if code != 0 or said["verdict"] != "PASS":
        outcome.problems.append(f"sanitize: exit {code}, {said['verdict']}: {said['reason']}")
    if len(said["entries"]) < 4 * len(found):
        outcome.problems.append(f"{len(said['entries'])} of {4 * len(found)} replays")


def cost(bench: Bench, outcome: Outcome) -> None:
    """Measure the collector against torch.profiler on as many ranks as there are GPUs, four at most."""
    ranks, file = min(4, len(bench.gpus)), bench.results / "multi_gpu_cost.json"
    limit_s = bench.left_s(160)
    argv = [str(HERE / "multi_gpu_cost.py"), "--ranks", str(ranks), "--layers", str(bench.layers)]
    argv += ["--json", str(file), "--limit", f"{limit_s - 8:.0f}"]
    code = run(argv, bench.work / "cost.log", limit_s, environment(bench.gpus), bench.work)
    outcome.lines += tail(bench.work / "cost.log").splitlines()
    if file.is_file():
        outcome.numbers = {key: json.loads(file.read_text())[key] for key in ("medians", "ratios", "missed")}
    if code != 0:
        outcome.problems.append(f"exit {code}: {outcome.numbers.get('missed', 'no numbers')}")


def plan(gpus: int, world_sizes: Sequence[int]) -> dict[str, Callable[[Bench, Outcome], None]]:
    """List the steps for a machine, what matters most first; the runs of two and four ranks come before all else."""
    runs = [Traced("h200-tp2", 2, 2)]
    if gpus >= 4:
        runs.append(Traced("h200-tp4", 4, 4))
    runs.append(Traced("gloo-tp4", 4, 2))
    runs.append(Traced("triton-tp2", 2, 2, "triton"))
    if gpus >= 4:
        runs.append(Traced("triton-tp4", 4, 4, "triton"))
    steps: dict[str, Callable[[Bench, Outcome], None]] = {"smoke": smoke}

    def step(traced: Traced) -> Callable[[Bench, Outcome], None]:
        return lambda bench, outcome: trace(bench, outcome, traced)

    steps |= {traced.name: step(traced) for traced in runs}
    steps |= {"dashboard": dashboard, "cost": cost, "sanitize": sanitize}
    if gpus >= 8 and 8 in world_sizes:
        steps["h200-tp8"] = step(Traced("h200-tp8", 8, 8))
    return steps


def pack(bench: Bench) -> None:
    """Pack the bundles; the one for examples/ by itself, without reports of this check."""
    example = bench.work / RUNS / "h200-tp4"
    if (example / "outcome.json").is_file():
        with tarfile.open(bench.results / "h200-tp4.tar.gz", "w:gz") as archive:
            archive.add(example, "h200-tp4")
    packed = bench.results / "bundles.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for path in sorted(bench.work.iterdir()):
            if path.suffix in (".log", ".json") or path.name == RUNS:
                archive.add(path, path.name)
    if packed.stat().st_size > MOST_PACKED_BYTES:
        packed.unlink()


def run_steps(
    bench: Bench, steps: dict[str, Callable[[Bench, Outcome], None]], write: Callable[[list[Outcome]], None]
) -> list[Outcome]:
    """Run steps in order; whatever one of them raises is its problem alone."""
    made: list[Outcome] = []
    for name, step in steps.items():
        outcome = Outcome(name)
        made.append(outcome)
        began = time.monotonic()
        if began >= bench.deadline:
            outcome.problems.append("not run: the time of the whole was up")
        else:
            try:
                step(bench, outcome)
            except Exception as error:  # one step must not lose the rest
                outcome.problems.append(f"{type(error).__name__}: {error}")
        outcome.wall_s = time.monotonic() - began
        print(f"\n--- {name}: {'WRONG' if outcome.problems else 'ok'}, {outcome.wall_s:.1f} s", flush=True)
        for line in [*outcome.lines, *(f"    WRONG {problem}" for problem in outcome.problems[:12])]:
            print(line, flush=True)
        write(made)
    return made


def visible_gpus() -> tuple[tuple[str, ...], str]:
    """Give the names of the GPUs in use and a line about the machine, from the driver alone."""
    if shutil.which("nvidia-smi") is None:
        return (), "no nvidia-smi"
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [[part.strip() for part in line.split(",")] for line in asked.stdout.splitlines() if line.count(",") == 3]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = tuple(row[0] for row in rows) if chosen is None else tuple(filter(None, chosen.split(",")))
    return names, f"{len(names)} x {rows[0][2]}, driver {rows[0][3]}" if rows else "no GPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("gpu-check"))
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that everything may take together")
    parser.add_argument("--only", nargs="+", help="run these steps only")
    arguments = parser.parse_args()
    began = time.monotonic()
    gpus, machine = visible_gpus()
    if len(gpus) < 2:
        print(f"skipped: {machine}; one GPU a rank needs two")
        return SKIPPED
    sys.path[:0] = [str(ROOT / folder) for folder in PACKAGE_ROOTS]
    from alphamoe_backend.geometry import preset

    results: Path = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    steps = plan(len(gpus), preset("qwen3-next-80b").world_sizes())
    if arguments.only:
        steps = {name: step for name, step in steps.items() if name in arguments.only}

    def write(made: list[Outcome]) -> None:
        document = {"machine": machine, "layers": arguments.layers, "steps": [vars(outcome) for outcome in made]}
        (results / "multi_gpu.json").write_text(json.dumps(document, indent=1) + "\n")

    work = Path(tempfile.mkdtemp(prefix="alphamoe-multi-gpu-"))
    try:
        # Packing and the end of the last command want some seconds.
        bench = Bench(work, results, gpus, arguments.layers, began + arguments.limit - 20)
        made = run_steps(bench, steps, write)
        pack(bench)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\n{machine}, {arguments.layers} layers, {time.monotonic() - began:.0f} s")
    for outcome in made:
        said = (
            f"{outcome.numbers.get('verdict', '')} gate {outcome.numbers['gate']}" if "gate" in outcome.numbers else ""
        )
        print(f"{outcome.name:12} {'WRONG' if outcome.problems else 'ok':6} {outcome.wall_s:6.1f} s  {said}")
    return 1 if not made or any(outcome.problems for outcome in made) else 0


if __name__ == "__main__":
    raise SystemExit(main())
