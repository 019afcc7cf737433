"""Main figures as PNG files for a PR, drawn by a headless browser that is already on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import plotly.graph_objects as go

from alphamoe_dashboards import figures, run_figures, tables
from alphamoe_dashboards.digest import RunDigest
from alphamoe_dashboards.page import plotly_js
from alphamoe_tracers.errors import AlphaMoEError, UsageError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
BROWSER_VARIABLE = "BROWSER_PATH"
"""The variable that plotly's kaleido reads too."""
NAMES = ("matrix", "launches", "gpu_time", "duration", "tokens", "roofline", "skew", "timeline")
WIDTH, TIMEOUT_S = 1000, 60
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def find_browser() -> str:
    """Return the path of a browser.

    Raises:
        UsageError: there is none.
    """
    named = os.environ.get(BROWSER_VARIABLE)
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UsageError(
            "--png needs a browser, and no Chromium or Chrome is found",
            f"install one (apt-get install chromium), or name it in {BROWSER_VARIABLE}",
        )
    return found


def check_png_target(folder: Path, force: bool) -> None:
    """Refuse a folder in which a figure would be written over.

    Raises:
        UsageError: it is a file, or holds a figure already.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--png {folder} is a file", "name a folder")
    there = [name for name in NAMES if (folder / f"{name}.png").exists()]
    if there and not force:
        raise UsageError(f"{folder / there[0]}.png is there already", "write over it with --force")


def main_figures(digested: RunDigest) -> dict[str, go.Figure]:
    """Return the figures of a run that have something to show, by name."""
    shared = bool(digested.facts["shared_gpu"])
    base = tables.main_symbol(digested)
    buckets = tables.bucket_table(digested, base)
    points, tokens, layers = (
        tables.point_table(digested, base), tables.token_table(digested), tables.layer_table(digested, base)
    )  # fmt: skip
    cells = tables.cell_table(digested)
    drawn: dict[str, go.Figure] = {}
    if len(cells):
        drawn["matrix"] = figures.matrix_figure(cells)
    if len(buckets):
        drawn["launches"] = figures.launches_figure(buckets)
        drawn["gpu_time"] = figures.gpu_time_figure(buckets, shared)
        drawn["duration"] = figures.duration_figure(buckets, points.head(20_000), shared)
    if len(tokens):
        drawn["tokens"] = figures.tokens_figure(tokens)
    roofline = tables.roofline_table(digested, base) if base is not None else tokens.iloc[:0]
    if len(roofline):
        drawn["roofline"] = figures.roofline_figure(roofline, digested.facts["card"], shared)
    if len(layers):
        drawn["skew"] = figures.skew_figure(layers, shared)
    steps = digested.tables["slices"]["step"]
    known = sorted(set(steps[steps >= 0].tolist()))
    if known:
        drawn["timeline"] = run_figures.timeline_figure(tables.step_table(digested, known[len(known) // 2]), shared)
    return drawn


def write_pngs(runs: list[RunDigest], folder: Path) -> list[Path]:
    """Draw the main figures of each run and return the files; with two runs their names start with the run's place.

    Raises:
        AlphaMoEError: the browser did not draw.
    """
    browser = find_browser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror or error}", "name another folder") from error
    written = []
    with tempfile.TemporaryDirectory(prefix="alphamoe-png-") as scratch:
        work = Path(scratch)
        (work / "plotly.js").write_text(plotly_js(), encoding="utf-8")
        for place, run in enumerate(runs):
            prefix = f"{place + 1}-" if len(runs) > 1 else ""
            for name, fig in main_figures(run).items():
                target = folder / f"{prefix}{name}.png"
                _draw(browser, work, fig, target)
                written.append(target)
    return written


def _draw(browser: str, work: Path, fig: go.Figure, target: Path) -> None:
    height = int(fig.layout.height)
    page = work / "figure.html"
    body = fig.to_html(include_plotlyjs=False, full_html=False, config={"displayModeBar": False, "responsive": True})
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0"><script src="plotly.js"></script>{body}',
        encoding="utf-8",
    )
    shot = work / "figure.png"
    shot.unlink(missing_ok=True)
    command = [
        browser, *_QUIET, f"--user-data-dir={work / 'profile'}", f"--window-size={WIDTH},{height}",
        "--force-device-scale-factor=2", "--virtual-time-budget=4000", f"--screenshot={shot}", page.as_uri(),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise AlphaMoEError(
            f"{browser} did not draw {target.name} in {TIMEOUT_S} s", "is the machine very busy?"
        ) from error
    if not shot.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AlphaMoEError(f"{browser} did not draw {target.name}: {last}", f"name another one in {BROWSER_VARIABLE}")
    shutil.copyfile(shot, target)
