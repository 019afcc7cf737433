"""What a gate says beside its cells: the reason, what was inspected, what did run, and notes."""

from __future__ import annotations

import difflib

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.evidence import Evidence, moe_counts, ranks_told
from alphamoe_profiler.gate_bundle import NarrowBundle
from alphamoe_profiler.gate_records import GateCell, GateRule, Ran, RankInspected, of_any_rank
from alphamoe_profiler.import_summary import imported_summary
from alphamoe_profiler.policy import PlacedPolicy
from alphamoe_profiler.policy_check import PlacedRule
from alphamoe_profiler.verdicts import Verdict
from alphamoe_profiler.windows import WindowBounds
from alphamoe_tracers.errors import EvidenceError


def inspected(evidence: Evidence, bundle: NarrowBundle, rank: int) -> RankInspected:
    """Say what was looked at on one rank."""
    kernels, launches = bundle.read_table("kernels", rank), bundle.read_table("launches", rank)
    record = readable_rank_file(bundle, rank)
    proof = evidence.proofs[rank]
    own = (proof.cut, proof.collector_off, *proof.failures("decode_graph_replay"))
    return RankInspected(
        rank=rank,
        kernels=kernels.table.num_rows + kernels.skipped,
        launches=launches.table.num_rows + launches.skipped,
        receipts=len(evidence.receipts[rank]),
        files=tuple(item.path for item in record.imported) if record else (),
        window=tuple(text for text in own if text),
    )


def what_ran(evidence: Evidence, bundle: NarrowBundle) -> list[Ran]:
    """Return the MoE kernels that did run, or the most frequent kernels where none did."""
    table = moe_counts(evidence)
    found = [
        Ran(int(rank), _text(execution), str(symbol), _text(kind), int(kernels))
        for rank, execution, symbol, kind, kernels in zip(
            *(table[name].tolist() for name in ("rank", "execution", "symbol", "class", "kernels")), strict=True
        )
    ]
    if found:
        return found
    for rank in bundle.ranks:
        counts = bundle.symbol_counts(rank)
        top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10]
        found += [Ran(rank, None, name, None, count) for name, count in top]
    return found


def notes_of(
    evidence: Evidence,
    bundle: NarrowBundle,
    policies: tuple[PlacedPolicy, ...],
    rules: list[PlacedRule],
    cells: tuple[GateCell, ...],
) -> list[str]:
    """Return what a reader should know and no rule judges."""
    notes = []
    names: set[str] = set()
    for rank in bundle.ranks:
        names |= set(bundle.symbol_counts(rank))
    for rule in rules:
        if rule.table == "dispatch":
            continue
        frames = evidence.frames.values()
        full = sorted({n for f in frames for n in f.loc[rule.selector.mask(f), "full"].astype(str).unique().tolist()})
        if rule.table == "require" and not full:
            near = difflib.get_close_matches(rule.selector.symbol, names, n=3, cutoff=0.5)
            told = f"; nearest: {', '.join(near)}" if near else ""
            notes.append(f"{rule.told} matches no kernel on any rank{told}")
        if rule.selector.match in ("base", "triton") and len(full) > 1:
            shown = ", ".join(full[:3]) + (f" and {len(full) - 3} more" if len(full) > 3 else "")
            notes.append(f"{rule.selector.told} is ambiguous: {len(full)} full names have this base name ({shown})")
    used = {cell.tolerated for cell in cells}
    for placed in policies:
        spare = [gap for gap in placed.policy.known_gap if gap not in used]
        notes += [f"known gap {gap.symbol} (until {gap.expires}) was not needed: take it out" for gap in spare]
    if bundle.run.kind == "imported":
        return notes + list(imported_summary(evidence).notes)
    for rank, own in evidence.kernels.items():
        loaded = _loaded_inside(bundle, rank, own.bounds)
        if loaded:
            notes.append(
                f"rank {rank}: {loaded} code modules were loaded inside the window (a first use, or compiled there)"
            )
        if own.duplicates:
            notes.append(f"rank {rank}: {own.duplicates} records were delivered twice and counted once")
    return notes


def _loaded_inside(bundle: RunBundle, rank: int, bounds: WindowBounds) -> int:
    if bounds.open_ns is None or bounds.close_ns is None:
        return 0
    try:
        return sum(bounds.open_ns <= module.loaded_ns <= bounds.close_ns for module in bundle.modules(rank))
    except EvidenceError:  # told by bundle_check.check()
        return 0


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def overall_reason(verdict: Verdict, cells: tuple[GateCell, ...], rules: list[GateRule], bundle: RunBundle) -> str:
    """Say in one line what the verdict rests on."""
    if verdict is Verdict.PASS:
        own = [c for c in cells if rules[c.rule].kind == "require" and c.tolerated is None]
        total = sum(cell.finding.witnesses for cell in own)
        count = len({cell.rule for cell in own})
        if not own:
            return f"no forbidden symbol ran on {ranks_told(bundle.ranks)}"
        what = rules[own[0].rule].title if count == 1 else f"{count} symbols"
        return f"{what} witnessed {total:,} times on {ranks_told({c.rank for c in own if c.rank is not None})}"
    groups: dict[tuple[str, str], list[GateCell]] = {}
    # A forbidden kernel that ran explains a missing one, so it is named first; one that did not explains nothing.
    failed = verdict is Verdict.FAIL
    ordered = sorted(cells, key=lambda cell: (rules[cell.rule].kind == "forbid") is not failed)
    for cell in ordered:
        if cell.finding.verdict is verdict and cell.tolerated is None:
            told = of_any_rank(cell.finding.reason, cell.rank)
            groups.setdefault((rules[cell.rule].title, told), []).append(cell)
    parts = []
    for (title, reason), own in groups.items():
        ranks = {cell.rank for cell in own if cell.rank is not None}
        executions = list(dict.fromkeys(cell.execution for cell in own if cell.execution))
        where = " ".join(part for part in (ranks_told(ranks) if ranks else "", ", ".join(executions)) if part)
        parts.append(f"{title}{f' on {where}' if where else ''}: {reason}")
    more = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
    return "; ".join(parts[:4]) + more
