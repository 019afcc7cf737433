"""``alphamoe-trace dashboard``: one self-contained HTML page of a run's M buckets, or of two runs compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from alphamoe_profiler.commands import check_outside_runs, check_targets
from alphamoe_tracers.errors import UsageError

_EXAMPLES = """\
examples:
  alphamoe-trace dashboard alphamoe-runs/RUN                        writes RUN/reports/dashboard.html
  alphamoe-trace dashboard RUN -o page.html --png figures/          the page, and its main figures for a PR
  alphamoe-trace dashboard BASELINE CANDIDATE -o compared.html      ratios of durations by bucket, with intervals

The page asks no network and holds everything: open it from a mail, a CI artifact or a disk.

exit codes: 0 written, whatever the verdict; 2 usage; 3 damaged beyond reading
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dashboard``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("run", type=Path, metavar="RUN", help="run bundle, the baseline where two are given")
    parser.add_argument("other", type=Path, nargs="?", metavar="RUN2", help="a second run: the candidate")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default RUN/reports/dashboard.html")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the main figures as PNG too (needs a browser)")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from alphamoe_profiler.bundle import RunBundle

    runs = [args.run] if args.other is None else [args.run, args.other]
    for path in runs:
        RunBundle.open(path)
    if len(runs) == 2 and args.run.resolve() == args.other.resolve():
        raise UsageError(f"{args.run} is given twice", "name a baseline and a candidate")
    if args.out is not None:
        check_targets({"-o": str(args.out)}, runs, args.out)
    check_outside_runs(args.out, "-o")
    check_outside_runs(args.png, "--png")
    # The one place where the roof calls down into this room, and lazily: --help must stay quick.
    from alphamoe_dashboards.build import build

    if args.png is not None:
        from alphamoe_dashboards.png import check_png_target, find_browser

        find_browser()
        check_png_target(args.png, args.force)
    target, digested = build(runs, args.out, args.force, _progress())
    sys.stdout.write(f"Wrote {target}\n")
    if args.png is not None:
        from alphamoe_dashboards.png import write_pngs

        for written in write_pngs(digested, args.png):
            sys.stdout.write(f"Wrote {written}\n")
    return 0


def _progress() -> Callable[[str], object]:
    if not sys.stderr.isatty():
        return str

    def told(line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}" if line != "page" else "\r\x1b[K")
        sys.stderr.flush()

    return told
