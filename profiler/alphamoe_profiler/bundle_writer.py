"""Write a run bundle: every file under a temporary name first, then renamed; JSON Lines appended and flushed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from alphamoe_profiler.bundle_files import encode_json, rank_of_name, read_json, replacing, sha256_of
from alphamoe_profiler.run_records import RankFile, RequestRecord, RunInfo, RunOutcome
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError
from alphamoe_tracers.records import SCHEMA_VERSION, TABLES, ModuleRecord, check_table

if TYPE_CHECKING:
    import pyarrow as pa

_OWN_NAMES = frozenset(
    {
        *TABLES,
        "modules",
        "receipts",
        "steps",
        "dispatch_log",
        "captures",
        "ranks",
        "reports",
        "run.json",
        "requests.jsonl",
        "outcome.json",
    }
)
_RANK_FOLDERS = _OWN_NAMES - {"reports", "run.json", "requests.jsonl", "outcome.json"}


class _Identity(msgspec.Struct):
    """What every run.json has said since the first version, and hardly any other file of that name says."""

    schema_version: int
    run_id: str
    world_size: int


def _not_a_bundle(root: Path, names: set[str]) -> str | None:
    """Say why a directory is not a run bundle, so that removing it could take away something else; null if it is."""
    strangers = sorted(name for name in names - _OWN_NAMES if not name.endswith(".tmp"))
    if strangers:
        return f"it holds {strangers[0]}"
    if "run.json" not in names:
        return "it has no run.json"
    try:
        read_json(root / "run.json", _Identity)
    except EvidenceError:
        return "its run.json is not one of a run"
    for folder in sorted(names & _RANK_FOLDERS):
        for entry in sorted((root / folder).iterdir()) if (root / folder).is_dir() else []:
            own = entry.name.startswith(".") or entry.name.endswith(".tmp") or rank_of_name(entry.name) is not None
            if not own:
                return f"it holds {folder}/{entry.name}"
            if folder not in TABLES or not entry.is_dir() or entry.is_symlink():
                continue
            parts = sorted(p.name for p in entry.iterdir() if not p.name.startswith((".", "part-")))
            if parts:
                return f"it holds {folder}/{entry.name}/{parts[0]}"
    return None


class BundleWriter:
    """The one way into a run bundle, for the launcher and for the rank processes.

    The launcher creates the directory; a rank joins it and writes only files of its own rank.
    """

    def __init__(self, path: Path | str, force: bool = False) -> None:
        """Create the directory of a new bundle.

        Args:
            path: a directory that does not exist yet or is empty.
            force: remove an existing bundle there first. Anything that is not a bundle is never removed.

        Raises:
            UsageError: the path is taken, or what is there is not a run bundle.
            AlphaMoEError: the directory cannot be created.
        """
        self.path = Path(path)
        try:
            if self.path.exists() or self.path.is_symlink():
                self._make_room(force)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.mkdir()
        except FileExistsError as error:
            # Another launcher was faster: two runs never share a directory.
            raise UsageError(f"{self.path} exists: another run has just begun there", "choose another --out") from error
        except OSError as error:
            raise AlphaMoEError(f"{self.path}: {error.strerror}", "choose another directory with --out") from error

    @classmethod
    def join(cls, path: Path | str) -> BundleWriter:
        """Return a writer for a bundle that the launcher has created already.

        Raises:
            UsageError: there is no run.json.
        """
        writer = cls.__new__(cls)
        writer.path = Path(path)
        if not (writer.path / "run.json").is_file():
            raise UsageError(f"{writer.path}: no run.json, this is not a run bundle", "the launcher creates it first")
        return writer

    def _make_room(self, force: bool) -> None:
        if not self.path.is_dir() or self.path.is_symlink():
            raise UsageError(f"{self.path} exists and is not a directory", "choose another directory with --out")
        names = {entry.name for entry in self.path.iterdir()}
        if not names:
            return
        if not force:
            raise UsageError(f"{self.path} exists", "choose another directory with --out, or overwrite it with --force")
        reason = _not_a_bundle(self.path, names)
        if reason is not None:
            raise UsageError(f"{self.path} is not a run bundle ({reason}): not overwritten", "choose another directory")
        # run.json first: an interrupted removal must not leave something that looks whole.
        (self.path / "run.json").unlink()
        for entry in list(self.path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def table_dir(self, name: str, rank: int) -> Path:
        """Return the directory of one table of one rank, for example ``RUN/kernels/rank=0``."""
        return self.path / name / f"rank={rank}"

    def receipts_path(self, rank: int) -> Path:
        """Return the path of a rank's receipts; its directory exists afterwards."""
        return self._lines("receipts", rank)

    def modules_path(self, rank: int) -> Path:
        """Return the path of a rank's module records; its directory exists afterwards."""
        return self._lines("modules", rank)

    def _lines(self, name: str, rank: int) -> Path:
        path = self.path / name / f"rank={rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_run(self, run: RunInfo) -> Path:
        """Write run.json.

        Raises:
            UsageError: the world size is not positive, the schema version is not this program's, or another run.json
                is there.
        """
        if run.world_size < 1:
            raise UsageError(f"a run needs at least one rank, not {run.world_size}", "for example --ranks 4")
        if run.schema_version != SCHEMA_VERSION:
            raise UsageError(f"run.json version {run.schema_version} cannot be written, only {SCHEMA_VERSION}")
        target = self.path / "run.json"
        try:
            # Two launchers may have found the same empty directory: whoever makes run.json has it.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError as error:
            raise UsageError(f"{self.path}: another run has just begun there", "choose another --out") from error
        try:
            return self._document("run.json", run)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def write_rank(self, record: RankFile) -> Path:
        """Write ranks/N.json, the last file of a rank, with the hash of each file of that rank filled in.

        Raises:
            EvidenceError: a number in it is not finite.
        """
        hashed = msgspec.structs.replace(record, sha256=self.hash_files(record.rank))
        return self._document(f"ranks/{record.rank}.json", hashed)

    def write_outcome(self, outcome: RunOutcome) -> Path:
        """Write outcome.json: how each rank's process ended, as the launcher saw it."""
        return self._document("outcome.json", outcome)

    def append_request(self, record: RequestRecord) -> None:
        """Append one request to requests.jsonl, flushed to the operating system before this returns."""
        line = encode_json(record, f"request {record.request_id}")
        handle = os.open(self.path / "requests.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with os.fdopen(handle, "ab") as stream:
            stream.write(line)

    def write_modules(self, rank: int, records: Iterable[ModuleRecord]) -> Path:
        """Write a rank's module records, one a line."""
        path = self.modules_path(rank)
        with replacing(path) as stream:
            for record in records:
                stream.write(encode_json(record, f"module {record.sha256}"))
        return path

    def write_table(self, name: str, rank: int, table: pa.Table, part: int = 0) -> Path:
        """Write one Parquet part of a bulk table.

        Raises:
            EvidenceError: the table does not follow its schema.
        """
        import pyarrow.parquet as pq

        problems = check_table(name, table)
        if problems:
            raise EvidenceError(f"rank {rank}: {problems[0]}", "this is a mistake of the program that writes it")
        path = self.table_dir(name, rank) / f"part-{part:05d}.parquet"
        with replacing(path) as stream:
            pq.write_table(table.cast(TABLES[name]), stream, compression="zstd")
        return path

    def hash_files(self, rank: int) -> dict[str, str]:
        """Return the SHA-256 of each file of one rank by its path relative to the bundle, sorted."""
        roots = [self.table_dir(name, rank) for name in (*TABLES, "captures")]
        files = [path for root in roots if root.is_dir() for path in root.rglob("*") if path.is_file()]
        files += [self.path / f"{name}/rank={rank}.jsonl" for name in ("modules", "receipts", "steps", "dispatch_log")]
        own = [(path, path.relative_to(self.path).parts) for path in files if path.is_file()]
        kept = [path for path, parts in own if not any(part.endswith(".tmp") for part in parts)]
        return {path.relative_to(self.path).as_posix(): sha256_of(path) for path in sorted(kept)}

    def _document(self, relative: str, record: RunInfo | RankFile | RunOutcome) -> Path:
        path = self.path / relative
        content = encode_json(record, relative, indent=2)
        if relative.startswith("ranks/") and rank_of_name(path.name) is None:
            raise UsageError(f"rank {path.stem} is not a rank")
        with replacing(path) as stream:
            stream.write(content)
        return path
