"""Small Nsight Systems exports made by hand, with as many columns as a case needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from alphamoe_tracers.trace_files import SymbolTable

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"


def gid(pid: int, tid: int = 0) -> int:
    """A serialized id of machine 1."""
    return 1 << 56 | pid << 24 | tid


def write(path: Path, tables: dict[str, tuple[str, Sequence[Sequence[object]]]]) -> Path:
    """Write tables given as (comma-separated columns, rows)."""
    connection = sqlite3.connect(path)
    for name, (columns, rows) in tables.items():
        connection.execute(f"CREATE TABLE {name} ({columns})")
        marks = ",".join("?" * len(columns.split(",")))
        connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)  # noqa: S608
    connection.commit()
    connection.close()
    return path


class Sink:
    """Keeps what a reader gives."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, str], list[pa.Table]] = {}
        self.names: dict[str, SymbolTable] = {}

    def put(self, rank_key: str, table: str, rows: pa.Table) -> None:
        self.parts.setdefault((rank_key, table), []).append(rows)

    def symbols(self, rank_key: str) -> SymbolTable:
        return self.names.setdefault(rank_key, SymbolTable())

    def table(self, rank_key: str, table: str) -> list[dict[str, object]]:
        return [row for part in self.parts.get((rank_key, table), []) for row in part.to_pylist()]
