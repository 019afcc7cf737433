"""What a gate came to, as records that its reports render and decide nothing about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from alphamoe_profiler.gate_cells import FirstRecord
from alphamoe_profiler.policy import KnownGap
from alphamoe_profiler.verdicts import Finding, Verdict, worst
from alphamoe_tracers.records import Execution

RuleKind = Literal["require", "forbid", "dispatch", "pin", "equality", "integrity", "binding", "policy"]
SYMBOL_KINDS = ("require", "forbid")


@dataclass(frozen=True)
class GateRule:
    """One question."""

    title: str
    kind: RuleKind
    line: int
    path: str | None
    """The policy file; None for what every gate asks."""


@dataclass(frozen=True)
class GateCell:
    """The answer to one question on one rank, or on the run where ``rank`` is None."""

    rule: int
    """Index into ``GateReport.rules``."""
    rank: int | None
    execution: Execution | None
    """None: any execution, or a question that is about none."""
    finding: Finding
    file: str | None = None
    """Where the evidence lies, relative to the bundle, with the imported file where there is one."""
    first: FirstRecord | None = None
    settled_by: str | None = None
    """Of an INCONCLUSIVE: which recording would settle it."""
    tolerated: KnownGap | None = None
    """A FAIL that the policy tolerates: listed apart, not part of the verdict."""

    @property
    def told(self) -> str:
        """Verdict and evidence in one line."""
        text = self.finding.reason or f"{self.finding.witnesses:,} kernels"
        cited = [part for part in (self.file, f"first {self.first.told()}" if self.first else None) if part]
        return text + (f" [{'; '.join(cited)}]" if cited else "")


def of_any_rank(text: str, rank: int | None) -> str:
    """Return a reason without the number of its rank, so that equal reasons of several ranks are told once."""
    if rank is None:
        return text
    return re.sub(rf"\branks/{rank}\.json", "ranks/N.json", re.sub(rf"\brank {rank}\b", "the rank", text))


@dataclass(frozen=True)
class RankInspected:
    """What was looked at on one rank."""

    rank: int
    kernels: int
    launches: int
    receipts: int
    files: tuple[str, ...]
    window: tuple[str, ...]
    """Conditions of a complete window that failed; none means that absence is proven."""


@dataclass(frozen=True)
class Ran:
    """One MoE symbol, or one that a rule is about, that did run."""

    rank: int
    execution: str | None
    symbol: str
    kind: str | None
    kernels: int


@dataclass(frozen=True)
class GateReport:
    """The whole answer."""

    verdict: Verdict
    reason: str
    run: str
    """The directory of the run."""
    run_id: str | None
    world_size: int | None
    policies: tuple[str, ...]
    rules: tuple[GateRule, ...]
    cells: tuple[GateCell, ...]
    inspected: tuple[RankInspected, ...] = ()
    ran: tuple[Ran, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a verdict that its cells do not carry.

        Raises:
            ValueError: it is not the worst of the cells that count, or a PASS that no witness carries.
        """
        judged = [cell.finding.verdict for cell in self.cells if cell.tolerated is None]
        if worst(judged) is not self.verdict:
            raise ValueError(f"{self.verdict.value} is not the worst of {sorted({own.value for own in judged})}")
        if self.verdict is Verdict.PASS:
            symbol_cells = [c for c in self.cells if c.tolerated is None and self.rules[c.rule].kind in SYMBOL_KINDS]
            if not symbol_cells or not any(rank.kernels for rank in self.inspected):
                raise ValueError("a PASS needs a symbol that was judged and kernels that were inspected")
        for cell in self.cells:
            if cell.tolerated is not None and cell.finding.verdict is not Verdict.FAIL:
                raise ValueError("only a FAIL can be a known gap")

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 2 CONFIG_ERROR, 3 INCONCLUSIVE."""
        return self.verdict.exit_code

    @property
    def tolerated(self) -> tuple[GateCell, ...]:
        """The cells that a known gap covers."""
        return tuple(cell for cell in self.cells if cell.tolerated is not None)

    def of_rule(self, index: int) -> list[GateCell]:
        """Return the cells of one rule."""
        return [cell for cell in self.cells if cell.rule == index]


def config_error(run: str, policies: tuple[str, ...], problems: list[tuple[str, int, str | None]]) -> GateReport:
    """Return the report of a question that cannot be asked: text, line and file of each problem."""
    rules = tuple(GateRule(text, "policy", line, path) for text, line, path in problems)
    cells = tuple(
        GateCell(number, None, None, Finding(Verdict.CONFIG_ERROR, text, must_be_seen=False))
        for number, (text, _, _) in enumerate(problems)
    )
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return GateReport(Verdict.CONFIG_ERROR, problems[0][0] + more, run, None, None, policies, rules, cells)


def unreadable(run: str, policies: tuple[str, ...], verdict: Verdict, message: str, hint: str) -> GateReport:
    """Return the report of evidence that could not be judged at all."""
    rule = GateRule("evidence", "integrity", 1, None)
    settled = hint or None
    cell = GateCell(0, None, None, Finding(verdict, message, must_be_seen=False), settled_by=settled)
    return GateReport(verdict, message, run, None, None, policies, (rule,), (cell,))
