"""Keep the result of a sweep in the repository, and print the table of its mechanisms.

    python tests/gpu/mutation_record.py                                        the kept result as markdown
    python tests/gpu/mutation_record.py --keep mutations.jsonl --on "2 H200"   keep that of a sweep first

The kept file (tests/data/sanitizer/mutations-h200.json) has a row for each run of a mutant that the sweep has an
outcome of, in the words of :class:`mutation_table.Row`, and names the mutants of which nothing is known yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("profiler", "tracers", "sanitizer_replays", "backend")]

from kernel_mutations import Mutant, all_mutants, changed_lines  # noqa: E402
from mutation_resume import kernel_sha256, read_outcomes  # noqa: E402
from mutation_table import CATCHES, KERNEL, SURVIVORS, Outcome, Row, tabulate  # noqa: E402

KEPT = ROOT / "tests" / "data" / "sanitizer" / "mutations-h200.json"


def fold(outcomes: Iterable[Outcome], mutants: Sequence[Mutant]) -> list[Row]:
    """Fold a sweep's outcomes into rows, one for each run that has any."""
    known = list(outcomes)
    ran = {(made.mutant, made.variant, made.input) for made in known if made.mutant != KERNEL}
    lost = {name for name, _, _ in ran} - {mutant.name for mutant in mutants}
    if lost:
        raise ValueError(f"no such mutants: {', '.join(sorted(lost))}")
    chosen = []
    for mutant in mutants:
        runs = tuple(sorted((variant, given) for name, variant, given in ran if name == mutant.name))
        if runs:
            chosen.append(dataclasses.replace(mutant, runs=runs))
    return tabulate(known, chosen).rows


def document(outcomes: Iterable[Outcome], mutants: Sequence[Mutant], on: str, tool: str) -> dict[str, Any]:
    """Make what is kept of a sweep.

    Args:
        outcomes: of mutations.jsonl.
        mutants: all that there are.
        on: what GPUs it ran on.
        tool: compute-sanitizer's version.
    """
    rows = [
        {
            "mutant": row.mutant.name,
            "mechanism": row.mutant.mechanism,
            "lines": [f"{file}:{line}" for file, line in changed_lines(row.mutant)],
            "variant": row.variant,
            "input": row.input,
            "seen": dict(row.seen),
            "caught_by": list(row.caught_by),
        }
        for row in fold(outcomes, mutants)
    ]
    made = {"on": on, "tool": tool, "kernel_sha256": kernel_sha256(), "rows": rows}
    return made | {"not_run": not_known(rows, mutants)}


def not_known(rows: Iterable[Mapping[str, Any]], mutants: Iterable[Mutant]) -> dict[str, str]:
    """Give the runs that are to tell of the mutants that no row tells of: neither caught, nor a known survivor."""
    caught = {row["mutant"] for row in rows if row["caught_by"]}
    return {
        mutant.name: "{}@{}".format(*mutant.runs[0])
        for mutant in mutants
        if not (mutant.harmless or mutant.same_code) and mutant.name not in caught and mutant.name not in SURVIVORS
    }


def markdown(kept: Mapping[str, Any], mutants: Iterable[Mutant]) -> str:
    """Print a kept result by mechanism: how many mutants, how many caught, and by which way of looking."""
    by_name: dict[str, set[str]] = {}
    for row in kept["rows"]:
        by_name.setdefault(row["mutant"], set()).update(row["caught_by"])
    lines: dict[str, list[int]] = {}
    for mutant in mutants:
        if mutant.harmless or mutant.same_code:
            continue
        ways = by_name.get(mutant.name, set())
        known = mutant.name not in kept["not_run"]
        told = [1, bool(ways), *(way in ways for way in CATCHES), known and not ways, not known]
        for name in (mutant.mechanism, "**all**"):
            counts = lines.setdefault(name, [0] * len(told))
            lines[name] = [count + int(more) for count, more in zip(counts, told, strict=True)]
    lines["**all**"] = lines.pop("**all**")
    titles = ("mechanism", "mutants", "caught", *(f"by {way}" for way in CATCHES), "survive", "not known")
    table = [f"| {' | '.join(titles)} |", f"| --- |{' --: |' * (len(titles) - 1)}"]
    table += [f"| {name} | {' | '.join(map(str, counts))} |" for name, counts in lines.items()]
    table += ["", *(f"- `{name}` survives: {why}." for name, why in SURVIVORS.items())]
    table += [f"- `{name}`: not known; to be run as {run}." for name, run in kept["not_run"].items()]
    return "\n".join(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="MUTATIONS.JSONL")
    parser.add_argument("--on", default="an H200", help="the GPUs of the sweep")
    parser.add_argument("--tool", default="2025.3.1.0", help="the version of compute-sanitizer")
    arguments = parser.parse_args()
    mutants = all_mutants()
    if arguments.keep:
        made = document(read_outcomes(arguments.keep), mutants, arguments.on, arguments.tool)
        rows = ",\n".join(f"  {json.dumps(row)}" for row in made.pop("rows"))
        head = json.dumps(made, indent=1).removesuffix("\n}")
        KEPT.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
    print(markdown(json.loads(KEPT.read_text()), mutants))
    return 0


if __name__ == "__main__":
    sys.exit(main())
