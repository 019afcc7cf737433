"""``alphamoe-trace import``: bring traces of other tools into a run bundle."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from alphamoe_profiler.import_plan import ImportPlan
    from alphamoe_profiler.importing import ImportResult

    FileProgress = Callable[[int, int, int], None]

_EXAMPLES = """\
examples:
  alphamoe-trace import traces/ --ranks 8 --out runs/profile                      (a folder of SGLang or vLLM traces)
  alphamoe-trace import a.json.gz b.json.gz --ranks 2 --map a.json.gz=0 --map b.json.gz=1 --out runs/two
  alphamoe-trace import report.sqlite --ranks 2 --map report.sqlite:144=0 --map report.sqlite:145=1 --out runs/nsys
  alphamoe-trace import sweep/ --ranks 1 --bucket 'batch_size_(\\d+)' --out runs/sweep
  alphamoe-trace import traces/ server.log --ranks 4 --out runs/served            (with SGLang's AlphaMoE log lines)

A rank comes from --map, else from the trace's content, else from its name; a disagreement imports nothing. It never
comes from a device index or the order of processes.

exit codes: 0 every rank was read to its end; 1 imported, but a rank is missing, unreadable or cut; 2 usage
"""
_PURPOSES = ("witness", "warmup", "capture", "accuracy", "performance", "other")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``import``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="trace, SQLite export, log, or a folder")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="world size of the recorded run")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="run bundle to write")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="FILE=RANK",
        help="rank of a file; FILE:PID=RANK of a process in it",
    )
    parser.add_argument("--bucket", metavar="REGEX", help="take a bucket value from file names: batch_size_(\\d+)")
    parser.add_argument("--force", action="store_true", help="replace the run bundle that is there")
    parser.add_argument(
        "--purpose", choices=_PURPOSES, default="witness", help="what the recorded traffic was (default witness)"
    )
    parser.add_argument(
        "--graph-execution",
        choices=("decode_graph_replay", "prefill_graph_replay"),
        default="decode_graph_replay",
        help="what graph replays are where no step annotation says so (default decode_graph_replay)",
    )
    parser.add_argument(
        "--window", type=_window, metavar="FROM:TO", help="request window in ns of the stored times; default all"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that read (default: one a CPU)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print one JSON document instead, or write it to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Import, say what each rank came to, and return 0 when every rank was read to its end, else 1."""
    from alphamoe_profiler.importing import ImportConfig, run_import

    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: at least one process reads", "leave it out for one a CPU")
    config = ImportConfig(
        paths=tuple(args.paths),
        ranks=args.ranks,
        out=args.out,
        mapping=tuple(args.map),
        bucket=args.bucket,
        force=args.force,
        purpose=args.purpose,
        graph_execution=args.graph_execution,
        window_ns=args.window,
        jobs=args.jobs,
        argv=tuple(args.argv),
    )
    from alphamoe_profiler.commands import check_outside_runs, claim_targets

    check_outside_runs(args.out, "--out")
    claim_targets({"--json": args.json}, args.paths, args.out)
    with _progress() as progress:
        result = run_import(config, progress)
    if args.json is None:
        _tell(result)
    else:
        from alphamoe_profiler.commands import write_json

        write_json(_document(result), args.json)
    return 0 if result.complete else 1


def _window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if match is None or int(match[2]) <= int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO in nanoseconds")
    return int(match[1]), int(match[2])


@contextmanager
def _progress() -> Iterator[Callable[[ImportPlan], FileProgress]]:
    """Show one bar over all bytes on stderr; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda plan: lambda index, done, size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def start(plan: ImportPlan) -> FileProgress:
            seen: dict[int, int] = {}
            total = sum(item.size_bytes for item in plan.files)
            task = bar.add_task(f"reading {len(plan.files)} file{'' if len(plan.files) == 1 else 's'}", total=total)

            def step(index: int, done: int, size: int) -> None:
                seen[index] = min(done, size)
                bar.update(task, completed=sum(seen.values()))

            return step

        yield start


def _tell(result: ImportResult) -> None:
    from alphamoe_profiler.printable import print_drawn

    print_drawn(lambda console: _draw(console, result))


def _draw(console: Console, result: ImportResult) -> None:
    from rich.text import Text

    from alphamoe_profiler.inspection import PROGRAM
    from alphamoe_profiler.reports.fitting import bare_table, print_fitting
    from alphamoe_profiler.reports.next_steps import print_next

    table = bare_table(console, "rank", "kernels", "launches", "graph launches", "steps", "from")
    for rank in result.ranks:
        counts = (f"{count:,}" for count in (rank.kernels, rank.launches, rank.graph_launches, rank.steps))
        source = ", ".join(Path(path).name for path in rank.files[:3]) or "-"
        more = f" and {len(rank.files) - 3} more" if len(rank.files) > 3 else ""
        told = Text(source + more)
        if rank.problem:
            told.append(f"\n{rank.problem}", style="yellow")
        table.add_row(str(rank.rank), *counts, told)
    print_fitting(console, table)
    for note in result.notes[:12]:
        console.print(Text(f"note: {note}", style="dim"))
    if len(result.notes) > 12:
        console.print(f"and {len(result.notes) - 12} more notes (--json lists all)")
    console.print(Text(f"Wrote {result.path}"))
    run = shlex.quote(str(result.path))
    if any(rank.kernels for rank in result.ranks):
        print_next(console, f"{PROGRAM} gate {run} --require-backend NAME")
    else:
        print_next(console, f"{PROGRAM} import NEW_TRACES --ranks {len(result.ranks)} --out {run} --force")


def _document(result: ImportResult) -> dict[str, object]:
    return {
        "schema": "alphamoe-trace-import-v1",
        "run_directory": str(result.path),
        "complete": result.complete,
        "ranks": [
            {
                "rank": rank.rank,
                "files": list(rank.files),
                "kernels": rank.kernels,
                "launches": rank.launches,
                "graph_launches": rank.graph_launches,
                "steps": rank.steps,
                "dispatch_records": rank.dispatch_records,
                "complete": rank.complete,
                "problem": rank.problem,
            }
            for rank in result.ranks
        ],
        "notes": list(result.notes),
    }
