"""Witness policies: what a gate asks of a run, as typed records. docs/gate.md describes every key.

A policy is written in TOML, as a file of its own or as ``[tool.alphamoe-trace.witness]`` in a pyproject.toml. Reading
one is in :mod:`policy_source`, what its symbols match in :mod:`policy_match`.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

PolicySchema = Literal["alphamoe-trace-policy-v1"]

MatchKind = Literal["base", "full", "mangled", "regex", "class", "triton"]
AskedExecution = Literal["any", "eager", "prefill_graph_replay", "decode_graph_replay"]
CountedPurpose = Literal["witness", "accuracy", "other"]
"""Warm-up, capture and performance traffic can not be asked for: it never counts."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Rank = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class MSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule about the set of M that a symbol ran at, in one execution on one rank."""

    exact: tuple[Tokens, ...] | None = None
    """The observed set is exactly this one."""
    within: tuple[tuple[Tokens, Tokens], ...] | None = None
    """Every observed M lies in one of these ranges, both ends included."""
    at_least: tuple[Tokens, ...] | None = None
    """Each of these was observed."""
    of: Literal["kernel", "dispatch", "real_tokens"] = "kernel"
    """``kernel``: M of witnessed kernels. ``dispatch`` and ``real_tokens``: of receipts, or of a server log."""


class RequireRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A symbol that must be witnessed on each rank, in each execution that is asked for."""

    symbol: Name | None = None
    symbols: tuple[Name, ...] = ()
    """Several symbols, each a rule of its own with the same settings."""
    match: MatchKind = "base"
    name: Name | None = None
    """How reports call the rule; the symbol where it has no name."""
    executions: tuple[AskedExecution, ...] | None = None
    """Default: the policy's, else what run.json asks for; of imported traces ``any``."""
    ranks: Literal["all"] | tuple[Rank, ...] = "all"
    purposes: tuple[CountedPurpose, ...] | None = None
    at_least: Count = 1
    """Kernels on each rank in each execution."""
    exactly: Count | None = None
    per_layer: Count | None = None
    """Kernels in each layer of each step."""
    equals_receipts: bool = False
    """As many kernels as the receipts submitted, in each step and layer."""
    equal_across_ranks: bool = False
    """The same number of kernels on every rank, at every M."""
    M: MSet | None = None
    source_sha256: tuple[Sha256, ...] = ()
    """The loaded code behind the symbol is of one of these CUDA sources."""
    module_sha256: tuple[Sha256, ...] = ()
    """The loaded code behind the symbol is one of these module images."""


class ForbidRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A symbol that must not run in real requests: seen, it means a fallback."""

    symbol: Name | None = None
    symbols: tuple[Name, ...] = ()
    match: MatchKind = "base"
    name: Name | None = None
    executions: tuple[AskedExecution, ...] | None = None
    ranks: Literal["all"] | tuple[Rank, ...] = "all"


class DispatchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule about what the backend dispatched, by receipt or server log. It is never a witness."""

    kernel: Name | None = None
    """The operator, for example ``alphamoe_fp8_block_scale_aligned_moe``; any where it is left out."""
    name: Name | None = None
    executions: tuple[AskedExecution, ...] | None = None
    ranks: Literal["all"] | tuple[Rank, ...] = "all"
    M: MSet | None = None
    exactly: Count | None = None
    """Forwards on each rank in each execution. Only receipts can be counted: of a server log it is CONFIG_ERROR."""
    at_least: Count = 1


class KnownGap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A FAIL that is tolerated until a date. It is listed apart and never hides missing evidence."""

    symbol: Name
    """As the rule spells it."""
    reason: Name
    expires: datetime.date
    """The last day on which it is tolerated; an expired one is an error."""
    executions: tuple[AskedExecution, ...] | None = None
    ranks: Literal["all"] | tuple[Rank, ...] = "all"


class ClassRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A symbol class of the user's own, looked up before the packaged ones."""

    name: Name
    base: tuple[Name, ...] = ()
    """Regular expressions that are searched in the base name."""
    full: tuple[Name, ...] = ()
    """Regular expressions that are searched in the full name."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a gate asks of a run."""

    schema: PolicySchema = "alphamoe-trace-policy-v1"
    name: Name | None = None
    description: str | None = None
    backend: Name | None = None
    """Start from the built-in policy of this MoE backend; the rules here are added to it."""
    world_size: Count | None = None
    executions: tuple[AskedExecution, ...] | None = None
    """Of every rule that names none."""
    purposes: tuple[CountedPurpose, ...] = ("witness",)
    conditional_graphs: bool = False
    """Graphs hold conditional nodes, of which only the first iteration is recorded: counts in replays are lower bounds
    and too few kernels there is no contradiction."""
    versions: dict[str, tuple[Name, ...]] = {}
    """Versions that the policy was written for, by package, with ``*``; another one is a warning."""
    require: tuple[RequireRule, ...] = ()
    forbid: tuple[ForbidRule, ...] = ()
    dispatch: tuple[DispatchRule, ...] = ()
    known_gap: tuple[KnownGap, ...] = ()
    classes: tuple[ClassRule, ...] = msgspec.field(default=(), name="class")


@dataclass(frozen=True)
class PlacedPolicy:
    """A policy with where each of its rules is written."""

    policy: Policy
    source: str
    """How messages call it: the file, or ``built-in policy NAME``."""
    path: str | None = None
    """The file, for annotations; None for a built-in policy."""
    lines: dict[tuple[str, int], int] = field(default_factory=dict)
    """1-based line of rule i of a table, by (table, i); ("", 0) is the policy itself."""

    def line(self, table: str, index: int) -> int:
        """Return the line of a rule, 1 where it is not known."""
        return self.lines.get((table, index), self.lines.get(("", 0), 1))


def policy_schema() -> dict[str, Any]:
    """Return the JSON schema of a policy file. ``docs/policy-schema.json`` is this document."""
    schema = msgspec.json.schema(Policy)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Witness policy of alphamoe-trace"}
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({**head, **schema}))  # tuples become lists
    return document
