"""Which rank each imported file belongs to: explicit map over the content over the name, any disagreement an error."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alphamoe_profiler.import_plan import ImportPlan, PlannedFile
from alphamoe_profiler.import_worker import FileResult, ReadKey
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.trace_files import TraceSummary

_MAP_HINT = "state it with --map FILE=RANK"


@dataclass(frozen=True)
class RankPart:
    """One file's share of one rank."""

    file: PlannedFile
    key: ReadKey

    @property
    def summary(self) -> TraceSummary:
        """What the file says of this rank."""
        return self.key.summary

    @property
    def is_log(self) -> bool:
        """A server log: dispatch evidence, beside a trace."""
        return self.file.format == "sglang-log"


@dataclass(frozen=True)
class RankMap:
    """Everything that was read, by rank."""

    parts: dict[int, tuple[RankPart, ...]]
    """Of each rank that has something readable, traces first."""
    unreadable: dict[int, tuple[tuple[PlannedFile, str], ...]]
    """Files of a rank that could not be read, with the reason."""
    loose: tuple[tuple[PlannedFile, str], ...]
    """Files, or processes of them, that belong to no known rank, with the reason."""
    ranks: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which no trace and no log was read or even found."""
        return tuple(rank for rank in range(self.ranks) if rank not in self.parts and rank not in self.unreadable)


def resolve(plan: ImportPlan, results: Sequence[FileResult], ranks: int) -> RankMap:
    """Give each file, or each process or label in it, its rank.

    Args:
        plan: the files.
        results: what reading each of them came to, in the same order.
        ranks: the world size; never counted from files.

    Raises:
        UsageError: map, content and name disagree, two files claim one rank, or a rank does not exist. Both sides are
            named.
    """
    parts: dict[int, list[RankPart]] = {}
    unreadable: dict[int, list[tuple[PlannedFile, str]]] = {}
    loose: list[tuple[PlannedFile, str]] = []
    alone = _alone(plan, results, ranks)
    for item, result in zip(plan.files, results, strict=True):
        if result.error is not None:
            text = result.error + (f" ({result.hint})" if result.hint else "")
            rank = _checked(item.expected_rank, item, ranks, "its name")
            rank = 0 if rank is None and ranks == 1 else rank
            if rank is None:
                loose.append((item, text))
            else:
                unreadable.setdefault(rank, []).append((item, text))
            continue
        used = [key for key in result.keys if not key.summary.capture_only]
        if len(used) < len(result.keys):
            loose.append((item, "recorded while graphs were captured: shapes, never executions"))
        _check_map(item, used)
        for key in used:
            rank = _rank(item, key.summary, len(used), ranks)
            rank = 0 if rank is None and (alone or (ranks == 1 and item.format == "sglang-log")) else rank
            if rank is None:
                loose.append((item, _no_rank(item, key.summary, len(used))))
            else:
                parts.setdefault(rank, []).append(RankPart(item, key))
    for rank, own in parts.items():
        _refuse_two(rank, own, [item for item, _ in unreadable.get(rank, ())])
    for rank, failed in unreadable.items():
        _refuse_two(rank, [], [item for item, _ in failed])
    ordered = {rank: tuple(sorted(own, key=lambda p: (p.is_log, p.file.index))) for rank, own in sorted(parts.items())}
    return RankMap(ordered, {rank: tuple(own) for rank, own in sorted(unreadable.items())}, tuple(loose), ranks)


def _alone(plan: ImportPlan, results: Sequence[FileResult], ranks: int) -> bool:
    """Say whether ``--ranks 1`` settles the rank: one trace, or one for each bucket, and no other claims anything."""
    if ranks != 1:
        return False
    traces = [
        (item.bucket, item.named.stage)
        for item, result in zip(plan.files, results, strict=True)
        for key in result.keys
        if not key.summary.capture_only and item.format != "sglang-log"
    ]
    return len(traces) == len(set(traces))


def _check_map(item: PlannedFile, keys: Sequence[ReadKey]) -> None:
    """Check that the map says which process it means, and means one that is there."""
    if item.mapped is not None and len(keys) > 1:
        listed = ", ".join(key.summary.key for key in keys)
        raise UsageError(
            f"{item.path}: --map gives it rank {item.mapped}, but it holds several processes ({listed})",
            f"for example --map {item.path.name}:{keys[0].summary.key}={item.mapped}",
        )
    known = [key.summary.key for key in keys]
    for pid in item.mapped_pids:
        if str(pid) not in known:
            near = difflib.get_close_matches(str(pid), known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"it holds {', '.join(known) or 'none'}"
            raise UsageError(f"{item.path}: --map names process {pid}, which is not in it", hint)


def _rank(item: PlannedFile, summary: TraceSummary, keys: int, ranks: int) -> int | None:
    """Return the rank of one summary, or None where nothing states it."""
    mapped = item.mapped
    if summary.key.isdigit() and int(summary.key) in item.mapped_pids:
        mapped = item.mapped_pids[int(summary.key)]
    # The name of a file that holds several ranks is none of theirs.
    named = item.named.rank if keys == 1 and not item.named.merged else None
    source = summary.rank_source or "content"
    said = [("the map", mapped), (f"its content ({source})", summary.rank), ("its name", named)]
    stated = [(who, rank) for who, rank in said if rank is not None]
    for who, rank in stated[1:]:
        if rank != stated[0][1]:
            name = f" ({item.path.name})" if who == "its name" else ""
            raise UsageError(
                f"{item.path}: {stated[0][0]} says rank {stated[0][1]}, {who}{name} says rank {rank}",
                "was a file renamed or overwritten? nothing was imported",
            )
    if summary.world_size is not None and summary.world_size != ranks:
        raise UsageError(
            f"{item.path}: its content says world size {summary.world_size}, --ranks says {ranks}",
            f"--ranks {summary.world_size} judges all of them",
        )
    return _checked(stated[0][1], item, ranks, stated[0][0]) if stated else None


def _checked(rank: int | None, item: PlannedFile, ranks: int, who: str) -> int | None:
    if rank is not None and rank >= ranks:
        raise UsageError(
            f"{item.path}: {who} says rank {rank}, but --ranks {ranks} has ranks 0 to {ranks - 1}", _MAP_HINT
        )
    return rank


def _no_rank(item: PlannedFile, summary: TraceSummary, keys: int) -> str:
    if item.format == "nsys-sqlite":
        return f"process {summary.key} has no rank: state it with --map {item.path.name}:{summary.key}=RANK"
    if item.format == "sglang-log":
        return "its lines give no rank" + (f" ({summary.notes[0]})" if summary.notes else "")
    why = f" ({item.named.why})" if item.named.why else ""
    what = f"{summary.key} in it" if keys > 1 else "it"
    return f"nothing says which rank {what} is{why}: {_MAP_HINT}"


def _refuse_two(rank: int, own: Sequence[RankPart], failed: Sequence[PlannedFile]) -> None:
    """Refuse two files for one rank, unless they are its stages, its buckets, or a trace and a log."""
    seen: dict[tuple[bool, str | None, str | None], Path] = {}
    bare: dict[tuple[bool, str | None], bool] = {}
    for item in (*(part.file for part in own), *failed):
        is_log = item.format == "sglang-log"
        key = (is_log, item.bucket, item.named.stage)
        staged = item.named.stage is not None
        group = (is_log, item.bucket)
        other = seen.get(key)
        if other is None and bare.get(group, staged) != staged:
            other = next(path for known, path in seen.items() if known[:2] == group)
        if other is not None:
            raise UsageError(
                f"{other} and {item.path} both claim rank {rank}",
                "name the files of one recording, tell runs apart with --bucket, or state ranks with --map",
            )
        seen[key] = item.path
        bare[group] = staged
