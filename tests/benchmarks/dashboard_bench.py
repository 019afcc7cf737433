"""Measure ``alphamoe-trace dashboard`` on 8 ranks x 1,000,000 kernels, and the page in a headless browser.

Builds the gate benchmark's bundle with spread durations (log-normal, every symbol and layer of its own), draws the page
in a fresh process (wall time, peak memory of the process tree), then opens it and changes filters in Chromium.

    .venv/bin/python tests/benchmarks/dashboard_bench.py
    .venv/bin/python tests/benchmarks/dashboard_bench.py --ranks 2 --kernels 100000
    .venv/bin/python tests/benchmarks/dashboard_bench.py --bundle DIR    # keeps the bundle there, and uses it again
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
for room in ("tests/benchmarks", "tests/dashboards", "tests/profiler", "profiler", "tracers", "backend", "dashboards"):
    sys.path.insert(0, str(ROOT / room))

LIMIT_S, LIMIT_MIB, LIMIT_FILE_MB = 30.0, 2048, 12.0
FILTER = "rank => { const began = performance.now(); AMT.set({ranks: [rank]}); return performance.now() - began; }"
LIMIT_OPEN_S, LIMIT_FILTER_MS = 8.0, 500.0


def build(path: Path, ranks: int, kernels: int) -> None:
    """Write the gate benchmark's bundle and give its kernels spread durations."""
    import gate_bench

    gate_bench.build(path, ranks, kernels)
    for rank in range(ranks):
        spread_durations(path / f"kernels/rank={rank}/part-00000.parquet", rank)


def spread_durations(part: Path, seed: int) -> None:
    """Replace the durations of one part: log-normal around 2 to 40 us, by symbol."""
    with pq.ParquetFile(part) as file:
        table = file.read()
    rng = np.random.default_rng(seed)
    symbol = table.column("symbol_id").to_numpy()
    center = 2_000 * 1.16 ** (symbol % 20)
    duration = (center * rng.lognormal(0.0, 0.12, len(symbol))).astype(np.int64)
    end = pa.array(table.column("start_ns").to_numpy() + duration)
    pq.write_table(table.set_column(table.column_names.index("end_ns"), "end_ns", end), part)


def tree_mib(pid: int) -> float:
    """Return the resident memory of a process and everything under it."""
    total = 0.0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                total = int(line.split()[1]) / 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(tree_mib(int(child)) for child in (task / "children").read_text().split())
    except OSError:  # it ended while we looked
        return total
    return total


def measure(bundle: Path, page: Path) -> tuple[int, float, float]:
    """Draw the page in a fresh process: exit code, seconds, peak MiB of the tree."""
    command = [sys.executable, "-m", "alphamoe_profiler", "dashboard", str(bundle), "-o", str(page), "--force"]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, tree_mib(process.pid))
        time.sleep(0.1)
    return process.returncode, time.perf_counter() - began, peak


def browse(page: Path) -> tuple[float, dict[str, float]]:
    """Open the page and change filters: seconds to open, milliseconds a view to redraw after a filter."""
    from browser import browser_page

    with browser_page() as tab:
        began = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_function("document.documentElement.dataset.renders > 0")
        opened = time.perf_counter() - began
        found = {}
        for view in ("overview", "buckets", "ranks", "timeline", "symbols", "requests"):
            tab.evaluate(f"AMT.set({{view: '{view}', ranks: null}})")
            times = [tab.evaluate(FILTER, rank) for rank in (0, 1, 0)]
            found[view] = float(np.median(times))
    return opened, found


def main() -> int:
    """Build, draw, browse, print; the exit code says whether the limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--bundle", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle, page = args.bundle or Path(folder) / "run", Path(folder) / "page.html"
        if not (bundle / "run.json").is_file():
            build(bundle, args.ranks, args.kernels)
        code, seconds, peak = measure(bundle, page)
        if code:
            return code
        size = page.stat().st_size / 1e6
        print(
            f"dashboard of {args.ranks} ranks x {args.kernels:,} kernels: {seconds:.1f} s (limit {LIMIT_S:.0f}), "
            f"peak {peak:.0f} MiB (limit {LIMIT_MIB}), file {size:.1f} MB (limit {LIMIT_FILE_MB:.0f})"
        )
        opened, views = browse(page)
    slowest = max(views.values())
    told = ", ".join(f"{name} {value:.0f}" for name, value in views.items())
    print(f"opened in {opened:.1f} s (limit {LIMIT_OPEN_S:.0f}); filter, ms (limit {LIMIT_FILTER_MS:.0f}): {told}")
    kept = seconds <= LIMIT_S and peak <= LIMIT_MIB and size <= LIMIT_FILE_MB
    return 0 if kept and opened <= LIMIT_OPEN_S and slowest <= LIMIT_FILTER_MS else 1


if __name__ == "__main__":
    sys.exit(main())
