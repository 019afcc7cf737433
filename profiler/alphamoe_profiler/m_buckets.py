"""M buckets: which real tokens, dispatch M and kernel M each execution ran at, as exact discrete sets.

Only receipts of purpose ``witness`` count. A range is printed only for consecutive values that were all observed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from alphamoe_tracers.records import EXECUTIONS, Execution, Receipt


def fold(values: Iterable[int]) -> str:
    """Write a set of integers with consecutive runs folded: ``[1, 2, 3, 5]`` becomes ``1-3, 5``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    # Two neighbours are shorter as a list than as a range, and cannot be misread.
    parts = []
    for first, last in runs:
        parts += [f"{first}-{last}"] if last > first + 1 else [str(value) for value in range(first, last + 1)]
    return ", ".join(parts)


@dataclass(frozen=True)
class DiscreteSet:
    """The distinct values of one quantity."""

    values: tuple[int, ...]
    """Ascending, each observed at least once."""

    @classmethod
    def of(cls, values: Iterable[int | None]) -> DiscreteSet:
        """Return the distinct known values; unknown (None) is left out, never guessed."""
        return cls(tuple(sorted({value for value in values if value is not None})))

    @property
    def summary(self) -> str:
        """``(n; min, max)``, n being the number of distinct values; ``(0)`` where nothing is known."""
        return f"({len(self.values)}; {self.values[0]}, {self.values[-1]})" if self.values else "(0)"

    @property
    def folded(self) -> str:
        """The exact set, consecutive runs folded."""
        return fold(self.values)

    def __str__(self) -> str:
        return f"{self.summary} {self.folded}".rstrip()


@dataclass(frozen=True)
class MBuckets:
    """The three columns of one execution, of one rank or of all."""

    execution: Execution
    rank: int | None
    """None: the union over the ranks."""
    steps: int
    """Receipts that count, over all ranks where rank is None."""
    real_tokens: DiscreteSet
    dispatch_M: DiscreteSet  # noqa: N815 -- the vocabulary's own name
    kernel_M: DiscreteSet  # noqa: N815 -- the vocabulary's own name
    """By receipt. Which of them a GPU record proves is in ``witnessed_M``."""
    witnessed_M: DiscreteSet  # noqa: N815 -- the vocabulary's own name


def buckets(receipts: dict[int, list[Receipt]], frames: dict[int, pd.DataFrame] | None = None) -> list[MBuckets]:
    """Return the M buckets by execution, first over all ranks and then of each rank.

    Args:
        receipts: by rank.
        frames: attributed kernels by rank; without them nothing is witnessed.

    Returns:
        One entry for each execution that some rank has a receipt of, in the order of the vocabulary.
    """
    proven = {rank: _witnessed(frame) for rank, frame in (frames or {}).items()}
    result = []
    for execution in EXECUTIONS:
        chosen = {
            rank: [item for item in own if item.purpose == "witness" and item.execution == execution]
            for rank, own in receipts.items()
        }
        present = {rank: own for rank, own in chosen.items() if own}
        if not present:
            continue
        everything = [item for own in present.values() for item in own]
        seen = {rank: proven.get(rank, {}).get(execution, ()) for rank in present}
        result.append(_row(execution, None, everything, [value for values in seen.values() for value in values]))
        result += [_row(execution, rank, own, seen[rank]) for rank, own in present.items()]
    return result


def bucket_table(rows: Iterable[MBuckets]) -> pd.DataFrame:
    """Return buckets as a table: execution, rank (null over all), quantity, n, min, max, values, folded."""
    records = []
    for row in rows:
        for quantity in ("real_tokens", "dispatch_M", "kernel_M", "witnessed_M"):
            chosen: DiscreteSet = getattr(row, quantity)
            records.append(
                {
                    "execution": row.execution,
                    "rank": row.rank,
                    "quantity": quantity,
                    "n": len(chosen.values),
                    "min": chosen.values[0] if chosen.values else None,
                    "max": chosen.values[-1] if chosen.values else None,
                    "values": chosen.values,
                    "folded": chosen.folded,
                }
            )
    table = pd.DataFrame(records, columns=["execution", "rank", "quantity", "n", "min", "max", "values", "folded"])
    return table.astype({"rank": "Int64", "min": "Int64", "max": "Int64"})


def kernels_by_bucket(frames: dict[int, pd.DataFrame]) -> pd.DataFrame:
    """Count witnessed kernels: rank, execution, base, kernel_M, steps, kernels; nothing outside the window counts."""
    names = ["rank", "execution", "base", "kernel_M"]
    parts = []
    for rank, frame in frames.items():
        chosen = frame.loc[witness_mask(frame) & frame["kernel_M"].notna(), ["execution", "base", "kernel_M", "step"]]
        grouped = chosen.groupby(["execution", "base", "kernel_M"], observed=True)["step"].agg(["nunique", "size"])
        parts.append(grouped.reset_index().assign(rank=rank).astype({"execution": object, "base": object}))
    whole = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*names, "nunique", "size"])
    return whole.rename(columns={"nunique": "steps", "size": "kernels"})[[*names, "steps", "kernels"]]


def witness_mask(frame: pd.DataFrame) -> pd.Series:
    """Say which kernels count for gates about real requests: inside the window, of a witness step."""
    return frame["in_window"] & (frame["purpose"] == "witness")


def m_disagreements(receipts: dict[int, list[Receipt]]) -> list[str]:
    """Say at which steps the ranks do not agree on the dispatch M or on the execution: an integrity problem."""
    by_step: dict[int, dict[tuple[str, int | None], list[int]]] = {}
    for rank, own in receipts.items():
        for item in own:
            by_step.setdefault(item.step, {}).setdefault((item.execution, item.M), []).append(rank)
    found = []
    for step, groups in sorted(by_step.items()):
        if len(groups) > 1:
            shown = ", ".join(
                f"M {m} ({execution}) on rank {fold(set(ranks))}" for (execution, m), ranks in groups.items()
            )
            found.append(f"step {step}: ranks disagree: {shown}")
    return found


def _witnessed(frame: pd.DataFrame) -> dict[str, list[int]]:
    chosen = frame.loc[witness_mask(frame) & frame["kernel_M"].notna(), ["execution", "kernel_M"]].drop_duplicates()
    return {str(key): own["kernel_M"].astype(int).tolist() for key, own in chosen.groupby("execution", observed=True)}


def _row(execution: Execution, rank: int | None, own: list[Receipt], witnessed: Iterable[int]) -> MBuckets:
    lists = {id(item.kernels): item.kernels for item in own}
    return MBuckets(
        execution=execution,
        rank=rank,
        steps=len(own),
        real_tokens=DiscreteSet.of(item.real_tokens for item in own),
        dispatch_M=DiscreteSet.of(item.M for item in own),
        kernel_M=DiscreteSet.of(submission.M for kernels in lists.values() for submission in kernels),
        witnessed_M=DiscreteSet.of(witnessed),
    )
