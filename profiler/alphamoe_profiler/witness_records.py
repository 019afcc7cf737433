"""What a witness summary says: its verdict, and the cells, checks and code identities behind it."""

from __future__ import annotations

from dataclasses import dataclass

from alphamoe_profiler.evidence import Identity
from alphamoe_profiler.integrity import Check
from alphamoe_profiler.verdicts import Finding, Verdict, worst
from alphamoe_tracers.records import Execution


@dataclass(frozen=True)
class Cell:
    """One symbol in one execution on one rank."""

    rank: int
    execution: Execution | None
    """None: in no execution that was asked for (only of forbidden symbols)."""
    symbol: str
    required: bool
    """False: forbidden."""
    kernels: int
    """GPU records that count. Shown also where the verdict is INCONCLUSIVE: presence survives damage."""
    submissions: int
    """What the receipts of witness steps submitted."""
    finding: Finding


@dataclass(frozen=True)
class WitnessSummary:
    """The judgement of one run."""

    verdict: Verdict
    reason: str
    cells: tuple[Cell, ...]
    checks: tuple[Check, ...]
    identities: tuple[Identity, ...]
    notes: tuple[str, ...]
    """What a reader should know and no rule judges."""

    def __post_init__(self) -> None:
        """Refuse a summary that its parts do not carry.

        Raises:
            ValueError: the verdict is not the worst of the parts, or a PASS without a single witness.
        """
        parts = [cell.finding.verdict for cell in self.cells] + [check.verdict for check in self.checks]
        if worst(parts) is not self.verdict:
            raise ValueError(f"{self.verdict.value} is not the worst of {sorted({part.value for part in parts})}")
        if self.verdict is Verdict.PASS and not self.witnesses:
            raise ValueError("a PASS needs at least one witness")

    @property
    def witnesses(self) -> int:
        """Kernels of required symbols that count."""
        return sum(cell.kernels for cell in self.cells if cell.required)
