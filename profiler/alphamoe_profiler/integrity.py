"""Contradictions inside accepted evidence: each is FAIL with reason ``integrity``, missing evidence is INCONCLUSIVE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphamoe_profiler.bundle import readable_rank_file
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.m_buckets import fold, m_disagreements, witness_mask
from alphamoe_profiler.verdicts import Verdict
from alphamoe_tracers.errors import EvidenceError

if TYPE_CHECKING:
    from alphamoe_profiler.evidence import Evidence


@dataclass(frozen=True)
class Check:
    """One way in which the records of a run may contradict each other."""

    name: str
    verdict: Verdict
    reason: str
    compared: int
    """How many things were compared. A PASS that compared nothing cannot be built."""

    def __post_init__(self) -> None:
        """Refuse silent states.

        Raises:
            ValueError: a PASS that compared nothing, or another verdict without a reason.
        """
        if self.verdict is Verdict.PASS and not self.compared:
            raise ValueError(f"{self.name}: a PASS must have compared something")
        if self.verdict is not Verdict.PASS and not self.reason:
            raise ValueError(f"{self.name}: {self.verdict.value} needs a reason")


def integrity_checks(evidence: Evidence) -> list[Check]:
    """Return every check that had something to compare."""
    checks = [_files(evidence)]
    if evidence.bundle.run.prompts:
        checks.append(_requests(evidence))
    if any(evidence.receipts.values()):
        layers = _layers(evidence)
        checks += [_receipts(evidence), _ranks_agree(evidence), *([layers] if layers is not None else [])]
    if _comparable(evidence):
        checks.append(_agreement(evidence))
    shapes = _shapes(evidence)
    return [*checks, shapes] if shapes is not None else checks


def _files(evidence: Evidence) -> Check:
    problems = check(evidence.bundle)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Check("files", Verdict.INCONCLUSIVE, f"{problems[0]}{more}", evidence.bundle.world_size)
    return Check("files", Verdict.PASS, "", evidence.bundle.world_size)


def _requests(evidence: Evidence) -> Check:
    """Check that real requests finished: a run without one witnessed something else."""
    try:
        requests = [item for item in evidence.bundle.requests() if item.purpose == "witness"]
    except EvidenceError as error:
        return Check("requests", Verdict.INCONCLUSIVE, str(error), 0)
    open_ = [f"request {item.request_id} {item.status}" for item in requests if item.status != "finished"]
    if not requests:
        open_ = ["requests.jsonl has no served request"]
    known = {item.request_id for item in requests}
    receipts = [item for own in evidence.receipts.values() for item in own if item.purpose == "witness"]
    lacking = sorted({name for item in receipts for name in item.request_ids} - known)
    open_ += [f"request {name} is in the receipts but not in requests.jsonl" for name in lacking if requests]
    if open_:
        return Check("requests", Verdict.INCONCLUSIVE, _first(open_), len(requests))
    return Check("requests", Verdict.PASS, "", len(requests))


def _receipts(evidence: Evidence) -> Check:
    """Check what each receipt says against itself."""
    found = []
    for rank, receipts in evidence.receipts.items():
        steps: set[int] = set()
        for receipt in receipts:
            found += [f"rank {rank} {problem}" for problem in receipt.problems()]
            if receipt.step in steps:
                found.append(f"rank {rank} step {receipt.step}: two different receipts")
            steps.add(receipt.step)
            # Dispatch M includes graph padding: no submission can have worked on more tokens than the layer was given.
            kernel_M = max((item.M for item in receipt.kernels), default=0)
            if receipt.M is not None and kernel_M > receipt.M:
                found.append(f"rank {rank} step {receipt.step}: kernel M {kernel_M} exceeds dispatch M {receipt.M}")
            if receipt.execution == "eager" and any(item.captured for item in receipt.kernels):
                found.append(f"rank {rank} step {receipt.step}: an eager step with submissions made while capturing")
    return _judged("receipts", found, sum(map(len, evidence.receipts.values())))


def _ranks_agree(evidence: Evidence) -> Check:
    steps = {receipt.step for own in evidence.receipts.values() for receipt in own}
    return _judged("ranks agree on M", [*m_disagreements(evidence.receipts), *_lone_steps(evidence)], len(steps))


def _lone_steps(evidence: Evidence) -> list[str]:
    """Say which whole rank has no receipt of a step that others ran: every rank takes part in every forward."""
    whole = {
        rank: {item.step for item in own if item.purpose == "witness"}
        for rank, own in evidence.receipts.items()
        if own and evidence.proofs[rank].cut is None and not _receipts_damaged(evidence, rank)
    }
    every = {item.step for own in evidence.receipts.values() for item in own if item.purpose == "witness"}
    return [
        f"rank {rank}: no receipt of step {fold(every - own)}, which other ranks ran"
        for rank, own in whole.items()
        if own != every
    ]


def _layers(evidence: Evidence) -> Check | None:
    """Check that witness steps submit in the same layers: one that left neither submission nor kernel shows so."""
    seen: dict[tuple[int, int], frozenset[int]] = {}
    by_list: dict[int, frozenset[int]] = {}  # steps share their lists of submissions
    for rank, receipts in evidence.receipts.items():
        for item in receipts:
            if item.purpose == "witness":
                own = by_list.get(id(item.kernels))
                if own is None:
                    own = by_list[id(item.kernels)] = frozenset(kernel.layer for kernel in item.kernels)
                seen[rank, item.step] = own
    every: frozenset[int] = frozenset().union(*set(seen.values()))
    # A rank that submits nothing at all is asked for by rules, if at all.
    compared = {rank for (rank, _), own in seen.items() if own}
    found = [
        f"rank {rank} step {step}: nothing was submitted in layer {fold(every - own)}, which other steps submit in"
        for (rank, step), own in seen.items()
        if rank in compared and own != every
    ]
    return _judged("every layer in every step", found, len(seen)) if every else None


def _comparable(evidence: Evidence) -> bool:
    return any(
        (own.compared or own.orphans) and evidence.proofs[rank].collector_off is None
        for rank, own in evidence.agreements.items()
    )


def _agreement(evidence: Evidence) -> Check:
    """Compare receipts with witnesses: a surplus is a contradiction, a gap only where the window is proven."""
    failed: list[str] = []
    open_: list[str] = []
    compared = 0
    # A run recorded without receipts lacks evidence; only kernels beside other receipts contradict something.
    silent = not any(evidence.receipts.values())
    for rank, own in evidence.agreements.items():
        proof = evidence.proofs[rank]
        if proof.collector_off is not None:
            continue
        compared += own.compared
        damaged = _receipts_damaged(evidence, rank)
        if own.orphans:
            text = f"rank {rank}: {own.orphans} MoE kernels in steps {fold(own.orphan_steps)} without a receipt"
            (open_ if silent or damaged or proof.cut else failed).append(text)
        if len(own.differences):
            executions = set(own.differences["execution"])
            # A kernel that ran, but whose step nothing tells, may be the one that is missing.
            loose = own.unattributed and own.missing <= own.unattributed
            proven = not loose and all(proof.complete(execution) for execution in executions)
            text = f"rank {rank}: {own.told()}"
            if loose:
                text += f" ({own.unattributed} kernels of these symbols could not be attributed to a step)"
            (failed if proven or (own.surplus and not damaged) else open_).append(text)
        elif own.unplaced:
            open_.append(f"rank {rank}: {own.unplaced} MoE kernels have no known layer, compared by step only")
    name = "receipts equal witnesses"
    if failed:
        return _judged(name, failed, compared)
    if open_:
        return Check(name, Verdict.INCONCLUSIVE, _first(open_), compared)
    if not compared:
        return Check(name, Verdict.INCONCLUSIVE, "there was nothing to compare", 0)
    return Check(name, Verdict.PASS, "", compared)


def _receipts_damaged(evidence: Evidence, rank: int) -> bool:
    file = evidence.bundle.receipts(rank)
    record = readable_rank_file(evidence.bundle, rank)
    fewer = record is not None and len(file.receipts) + file.duplicates < record.receipts
    return bool(file.cut or file.problems or fewer)


def _shapes(evidence: Evidence) -> Check | None:
    """Check recorded launch shapes against the launch rule for the receipt's M; None where no rule applies."""
    wrong, compared = [], 0
    for rank, frame in evidence.frames.items():
        judged = frame.loc[witness_mask(frame) & frame["shape_ok"].notna()]
        compared += len(judged)
        bad = judged.loc[~judged["shape_ok"].astype(bool)]
        if len(bad):
            first = bad.iloc[0]
            grid = (int(first["grid_x"]), int(first["grid_y"]), int(first["grid_z"]))
            wrong.append(
                f"rank {rank}: {len(bad)} kernels were not launched as their M asks for, the first at step "
                f"{first['step']} layer {first['layer']} M {first['kernel_M']} with grid {grid}"
            )
    return _judged("launch shapes", wrong, compared) if compared else None


def _judged(name: str, contradictions: list[str], compared: int) -> Check:
    if contradictions:
        return Check(name, Verdict.FAIL, f"integrity: {_first(contradictions)}", compared)
    return Check(name, Verdict.PASS, "", compared)


def _first(texts: list[str]) -> str:
    return texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")
