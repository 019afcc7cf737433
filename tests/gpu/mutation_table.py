"""The table of mutants and tools: which way of looking catches which mutant, and how many are caught at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kernel_mutations import Mutant, changed_lines

from alphamoe_sanitizer_replays.results import TOOLS

KERNEL = "kernel"
"""Stands for the kernel itself among the mutants' names."""
DEADLOCK = "deadlock"
"""Stands among the tools for racecheck with its deadlock detection, which only mutants that hang are shown to."""
CATCHES = ("output", *TOOLS)
_PLAINLY_WRONG = ("wrong", "hang", "crash")
ENDS_ITSELF = ("hang", "crash")
"""Outcomes without a tool after which tools are of no consequence: that the mutant is wrong is plain."""
NO_ANSWER = ("not run", "unclear", "no baseline", "unfinished")
_STAGING = (
    "racecheck does not see stmatrix race within a warp: its control stmatrix_warp is missed as well. The lanes of"
    " a warp are together here, so that the output is right"
)
SURVIVORS: Mapping[str, str] = {
    "staging_stored_sync": _STAGING,
    "staging_read_sync": _STAGING,
    "proxy_fence": "racecheck does not see what wgmma reads through the async proxy: its control warpgroup_fence is"
    " missed as well. Stores before a block barrier have arrived by the time wgmma reads, so that the output is right",
    "wgmma_unit_wait_one_less": "what races are registers of a product in flight, which no tool watches, and racecheck"
    " does not even see wgmma's memory: its control warpgroup_wait is missed. A product of half a tile has ended long"
    " before its registers are reused, so that the output is right",
}
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
    """``clean``, ``found``; without a tool ``clean``, ``wrong``; ``hang``, ``crash``, ``unclear``, ``not run``.

    ``skipped`` is a tool that a mutant was not shown to because it hangs or crashes, and that is an answer already.
    """
    detail: str
    wall_s: float
    launch_s: float | None = None
    """Seconds from the launch until the kernel had ended, as the replay itself says."""

    @classmethod
    def of(cls, case: Case, outcome: str, detail: str, wall_s: float = 0.0, launch_s: float | None = None) -> Outcome:
        """Make the outcome of a case."""
        return cls(**asdict(case), outcome=outcome, detail=detail, wall_s=wall_s, launch_s=launch_s)

    @property
    def case(self) -> Case:
        """Give what it is the outcome of."""
        return Case(self.mutant, self.variant, self.input, self.tool)

    @property
    def caught(self) -> bool:
        """Whether this process alone tells that something is wrong."""
        return self.outcome in (_PLAINLY_WRONG if self.tool == "none" else ("found",))


@dataclass(frozen=True)
class Row:
    """One mutant of one variant with one input: what each way of looking said."""

    mutant: Mutant
    variant: str
    input: str
    seen: Mapping[str, str]
    """Outcome by ``output`` or tool.

    Two more than :class:`Outcome` has: ``lost`` is a tool without a finding in a process that the kernel's exception
    ended, or left waiting (in a cluster the other CTAs wait for the one that is gone). ``unfinished`` is a tool that
    did not come to an end with a mutant that does without it: it drowned in hazards, and nothing is known.
    """

    @property
    def caught_by(self) -> tuple[str, ...]:
        """List who caught it: tools with a finding, and the output check by a wrong output, a hang or a crash."""
        ways = {"output": _PLAINLY_WRONG}
        return tuple(way for way in CATCHES if self.seen[way] in ways.get(way, ("found",)))

    @property
    def complete(self) -> bool:
        """Whether every way of looking gave an answer, or needed none."""
        return not any(outcome in NO_ANSWER for outcome in self.seen.values())


@dataclass(frozen=True)
class Table:
    """Rows, and what keeps them from counting."""

    rows: list[Row]
    wrong: list[str]
    """The kernel itself is not clean."""
    incomplete: list[str]
    """Nothing was learnt: the time was up, or an outcome cannot be read."""


def tabulate(outcomes: Iterable[Outcome], mutants: Iterable[Mutant]) -> Table:
    """Fold outcomes into rows; a case without one was not run."""
    by_case = {made.case: made for made in outcomes}
    plainly = {replace(case, tool=""): made.outcome for case, made in by_case.items() if case.tool == "none"}
    table = Table([], [], [])
    for case, made in by_case.items():
        label = f"{case.mutant} {case.variant} {case.input} {case.tool}: {made.outcome} {made.detail}"
        if case.tool == DEADLOCK:
            continue
        if case.mutant == KERNEL and made.outcome not in ("clean", "not run"):
            table.wrong.append(f"the kernel itself, {label}")
        elif plainly.get(replace(case, tool="")) not in ENDS_ITSELF and (
            made.outcome in ("not run", "unclear") or (made.outcome == "hang" and case.tool != "none")
        ):
            table.incomplete.append(label)
    for mutant in mutants:
        for variant, inputs in mutant.runs:
            plain = Case(mutant.name, variant, inputs, "none")
            seen = {}
            for way in CATCHES:
                case = plain if way == "output" else replace(plain, tool=way)
                made = by_case.get(case)
                own = by_case.get(replace(case, mutant=KERNEL))
                sound = own is not None and own.outcome == "clean"
                if made is not None and made.detail.startswith(DEADLOCK):
                    flagged = by_case.get(replace(case, mutant=KERNEL, tool=DEADLOCK))
                    sound = flagged is not None and flagged.outcome == "clean"
                answered = made is not None and made.outcome not in (*NO_ANSWER, "skipped")
                told = "not run" if made is None else "no baseline" if answered and not sound else made.outcome
                seen[way] = told if way == "output" else _under_a_tool(told, plainly.get(replace(case, tool="")))
            table.rows.append(Row(mutant, variant, inputs, seen))
    return table


def _under_a_tool(told: str, plainly: str | None) -> str:
    """Say what an outcome under a tool is worth beside that without one."""
    if plainly == "crash" and told in ENDS_ITSELF:
        return "lost"
    if plainly in ENDS_ITSELF:
        return "skipped" if told in NO_ANSWER else told
    return "unfinished" if told == "hang" else told


def summarise(rows: Iterable[Row]) -> dict[str, object]:
    """Count: a mutant is killed when one of its runs is. The harmless and the same do not count in the rate."""
    by_mutant: dict[str, list[Row]] = {}
    for row in rows:
        by_mutant.setdefault(row.mutant.name, []).append(row)
    killed, survived, unknown, surprises, same = [], [], [], [], []
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
        (killed if ways else survived if all(row.complete for row in its) else unknown).append(name)
        for way in ways:
            caught[way] += 1
    return {
        "mutants": len(killed) + len(survived) + len(unknown),
        "killed": len(killed),
        "survived": survived,
        "not_known": unknown,
        "unlisted_survivors": [name for name in survived if name not in SURVIVORS],
        "caught_by": caught,
        "mechanisms": {name: {"killed": counts[0], "mutants": counts[1]} for name, counts in mechanisms.items()},
        "harmless_and_quiet": same,
        "harmless_but_caught": surprises,
    }


SIGNS = {
    "found": "X",
    "wrong": "X",
    "hang": "hang",
    "crash": "crash",
    "clean": ".",
    "lost": "lost",
    "skipped": "(-)",
    "unfinished": "...",
    "unclear": "?",
}
"""Any other is ``-``: nothing is known."""


def print_table(rows: Iterable[Row], summary: Mapping[str, object]) -> None:
    """Print one line a row and the sums."""
    print(f"\n{'mutant':32} {'variant':7} {'input':9} " + " ".join(f"{way:>9}" for way in CATCHES) + "  mechanism")
    for row in rows:
        signs = " ".join(f"{SIGNS.get(row.seen[way], '-'):>9}" for way in CATCHES)
        note = " (harmless)" if row.mutant.harmless else " (same code)" if row.mutant.same_code else ""
        print(f"{row.mutant.name:32} {row.variant:7} {row.input:9} {signs}  {row.mutant.mechanism}{note}")
    print(f"\n{summary['killed']} of {summary['mutants']} mutants are caught; by {summary['caught_by']}")
    for key in ("mechanisms", "survived", "not_known", "unlisted_survivors", "harmless_but_caught"):
        print(f"{key}: {summary[key]}")


@dataclass
class Report:
    """What is printed and written of a sweep, whatever became of it."""

    results: Path
    mutants: list[Mutant]
    wrong: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    walls: dict[str, float] = field(default_factory=dict)

    def write(self, outcomes: Iterable[Outcome]) -> tuple[Table, dict[str, object]]:
        """Write mutations.json."""
        table = tabulate(outcomes, self.mutants)
        summary = summarise(table.rows)
        listed = [
            {
                "mutant": row.mutant.name,
                "mechanism": row.mutant.mechanism,
                "lines": [f"{file}:{line}" for file, line in changed_lines(row.mutant)],
                "variant": row.variant,
                "input": row.input,
                "seen": dict(row.seen),
                "caught_by": row.caught_by,
                "complete": row.complete,
                "harmless": row.mutant.harmless,
                "same_code": row.mutant.same_code,
            }
            for row in table.rows
        ]
        document = {"summary": summary, "wall_s": self.walls, "problems": [*self.wrong, *table.wrong]}
        document |= {"incomplete": [*self.incomplete, *table.incomplete], "rows": listed}
        path = self.results / "mutations.json"
        path.with_suffix(".tmp").write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)
        return table, summary

    def finish(self, outcomes: list[Outcome]) -> int:
        """Write and print everything and give the exit code."""
        table, summary = self.write(outcomes)
        print_table(table.rows, summary)
        walls = ", ".join(f"{name} {value:.0f}" for name, value in self.walls.items())
        print(f"{len(outcomes)} replays; seconds: {walls}")
        wrong, incomplete = [*self.wrong, *table.wrong], [*self.incomplete, *table.incomplete]
        for label, problems in (("WRONG", wrong), ("INCOMPLETE", incomplete)):
            for problem in problems[:40]:
                print(f"    {label} {problem}", flush=True)
        if wrong or summary["unlisted_survivors"]:
            return 1
        return 3 if incomplete or summary["not_known"] or not table.rows else 0
