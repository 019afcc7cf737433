"""Take outcomes of an earlier sweep up into a later one, where the very same thing would be run again.

Each line of mutations.jsonl is an outcome with its identity: hashes of the kernel's sources, of the mutant's edits and
of the input's tensors, and the version of the tool. An outcome counts again only where all of them are the same and it
was an answer; what was not run, was unclear, or did not end under a tool is run again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kernel_mutations import Mutant, read_sources
from mutation_table import DEADLOCK, KERNEL, NO_ANSWER, Case, Outcome

from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_tracers.errors import EvidenceError

FIELDS = tuple(field.name for field in dataclasses.fields(Outcome))


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be the same for an outcome to count again, beside the variant and the tool that a case names."""

    kernel_sha256: str
    """Of all sources without a mutant."""
    mutant_sha256: str
    """Of the edits; of none for the kernel itself."""
    input_sha256: str
    """Of what the replay is given; outputs are left out, because real runs add in another order each time."""
    tool_version: str
    """Empty without a tool."""


def _sha256(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class Identities:
    """The identity of every case of a sweep.

    Args:
        mutants: that are run.
        captures: inputs by name.
        tool_version: of compute-sanitizer.
    """

    def __init__(self, mutants: Iterable[Mutant], captures: Mapping[str, Capture], tool_version: str) -> None:
        self._kernel = kernel_sha256()
        self._mutants = {KERNEL: _sha256([])} | {
            mutant.name: _sha256([dataclasses.astuple(edit) for edit in mutant.edits]) for mutant in mutants
        }
        self._inputs = {
            name: _sha256(
                [
                    [capture.M, sorted(capture.arguments.items())],
                    sorted([info.name, info.sha256] for info in capture.tensors if info.role != "output"),
                ]
            )
            for name, capture in captures.items()
        }
        self._tool_version = tool_version

    def of(self, case: Case) -> Identity | None:
        """Give a case's identity, or null for one that this sweep does not have."""
        if case.mutant not in self._mutants or case.input not in self._inputs:
            return None
        version = "" if case.tool == "none" else self._tool_version
        return Identity(self._kernel, self._mutants[case.mutant], self._inputs[case.input], version)

    def line(self, made: Outcome) -> str:
        """Give an outcome as a line of mutations.jsonl."""
        identity = self.of(made.case)
        return json.dumps(dataclasses.asdict(made) | (dataclasses.asdict(identity) if identity else {}))


def kernel_sha256() -> str:
    """Hash the kernel's own sources."""
    return _sha256(read_sources())


def read_lines(path: Path) -> list[dict[str, object]]:
    """Read mutations.jsonl; a last line that was cut, by the end of the time, is left out.

    Raises:
        EvidenceError: it cannot be read, or another line is no outcome.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}") from error
    read = []
    for number, line in enumerate(lines, 1):
        try:
            said = json.loads(line)
            Outcome(**{name: said[name] for name in FIELDS})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise EvidenceError(f"{path}, line {number}: no outcome of a sweep", "give its mutations.jsonl") from error
        read.append(said)
    return read


def read_outcomes(path: Path) -> list[Outcome]:
    """Read the outcomes of mutations.jsonl, whatever they are of; raises what :func:`read_lines` does."""
    return [Outcome(**{name: said[name] for name in FIELDS}) for said in read_lines(path)]  # type: ignore[arg-type]


def take_up(lines: Iterable[Mapping[str, object]], identities: Identities, to_do: Iterable[Case]) -> list[Outcome]:
    """Choose the outcomes that need not be made again, those without a tool first.

    Args:
        lines: of the earlier mutations.jsonl.
        identities: of this sweep.
        to_do: its cases; only these, and baselines of the deadlock detection, are taken.
    """
    wanted = set(to_do)
    taken: dict[Case, Outcome] = {}
    for said in lines:
        made = Outcome(**{name: said[name] for name in FIELDS})  # type: ignore[arg-type]
        own = made.case.mutant == KERNEL and made.case.tool == DEADLOCK
        identity = identities.of(made.case)
        same = identity is not None and all(said.get(key) == value for key, value in vars(identity).items())
        under = made.case.tool != "none" and made.outcome in ("hang", "crash")
        if same and not under and (made.case in wanted or own) and made.outcome not in (*NO_ANSWER, "skipped"):
            taken[made.case] = made
    return sorted(taken.values(), key=lambda made: made.case.tool != "none")
