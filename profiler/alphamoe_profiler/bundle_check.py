"""Check a run bundle as a whole: schemas, hashes, identities, and which ranks were cut short."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.bundle_files import inside, rank_of_name, read_json, sha256_of
from alphamoe_tracers.columns import column
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError
from alphamoe_tracers.records import SCHEMA_VERSION, TABLES

_CANNOT_AGREE = 16
"""Traces of a kernel or two may agree by chance in whole microseconds; so many kernels never do."""


def contradictions(bundle: RunBundle) -> list[str]:
    """Say which files contradict each other: such a bundle is a usage error and nothing of it is judged.

    Two files for one rank, a name against its content, parts of another run, one rank under two names.
    """
    return [*_names(bundle), *_identities(bundle), *_copies(bundle)]


def check(bundle: RunBundle) -> list[str]:
    """Say everything that is wrong with a bundle, one sentence each, or nothing."""
    problems = contradictions(bundle)
    for rank in bundle.ranks:
        problems += rank_problems(bundle, rank)
    return [*problems, *_outcome(bundle), *_served(bundle)]


def _outcome(bundle: RunBundle) -> list[str]:
    """Say how the launcher's account of the run is incomplete."""
    try:
        outcome = bundle.outcome()
    except EvidenceError as error:
        return [str(error)]
    if outcome is None:
        return ["no outcome.json, the launcher was cut short"]
    problems = [
        f"rank {end.rank}: its process ended with {end.signal or f'exit code {end.exit_code}'}"
        for end in outcome.ranks
        if end.exit_code != 0 or end.signal
    ]
    if not outcome.complete and not problems:
        problems.append(f"outcome.json: the run was cut short: {outcome.error or 'no reason given'}")
    told = Counter(end.rank for end in outcome.ranks)
    problems += [f"outcome.json: it does not say how rank {rank} ended" for rank in bundle.ranks if not told[rank]]
    problems += [
        f"outcome.json: it says {count} times how rank {rank} ended" for rank, count in told.items() if count > 1
    ]
    return problems


def _served(bundle: RunBundle) -> list[str]:
    """Say what is wrong with requests.jsonl; whether the requests finished is judged elsewhere."""
    try:
        bundle.requests()
    except EvidenceError as error:
        return [str(error)]
    return ["requests.jsonl ends inside a line, it was cut"] if bundle.cut_line("requests.jsonl") else []


def rank_problems(bundle: RunBundle, rank: int) -> list[str]:
    """Say what is missing or damaged in one rank's files. What can be read is used all the same."""
    if rank not in bundle.problems_by_rank:
        bundle.problems_by_rank[rank] = _rank_problems(bundle, rank)
    return bundle.problems_by_rank[rank]


def _rank_problems(bundle: RunBundle, rank: int) -> list[str]:
    problems: list[str] = []
    record = None
    try:
        record = bundle.rank_file(rank)
        if record is None:
            why = "no trace was imported for it" if bundle.run.kind == "imported" else "it was cut short"
            problems.append(f"rank {rank}: no ranks/{rank}.json, {why}")
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
        rows = {} if record is None else (record.collector.rows if record.collector is not None else record.rows)
        written = rows.get(name)
        if record is not None and written is None and read.table.num_rows:
            problems.append(f"rank {rank}: ranks/{rank}.json does not say how many rows of {name} were written")
        rows_read = read.table.num_rows + read.skipped
        if written is not None and rows_read + read.duplicates < written:
            problems.append(f"rank {rank}: {name} has {rows_read} rows of {written} that were written")
    receipts = bundle.receipts(rank)
    problems += [f"rank {rank}: {problem}" for problem in receipts.problems]
    if receipts.cut:
        problems.append(f"rank {rank}: receipts/rank={rank}.jsonl ends inside a line, it was cut")
    lines = len(receipts.receipts) + receipts.duplicates
    if record is not None and lines < record.receipts:
        problems.append(f"rank {rank}: {lines} receipts of {record.receipts} that were written")
    try:
        bundle.modules(rank)
        if bundle.cut_line(f"modules/rank={rank}.jsonl"):
            problems.append(f"rank {rank}: modules/rank={rank}.jsonl ends inside a line, it was cut")
    except EvidenceError as error:
        problems.append(f"rank {rank}: {error}")
    if record is not None:
        problems += [f"rank {rank}: {problem}" for problem in _hashes(bundle.path, record.sha256)]
        problems += [f"rank {rank}: {problem}" for problem in _unlisted(bundle.path, rank, record.sha256)]
    return problems


def capture_problems(bundle: RunBundle, rank: int) -> list[str]:
    """Say why one rank's captures are not those that it recorded, whatever became of the rest of its files."""
    try:
        record = bundle.rank_file(rank)
    except EvidenceError as error:
        return [f"rank {rank}: {error}"]
    if record is None:
        return [f"rank {rank}: no ranks/{rank}.json, nothing vouches for its captures"]
    listed = {name: sha256 for name, sha256 in record.sha256.items() if name.startswith("captures/")}
    problems = [*_hashes(bundle.path, listed), *_unlisted_captures(bundle.path, rank, listed)]
    return [f"rank {rank}: {problem}" for problem in problems]


def _unlisted(root: Path, rank: int, recorded: dict[str, str]) -> Iterator[str]:
    """Yield evidence of a rank that its rank file does not vouch for: a file that was added, or a hash that is gone."""
    found = [f"{name}/rank={rank}.jsonl" for name in ("modules", "receipts")]
    for name in TABLES:
        directory = root / name / f"rank={rank}"
        found += [f"{name}/rank={rank}/{path.name}" for path in sorted(directory.glob("part-*.parquet"))]
    for relative in found:
        if relative not in recorded and (root / relative).is_file():
            yield f"{relative} is not among the files that ranks/{rank}.json lists"
    yield from _unlisted_captures(root, rank, recorded)


def _unlisted_captures(root: Path, rank: int, recorded: dict[str, str]) -> Iterator[str]:
    captures = root / "captures" / f"rank={rank}"
    for path in sorted(captures.rglob("*")) if captures.is_dir() else []:
        relative = path.relative_to(root).as_posix()
        half = any(part.endswith(".tmp") for part in path.relative_to(root).parts)
        if not half and relative not in recorded and path.is_file():
            yield f"{relative} is not among the files that ranks/{rank}.json lists"


def _hashes(root: Path, recorded: dict[str, str]) -> Iterator[str]:
    for relative, wanted in recorded.items():
        try:
            path = inside(root, relative)
        except UsageError as error:
            yield str(error)
            continue
        try:
            # A pipe or a device would block, or never end.
            found = sha256_of(path) if path.is_file() or not path.exists() else "not a file"
        except OSError as error:
            yield f"{relative} cannot be read: {error.strerror}"
            continue
        if found != wanted:
            yield f"{relative} was changed after it was written (sha256 {found[:12]}, recorded {wanted[:12]})"


def _names(bundle: RunBundle) -> Iterator[str]:
    """Yield names that give a rank in another spelling, or a rank that the run does not have."""
    for folder in (*TABLES, "modules", "receipts", "steps", "dispatch_log", "captures", "ranks"):
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


class _Version(msgspec.Struct):
    schema_version: int = 1


class _CaptureIdentity(msgspec.Struct):
    """What a capture says of where it comes from; the rest is for the sanitizer's own reader."""

    rank: int
    run_id: str | None


def _identities(bundle: RunBundle) -> Iterator[str]:
    """Yield files whose content belongs to another rank, another run, another world size or a newer format."""
    run = bundle.run
    for rank in bundle.ranks:
        shown = f"ranks/{rank}.json"
        newer = _newer(bundle, shown)
        if newer is not None:
            yield f"{shown}: schema version {newer} is newer than {SCHEMA_VERSION}, the newest known here"
            continue
        try:
            record = bundle.rank_file(rank)
        except EvidenceError:
            record = None
        if record is not None:
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
        yield from _captures(bundle, rank)
    try:
        outcome = bundle.outcome()
    except EvidenceError:  # told by check()
        outcome = None
    if outcome is not None and outcome.run_id != run.run_id:
        yield f"outcome.json: of run {outcome.run_id}, not of this run {run.run_id} (a stale file?)"


def _captures(bundle: RunBundle, rank: int) -> Iterator[str]:
    """Yield captures of another rank or run; one that cannot be read is told by the hashes, and by its reader."""
    root = bundle.path / "captures" / f"rank={rank}"
    for path in sorted(root.glob("*/capture.json")) if root.is_dir() else []:
        shown = path.relative_to(bundle.path).as_posix()
        try:
            found = read_json(inside(bundle.path, shown), _CaptureIdentity)
        except AlphaMoEError:
            continue
        if found.rank != rank:
            yield f"{shown}: the folder says rank {rank}, its content says rank {found.rank}"
        if found.run_id != bundle.run.run_id:
            yield f"{shown}: of run {found.run_id}, not of this run {bundle.run.run_id} (a stale file?)"


def _newer(bundle: RunBundle, relative: str) -> int | None:
    """Return the schema version of a document where it is newer than this program: its other fields mean nothing."""
    path = inside(bundle.path, relative)
    try:
        version = read_json(path, _Version).schema_version if path.is_file() else SCHEMA_VERSION
    except EvidenceError:
        return None
    return version if version > SCHEMA_VERSION else None


def _copies(bundle: RunBundle) -> Iterator[str]:
    """Yield kernels that stand under two ranks' names: two processes never have the same records.

    The records are compared and not the files: a copy that was written again is a copy still.
    """
    pids = _pids(bundle)
    seen: dict[str, int] = {}
    for rank in bundle.ranks:
        shown = f"kernels/rank={rank}"
        table = bundle.read_table("kernels", rank).table
        if not table.num_rows:
            continue
        digest = hashlib.sha256()
        for name in ("process", "start_ns", "end_ns", "correlation_id"):
            digest.update(column(table, name).tobytes())
        first = seen.setdefault(digest.hexdigest(), rank)
        if first != rank:
            if bundle.run.kind == "imported" and table.num_rows < _CANNOT_AGREE:
                continue
            yield f"kernels/rank={first} and {shown} hold the same records: one rank under two names"
            continue
        processes = set(np.unique(column(table, "process")).tolist())
        others = {pid: other for pid, other in pids.items() if other != rank and pid in processes}
        if others and not any(pids.get(pid) == rank for pid in processes):
            pid, other = next(iter(others.items()))
            yield f"{shown}: the file says rank {rank}, its kernels are of process {pid}, which is rank {other}"


def _pids(bundle: RunBundle) -> dict[int, int]:
    """Return the rank of each process id; nothing where two ranks have one (each in a container of its own)."""
    found: dict[int, int] = {}
    for rank in bundle.ranks:
        record = readable_rank_file(bundle, rank)
        # An imported rank has no process id of its own: its tables hold those of the trace.
        if record is not None and record.pid is not None and found.setdefault(record.pid, rank) != rank:
            return {}
    return found
