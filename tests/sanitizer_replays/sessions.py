"""Whole sanitize sessions for tests: how one is run, and a run bundle with captures in it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from alphamoe_profiler.bundle import BundleWriter, RunBundle
from alphamoe_profiler.cli import main
from alphamoe_sanitizer_replays.reports.records import SanitizeReport
from alphamoe_sanitizer_replays.session.run import read_report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "profiler"))  # the golden bundles' builder
import golden

BOTH = ("synccheck", "racecheck")


def session(
    captures: Path, out: Path, sanitizer: str, *more: str, tools: Sequence[str] = BOTH
) -> tuple[int, SanitizeReport]:
    """Run a session by its command line; gives the exit code and the report."""
    words = ["sanitize", str(captures), "--tool", *tools, "--out", str(out), "--sanitizer", sanitizer, "--jobs", "4"]
    code = main([*words, *more])
    return code, read_report(out / "report.json")


def captured_run(path: Path, captures: Path | None) -> Path:
    """Build a golden run of four ranks whose rank 2 made these captures and vouches for them."""
    run = golden.build(path, world_size=4)
    if captures is not None:
        shutil.copytree(captures, run / "captures" / "rank=2")
        for capture in (run / "captures").rglob("capture.json"):
            of_run = json.loads(capture.read_text()) | {"run_id": RunBundle.open(run).run.run_id}
            capture.write_text(json.dumps(of_run))
        record = RunBundle.open(run).rank_file(2)
        assert record is not None
        BundleWriter.join(run).write_rank(record)
    return run
