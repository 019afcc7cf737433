"""``alphamoe-trace selftest``: prove on this machine that the gate can fail."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_profiler.commands import check_target

if TYPE_CHECKING:
    from rich.console import Console

    from alphamoe_profiler.selftest import CaseResult

_EXAMPLES = """\
examples:
  alphamoe-trace selftest
  alphamoe-trace selftest --json selftest.json

Each case damages a small recording that is built in a temporary directory, and gates it. No GPU is needed.

exit codes: 0 every case got its verdict, 1 one got another
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``selftest``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print one JSON document instead, or write it to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Run every case, print what each came to, and return 0 when all are right, else 1."""
    from alphamoe_profiler.selftest import run_selftest

    check_target(args.json)
    with tempfile.TemporaryDirectory(prefix="alphamoe-trace-selftest-") as folder:
        results = run_selftest(Path(folder))
    right = all(result.right for result in results)
    if args.json is not None:
        from alphamoe_profiler.commands import write_json

        write_json(_document(results, right), args.json)
    if args.json != "-":
        _tell(results)
    return 0 if right else 1


def _document(results: list[CaseResult], right: bool) -> dict[str, object]:
    return {
        "schema": "alphamoe-trace-selftest-v1",
        "right": right,
        "cases": [
            {
                "name": result.case.name,
                "expected": result.case.expected.value,
                "verdict": result.verdict.value,
                "right": result.right,
                "reason": result.reason,
            }
            for result in results
        ],
    }


def _tell(results: list[CaseResult]) -> None:
    from alphamoe_profiler.printable import print_drawn

    print_drawn(lambda console: _draw(console, results))


def _draw(console: Console, results: list[CaseResult]) -> None:
    from rich.text import Text

    from alphamoe_profiler.reports.fitting import bare_table, print_fitting

    wrong = [result for result in results if not result.right]
    word = "The gate can fail" if not wrong else "The gate is NOT to be trusted here"
    console.print(f"{word}: {len(results) - len(wrong)} of {len(results)} cases got their verdict")
    table = bare_table(console, "", "case", "expected", "verdict")
    for result in results:
        mark = Text("ok", style="green") if result.right else Text("WRONG", style="bold red")
        table.add_row(mark, result.case.name, result.case.expected.value, result.verdict.value)
    print_fitting(console, table, keys=2)
    for result in wrong:
        console.print(Text(f"{result.case.name}: {result.reason}"))
