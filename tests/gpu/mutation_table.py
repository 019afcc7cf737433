"""The table of mutants and tools: which way of looking catches which mutant, and how many are caught at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernel_mutations import Mutant

from alphamoe_sanitizer_replays.results import TOOLS

KERNEL = "kernel"
"""Stands for the kernel itself among the mutants' names."""
CATCHES = ("output", *TOOLS)
SURVIVORS: Mapping[str, str] = {}
"""Mutants that nothing catches although something should, as measured on an H200, and why; others fail this check."""


@dataclass(frozen=True)
class Case:
    """One process: a mutant of one variant, or the kernel itself, with one input under one tool or none."""

    mutant: str
    variant: str
    input: str
    tool: str


@dataclass(frozen=True)
class Outcome:
    """What came of one process."""

    mutant: str
    variant: str
    input: str
    tool: str
    outcome: str
    """``clean``, ``found``; without a tool ``clean``, ``wrong``; ``hang``, ``crash``, ``unclear``, ``not run``."""
    detail: str
    wall_s: float


@dataclass(frozen=True)
class Row:
    """One mutant of one variant with one input: what each way of looking said."""

    mutant: Mutant
    variant: str
    input: str
    seen: Mapping[str, str]
    """Outcome by ``output`` or tool."""

    @property
    def caught_by(self) -> tuple[str, ...]:
        """List who caught it: tools with a finding, and the output check by a wrong output, a hang or a crash."""
        own = ("wrong", "hang", "crash")
        return tuple(way for way in CATCHES if self.seen[way] in (own if way == "output" else ("found",)))


def tabulate(outcomes: Iterable[Outcome], mutants: Iterable[Mutant]) -> tuple[list[Row], list[str]]:
    """Fold outcomes into rows, and list what keeps them from counting."""
    by_case = {Case(made.mutant, made.variant, made.input, made.tool): made for made in outcomes}
    rows, problems = [], []
    for case, made in by_case.items():
        if case.mutant == KERNEL and made.outcome != "clean":
            label = f"the kernel itself, {case.variant} {case.input} {case.tool}"
            problems.append(f"{label}: {made.outcome} {made.detail}")
        elif made.outcome in ("unclear", "not run"):
            problems.append(f"{case.mutant} {case.variant} {case.input} {case.tool}: {made.outcome} {made.detail}")
    for mutant in mutants:
        for variant, inputs in mutant.runs:
            seen = {}
            for way in CATCHES:
                tool = "none" if way == "output" else way
                own = by_case.get(Case(KERNEL, variant, inputs, tool))
                made = by_case.get(Case(mutant.name, variant, inputs, tool))
                sound = own is not None and own.outcome == "clean"
                seen[way] = made.outcome if made and sound else "no baseline" if made else "not run"
            rows.append(Row(mutant, variant, inputs, seen))
    return rows, problems


def summarise(rows: Iterable[Row]) -> dict[str, object]:
    """Count: a mutant is killed when one of its runs is. The harmless and the same do not count in the rate."""
    by_mutant: dict[str, list[Row]] = {}
    for row in rows:
        by_mutant.setdefault(row.mutant.name, []).append(row)
    killed, survived, surprises, same = [], [], [], []
    caught: dict[str, int] = dict.fromkeys(CATCHES, 0)
    mechanisms: dict[str, list[int]] = {}
    for name, its in by_mutant.items():
        mutant = its[0].mutant
        ways = {way for row in its for way in row.caught_by}
        if mutant.harmless or mutant.same_code:
            (surprises if ways else same).append(name)
            continue
        counted = mechanisms.setdefault(mutant.mechanism, [0, 0])
        counted[0] += bool(ways)
        counted[1] += 1
        (killed if ways else survived).append(name)
        for way in ways:
            caught[way] += 1
    return {
        "mutants": len(killed) + len(survived),
        "killed": len(killed),
        "survived": survived,
        "unlisted_survivors": [name for name in survived if name not in SURVIVORS],
        "caught_by": caught,
        "mechanisms": {name: {"killed": counts[0], "mutants": counts[1]} for name, counts in mechanisms.items()},
        "harmless_and_quiet": same,
        "harmless_but_caught": surprises,
    }


SIGNS = {"found": "X", "wrong": "X", "hang": "hang", "crash": "crash", "clean": ".", "unclear": "?"}


def print_table(rows: Iterable[Row], summary: Mapping[str, object]) -> None:
    """Print one line a row and the sums."""
    print(f"\n{'mutant':32} {'variant':7} {'input':9} " + " ".join(f"{way:>9}" for way in CATCHES) + "  mechanism")
    for row in rows:
        signs = " ".join(f"{SIGNS.get(row.seen[way], '-'):>9}" for way in CATCHES)
        note = " (harmless)" if row.mutant.harmless else " (same code)" if row.mutant.same_code else ""
        print(f"{row.mutant.name:32} {row.variant:7} {row.input:9} {signs}  {row.mutant.mechanism}{note}")
    print(f"\n{summary['killed']} of {summary['mutants']} mutants are caught; by {summary['caught_by']}")
    for key in ("mechanisms", "survived", "unlisted_survivors", "harmless_but_caught"):
        print(f"{key}: {summary[key]}")
