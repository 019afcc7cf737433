"""``alphamoe-trace doctor``: say what this machine can do and what is missing."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from alphamoe_profiler.commands import check_target

if TYPE_CHECKING:
    from alphamoe_profiler.doctor import Diagnosis

_EPILOG = """\
exit codes: 0 a run works here (on the CPU at least); 1 something that every run needs is missing
"""
_GROUPS = {
    "cpu": "every run needs",
    "gpu": "witnesses on a GPU need",
    "extra": "further commands need",
}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print one JSON document instead, or write it to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 when a run works here."""
    from alphamoe_profiler.doctor import diagnose

    check_target(args.json)
    diagnosis = diagnose()
    if args.json is None:
        _print(diagnosis)
    else:
        from alphamoe_profiler.commands import write_json

        content = {
            "cpu_run_works": diagnosis.cpu_run_works,
            "gpu_run_works": diagnosis.gpu_run_works,
            "checks": diagnosis.checks,
        }
        write_json(content, args.json)
    return 0 if diagnosis.cpu_run_works else 1


def _print(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    from alphamoe_profiler.printable import printable_console

    console = printable_console(file=sys.stdout, highlight=False, soft_wrap=True)
    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    for group, title in _GROUPS.items():
        console.print(Text(title, style="bold"))
        for check in diagnosis.checks:
            if check.needed_for != group:
                continue
            console.print(
                Text.assemble("  ", (f"{check.state:<8}", colours[check.state]), f" {check.name:<18} {check.detail}")
            )
            if check.state != "ok" and check.remedy:
                console.print(Text(f"           {'':<18} -> {check.remedy}"))
    if diagnosis.gpu_run_works:
        answer = "A run here can be witnessed: alphamoe-trace --ranks 4 --prompt gsm8k:17"
    elif diagnosis.cpu_run_works:
        answer = "A run works here, but nothing on a GPU can be witnessed: its verdict is INCONCLUSIVE."
    else:
        answer = "No run works here until the lines above that are not ok are mended."
    console.print(Text(answer, style="bold"))
