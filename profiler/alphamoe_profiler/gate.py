"""The witness gate: a policy asked of a run bundle, every answer with its evidence (DESIGN 8)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from alphamoe_backend.experts.registry import BACKENDS
from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.evidence import MOE_CLASSES, Evidence
from alphamoe_profiler.gate_binding import binding_findings, pin_finding, version_warnings
from alphamoe_profiler.gate_bundle import NarrowBundle
from alphamoe_profiler.gate_cells import (
    Seen,
    Where,
    forbidden_finding,
    look,
    required_finding,
    settled_by,
    submissions_of,
)
from alphamoe_profiler.gate_conditions import (
    SETS_ONLY,
    counted_finding,
    counts_asked,
    dispatch_finding,
    equality_finding,
    log_only,
)
from alphamoe_profiler.gate_evidence import gather_for_gate
from alphamoe_profiler.gate_records import (
    GateCell,
    GateReport,
    GateRule,
    RuleKind,
    config_error,
)
from alphamoe_profiler.gate_summary import inspected, notes_of, overall_reason, what_ran
from alphamoe_profiler.integrity import integrity_checks
from alphamoe_profiler.policy import AskedExecution, DispatchRule, KnownGap, PlacedPolicy, Policy, RequireRule
from alphamoe_profiler.policy_check import PlacedRule, placed_rules, policy_problems
from alphamoe_profiler.policy_source import builtin_policy
from alphamoe_profiler.verdicts import Finding, Verdict, worst
from alphamoe_profiler.windows import SENTINEL_PREFIX
from alphamoe_tracers.records import Execution
from alphamoe_tracers.symbols import is_truncated, symbol_class
from alphamoe_tracers.tables import UNRESOLVED

_DISPATCHED = ("alphamoe.w8a8", "alphamoe.nvfp4", "moe.gemm")
"""Classes of kernels that a backend dispatches and writes receipts of."""


@dataclass(frozen=True)
class Expected:
    """The code that the evidence must be of."""

    commit: str | None = None
    tree: str | None = None


def evaluate(
    bundle: RunBundle,
    policies: Iterable[PlacedPolicy],
    expected: Expected | None = None,
    today: datetime.date | None = None,
) -> GateReport:
    """Judge one run by policies.

    Args:
        bundle: the run.
        policies: asked together; a policy that names a backend brings the built-in one along.
        expected: commit and tree under review.
        today: what expiry dates are compared with.

    Raises:
        UsageError: files of the bundle contradict each other, or a backend has no built-in policy.
    """
    asked = _with_backends(policies)
    sources = tuple(placed.source for placed in asked)
    day = today or datetime.datetime.now(datetime.UTC).date()
    problems = [(p.text, p.line, p.path) for p in policy_problems(asked, bundle.world_size, day)]
    rules = placed_rules(asked)
    if not problems and bundle.run.kind == "recorded" and not bundle.run.executions:
        open_ = [rule for rule in rules if not rule.rule.executions]
        if open_ and any(placed.policy.executions is None for placed in asked):
            problems.append(
                ("run.json asks for no execution, and neither does the policy", open_[0].line, open_[0].path)
            )
    if problems:
        return config_error(str(bundle.path), sources, problems)
    return _Gate(bundle, asked, rules).report(expected or Expected())


def _with_backends(policies: Iterable[PlacedPolicy]) -> tuple[PlacedPolicy, ...]:
    asked: list[PlacedPolicy] = []
    for placed in policies:
        asked.append(placed)
        if placed.policy.backend is not None:
            asked.append(builtin_policy(placed.policy.backend))
    return tuple({placed.source: placed for placed in asked}.values())


class _Gate:
    """One evaluation: rules and cells are added one after the other."""

    def __init__(self, bundle: RunBundle, policies: tuple[PlacedPolicy, ...], rules: list[PlacedRule]) -> None:
        self.policies = policies
        self.asked = rules
        self.bundle = NarrowBundle.narrow(bundle, self._wanted(bundle))
        self.bundle.prefetch()
        required, forbidden = self._base_names()
        compared = self._compared(required, forbidden)
        self.evidence: Evidence = gather_for_gate(self.bundle, required, forbidden, compared)
        self.rules: list[GateRule] = []
        self.cells: list[GateCell] = []
        self.looked: dict[tuple[int, Where], Seen] = {}

    def _wanted(self, bundle: RunBundle) -> Any:
        selectors = [rule.selector for rule in self.asked if rule.table != "dispatch"]
        lists = {id(r.kernels): r.kernels for rank in bundle.ranks for r in bundle.receipts(rank).receipts}
        submitted = {item.symbol for kernels in lists.values() for item in kernels}

        def wanted(row: dict[str, Any]) -> bool:
            base, full = row["base"] or "", row["full"] or ""
            if base.startswith(SENTINEL_PREFIX) or base in submitted or is_truncated(full) or full == UNRESOLVED:
                return True
            if (row["class"] or "").startswith(MOE_CLASSES):
                return True
            return any(own.matches(row[own.form] or "") for own in selectors)

        return wanted

    def _base_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the base names of what is required and forbidden, as the run's own symbols spell them."""
        found: dict[str, set[str]] = {"require": set(), "forbid": set()}
        for rank in self.bundle.ranks:
            for row in self.bundle.table("symbols", rank).to_pylist():
                for rule in self.asked:
                    if rule.table in found and rule.selector.matches(row[rule.selector.form]):
                        found[rule.table].add(row["base"])
        return tuple(sorted(found["require"])), tuple(sorted(found["forbid"]))

    def _compared(self, required: tuple[str, ...], forbidden: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names whose kernels no receipt may be lacking for: MoE GEMMs, which backends dispatch.

        Nobody writes receipts of a norm or an all-reduce, and a gap that is tolerated is known to have none.
        """
        gaps = {gap.symbol for placed in self.policies for gap in placed.policy.known_gap}
        known = [rule.selector for rule in self.asked if rule.selector.symbol in gaps]
        names = {name for name in (*required, *forbidden) if (symbol_class(name, name) or "").startswith(_DISPATCHED)}
        backend = BACKENDS.get(self.bundle.run.moe_runner_backend or "")
        names |= {*backend.required, *backend.forbidden} if backend is not None else set()
        return tuple(sorted(name for name in names if not any(own.matches(name) for own in known)))

    def report(self, expected: Expected) -> GateReport:
        """Judge everything and return the report."""
        for rule in self.asked:
            if rule.table == "dispatch":
                self._dispatch(rule)
            elif rule.table == "forbid":
                self._forbid(rule)
            else:
                self._require(rule)
        self._integrity()
        sizes = [
            (placed.policy.world_size, placed.line("", 0), placed.path)
            for placed in self.policies
            if placed.policy.world_size is not None
        ]
        run = self.bundle.run
        for title, line, path, finding, settled in binding_findings(run, expected.commit, expected.tree, sizes):
            open_ = settled if finding.verdict is Verdict.INCONCLUSIVE else None
            self._add("binding", title, line, path, [GateCell(0, None, None, finding, "run.json", settled_by=open_)])
        cells = tuple(self._tolerated(cell) for cell in self.cells)
        verdict = worst(cell.finding.verdict for cell in cells if cell.tolerated is None)
        notes = notes_of(self.evidence, self.bundle, self.policies, self.asked, cells)
        verdict, cells = self._guarded(verdict, cells)
        return GateReport(
            verdict=verdict,
            reason=overall_reason(verdict, cells, self.rules, self.bundle),
            run=str(self.bundle.path),
            run_id=run.run_id,
            world_size=run.world_size,
            policies=tuple(placed.source for placed in self.policies),
            rules=tuple(self.rules),
            cells=cells,
            inspected=tuple(inspected(self.evidence, self.bundle, rank) for rank in self.bundle.ranks),
            ran=tuple(what_ran(self.evidence, self.bundle)),
            warnings=tuple(version_warnings(self.bundle, self.policies)),
            notes=tuple(notes),
        )

    def _guarded(self, verdict: Verdict, cells: tuple[GateCell, ...]) -> tuple[Verdict, tuple[GateCell, ...]]:
        """Hold the last line: a PASS that no symbol and no kernel carries is none."""
        judged = [c for c in cells if c.tolerated is None and self.rules[c.rule].kind in ("require", "forbid")]
        if verdict is not Verdict.PASS or (judged and any(len(f) for f in self.evidence.frames.values())):
            return verdict, cells
        reason = (
            "0 kernels were recorded on any rank" if judged else "every rule is a known gap: nothing is left to judge"
        )
        self.rules.append(GateRule("something was witnessed", "policy", 1, None))
        kind = Verdict.INCONCLUSIVE if judged else Verdict.CONFIG_ERROR
        return kind, (*cells, GateCell(len(self.rules) - 1, None, None, Finding(kind, reason, must_be_seen=False)))

    def _add(self, kind: RuleKind, title: str, line: int, path: str | None, cells: Iterable[GateCell]) -> None:
        self.rules.append(GateRule(title, kind, line, path))
        self.cells += [replace(cell, rule=len(self.rules) - 1) for cell in cells]

    def _wheres(self, placed: PlacedRule) -> list[Where]:
        rule, run = placed.rule, self.bundle.run
        policy = next(p.policy for p in self.policies if _holds(p.policy, placed))
        asked: tuple[AskedExecution, ...] = ("any",) if run.kind == "imported" else run.executions
        stated = rule.executions or policy.executions or asked
        executions: list[Execution | None] = [None if own == "any" else own for own in dict.fromkeys(stated)]
        ranks = self.bundle.ranks if isinstance(rule.ranks, str) else sorted(set(rule.ranks))
        own = rule.purposes if isinstance(rule, RequireRule) else None
        purposes = policy.purposes if own is None else own
        return [Where(rank, execution, purposes) for rank in ranks for execution in executions]

    def _conditional(self, placed: PlacedRule) -> bool:
        return any(p.policy.conditional_graphs for p in self.policies if _holds(p.policy, placed))

    def _require(self, placed: PlacedRule) -> None:
        rule = placed.rule
        assert isinstance(rule, RequireRule)  # noqa: S101 -- the table says so
        wheres = self._wheres(placed)
        seen = {where: look(self.evidence, placed.selector, where, True) for where in wheres}
        cells = [self._required_cell(placed, rule, where, seen[where]) for where in wheres]
        self._add("require", placed.title, placed.line, placed.path, cells)
        if rule.source_sha256 or rule.module_sha256:
            pins = []
            for rank in dict.fromkeys(where.rank for where in wheres):
                where = Where(rank, None, wheres[0].purposes)
                pins.append(self._cell(where, pin_finding(self.evidence, where, rule, placed.selector), "modules"))
            self._add("pin", f"{placed.title}: pinned code", placed.line, placed.path, pins)
        if rule.equal_across_ranks:
            cells = []
            for execution in dict.fromkeys(where.execution for where in wheres):
                own = {where.rank: where for where in wheres if where.execution == execution}
                if any(log_only(self.evidence, rank) for rank in own):
                    finding = Finding(Verdict.CONFIG_ERROR, f"equal_across_ranks cannot be judged: {SETS_ONLY}")
                else:
                    finding = equality_finding(self.evidence, {r: seen[w] for r, w in own.items()}, own)
                cells.append(GateCell(0, None, execution, finding, "kernels"))
            self._add("equality", f"{placed.title}: equal on all ranks", placed.line, placed.path, cells)

    def _required_cell(self, placed: PlacedRule, rule: RequireRule, where: Where, seen: Seen) -> GateCell:
        asked = counts_asked(rule)
        if asked is not None and log_only(self.evidence, where.rank):
            return self._cell(
                where, Finding(Verdict.CONFIG_ERROR, f"{asked} cannot be judged: {SETS_ONLY}"), "dispatch_log"
            )
        submissions = submissions_of(self.evidence, where, placed.selector)
        finding = required_finding(self.evidence, where, seen, submissions, rule.at_least)
        if finding.verdict is Verdict.PASS or (seen.kernels and finding.verdict is not Verdict.FAIL):
            bound = self._conditional(placed)
            more = counted_finding(self.evidence, where, seen, rule, placed.selector, bound)
            finding = _joined([self._settled(where, own) for own in (finding, *more)])
        return self._cell(where, finding, "kernels", seen)

    def _forbid(self, placed: PlacedRule) -> None:
        wheres = self._wheres(placed)
        cells = []
        for where in wheres:
            seen = look(self.evidence, placed.selector, where, False)
            found = forbidden_finding(self.evidence, where, seen, self._told(placed, where, seen))
            cells.append(self._cell(where, found, "kernels", seen))
        if placed.rule.executions is None:
            cells += self._elsewhere(placed, wheres)
        self._add("forbid", placed.title, placed.line, placed.path, cells)

    def _elsewhere(self, placed: PlacedRule, wheres: list[Where]) -> list[GateCell]:
        """Judge forbidden kernels in an execution that was not asked for, or in none that is known."""
        cells = []
        for rank in dict.fromkeys(where.rank for where in wheres):
            own = [where for where in wheres if where.rank == rank]
            if any(where.execution is None for where in own):
                continue
            everywhere = Where(rank, None, own[0].purposes)
            seen = look(self.evidence, placed.selector, everywhere, False)
            inside = sum(look(self.evidence, placed.selector, where, False).kernels for where in own)
            count = seen.kernels - inside
            if count > 0:
                ran = f"forbidden {self._told(placed, everywhere, seen)} ran {count} times in the window"
                text = f"{ran} (in no execution that was asked for)"
                found = Finding(Verdict.FAIL, text, count, must_be_seen=False)
                cells.append(self._cell(everywhere, found, "kernels", seen))
        return cells

    def _told(self, placed: PlacedRule, where: Where, seen: Seen) -> str:
        """Tell a symbol, and where it is an expression or a class the kernels that are behind it."""
        if placed.selector.match not in ("regex", "class") or not seen.kernels:
            return placed.told
        names = self.evidence.kernels[where.rank].frame.loc[seen.mask, "base"].astype(str).unique().tolist()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{placed.told} ({', '.join(sorted(names)[:3])}{more})"

    def _dispatch(self, placed: PlacedRule) -> None:
        rule = placed.rule
        assert isinstance(rule, DispatchRule)  # noqa: S101 -- the table says so
        cells = []
        for where in self._wheres(placed):
            table = "receipts" if self.evidence.receipts[where.rank] else "dispatch_log"
            cells.append(self._cell(where, dispatch_finding(self.evidence, where, rule), table))
        self._add("dispatch", placed.title, placed.line, placed.path, cells)

    def _integrity(self) -> None:
        # Traces of others have no receipts: there is nothing that their kernels could contradict.
        silent = self.bundle.run.kind == "imported" and not any(self.evidence.receipts.values())
        for check in integrity_checks(self.evidence):
            if silent and check.name == "receipts equal witnesses":
                continue
            finding = Finding(check.verdict, check.reason, must_be_seen=False)
            settled = None
            if check.verdict is Verdict.INCONCLUSIVE:
                settled = settled_by(self.evidence, Where(self._rank_named(check.reason), None), check.reason)
            self._add("integrity", check.name, 1, None, [GateCell(0, None, None, finding, settled_by=settled)])

    def _rank_named(self, reason: str) -> int:
        return next((rank for rank in self.bundle.ranks if f"rank {rank}:" in reason), 0)

    def _cell(self, where: Where, finding: Finding, table: str, seen: Seen | None = None) -> GateCell:
        finding = self._settled(where, finding)
        first = seen.first if seen is not None else None
        file = self._file(table, where.rank)
        return GateCell(0, where.rank, where.execution, finding, file, first, finding.settled_by)

    def _settled(self, where: Where, finding: Finding) -> Finding:
        """Say which recording would settle what is INCONCLUSIVE, where the finding does not say so itself."""
        if finding.verdict is not Verdict.INCONCLUSIVE or finding.settled_by is not None:
            return finding
        return replace(finding, settled_by=settled_by(self.evidence, where, finding.reason))

    def _file(self, table: str, rank: int) -> str:
        suffix = ".jsonl" if table in ("modules", "receipts", "dispatch_log") else ""
        record = readable_rank_file(self.bundle, rank)
        imported = dict.fromkeys(item.path.rsplit("/", 1)[-1] for item in record.imported) if record else {}
        return f"{table}/rank={rank}{suffix}" + (f" from {', '.join(imported)}" if imported else "")

    def _tolerated(self, cell: GateCell) -> GateCell:
        rule = self.rules[cell.rule]
        if cell.finding.verdict is not Verdict.FAIL or rule.kind not in ("require", "forbid"):
            return cell
        for placed in self.asked:
            if placed.title != rule.title or placed.line != rule.line or placed.path != rule.path:
                continue
            for policy in self.policies:
                for gap in policy.policy.known_gap:
                    if gap.symbol == placed.selector.symbol and _covers(gap, cell):
                        return replace(cell, tolerated=gap)
        return cell


def _holds(policy: Policy, placed: PlacedRule) -> bool:
    """Say whether a rule is of a policy: the very object, because two policies may hold equal rules."""
    return any(placed.rule is own for own in (*policy.require, *policy.forbid, *policy.dispatch))


def _joined(findings: list[Finding]) -> Finding:
    """Return the worst of several findings about one cell, with every reason of that weight."""
    verdict = worst(finding.verdict for finding in findings)
    own = [finding for finding in findings if finding.verdict is verdict]
    kernels = max(finding.witnesses for finding in findings)
    settled = "; ".join(dict.fromkeys(f.settled_by for f in own if f.settled_by)) or None
    return Finding(verdict, "; ".join(dict.fromkeys(f.reason for f in own if f.reason)), kernels, settled_by=settled)


def _covers(gap: KnownGap, cell: GateCell) -> bool:
    executions = gap.executions
    in_execution = executions is None or "any" in executions or cell.execution in executions
    return in_execution and (isinstance(gap.ranks, str) or cell.rank in gap.ranks)
