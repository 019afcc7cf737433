"""The conditions that a rule adds to presence: counts, layers, receipts, sets of M, equality across ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from alphamoe_profiler.bundle import readable_rank_file
from alphamoe_profiler.gate_cells import (
    Seen,
    Where,
    complete,
    exercised,
    failures,
    how_to_serve,
    not_exercised,
    submissions_of,
)
from alphamoe_profiler.m_buckets import fold
from alphamoe_profiler.policy import DispatchRule, MSet, RequireRule
from alphamoe_profiler.policy_match import Selector
from alphamoe_profiler.verdicts import Finding, Verdict
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.records import Receipt
from alphamoe_tracers.sglang_log import LoggedExecution

if TYPE_CHECKING:
    from alphamoe_profiler.evidence import Evidence

SETS_ONLY = "a server log is deduplicated: it holds sets, never counts"


def log_only(evidence: Evidence, rank: int) -> bool:
    """Say whether all that a rank has is a server log."""
    record = readable_rank_file(evidence.bundle, rank)
    return record is not None and bool(record.imported) and all(i.format == "sglang-log" for i in record.imported)


def counts_asked(rule: RequireRule) -> str | None:
    """Name the first condition of a rule that needs counts, or None."""
    asked = {
        "exactly": rule.exactly is not None,
        "per_layer": rule.per_layer is not None,
        "equals_receipts": rule.equals_receipts,
        "equal_across_ranks": rule.equal_across_ranks,
        "at_least": rule.at_least > 1,
    }
    return next((name for name, wanted in asked.items() if wanted), None)


def counted_finding(
    evidence: Evidence, where: Where, seen: Seen, rule: RequireRule, selector: Selector, lower_bounds: bool
) -> list[Finding]:
    """Judge every condition of a rule beside presence, in one cell that has at least one kernel.

    Args:
        evidence: of the run.
        where: the cell.
        seen: the records that count.
        rule: what is asked.
        selector: of which symbol.
        lower_bounds: counts in graph replays may be lower than what ran (conditional nodes).
    """
    bound = lower_bounds and where.execution != "eager"
    found = []
    if rule.exactly is not None:
        found.append(_exactly(evidence, where, seen, rule.exactly, bound))
    if rule.per_layer is not None:
        found.append(_per_layer(evidence, where, seen, rule.per_layer, bound))
    if rule.equals_receipts:
        found.append(_equals_receipts(evidence, where, seen, selector, bound))
    if rule.M is not None:
        found.append(_m_set(evidence, where, seen, rule.M, bound))
    return found


def _too_few(evidence: Evidence, where: Where, text: str, seen: Seen, bound: bool) -> Finding:
    """Judge a count that is too low: a contradiction only where nothing can be missing."""
    if bound:
        return Finding(Verdict.INCONCLUSIVE, f"{text}: counts in conditional graphs are lower bounds", seen.kernels)
    if seen.hidden:
        told = f"{text}, but {seen.hidden} kernels have no known name, or one that a tool cut, and may be it"
        return Finding(Verdict.INCONCLUSIVE, told, seen.kernels)
    if seen.loose:
        told = f"{text}, but {seen.loose} kernels of it ran in the window that could not be attributed"
        return Finding(Verdict.INCONCLUSIVE, told, seen.kernels)
    proof = evidence.proofs[where.rank]
    if complete(proof, where.execution):
        return Finding(Verdict.FAIL, text, seen.kernels)
    missing = failures(proof, where.execution) or (proof.cut or proof.collector_off or "",)
    return Finding(Verdict.INCONCLUSIVE, f"{text}, window not proven complete: {missing[0]}", seen.kernels)


def _exactly(evidence: Evidence, where: Where, seen: Seen, wanted: int, bound: bool) -> Finding:
    kernels = seen.kernels
    least = "at least " if bound else ""
    text = f"seen {least}{kernels} times, not exactly {wanted}"
    if kernels > wanted:
        return Finding(Verdict.FAIL, text, kernels)
    if kernels < wanted:
        return _too_few(evidence, where, text, seen, bound)
    if bound or seen.loose or not complete(evidence.proofs[where.rank], where.execution):
        return _too_few(evidence, where, f"seen {least}{kernels} times, and there may be more", seen, bound)
    return Finding(Verdict.PASS, "", kernels)


def _per_layer(evidence: Evidence, where: Where, seen: Seen, wanted: int, bound: bool) -> Finding:
    frame = evidence.kernels[where.rank].frame
    own = frame.loc[seen.mask, ["step", "layer"]]
    unplaced = int((own["step"].isna() | own["layer"].isna()).sum())
    if unplaced:
        text = f"{unplaced} of {seen.kernels} kernels could not be attributed to a layer"
        return Finding(Verdict.INCONCLUSIVE, text, seen.kernels)
    pairs, sizes = np.unique(own.to_numpy(np.int64), axis=0, return_counts=True)
    counts = {(step, layer): size for (step, layer), size in zip(pairs.tolist(), sizes.tolist(), strict=True)}
    many = {key: size for key, size in counts.items() if size > wanted}
    if many:
        step, layer = min(many)
        text = f"{many[step, layer]} kernels in step {step} layer {layer}, not {wanted}"
        return Finding(Verdict.FAIL, _more(text, len(many)), seen.kernels)
    few = {key: size for key, size in counts.items() if size < wanted}
    few |= dict.fromkeys(_expected_layers(evidence, where) - counts.keys(), 0)
    if few:
        step, layer = min(few)
        text = f"{few[step, layer]} kernels in step {step} layer {layer}, not {wanted}"
        return _too_few(evidence, where, _more(text, len(few)), seen, bound)
    return Finding(Verdict.PASS, "", seen.kernels)


def _expected_layers(evidence: Evidence, where: Where) -> set[tuple[int, int]]:
    """Return (step, layer) of every step that receipts name, for every layer of the model."""
    own = _receipts(evidence, where)
    geometry = evidence.bundle.run.geometry
    lists = {id(receipt.kernels): receipt.kernels for receipt in own}
    layers = {item.layer for kernels in lists.values() for item in kernels}
    if geometry is not None:
        layers |= set(range(geometry.layers))
    return {(receipt.step, layer) for receipt in own for layer in layers}


def _equals_receipts(evidence: Evidence, where: Where, seen: Seen, selector: Selector, bound: bool) -> Finding:
    rank = where.rank
    if not evidence.receipts[rank]:
        if _logged(evidence, rank):
            return Finding(Verdict.CONFIG_ERROR, f"equals_receipts cannot be judged: {SETS_ONLY}", seen.kernels)
        return Finding(Verdict.INCONCLUSIVE, "no receipt of this rank to compare with", seen.kernels)
    submitted = submissions_of(evidence, where, selector)
    if not submitted:
        return Finding(Verdict.FAIL, f"seen {seen.kernels} times, and no receipt submits it", seen.kernels)
    frame = evidence.kernels[rank].frame
    shapes = frame.loc[seen.mask, "shape_ok"]
    wrong = int((shapes == False).sum())  # noqa: E712 -- null is unknown, not wrong
    if wrong:
        return Finding(
            Verdict.FAIL, f"{wrong} kernels were not launched as the M of their receipt asks for", seen.kernels
        )
    own = evidence.agreements[rank]
    chosen = own.differences["symbol"].map(selector.matches).astype(bool)
    if where.execution is not None:
        chosen &= own.differences["execution"] == where.execution
    different = own.differences.loc[chosen]
    if len(different):
        row = different.iloc[0]
        layer = "all layers" if row["layer"] is None or row.isna()["layer"] else f"layer {row['layer']}"
        text = f"{row['witnessed']} kernels for {row['submitted']} submissions in step {row['step']} {layer}"
        text = _more(text, len(different))
        if bool((different["witnessed"] > different["submitted"]).any()):
            return Finding(Verdict.FAIL, text, seen.kernels)
        return _too_few(evidence, where, text, seen, bound)
    if seen.kernels != submitted:
        text = f"{seen.kernels} kernels for {submitted} submissions"
        return (
            Finding(Verdict.FAIL, text, seen.kernels)
            if seen.kernels > submitted
            else _too_few(evidence, where, text, seen, bound)
        )
    return Finding(Verdict.PASS, "", seen.kernels)


def _m_set(evidence: Evidence, where: Where, seen: Seen, asked: MSet, bound: bool) -> Finding:
    if asked.of != "kernel":
        return m_of_dispatch(evidence, where, asked, None, seen.kernels)
    frame = evidence.kernels[where.rank].frame
    values = frame.loc[seen.mask, "kernel_M"]
    unknown = int(values.isna().sum())
    observed = {int(value) for value in values.dropna().unique()}
    found = _strangers(asked, observed, seen.kernels)
    if found is not None:
        return found
    if unknown:
        return Finding(Verdict.INCONCLUSIVE, f"{unknown} of {seen.kernels} kernels have no known M", seen.kernels)
    dispatched = {item.M for receipt in _receipts(evidence, where) for item in receipt.kernels}
    absent = _lacking(asked, observed) & dispatched
    if absent:
        return _too_few(evidence, where, f"kernel M {fold(absent)} was dispatched and never witnessed", seen, bound)
    return _set_found(evidence, where, asked, observed, seen.kernels)


def m_of_dispatch(evidence: Evidence, where: Where, asked: MSet, kernel: str | None, witnesses: int) -> Finding:
    """Judge a set of dispatch M or of real tokens, by receipt or by server log."""
    name = "M" if asked.of != "real_tokens" else "real_tokens"
    records: list[Receipt] | list[LoggedExecution] = _receipts(evidence, where)
    if not records:
        logged = _logged(evidence, where.rank)
        records = [item for item in logged if where.execution in (None, item.execution)]
    if kernel is not None:
        records = [r for r in records if any(k.kernel == kernel for k in r.kernels)]  # type: ignore[assignment]
    if asked.of == "kernel":
        observed = {k.M for r in records for k in r.kernels if kernel in (None, k.kernel)}
    else:
        observed = {value for r in records if (value := getattr(r, name)) is not None}
    if not observed:
        return Finding(Verdict.INCONCLUSIVE, f"no {asked.of} M was recorded there", witnesses)
    found = _strangers(asked, observed, witnesses)
    return found if found is not None else _set_found(evidence, where, asked, observed, witnesses)


def _what(asked: MSet) -> str:
    return "real tokens" if asked.of == "real_tokens" else f"{asked.of} M"


def _lacking(asked: MSet, observed: set[int]) -> set[int]:
    return {*(asked.exact or ()), *(asked.at_least or ())} - observed


def _strangers(asked: MSet, observed: set[int], witnesses: int) -> Finding | None:
    """Judge values that were observed and are not allowed; None where there is none."""
    strangers = set(observed) - set(asked.exact) if asked.exact is not None else set()
    if asked.within is not None:
        ranges = asked.within
        strangers |= {value for value in observed if not any(low <= value <= high for low, high in ranges)}
    if not strangers:
        return None
    told = f"{_what(asked)} {fold(strangers)} is not in the set that is allowed: {_allowed(asked)}"
    return Finding(Verdict.FAIL, told, witnesses)


def _set_found(evidence: Evidence, where: Where, asked: MSet, observed: set[int], witnesses: int) -> Finding:
    """Judge an allowed set: a value that nothing says was dispatched was not exercised, which is not absence."""
    lacking = _lacking(asked, observed)
    if lacking:
        way = how_to_serve(evidence, where, asked.of != "real_tokens")
        told = f"{_what(asked)} {fold(lacking)} was not exercised"
        return Finding(Verdict.INCONCLUSIVE, told, witnesses, settled_by=way)
    # Dispatch evidence is no witness: its PASS is about the set, not about presence.
    return Finding(Verdict.PASS, "", witnesses, must_be_seen=witnesses > 0)


def _allowed(asked: MSet) -> str:
    """Write the values that a set allows."""
    exact = None if asked.exact is None else fold(asked.exact) or "none"
    ranges = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in asked.within or ())
    within = None if asked.within is None else ranges or "none"
    return " within ".join(part for part in (exact, within) if part is not None)


def dispatch_finding(evidence: Evidence, where: Where, rule: DispatchRule) -> Finding:
    """Judge what the backend dispatched in one cell."""
    own = _receipts(evidence, where)
    logged = [item for item in _logged(evidence, where.rank) if where.execution in (None, item.execution)]
    if not own and (rule.exactly is not None or rule.at_least > 1) and _logged(evidence, where.rank):
        return Finding(Verdict.CONFIG_ERROR, f"a count of forwards cannot be judged: {SETS_ONLY}", must_be_seen=False)
    if not own and not logged:
        reason = (
            not_exercised(evidence, where) if not exercised(evidence, where) else "nothing says what was dispatched"
        )
        return Finding(Verdict.INCONCLUSIVE, reason, must_be_seen=False)
    names = {k.kernel for record in (own or logged) for k in record.kernels}
    if rule.kernel is not None and rule.kernel not in names:
        text = f"{rule.kernel} was not dispatched; dispatched: {', '.join(sorted(names)) or 'nothing'}"
        return Finding(Verdict.FAIL, text, must_be_seen=False)
    if own:
        count = sum(rule.kernel is None or any(k.kernel == rule.kernel for k in r.kernels) for r in own)
        if rule.exactly is not None and count != rule.exactly:
            return Finding(Verdict.FAIL, f"{count} forwards, not exactly {rule.exactly}", must_be_seen=False)
        if count < rule.at_least:
            return Finding(Verdict.FAIL, f"{count} forwards of {rule.at_least}", must_be_seen=False)
    if rule.M is not None:
        return m_of_dispatch(evidence, where, rule.M, rule.kernel, 0)
    return Finding(Verdict.PASS, "", must_be_seen=False)


def equality_finding(evidence: Evidence, seen: dict[int, Seen], wheres: dict[int, Where]) -> Finding:
    """Compare the kernels of one rule in one execution across ranks, in all and at every M."""
    totals = {rank: own.kernels for rank, own in seen.items()}
    least = min(totals.values(), default=0)
    by_m: dict[int, dict[int, int]] = {}
    for rank, own in seen.items():
        frame = evidence.kernels[rank].frame
        values, counts = np.unique(frame.loc[own.mask, "kernel_M"].dropna().to_numpy(np.int64), return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            by_m.setdefault(value, {})[rank] = count
    parts = []
    for value, counts_at in sorted(by_m.items()):
        own_counts = {rank: counts_at.get(rank, 0) for rank in seen}
        if len(set(own_counts.values())) > 1:
            parts.append(f"M {value}: {_by_count(own_counts)}")
    if len(set(totals.values())) > 1 and not parts:
        parts.append(_by_count(totals))
    if not parts:
        if not least:
            return Finding(Verdict.INCONCLUSIVE, "there is nothing to compare: no kernel was witnessed")
        return Finding(Verdict.PASS, "", sum(totals.values()))
    text = f"the ranks differ: {'; '.join(parts[:6])}" + (f"; and {len(parts) - 6} more" if len(parts) > 6 else "")
    placeless = [r for r, own in seen.items() if evidence.kernels[r].frame.loc[own.mask, "kernel_M"].isna().any()]
    if placeless and len(set(totals.values())) == 1:
        text += f", but kernels of it have no known M on rank {fold(placeless)}"
        return Finding(Verdict.INCONCLUSIVE, text, least)
    loose = [rank for rank, own in seen.items() if own.loose]
    if loose:
        text += f", but kernels of it could not be attributed on rank {fold(loose)}"
        return Finding(Verdict.INCONCLUSIVE, text, least)
    open_ = [rank for rank in seen if not complete(evidence.proofs[rank], wheres[rank].execution)]
    if open_:
        return Finding(
            Verdict.INCONCLUSIVE, f"{text}, but windows are not proven complete on rank {fold(open_)}", least
        )
    return Finding(Verdict.FAIL, text, least)


def _by_count(counts: dict[int, int]) -> str:
    groups: dict[int, list[int]] = {}
    for rank, count in counts.items():
        groups.setdefault(count, []).append(rank)
    return ", ".join(f"{count} on rank {fold(ranks)}" for count, ranks in sorted(groups.items(), reverse=True))


def _receipts(evidence: Evidence, where: Where) -> list[Receipt]:
    own: Iterable[Receipt] = evidence.receipts[where.rank]
    return [r for r in own if r.purpose in where.purposes and where.execution in (None, r.execution)]


def _logged(evidence: Evidence, rank: int) -> list[LoggedExecution]:
    try:
        return [line.execution for line in evidence.bundle.dispatch_log(rank) if line.execution is not None]
    except EvidenceError:  # told by bundle_check.check()
        return []


def _more(text: str, count: int) -> str:
    return text + (f" (and {count - 1} more)" if count > 1 else "")
