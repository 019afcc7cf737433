"""Check a run bundle as a whole: schemas, hashes, identities, and which ranks were cut short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_profiler.bundle_files import inside, rank_of_name, sha256_of
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError
from alphamoe_tracers.records import TABLES

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle


def contradictions(bundle: RunBundle) -> list[str]:
    """Say which files contradict each other. See :meth:`RunBundle.contradictions`."""
    return [*_names(bundle), *_identities(bundle), *_copies(bundle)]


def check(bundle: RunBundle) -> list[str]:
    """Say everything that is wrong with a bundle. See :meth:`RunBundle.check`."""
    problems = contradictions(bundle)
    for rank in bundle.ranks:
        problems += bundle.rank_problems(rank)
    try:
        outcome = bundle.outcome()
        if outcome is None:
            problems.append("no outcome.json, the launcher was cut short")
        elif outcome.run_id != bundle.run.run_id:
            problems.append(f"outcome.json: of run {outcome.run_id}, not of this run {bundle.run.run_id}")
        for end in outcome.ranks if outcome else ():
            if end.exit_code != 0 or end.signal:
                problems.append(f"rank {end.rank}: its process ended with {end.signal or f'exit code {end.exit_code}'}")
    except EvidenceError as error:
        problems.append(str(error))
    try:
        bundle.requests()
    except EvidenceError as error:
        problems.append(str(error))
    return problems


def rank_problems(bundle: RunBundle, rank: int) -> list[str]:
    """Say what is wrong with one rank's files. See :meth:`RunBundle.rank_problems`."""
    problems: list[str] = []
    record = None
    try:
        record = bundle.rank_file(rank)
        if record is None:
            problems.append(f"rank {rank}: no ranks/{rank}.json, it was cut short")
        elif record.ended != "complete":
            problems.append(f"rank {rank}: it ended by {record.ended}: {record.error or 'no reason recorded'}")
    except EvidenceError as error:
        problems.append(f"rank {rank}: {error}")
    for name in TABLES:
        try:
            read = bundle.read_table(name, rank)
        except AlphaMoEError as error:
            problems.append(f"rank {rank}: {error}")
            continue
        problems += [f"rank {rank}: {problem}" for problem in read.problems]
        written = record.collector.rows.get(name) if record else None
        if written is not None and read.table.num_rows + read.duplicates < written:
            problems.append(f"rank {rank}: {name} has {read.table.num_rows} rows of {written} that were written")
    receipts = bundle.receipts(rank)
    problems += [f"rank {rank}: {problem}" for problem in receipts.problems]
    if receipts.cut:
        problems.append(f"rank {rank}: receipts/rank={rank}.jsonl ends inside a line, it was cut")
    lines = len(receipts.receipts) + receipts.duplicates
    if record is not None and lines < record.receipts:
        problems.append(f"rank {rank}: {lines} receipts of {record.receipts} that were written")
    try:
        bundle.modules(rank)
    except EvidenceError as error:
        problems.append(f"rank {rank}: {error}")
    if record is not None:
        problems += [f"rank {rank}: {problem}" for problem in _hashes(bundle.path, record.sha256)]
    return problems


def _hashes(root: Path, recorded: dict[str, str]) -> Iterator[str]:
    for relative, wanted in recorded.items():
        try:
            path = inside(root, relative)
        except UsageError as error:
            yield str(error)
            continue
        try:
            found = sha256_of(path)
        except OSError as error:
            yield f"{relative} cannot be read: {error.strerror}"
            continue
        if found != wanted:
            yield f"{relative} was changed after it was written (sha256 {found[:12]}, recorded {wanted[:12]})"


def _names(bundle: RunBundle) -> Iterator[str]:
    """Yield names that give a rank in another spelling, or a rank that the run does not have."""
    for folder in (*TABLES, "modules", "receipts", "captures", "ranks"):
        directory = bundle.path / folder
        for entry in sorted(directory.iterdir()) if directory.is_dir() else []:
            if entry.name.endswith(".tmp") or entry.name.startswith("."):
                continue
            rank = rank_of_name(entry.name)
            shown = f"{folder}/{entry.name}"
            if rank is None:
                yield f"{shown}: not a name of one rank's files; one rank has one spelling (rank=0, 0.json)"
            elif rank not in bundle.ranks:
                yield f"{shown}: the run has ranks 0 to {bundle.world_size - 1}"


def _identities(bundle: RunBundle) -> Iterator[str]:
    """Yield files whose content belongs to another rank, another run or another world size."""
    run = bundle.run
    for rank in bundle.ranks:
        try:
            record = bundle.rank_file(rank)
        except EvidenceError:
            record = None
        if record is not None:
            shown = f"ranks/{rank}.json"
            if record.rank != rank:
                yield f"{shown}: the file says rank {rank}, its content says rank {record.rank}"
            if record.run_id != run.run_id:
                yield f"{shown}: of run {record.run_id}, not of this run {run.run_id} (a stale file?)"
            if record.world_size != run.world_size:
                yield f"{shown}: world size {record.world_size}, but run.json says {run.world_size}"
        receipts = bundle.receipts(rank).receipts
        other_ranks = sorted({receipt.rank for receipt in receipts} - {rank})
        other_runs = sorted({receipt.run_id for receipt in receipts} - {run.run_id})
        if other_ranks:
            yield f"receipts/rank={rank}.jsonl: the file says rank {rank}, its content says rank {other_ranks[0]}"
        if other_runs:
            yield f"receipts/rank={rank}.jsonl: of run {other_runs[0]}, not of this run {run.run_id} (a stale file?)"


def _copies(bundle: RunBundle) -> Iterator[str]:
    """Yield kernel parts that are byte for byte one file under two ranks' names: ranks never have equal timestamps."""
    by_size: dict[int, list[tuple[int, Path]]] = {}
    for rank in bundle.ranks:
        directory = bundle.path / "kernels" / f"rank={rank}"
        for path in sorted(directory.glob("part-*.parquet")) if directory.is_dir() else []:
            by_size.setdefault(path.stat().st_size, []).append((rank, path))
    for group in by_size.values():
        if len({rank for rank, _ in group}) < 2:
            continue
        seen: dict[str, tuple[int, Path]] = {}
        for rank, path in group:
            digest = sha256_of(path)
            first_rank, first = seen.setdefault(digest, (rank, path))
            if first_rank != rank and bundle.read_table("kernels", rank).table.num_rows:
                names = [p.relative_to(bundle.path).as_posix() for p in (first, path)]
                yield f"{names[0]} and {names[1]} are the same file (sha256 {digest[:12]}): one rank under two names"
