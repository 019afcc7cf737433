"""The four verdicts, their exit codes, and a cell whose illegal states cannot be built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What a question about a run came to."""

    PASS = "PASS"  # noqa: S105 -- a verdict, not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    CONFIG_ERROR = "CONFIG_ERROR"

    @property
    def exit_code(self) -> int:
        """The exit code of a gate with this verdict: 0 PASS, 1 FAIL, 2 CONFIG_ERROR, 3 INCONCLUSIVE."""
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.CONFIG_ERROR: 2, Verdict.INCONCLUSIVE: 3}[self]


# Proven contradiction outweighs an empty question, which outweighs missing evidence.
_SEVERITY = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.CONFIG_ERROR: 2, Verdict.FAIL: 3}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict, in the order FAIL, CONFIG_ERROR, INCONCLUSIVE, PASS.

    No verdict at all is CONFIG_ERROR: a question that nothing answers was empty.
    """
    return max(verdicts, key=_SEVERITY.__getitem__, default=Verdict.CONFIG_ERROR)


@dataclass(frozen=True)
class Finding:
    """One judged question: a verdict with its reason and the counts that carry it."""

    verdict: Verdict
    reason: str
    """One line. Empty only for PASS."""
    witnesses: int = 0
    """GPU records that count for this question: inside the window, purpose ``witness``."""
    must_be_seen: bool = True
    """False for a question about something that must not be there."""
    settled_by: str | None = None
    """Of an INCONCLUSIVE: which recording would settle it, where the judge of this question knows best."""

    def __post_init__(self) -> None:
        """Refuse the states that would let silence read as success.

        Raises:
            ValueError: a PASS of a required symbol without witnesses, a PASS of a forbidden one with witnesses,
                a verdict other than PASS without a reason, or a negative count.
        """
        if self.witnesses < 0:
            raise ValueError(f"{self.witnesses} witnesses cannot be")
        if self.verdict is Verdict.PASS:
            if self.must_be_seen and self.witnesses == 0:
                raise ValueError("a PASS needs at least one witness")
            if not self.must_be_seen and self.witnesses:
                raise ValueError(f"a forbidden symbol that was seen {self.witnesses} times cannot be a PASS")
        elif not self.reason:
            raise ValueError(f"{self.verdict.value} needs a reason")
