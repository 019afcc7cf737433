"""What ``alphamoe-trace dashboard`` does: digest one or two runs, write the page, and the main figures on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from alphamoe_dashboards.columns import Strings
from alphamoe_dashboards.digest import RunDigest, digest_run
from alphamoe_dashboards.page import render
from alphamoe_profiler.bundle_files import replacing
from alphamoe_tracers.errors import UsageError


def build(
    runs: list[Path], out: Path | None, force: bool = False, told: Callable[[str], object] = str
) -> tuple[Path, list[RunDigest]]:
    """Write the page of one run, or of a baseline and a candidate.

    Args:
        runs: one or two bundles.
        out: the file; null puts it into the (last) run's ``reports/dashboard.html``.
        force: replace a file that is there.
        told: called with a line for each step of the work.

    Returns:
        (the file that was written, the digested runs).

    Raises:
        UsageError: the file is there or cannot be written, or a bundle cannot be read.
    """
    target = out if out is not None else runs[-1] / "reports" / "dashboard.html"
    if target.is_dir():
        raise UsageError(f"{target} is a directory", "name a file: -o dashboard.html")
    if target.exists() and not force:
        raise UsageError(f"{target} is there already", "write over it with --force, or name another file with -o")
    strings = Strings()
    digested = [digest_run(path, strings, len(runs) > 1, told) for path in runs]
    told("page")
    page = render(digested).encode()
    try:
        with replacing(target) as stream:
            stream.write(page)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror or error}", "name another file with -o"
        ) from error
    return target, digested
