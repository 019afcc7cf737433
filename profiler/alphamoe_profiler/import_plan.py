"""Which files an import reads, and what their names, the map and the bucket expression say of each."""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from alphamoe_profiler.bundle_files import sha256_of
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.rank_names import NamedRank, rank_of_trace_name

Format = Literal["kineto", "nsys-sqlite", "sglang-log"]
_SQLITE = (".sqlite", ".sqlite3", ".db")
_JSON = (".json", ".json.gz")
_LOG = (".log", ".txt", ".out", ".err")
_SNIFF_BYTES = 1 << 18
_MAP = re.compile(r"(?P<file>.+?)(?::(?P<pid>\d{1,10}))?=(?P<rank>\d{1,6})\Z", re.DOTALL)
_INNER_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,6})')


@dataclass(frozen=True)
class PlannedFile:
    """One file to read."""

    index: int
    path: Path
    format: Format
    named: NamedRank
    mapped: int | None = None
    """Its rank by the explicit map."""
    mapped_pids: dict[int, int] = field(default_factory=dict)
    """Rank by process id, by the explicit map."""
    bucket: str | None = None

    @property
    def expected_rank(self) -> int | None:
        """The rank that map or name give before the file is read."""
        return self.mapped if self.mapped is not None else self.named.rank

    @property
    def size_bytes(self) -> int:
        """Size on disk, 0 where it cannot be asked."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


@dataclass(frozen=True)
class ImportPlan:
    """All files, and those that were set aside."""

    files: tuple[PlannedFile, ...]
    skipped: tuple[tuple[Path, str], ...]
    """Files that are not read, with the reason."""


def plan_import(paths: Sequence[Path], ranks: int, mapping: Sequence[str], bucket: str | None) -> ImportPlan:
    """Find the files and check what can be checked before anything is read.

    Args:
        paths: files and folders; folders are searched for traces, SQLite exports and logs.
        ranks: the world size.
        mapping: ``FILE=RANK`` or ``FILE:PID=RANK``.
        bucket: a regular expression whose first group (or whole match) in a file's name is its bucket.

    Raises:
        UsageError: a path does not exist, nothing is there to read, the map or the expression does not fit, files are
            byte for byte the same, or belong to two profiles.
    """
    found, skipped = _find(paths)
    maps = _read_map(mapping, [path for path, _ in found], ranks)
    pattern = _compiled(bucket)
    files: list[PlannedFile] = []
    for path, kind in found:
        named = rank_of_trace_name(path)
        if named.capture:
            skipped.append((path, "recorded while graphs were captured: shapes, never executions"))
            continue
        mapped, pids = maps.get(path, (None, {}))
        files.append(PlannedFile(len(files), path, kind, named, mapped, pids, _bucket(pattern, path)))
    if pattern is not None and files and all(item.bucket is None for item in files):
        raise UsageError(f"--bucket {bucket!r} is found in no file's name", f"for example {files[0].path.name}")
    if not files and not skipped:
        raise UsageError("there is no trace to import", "name traces, SQLite exports or server logs, or their folder")
    _refuse_copies(files)
    _refuse_two_profiles(files)
    return ImportPlan(tuple(files), tuple(skipped))


def _find(paths: Sequence[Path]) -> tuple[list[tuple[Path, Format]], list[tuple[Path, str]]]:
    found: dict[Path, tuple[Path, Format]] = {}
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")):
                kind = _kind_in_folder(file)
                if kind is None:
                    skipped.append((file, "not a trace"))
                else:
                    found.setdefault(_place(file), (file, kind))
        elif path.exists():
            found.setdefault(_place(path), (path, _kind(path)))
        else:
            raise UsageError(f"{path}: no such file or folder", "name traces, or the folder that holds them")
    return list(found.values()), skipped


def _place(path: Path) -> Path:
    """Return where a file lies; two links to one file under different names stay two."""
    return path.parent.resolve() / path.name


def _kind(path: Path) -> Format:
    """Return the format of a file that was named outright. A damaged file keeps the format that its name claims."""
    name = path.name.lower()
    if name.endswith((".nsys-rep", ".qdrep")):
        hint = f"nsys export --type sqlite {path.name}, then import the .sqlite file"
        raise UsageError(f"{path}: a report of Nsight Systems must be exported first", hint)
    head = _head(path)
    if name.endswith(_SQLITE) or head.startswith(b"SQLite format 3\x00"):
        return "nsys-sqlite"
    if name.endswith(_JSON):
        return "kineto"
    if name.endswith(_LOG) or b"ALPHAMOE_" in head:
        return "sglang-log"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    # A server's lines begin with [2026-..., a list of events with [{.
    return "kineto" if text.startswith(b"{") or re.match(rb"\[\s*(\{|\]|\Z)", text) else "sglang-log"


def _kind_in_folder(path: Path) -> Format | None:
    """Return the format of a file that was found in a folder, or None for something else (``server_args.json``)."""
    name = path.name.lower()
    if name.endswith(_SQLITE):
        return "nsys-sqlite"
    if name.endswith(_JSON):
        stated = ".trace.json" in name or rank_of_trace_name(path).rank is not None
        head = _head(path)
        events = b'"traceEvents"' in head or b'"ph"' in head
        return "kineto" if stated or events or not head else None
    if name.endswith(_LOG):
        return "sglang-log"
    return None


def _head(path: Path) -> bytes:
    """Return the beginning of a file's content, inflated; empty where it cannot be read (its reader will say why)."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_SNIFF_BYTES)
    except OSError:
        return b""
    if head.startswith(b"\x1f\x8b"):
        try:
            return zlib.decompressobj(wbits=31).decompress(head, _SNIFF_BYTES)
        except zlib.error:
            return b""
    return head


def _read_map(
    mapping: Sequence[str], files: Sequence[Path], ranks: int
) -> dict[Path, tuple[int | None, dict[int, int]]]:
    found: dict[Path, tuple[int | None, dict[int, int]]] = {}
    for entry in mapping:
        match = _MAP.fullmatch(entry)
        if match is None:
            raise UsageError(f"--map {entry!r} is not FILE=RANK or FILE:PID=RANK", "for example --map trace.json=0")
        rank = int(match["rank"])
        if rank >= ranks:
            raise UsageError(f"--map {entry!r}: --ranks {ranks} has ranks 0 to {ranks - 1}")
        path = _named_file(match["file"], files, entry)
        one, pids = found.get(path, (None, {}))
        pid = match["pid"]
        before = one if pid is None else pids.get(int(pid))
        if before is not None and before != rank:
            raise UsageError(f"--map gives {match['file']} both rank {before} and rank {rank}")
        found[path] = (rank, pids) if pid is None else (one, pids | {int(pid): rank})
    return found


def _named_file(text: str, files: Sequence[Path], entry: str) -> Path:
    same = [path for path in files if path == Path(text) or _place(path) == _place(Path(text))]
    same = same or [path for path in files if path.name == text]
    if len(same) == 1:
        return same[0]
    if same:
        raise UsageError(f"--map {entry!r} fits {same[0]} and {same[1]}", "give the path instead of the name")
    near = difflib.get_close_matches(text, [path.name for path in files], n=1, cutoff=0.5)
    raise UsageError(f"--map {entry!r}: no such file is imported", f"did you mean {near[0]!r}?" if near else "")


def _compiled(bucket: str | None) -> re.Pattern[str] | None:
    if bucket is None:
        return None
    try:
        return re.compile(bucket)
    except re.error as error:
        raise UsageError(f"--bucket {bucket!r} is no regular expression: {error}") from error


def _bucket(pattern: re.Pattern[str] | None, path: Path) -> str | None:
    match = None if pattern is None else pattern.search(path.name) or pattern.search(path.as_posix())
    if match is None:
        return None
    return match[1] if match.re.groups else match[0]


def _refuse_copies(files: Sequence[PlannedFile]) -> None:
    """Refuse files that are byte for byte the same: two ranks never record the same times."""
    by_size: dict[int, list[PlannedFile]] = {}
    for item in files:
        by_size.setdefault(item.size_bytes, []).append(item)
    for size, group in by_size.items():
        if not size or len(group) < 2:
            continue
        seen: dict[str, PlannedFile] = {}
        for item in group:
            try:
                digest = sha256_of(item.path)
            except OSError:
                continue
            first = seen.setdefault(digest, item)
            if first is not item:
                inner = _INNER_RANK.search(_head(item.path))
                stated = f"; its content says rank {int(inner[1])}" if inner else ""
                raise UsageError(
                    f"{item.path}: same SHA-256 as {first.path} ({digest[:12]}): one rank under two names"
                    f"{_says(item)}{stated}",
                    "two writers may have used one file name; record those ranks again",
                )


def _says(item: PlannedFile) -> str:
    if item.named.rank is None:
        return ""
    label = f"TP-{item.named.tp}" if item.named.tp is not None else f"rank {item.named.rank}"
    return f"; the file says {label}"


def _refuse_two_profiles(files: Sequence[PlannedFile]) -> None:
    """Refuse files of two SGLang profiles in one run: one of them is stale."""
    first: dict[str | None, PlannedFile] = {}
    for item in files:
        if item.named.profile is None or item.mapped is not None or item.named.merged:
            continue
        other = first.setdefault(item.bucket, item)
        if other.named.profile != item.named.profile:
            raise UsageError(
                f"{other.path.name} and {item.path.name} are of two profiles ({other.named.profile} and"
                f" {item.named.profile}): one of them is stale",
                "name the files of one profile, or state every rank with --map",
            )
