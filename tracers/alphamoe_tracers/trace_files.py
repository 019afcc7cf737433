"""What every reader of other tools' files shares: where rows go, how symbols are numbered, what a file says of itself.

A reader streams one file into a sink and returns one :class:`TraceSummary` for each rank it found there. It gives the
sink nothing before the file was read to its end, so that a malformed file leaves no rows behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import pyarrow as pa

from alphamoe_tracers.records import SYMBOLS
from alphamoe_tracers.symbols import base_name, demangle, symbol_class

TraceFormat = Literal["kineto", "nsys-sqlite", "sglang-log"]
RankSource = Literal["distributedInfo", "file name", "label"]
Clock = Literal["unix", "boot", "unknown"]

BATCH_ROWS = 65_536
"""Rows of one :meth:`TraceSink.put` at most."""

Progress = Callable[[int, int], None]
"""Called as (bytes of the file read so far, size of the file in bytes)."""


class SymbolTable:
    """Numbers kernel names, as the trace spells them, in order of appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def id_of(self, name: str) -> int:
        """Return the ``symbol_id`` of a name, giving it the next number when it is new."""
        return self._ids.setdefault(name, len(self._ids))

    @property
    def names(self) -> list[str]:
        """The names; a name's index is its symbol id."""
        return list(self._ids)

    def rows(self) -> pa.Table:
        """Return the SYMBOLS rows of all names: mangled is the trace's own spelling, the module is unknown."""
        rows = []
        for name, symbol_id in self._ids.items():
            full = demangle(name)
            base = base_name(full)
            kind = symbol_class(base, full)
            row = {"symbol_id": symbol_id, "mangled": name, "full": full, "base": base, "class": kind}
            rows.append(row | {"module_sha256": None})
        return pa.Table.from_pylist(rows, schema=SYMBOLS)


class TraceSink(Protocol):
    """Where a reader puts rows. A rank key tells the ranks (or processes) of one file apart and means nothing else."""

    def put(self, rank_key: str, table: str, rows: pa.Table) -> None:
        """Take at most :data:`BATCH_ROWS` rows that follow ``records.TABLES[table]``; never called for symbols."""
        ...

    def symbols(self, rank_key: str) -> SymbolTable:
        """Return the one symbol table of this key; its ids are what the KERNELS rows of this key hold."""
        ...


class TraceSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one file says of one rank, counted while it was read. Counts are records, duplicates left out."""

    key: str
    """The rank key under which this rank's rows were put."""
    path: str
    sha256: str
    size_bytes: int
    format: TraceFormat
    format_version: str | None = None
    rank: int | None = None
    """As the file states it. Null when it does not: never a guess, never a device index."""
    rank_source: RankSource | None = None
    name_rank: int | None = None
    """What the file's name says, also where ``rank`` was read inside the file: the two may disagree."""
    world_size: int | None = None
    whole: bool = True
    """The file was written to its end and can prove absence as far as its records go."""
    cut: str | None = None
    """Why it is not whole."""
    capture_only: bool = False
    """Recorded while graphs were captured: shapes, never executions."""
    kernels: int = 0
    graph_kernels: int = 0
    """Kernels that share the correlation id of a graph launch, or carry a graph node id."""
    transfers: int = 0
    launches: int = 0
    """Submissions of kernels and graphs, after runtime and driver rows of one submission were folded."""
    graph_launches: int = 0
    launches_without_kernel: int = 0
    """Launches with no kernel and no transfer, those made while a stream was capturing left out."""
    launches_while_capturing: int = 0
    kernels_without_launch: int = 0
    submitted_before_window: int = 0
    """Of these, kernels whose correlation id is below the smallest launch id: submitted before recording began."""
    duplicates: int = 0
    """Kernels recorded twice and kept once."""
    untimed: int = 0
    """Kernels that ran with start and end 0."""
    invalid_times: int = 0
    """Kernels whose end lies before their start."""
    overlapping: int = 0
    """Kernels that start before an earlier kernel of their own stream has ended."""
    summed_ns: int = 0
    """Sum of kernel times (untimed and invalid ones left out)."""
    busy_ns: int = 0
    """Time during which at least one kernel of a stream ran, summed over streams; below summed_ns by the overlap."""
    first_kernel_ns: int | None = None
    last_kernel_ns: int | None = None
    ranges: int = 0
    node_ids: bool = False
    """Every kernel of a graph launch carries its graph node id (true when no kernel came from a graph)."""
    clock: Clock = "unknown"
    base_ns: int = 0
    """What was added to the file's own times to reach the stored ones."""
    versions: dict[str, str] = {}
    events: dict[str, int] = {}
    """Records by the file's own category, for "0 events of kind X"."""
    truncated_names: int = 0
    """Distinct kernel names that a tool cut with an ellipsis: they cannot prove absence."""
    notes: tuple[str, ...] = ()

    @property
    def overlap_share(self) -> float | None:
        """Share of the summed kernel time that ran beside another kernel of its stream; null when no time is known."""
        return (self.summed_ns - self.busy_ns) / self.summed_ns if self.summed_ns > 0 else None


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes as they lie on disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
