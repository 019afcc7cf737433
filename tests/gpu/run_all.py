"""Run every GPU test and benchmark on this machine and print one short table (`make gpu-check`).

    python tests/gpu/run_all.py [--only kernel trace] [--results DIR]

Each step is a program of its own that prints its own table, writes its numbers as JSON and exits non-zero when a bar is
missed. A step that could not run is a failure here: nothing is green because nothing ran. The one exception is the step
for several GPUs, which says on a machine with one that it was skipped, and why.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE_ROOTS = ("profiler", "tracers", "sanitizer_replays", "dashboards", "backend")


@dataclass(frozen=True)
class Step:
    """One program: its name in the table, its arguments and the seconds it may take."""

    name: str
    argv: tuple[str, ...]
    limit_s: int
    needs_gpus: int = 1
    """With fewer GPUs the step exits with ``SKIPPED`` and is shown as skipped."""


SKIPPED = 77
SANITIZER = ("captures", "plain", "walls", "sanitize", "variants")

STEPS = (
    Step("probe", (str(HERE / "collector_probe.py"),), 120),
    Step("kernel", (str(HERE / "kernel_check.py"), "--json", "{results}/kernel.json"), 300),
    Step("engine", (str(HERE / "engine_check.py"), "--json", "{results}/engine.json"), 180),
    Step("trace", (str(HERE / "trace_check.py"), "--results", "{results}"), 420),
    Step("collector-bench", (str(HERE / "collector_bench.py"), "--json", "{results}/collector_bench.json"), 240),
    Step("overhead", (str(HERE / "engine_overhead.py"), "--json", "{results}/overhead.json"), 240),
    Step("multi-gpu", (str(HERE / "multi_gpu_check.py"), "--results", "{results}"), 580, needs_gpus=2),
    Step("sanitizer", (str(HERE / "sanitizer_check.py"), "--results", "{results}", "--only", *SANITIZER), 600),
    Step("mutations", (str(HERE / "sanitizer_check.py"), "--results", "{results}", "--only", "mutations"), 600),
    Step("pytest", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests")), 300),
)


def describe_machine() -> str:
    """Name what the numbers were measured on."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu-check needs a CUDA device; `make test` is the check for machines without one")
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")[0]
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver or 'unknown'}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    )


def run_step(step: Step, results: Path, env: dict[str, str]) -> tuple[str, float]:
    """Run one step with its output shown and kept, and give its outcome and the seconds it took."""
    argv = [sys.executable, *(part.format(results=results) for part in step.argv)]
    print(f"\n=== {step.name}: {' '.join(argv[1:])}", flush=True)
    began = time.monotonic()
    with (results / f"{step.name}.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        outcome = ""
        while not outcome:
            chunk = process.stdout.read()
            if chunk:
                log.write(chunk)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            elif process.poll() is not None:
                outcome = "ok" if process.returncode == 0 else f"exit {process.returncode}"
                if process.returncode == SKIPPED and step.needs_gpus > 1:
                    outcome = f"skipped: needs {step.needs_gpus} GPUs"
            elif time.monotonic() - began > step.limit_s:
                process.kill()
                outcome = f"killed after {step.limit_s} s"
            else:
                time.sleep(0.1)
    return outcome, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="run these steps only")
    parser.add_argument("--results", type=Path, default=Path("gpu-check"), help="folder for logs and JSON")
    arguments = parser.parse_args()
    machine = describe_machine()
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ, PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(
        [*(str(ROOT / folder) for folder in PACKAGE_ROOTS), *filter(None, [env.get("PYTHONPATH")])]
    )
    outcomes = [
        (step.name, *run_step(step, results, env))
        for step in STEPS
        if not arguments.only or step.name in arguments.only
    ]
    print(f"\n{machine}")
    for name, outcome, seconds in outcomes:
        print(f"{name:16} {outcome:22} {seconds:6.1f} s")
    passed = [outcome for _, outcome, _ in outcomes if not outcome.startswith("skipped")]
    return 0 if passed and all(outcome == "ok" for outcome in passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
