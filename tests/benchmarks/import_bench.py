"""Measure the import of a large Kineto trace against ``json.load(gzip.open())`` and a loop over its events.

Builds one gzip file with copies of the H200 trace's events (timestamps and correlation ids shifted, so that nothing
repeats), reads it with the baseline, with one process and with two, each in a fresh process, and prints ratios and peak
memory. Every reading must find the same kernels to the nanosecond: their count and the sum of their starts and ends.

    .venv/bin/python tests/benchmarks/import_bench.py              # eight copies: 1 GB of JSON
    .venv/bin/python tests/benchmarks/import_bench.py --copies 2 --repeat 1
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT.parent / "shared" / "traces" / "h200" / "kineto-cuda.json.gz"
SHIFT_US = 2_000_000
SHIFT_ID = 1_000_000
MASK = (1 << 64) - 1
_NUMBERS = re.compile(rb'("ts": )(\d+)(?=\.)|("correlation": |"id": )(\d{4,})')


def build(target: Path, copies: int) -> int:
    """Write the large trace and return its size in bytes before compression."""
    text = gzip.decompress(TRACE.read_bytes())
    start = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    stop = text.rindex(b"]")
    events, size = text[start:stop].rstrip(), 0
    with gzip.open(target, "wb", compresslevel=6) as out:
        for copy in range(copies):

            def shifted(found: re.Match[bytes], copy: int = copy) -> bytes:
                if found[1]:
                    return found[1] + b"%d" % (int(found[2]) + copy * SHIFT_US)
                return found[3] + b"%d" % (int(found[4]) + copy * SHIFT_ID)

            before = text[:start] if copy == 0 else b","
            size += out.write(before) + out.write(_NUMBERS.sub(shifted, events))
        size += out.write(text[stop:])
    return size


def baseline(path: Path) -> tuple[int, int]:
    """Load everything with the standard library and loop over the events."""
    with gzip.open(path) as file:
        trace = json.load(file)
    base_ns, count, checksum = trace["baseTimeNanoseconds"], 0, 0
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            # Exact here only because these times are below 2**43 microseconds with three decimals.
            whole = int(event["ts"])
            start_ns = base_ns + whole * 1000 + round((event["ts"] - whole) * 1000)
            count += 1
            checksum += 2 * start_ns + round(event["dur"] * 1000) + event["args"]["correlation"]
    return count, checksum & MASK


class Totals:
    """A sink that keeps nothing but what the readings are compared by."""

    def __init__(self) -> None:
        from alphamoe_tracers.trace_files import SymbolTable

        self.count = self.checksum = 0
        self._symbols = SymbolTable()

    def symbols(self, _: str) -> object:
        return self._symbols

    def put(self, _: str, table: str, rows: object) -> None:
        if table == "kernels":
            import pyarrow.compute as pc

            names = ("start_ns", "end_ns", "correlation_id")
            self.count += rows.num_rows
            # Arrow's sums wrap at 64 bits, as the baseline's are cut.
            self.checksum += sum(pc.sum(rows.column(name)).as_py() for name in names)


def ours(path: Path, workers: int) -> tuple[int, int]:
    """Read with the project's reader."""
    from alphamoe_tracers.kineto import read_kineto

    sink = Totals()
    read_kineto(path, sink, workers=workers)
    return sink.count, sink.checksum & MASK


def measure(path: Path, way: str) -> None:
    """Read one way and print what it took as JSON; imports and process starts count."""
    start = time.perf_counter()
    count, checksum = baseline(path) if way == "baseline" else ours(path, int(way))
    seconds = time.perf_counter() - start
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(used.ru_utime + used.ru_stime for used in usage)
    # ru_maxrss of a process begins with that of the process that started it; the kernel's own mark does not.
    status = Path("/proc/self/status").read_text()
    own = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10
    found = {"seconds": seconds, "cpu": cpu, "count": count, "checksum": checksum}
    print(json.dumps(found | {"own_mib": own, "child_mib": usage[1].ru_maxrss >> 10}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=8, help="copies of the 126 MB trace (8)")
    parser.add_argument("--repeat", type=int, default=3, help="readings of each kind, in turn; the best counts (3)")
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(Path(options.measure[0]), options.measure[1])
        return 0
    if not TRACE.exists():
        print(f"{TRACE.name} does not lie beside this checkout", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json.gz"
        size = build(path, options.copies)
        print(f"{size / 1e9:.2f} GB of JSON, {path.stat().st_size / 1e6:.0f} MB compressed")
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.repeat):
            for way in ("baseline", "1", "2"):
                command = [sys.executable, __file__, "--measure", str(path), way]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.setdefault(way, []).append(json.loads(done.stdout))
    found = {(result["count"], result["checksum"]) for runs in results.values() for result in runs}
    if len(found) != 1:
        print(f"the readings differ: {found}", file=sys.stderr)
        return 1
    best = {way: min(runs, key=lambda run: run["seconds"]) for way, runs in results.items()}
    print(f"{int(best['baseline']['count'])} kernels, the same to the nanosecond in every reading")
    for way, name in (("baseline", "json.load + loop"), ("1", "one process"), ("2", "two processes")):
        run = best[way]
        ratio = best["baseline"]["seconds"] / run["seconds"]
        memory = f"{run['own_mib']} MiB" + (f" + {run['child_mib']} MiB" if way == "2" else "")
        cpu = min(run["cpu"] for run in results[way])
        speed = f"{size / run['seconds'] / 1e6:6.0f} MB/s  cpu {cpu:6.2f} s"
        print(f"{name:18s} {run['seconds']:7.2f} s  {ratio:5.2f} x  {speed}  {memory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
