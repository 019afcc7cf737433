"""One way to judge a symbol on a rank in an execution: the conditions of DESIGN 8, for gates and run reports alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alphamoe_profiler.bundle import readable_rank_file
from alphamoe_profiler.evidence import NOT_REAL_REQUESTS, Evidence
from alphamoe_profiler.import_attribution import exercised_executions
from alphamoe_profiler.policy_match import Bools, Selector
from alphamoe_profiler.verdicts import Finding, Verdict
from alphamoe_profiler.windows import WindowProof
from alphamoe_tracers.records import Execution

if TYPE_CHECKING:
    import pandas as pd

    from alphamoe_profiler.run_records import RunInfo

_HOW_TO_EXERCISE = {
    "eager": "serve a request eagerly: --executions eager",
    "prefill_graph_replay": "a prompt that fits a captured prefill size would exercise it: --executions, "
    "--cuda-graph-bs-prefill",
    "decode_graph_replay": "more than one new token, in a batch that fits a captured decode size, would exercise it: "
    "--executions, --max-new-tokens, --cuda-graph-bs-decode",
}
_IN_A_TRACE = "no {what} in the imported trace; profile a window that serves such steps"


@dataclass(frozen=True)
class Where:
    """One cell of the question: a rank and an execution, None being any."""

    rank: int
    execution: Execution | None
    purposes: tuple[str, ...] = ("witness",)


@dataclass(frozen=True)
class FirstRecord:
    """The earliest record behind a count."""

    start_ns: int
    correlation_id: int | None
    graph_node_id: int | None

    def told(self) -> str:
        """Name it in a few words."""
        ids = [
            f"{name} {value}"
            for name, value in (("correlation", self.correlation_id), ("node", self.graph_node_id))
            if value is not None
        ]
        return ", ".join([f"start_ns {self.start_ns}", *ids])


@dataclass(frozen=True)
class Seen:
    """What the records of one rank show of one symbol in one cell."""

    kernels: int
    """Records that count: inside the window, of a purpose that counts."""
    loose: int
    """Inside the window, but in no known execution or purpose."""
    elsewhere: int
    """Everything else of that symbol."""
    hidden: int
    """Kernels that may be this symbol: their name is not known, or a tool cut it."""
    first: FirstRecord | None
    mask: Bools
    """[n] the records that count."""


def counted(frame: pd.DataFrame, where: Where) -> Bools:
    """Return [n] which kernels count for a required symbol."""
    purposes = frame["purpose"].cat.categories.isin(where.purposes)
    codes = frame["purpose"].cat.codes.to_numpy()
    real = frame["in_window"].to_numpy() & _lookup(purposes, codes)
    return real & _in_execution(frame, where.execution)


def not_other_traffic(frame: pd.DataFrame) -> Bools:
    """Return [n] which kernels a forbidden symbol is sought in: inside the window, not known to be other traffic."""
    other = frame["purpose"].cat.categories.isin(NOT_REAL_REQUESTS)
    return frame["in_window"].to_numpy() & ~_lookup(other, frame["purpose"].cat.codes.to_numpy())


def look(evidence: Evidence, selector: Selector, where: Where, required: bool) -> Seen:
    """Look for one symbol in the records of one rank."""
    frame = evidence.kernels[where.rank].frame
    meant = selector.mask(frame)
    real = counted(frame, where) if required else not_other_traffic(frame) & _in_execution(frame, where.execution)
    of_symbol = meant & real
    kernels = int(of_symbol.sum())
    loose = 0
    if required:
        unknown = frame["purpose"].isna().to_numpy()
        if where.execution is not None:
            unknown = unknown | frame["execution"].isna().to_numpy()
        loose = int((meant & frame["in_window"].to_numpy() & unknown).sum())
    hidden = int((selector.truncated(frame) & ~meant).sum())
    elsewhere = int((meant & ~real).sum()) - loose if required else 0
    return Seen(kernels, loose, max(elsewhere, 0), hidden, first_record(frame, of_symbol), of_symbol)


def first_record(frame: pd.DataFrame, mask: Bools) -> FirstRecord | None:
    """Return the earliest timed record of a mask, an untimed one where there is no other, None where there is none."""
    rows = np.flatnonzero(mask)
    if not len(rows):
        return None
    start = frame["start_ns"].to_numpy()[rows]
    timed = rows[start > 0]
    row = int(timed[np.argmin(start[start > 0])]) if len(timed) else int(rows[0])
    ids = [frame[name].iloc[row] for name in ("correlation_id", "graph_node_id")]
    correlation, node = (None if value is None or not _known(value) else int(value) for value in ids)
    return FirstRecord(int(frame["start_ns"].iloc[row]), correlation, node)


def required_finding(evidence: Evidence, where: Where, seen: Seen, submissions: int, at_least: int = 1) -> Finding:
    """Judge a symbol that must be witnessed. Presence survives damage, absence must be proven."""
    proof = evidence.proofs[where.rank]
    if proof.cut is not None:
        return Finding(Verdict.INCONCLUSIVE, proof.cut, seen.kernels)
    if seen.kernels >= at_least:
        return Finding(Verdict.PASS, "", seen.kernels)
    if proof.collector_off is not None:
        return Finding(Verdict.INCONCLUSIVE, proof.collector_off, seen.kernels)
    what = f"seen {seen.kernels} times of {at_least}" if seen.kernels else "not seen"
    if not seen.kernels and not exercised(evidence, where):
        return _before(Finding(Verdict.INCONCLUSIVE, not_exercised(evidence, where)), seen)
    if seen.loose:
        there = "there, but" if where.execution is not None else "in a known step, but"
        reason = f"{what} {there} {seen.loose} kernels of it ran in the window that could not be attributed"
        return Finding(Verdict.INCONCLUSIVE, reason, seen.kernels)
    if seen.hidden:
        reason = f"{what}, but {seen.hidden} kernels have no known name, or one that a tool cut, and may be it"
        return Finding(Verdict.INCONCLUSIVE, reason, seen.kernels)
    if not complete(proof, where.execution):
        reason = f"{what}, window not proven complete: {failures(proof, where.execution)[0]}"
        return _before(Finding(Verdict.INCONCLUSIVE, reason, seen.kernels), seen)
    submitted = f"{submissions} submissions by receipt" if submissions else "no submission by receipt either"
    by_receipt = "" if evidence.bundle.run.kind == "imported" else f" ({submitted})"
    return _before(Finding(Verdict.FAIL, f"{what} in a window proven complete{by_receipt}", seen.kernels), seen)


def forbidden_finding(evidence: Evidence, where: Where, seen: Seen, symbol: str) -> Finding:
    """Judge a symbol that must not be there: seen is FAIL, whatever else is missing."""
    proof = evidence.proofs[where.rank]
    if seen.kernels:
        reason = f"forbidden {symbol} ran {seen.kernels} times"
        return Finding(Verdict.FAIL, reason, seen.kernels, must_be_seen=False)
    if proof.cut is not None or proof.collector_off is not None:
        return Finding(Verdict.INCONCLUSIVE, proof.cut or proof.collector_off or "", must_be_seen=False)
    if not exercised(evidence, where):
        return Finding(Verdict.INCONCLUSIVE, not_exercised(evidence, where), must_be_seen=False)
    if seen.hidden:
        reason = f"absence not proven: {seen.hidden} kernels have no known name, or one that a tool cut, and may be it"
        return Finding(Verdict.INCONCLUSIVE, reason, must_be_seen=False)
    if not complete(proof, where.execution):
        reason = f"absence not proven, window not proven complete: {failures(proof, where.execution)[0]}"
        return Finding(Verdict.INCONCLUSIVE, reason, must_be_seen=False)
    return Finding(Verdict.PASS, "", must_be_seen=False)


def failures(proof: WindowProof, execution: Execution | None) -> tuple[str, ...]:
    """Return the failed conditions of a complete window; any execution needs those of graphs too."""
    return proof.failures(execution if execution is not None else "decode_graph_replay")


def complete(proof: WindowProof, execution: Execution | None) -> bool:
    """Say whether absence is proven in an execution, or in any."""
    return proof.complete(execution if execution is not None else "decode_graph_replay")


def exercised(evidence: Evidence, where: Where) -> bool:
    """Say whether the window of a rank holds a step of an execution: by receipt, step annotation or graph launch."""
    own = evidence.receipts[where.rank]
    if any(r.purpose in where.purposes and where.execution in (None, r.execution) for r in own):
        return True
    return evidence.bundle.run.kind == "imported" and _in_trace(evidence, where)


def _in_trace(evidence: Evidence, where: Where) -> bool:
    """Say whether an imported rank launched something of an execution, visible or not."""
    info = evidence.bundle.run.imported
    if bool(counted(evidence.kernels[where.rank].frame, where).any()):
        return True
    if info is None or info.purpose not in where.purposes:
        return False
    if where.execution is not None:
        return where.execution in exercised_executions(evidence.bundle, where.rank)
    record = readable_rank_file(evidence.bundle, where.rank)
    return record is not None and any(own.kernels for own in record.imported if not own.capture_only)


def not_exercised(evidence: Evidence, where: Where) -> str:
    """Say what would exercise an execution; where a rank has no receipt at all, nothing says that it was not."""
    if evidence.bundle.run.kind == "imported":
        if where.execution is None:
            return "no GPU kernel was recorded; host launch calls are no GPU evidence"
        return "not exercised; " + _IN_A_TRACE.format(what=where.execution.replace("_", " "))
    if not evidence.receipts[where.rank]:
        return "no receipt of this rank, so nothing says what was exercised; record the run without --no-receipts"
    if where.execution is None:
        return "not exercised; no receipt of a step that counts: serve a request"
    return f"not exercised; {_HOW_TO_EXERCISE[where.execution]}"


def how_to_serve(evidence: Evidence, where: Where, padded: bool) -> str:
    """Say what would exercise an M that was not served: a prompt sets that of a prefill, the number of them a decode's.

    Args:
        evidence: of the run.
        where: rank and execution that lack it.
        padded: a graph's padding counts (any M), or does not (real tokens).
    """
    prefill, decode = "a prompt of that many tokens", "that many prompts decoded in one batch"
    if evidence.bundle.run.kind == "imported":
        ways = {"prefill_graph_replay": prefill, "decode_graph_replay": decode}
        return f"a trace of rank {where.rank} with {ways.get(where.execution or '', f'{prefill}, or {decode}')}"
    prefill += " (--prompt)"
    decode += " (a --prompt each, --max-new-tokens 2 or more; a run has one such batch)"
    if where.execution == "prefill_graph_replay":
        return f"{prefill}{', or a shorter one padded to it: --cuda-graph-bs-prefill' if padded else ''}"
    if where.execution == "decode_graph_replay":
        return f"{decode}{', or fewer padded to it: --cuda-graph-bs-decode' if padded else ''}"
    return f"{prefill}, or {decode}"


def submissions_of(evidence: Evidence, where: Where, selector: Selector) -> int:
    """Count what the receipts of a cell's steps submitted of a symbol; receipts know base names only."""
    if selector.form == "mangled":
        return 0
    chosen = [
        r
        for r in evidence.receipts[where.rank]
        if r.purpose in where.purposes and where.execution in (None, r.execution)
    ]
    known: dict[str, bool] = {}
    total = 0
    for receipt in chosen:
        for item in receipt.kernels:
            if item.symbol not in known:
                known[item.symbol] = selector.matches(item.symbol)
            total += known[item.symbol]
    return total


def settled_by(evidence: Evidence, where: Where, reason: str) -> str:
    """Say which recording would settle an INCONCLUSIVE."""
    run, rank = evidence.bundle.run, where.rank
    low = reason.lower()
    if run.kind == "imported":
        return _trace_that_settles(evidence, where, low)
    if "not exercised" in low:
        return _HOW_TO_EXERCISE[where.execution] if where.execution else "serve a request in the recorded window"
    if "no receipt" in low:
        return "record again without --no-receipts"
    if "attributed" in low or "no known layer" in low:
        return "record again with NVTX ranges (without --no-nvtx), so that kernels reach their step and layer"
    if "known name" in low:
        return "record again with a collector that resolves every name (`alphamoe-trace doctor`)"
    if "dropped" in low:
        return "record a shorter window: fewer requests or fewer new tokens"
    if "graph" in low and "sentinel" in low:
        return "record again where graph kernels are traced by node (`alphamoe-trace doctor` says whether they are)"
    if evidence.proofs[rank].collector_off is not None:
        return "record again with the collector on; `alphamoe-trace doctor` says what is missing"
    return f"record the run again until rank {rank} ends by itself: {_again(run)}"


def _trace_that_settles(evidence: Evidence, where: Where, reason: str) -> str:
    record = readable_rank_file(evidence.bundle, where.rank)
    traces = [own for own in record.imported if own.format != "sglang-log"] if record else []
    formats = {own.format for own in traces}
    if not traces:
        return f"a GPU trace of rank {where.rank}"
    if "node" in reason or ("graph" in reason and "not exercised" not in reason):
        if "nsys-sqlite" in formats:
            return "nsys profile --cuda-graph-trace=node, then nsys export --type sqlite"
        return "alphamoe-trace record, or nsys profile --cuda-graph-trace=node: both give graph kernels their node ids"
    if "not exercised" in reason or "no gpu kernel" in reason:
        return f"a trace of rank {where.rank} with GPU activities on, over steps of real requests"
    if "launch" in reason:
        if "nsys-sqlite" in formats:
            return (
                "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node from before the first launch to the last kernel"
            )
        return "torch.profiler with activities CPU and CUDA, stopped after torch.cuda.synchronize()"
    if "known name" in reason:
        return "a trace whose kernel names are whole (nsys export of demangledName, or the PyTorch profiler)"
    return f"a whole trace of rank {where.rank}"


def _again(run: RunInfo) -> str:
    return " ".join(run.argv[:6]) + (" ..." if len(run.argv) > 6 else "")


def _before(finding: Finding, seen: Seen) -> Finding:
    if seen.elsewhere <= 0 or seen.kernels:
        return finding
    more = f"{finding.reason}; {seen.elsewhere} kernels of it ran outside this execution, the window or its requests"
    return Finding(finding.verdict, more, finding.witnesses, finding.must_be_seen)


def _in_execution(frame: pd.DataFrame, execution: Execution | None) -> Bools:
    if execution is None:
        return np.ones(len(frame), bool)
    wanted = frame["execution"].cat.categories == execution
    return _lookup(np.asarray(wanted, bool), frame["execution"].cat.codes.to_numpy())


def _lookup(hit: Bools, codes: np.ndarray) -> Bools:
    return np.where(codes >= 0, hit[codes], False) if len(hit) else np.zeros(len(codes), bool)


def _known(value: object) -> bool:
    import pandas as pd

    return not pd.isna(value)  # type: ignore[call-overload]
