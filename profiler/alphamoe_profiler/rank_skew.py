"""How far apart the ranks of one run were: starts of the same step and of the same all-reduce, and the all-reduces.

Every timestamp of a recorded run comes from CUPTI, which maps each GPU's clock onto the clock of the host, so ranks of
one machine can be laid on one time line. How well, the all-reduces themselves say: one ends at nearly the same moment
on all ranks, and cannot end anywhere before the last rank has begun it. Nothing here is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.m_buckets import witness_mask
from alphamoe_tracers.records import EXECUTIONS

if TYPE_CHECKING:
    from alphamoe_profiler.attributed_kernels import AttributedKernels

Ints = npt.NDArray[np.int64]
ALL_REDUCE_CLASS = "all_reduce"
Moment = Literal["step start", "all-reduce start", "all-reduce end"]


@dataclass(frozen=True)
class RankMarks:
    """When steps and all-reduces of one rank ran: witness steps inside the window, timed kernels only. Small."""

    rank: int
    steps: Ints
    """[s], rising."""
    executions: Ints
    """[s] index into ``EXECUTIONS``, -1 where nothing says."""
    first: Ints
    """[s] start of the step's first kernel, ns."""
    reduce_step: Ints
    """[a] step of each all-reduce; rising, and within a step by start."""
    reduce_start: Ints
    reduce_end: Ints
    reduce_symbol: Ints
    """[a] index into ``symbols``."""
    symbols: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """How far apart the ranks were at the same moment of the same work."""

    execution: str
    moment: Moment
    compared: int
    """Steps or all-reduces that every compared rank ran."""
    median_ns: int
    worst_ns: int
    worst_step: int
    worst_rank: int
    """Who was last then."""
    last: dict[int, int]
    """How often each rank was last."""


@dataclass(frozen=True)
class AllReduces:
    """The all-reduce kernels of one symbol on one rank. Their time holds the wait for the last rank."""

    rank: int
    symbol: str
    kernels: int
    total_ns: int
    median_ns: int


@dataclass(frozen=True)
class RankSkew:
    """Everything that a report shows of ranks beside each other."""

    spreads: tuple[Spread, ...]
    all_reduces: tuple[AllReduces, ...]
    clock_error_ns: int | None
    """By how much an all-reduce seems to end on one rank before another began it, at worst: the clocks are off by that
    at least. 0: never. None: no all-reduce was compared."""
    shared_gpu: bool
    """Some ranks share a GPU: these times are comparable with nothing."""
    notes: tuple[str, ...]
    """What could not be compared, and why."""


def rank_marks(own: AttributedKernels) -> RankMarks:
    """Take what is compared between ranks out of one rank's attributed kernels."""
    frame = own.frame
    counts = witness_mask(frame) & frame["step"].notna() & frame["duration_ns"].notna()
    counts &= (frame["reason"] != "sentinel").to_numpy()
    kept = frame.loc[counts, ["step", "start_ns", "end_ns", "base", "class", "execution"]]
    step, start = kept["step"].to_numpy(np.int64), kept["start_ns"].to_numpy(np.int64)
    steps, of = np.unique(step, return_inverse=True)
    of = of.reshape(-1)
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, of, start)
    codes: dict[str, int] = {execution: code for code, execution in enumerate(EXECUTIONS)}
    names = [codes.get(str(name), -1) for name in kept["execution"].cat.categories]
    code = np.array([*names, -1], np.int64)[kept["execution"].cat.codes.to_numpy()]
    executions = np.full(len(steps), -1, np.int64)
    np.maximum.at(executions, of, code)
    rows = np.flatnonzero((kept["class"] == ALL_REDUCE_CLASS).to_numpy())
    rows = rows[np.lexsort((start[rows], step[rows]))]
    symbols, symbol = np.unique(kept["base"].astype(object).fillna("").to_numpy(str)[rows], return_inverse=True)
    return RankMarks(
        rank=own.rank,
        steps=steps,
        executions=executions,
        first=first,
        reduce_step=step[rows],
        reduce_start=start[rows],
        reduce_end=kept["end_ns"].to_numpy(np.int64)[rows],
        reduce_symbol=symbol.reshape(-1).astype(np.int64),
        symbols=tuple(symbols.tolist()),
    )


def compare_ranks(bundle: RunBundle, marks: Sequence[RankMarks]) -> RankSkew | None:
    """Compare the ranks of one run; None where there is one rank only, or no timed kernel on any.

    Args:
        bundle: what the marks were taken from.
        marks: one a rank.
    """
    if bundle.world_size < 2 or not any(len(own.steps) for own in marks):
        return None
    records = [record for rank in bundle.ranks if (record := readable_rank_file(bundle, rank)) is not None]
    reduces = tuple(row for own in marks for row in _all_reduces(own))
    notes: list[str] = []
    shared = any(record.shared_gpu for record in records)
    if not reduces:
        gloo = shared or any(record.communication == "gloo" for record in records)
        notes.append(f"no all-reduce kernel was recorded{': gloo sums on the host' if gloo else ''}")
    ran = [own for own in marks if len(own.steps)]
    silent = [own.rank for own in marks if not len(own.steps)]
    apart = None
    if bundle.run.kind == "imported":
        apart = "imported traces have clocks of their own: starts of different ranks are not compared"
    elif len({record.host for record in records if record.host}) > 1:
        apart = "the ranks ran on several hosts: their clocks are not compared"
    elif len(ran) < 2:
        apart = "fewer than two ranks have timed kernels in witness steps: there is nothing to compare"
    elif silent:
        notes.append(f"no timed kernel in a witness step on rank {', '.join(map(str, silent))}: left out")
    if apart is not None:
        return RankSkew((), reduces, None, shared, (*notes, apart))
    spreads = _step_spreads(ran)
    clock_error_ns, unlike, steps_seen = None, 0, 0
    if all(len(own.reduce_step) for own in ran):
        matched, unlike, steps_seen = _matched(ran)
        if matched is not None:
            steps, executions, starts, ends = matched
            spreads += _spreads("all-reduce start", steps, executions, starts, ran)
            spreads += _spreads("all-reduce end", steps, executions, ends, ran)
            clock_error_ns = max(0, int((starts.max(0) - ends.min(0)).max()))
    if unlike:
        told = f"left out {unlike} of {steps_seen} steps, in which the ranks did not run equally many all-reduces"
        notes.append(told)
    order: dict[str, int] = {execution: place for place, execution in enumerate(EXECUTIONS)}
    spreads.sort(key=lambda row: order[row.execution])
    return RankSkew(tuple(spreads), reduces, clock_error_ns, shared, tuple(notes))


def skew_document(skew: RankSkew | None) -> dict[str, Any] | None:
    """Return the comparison as plain data, for the JSON report and the dashboard."""
    if skew is None:
        return None
    return {
        "spreads": [
            {
                "execution": row.execution,
                "moment": row.moment,
                "compared": row.compared,
                "median_ns": row.median_ns,
                "worst_ns": row.worst_ns,
                "worst_step": row.worst_step,
                "worst_rank": row.worst_rank,
                "last": {str(rank): count for rank, count in row.last.items()},
            }
            for row in skew.spreads
        ],
        "all_reduces": [
            {
                "rank": row.rank,
                "symbol": row.symbol,
                "kernels": row.kernels,
                "total_ns": row.total_ns,
                "median_ns": row.median_ns,
            }
            for row in skew.all_reduces
        ],
        "clock_error_ns": skew.clock_error_ns,
        "shared_gpu": skew.shared_gpu,
        "notes": list(skew.notes),
    }


def _all_reduces(own: RankMarks) -> list[AllReduces]:
    duration = own.reduce_end - own.reduce_start
    rows = []
    for number, symbol in enumerate(own.symbols):
        of = duration[own.reduce_symbol == number]
        rows.append(AllReduces(own.rank, symbol, len(of), int(of.sum()), int(np.median(of))))
    return sorted(rows, key=lambda row: -row.kernels)


def _step_spreads(ran: Sequence[RankMarks]) -> list[Spread]:
    steps = reduce(np.intersect1d, [own.steps for own in ran])
    rows = [np.searchsorted(own.steps, steps) for own in ran]
    times = np.stack([own.first[row] for own, row in zip(ran, rows, strict=True)])
    return _spreads("step start", steps, ran[0].executions[rows[0]], times, ran)


def _matched(ran: Sequence[RankMarks]) -> tuple[tuple[Ints, Ints, Ints, Ints] | None, int, int]:
    """Match all-reduces by step and by their order within it.

    Returns:
        (steps [n], executions [n], starts [ranks, n], ends [ranks, n]) or None where none match, how many steps were
        left out because the ranks did not run equally many, and of how many.
    """
    counted = [np.unique(own.reduce_step, return_counts=True) for own in ran]
    every = np.unique(np.concatenate([steps for steps, _ in counted]))
    counts = np.zeros((len(ran), len(every)), np.int64)
    for row, (steps, count) in enumerate(counted):
        counts[row, np.searchsorted(every, steps)] = count
    alike = every[(counts == counts[0]).all(0)]
    if not len(alike):
        return None, len(every), len(every)
    kept = [np.isin(own.reduce_step, alike) for own in ran]
    starts = np.stack([own.reduce_start[rows] for own, rows in zip(ran, kept, strict=True)])
    ends = np.stack([own.reduce_end[rows] for own, rows in zip(ran, kept, strict=True)])
    steps = ran[0].reduce_step[kept[0]]
    executions = ran[0].executions[np.searchsorted(ran[0].steps, steps)]
    return (steps, executions, starts, ends), len(every) - len(alike), len(every)


def _spreads(moment: Moment, steps: Ints, executions: Ints, times: Ints, ran: Sequence[RankMarks]) -> list[Spread]:
    """Return one spread an execution; ``times`` is [ranks, n]."""
    found = []
    ranks = [own.rank for own in ran]
    for code in np.unique(executions[executions >= 0]).tolist():
        of = np.flatnonzero(executions == code)
        spread, last = np.ptp(times[:, of], axis=0), times[:, of].argmax(0)
        worst = int(spread.argmax())
        often = np.bincount(last, minlength=len(ran)).tolist()
        found.append(
            Spread(
                execution=EXECUTIONS[code],
                moment=moment,
                compared=len(of),
                median_ns=int(np.median(spread)),
                worst_ns=int(spread[worst]),
                worst_step=int(steps[of[worst]]),
                worst_rank=ranks[int(last[worst])],
                last={rank: count for rank, count in zip(ranks, often, strict=True) if count},
            )
        )
    return found
