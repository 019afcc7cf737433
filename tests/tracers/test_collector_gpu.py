"""The collector on a real GPU: the probe's checks, as one test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).resolve().parents[1] / "gpu" / "collector_probe.py"


@pytest.mark.gpu
def test_probe_finds_every_count_as_expected() -> None:
    """Counts, node paths, sentinels, modules, SIGKILL and other tools are as the collector assumes."""
    done = subprocess.run([sys.executable, str(PROBE)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
