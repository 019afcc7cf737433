"""Read a run bundle: the one thing that everything downstream reads. Lazy, per rank, and strict.

Damaged evidence is reported and the rest is still read, because presence can be proven by damaged evidence.
The format is described in docs/run-bundle.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from alphamoe_profiler.bundle_files import decode_json, inside, read_json, refuse_integers
from alphamoe_profiler.bundle_writer import BundleWriter
from alphamoe_profiler.import_records import ImportedStep
from alphamoe_profiler.run_records import (
    GeometryInfo,
    GpuInfo,
    MemorySnapshot,
    PromptInfo,
    RankEnd,
    RankFile,
    RequestRecord,
    RunInfo,
    RunOutcome,
    SourceRevision,
)
from alphamoe_tracers.errors import EvidenceError, UsageError
from alphamoe_tracers.records import SCHEMA_VERSION, ModuleRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from alphamoe_profiler.tables import TableRead
    from alphamoe_tracers.receipts import ReceiptFile
    from alphamoe_tracers.sglang_log import LoggedLine

__all__ = [
    "BundleWriter",
    "GeometryInfo",
    "GpuInfo",
    "MemorySnapshot",
    "PromptInfo",
    "RankEnd",
    "RankFile",
    "RequestRecord",
    "RunBundle",
    "RunInfo",
    "RunOutcome",
    "SourceRevision",
    "readable_rank_file",
]


T = TypeVar("T")

MAX_WORLD_SIZE = 4096
"""No tensor-parallel run has more ranks; a damaged number must not make a reader count to a billion."""


class _Version(msgspec.Struct):
    schema_version: int


class RunBundle:
    """One recorded run on disk.

    Everything but run.json is read when it is asked for and kept. No method writes.
    """

    def __init__(self, path: Path, run: RunInfo) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.run = run
        self._tables: dict[tuple[str, int], TableRead] = {}
        self._receipts: dict[int, ReceiptFile] = {}
        self._rank_files: dict[int, RankFile | EvidenceError | None] = {}
        self.problems_by_rank: dict[int, list[str]] = {}
        """What :func:`bundle_check.rank_problems` found, kept so that files are hashed once."""

    @classmethod
    def open(cls, path: Path | str) -> RunBundle:
        """Open a bundle.

        Raises:
            UsageError: there is no bundle, or a newer version of this program wrote it.
            EvidenceError: run.json is damaged.
        """
        root = Path(path)
        document = root / "run.json"
        if not document.is_file():
            raise UsageError(f"{root}: no run.json, this is not a run bundle", "name the directory of a recorded run")
        inside(root, "run.json")
        version = read_json(document, _Version).schema_version
        if version > SCHEMA_VERSION:
            raise UsageError(
                f"{document}: schema version {version} is newer than {SCHEMA_VERSION}, the newest known here",
                "read it with the version of alphamoe-trace that wrote it, or a later one",
            )
        if version < 1:
            raise EvidenceError(f"{document}: schema version {version} has never existed")
        run = read_json(document, RunInfo)
        if not 1 <= run.world_size <= MAX_WORLD_SIZE:
            raise EvidenceError(f"{document}: world size {run.world_size}", f"a run has 1 to {MAX_WORLD_SIZE} ranks")
        return cls(root, run)

    @property
    def world_size(self) -> int:
        """Ranks that the run was asked for. From run.json only, never from counting files."""
        return self.run.world_size

    @property
    def ranks(self) -> range:
        """Every rank that the run was asked for, whether it left files or not."""
        return range(self.run.world_size)

    def _rank_checked(self, rank: int) -> int:
        if rank not in self.ranks:
            raise UsageError(f"rank {rank}: this run has ranks 0 to {self.world_size - 1}")
        return rank

    def read_table(self, name: str, rank: int) -> TableRead:
        """Return one table of one rank with what was wrong with it. See :func:`tables.read_parts`."""
        from alphamoe_profiler.tables import read_parts

        key = (name, self._rank_checked(rank))
        if key not in self._tables:
            relative = f"{name}/rank={rank}"
            read = read_parts(name, inside(self.path, relative), relative)
            if name == "symbols":
                from alphamoe_profiler.symbol_rows import with_true_bases

                read = with_true_bases(read, relative)
            self._tables[key] = read
        return self._tables[key]

    def table(self, name: str, rank: int) -> pa.Table:
        """Return the readable rows of one table of one rank, exact duplicates dropped; launches one a submission."""
        table = self.read_table(name, rank).table
        if name == "launches":
            from alphamoe_tracers.launches import fold_launches

            return fold_launches(table)
        return table

    def receipts(self, rank: int) -> ReceiptFile:
        """Return a rank's receipts: empty where it left none, cut and with problems where the file is damaged."""
        from alphamoe_tracers.receipts import ReceiptFile, read_receipts

        if self._rank_checked(rank) not in self._receipts:
            path = inside(self.path, f"receipts/rank={rank}.jsonl")
            empty = ReceiptFile(receipts=[], duplicates=0, cut=False, problems=())
            self._receipts[rank] = read_receipts(path) if path.is_file() else empty
        return self._receipts[rank]

    def modules(self, rank: int) -> list[ModuleRecord]:
        """Return the code modules that the rank's collector saw loaded.

        Raises:
            EvidenceError: a line is damaged.
        """
        return self._lines(f"modules/rank={self._rank_checked(rank)}.jsonl", ModuleRecord)

    def steps(self, rank: int) -> list[ImportedStep]:
        """Return the step annotations of an imported rank.

        Raises:
            EvidenceError: a line is damaged.
        """
        return self._lines(f"steps/rank={self._rank_checked(rank)}.jsonl", ImportedStep)

    def dispatch_log(self, rank: int) -> list[LoggedLine]:
        """Return what an imported server log says that a rank dispatched: sets, never counts.

        Raises:
            EvidenceError: a line is damaged.
        """
        from alphamoe_tracers.sglang_log import LoggedLine

        return self._lines(f"dispatch_log/rank={self._rank_checked(rank)}.jsonl", LoggedLine)

    def requests(self) -> list[RequestRecord]:
        """Return the served requests. A last line without its end was cut and is left out.

        Raises:
            EvidenceError: another line is damaged.
        """
        return self._lines("requests.jsonl", RequestRecord)

    def rank_file(self, rank: int) -> RankFile | None:
        """Return ranks/N.json, or None where the rank left none: it was cut short.

        Raises:
            EvidenceError: the file is damaged.
        """
        if self._rank_checked(rank) not in self._rank_files:
            path = inside(self.path, f"ranks/{rank}.json")
            try:
                self._rank_files[rank] = self._read_rank_file(path) if path.is_file() else None
            except EvidenceError as error:
                self._rank_files[rank] = error
        found = self._rank_files[rank]
        if isinstance(found, EvidenceError):
            raise found
        return found

    def _read_rank_file(self, path: Path) -> RankFile:
        record = read_json(path, RankFile)
        refuse_integers(record, 0, str(path))  # counts, sizes, times and ids: none is ever below 0
        if record.sm_count == 0 or record.schema_version == 0:
            raise EvidenceError(f"{path}: a number in it is 0 and cannot be", "the file is damaged")
        return record

    def outcome(self) -> RunOutcome | None:
        """Return outcome.json, or None where the launcher did not live to write it.

        Raises:
            EvidenceError: the file is damaged.
        """
        path = inside(self.path, "outcome.json")
        return read_json(path, RunOutcome) if path.is_file() else None

    def _lines(self, relative: str, kind: type[T]) -> list[T]:
        path = inside(self.path, relative)
        if not path.is_file():
            return []
        records = []
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.endswith(b"\n"):
                        records.append(decode_json(line, kind, f"{path}:{number}"))
        except OSError as error:
            raise EvidenceError(f"{path}: {error.strerror or error}", "was the run cut short?") from error
        return records

    def cut_line(self, relative: str) -> bool:
        """Say whether a JSON Lines file ends inside a line: its writer was killed, or it was truncated."""
        path = inside(self.path, relative)
        try:
            with path.open("rb") as stream:
                if not stream.seek(0, 2):
                    return False
                stream.seek(-1, 2)
                return stream.read(1) != b"\n"
        except OSError:
            return False


def readable_rank_file(bundle: RunBundle, rank: int) -> RankFile | None:
    """Return ranks/N.json where it is there and readable. :mod:`bundle_check` says what is wrong with it."""
    try:
        return bundle.rank_file(rank)
    except EvidenceError:
        return None
