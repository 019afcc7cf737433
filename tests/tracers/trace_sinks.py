"""A sink that keeps what a reader gives it, and short ways to make small traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphamoe_tracers.records import TABLES, check_table
from alphamoe_tracers.trace_files import BATCH_ROWS, SymbolTable


class KeptRows:
    """Rows by rank key and table; every batch is checked against its schema."""

    def __init__(self) -> None:
        self.batches: dict[tuple[str, str], list[pa.Table]] = {}
        self.tables_of_symbols: dict[str, SymbolTable] = {}

    def put(self, rank_key: str, table: str, rows: pa.Table) -> None:
        assert 0 <= rows.num_rows <= BATCH_ROWS
        assert check_table(table, rows) == []
        self.batches.setdefault((rank_key, table), []).append(rows)

    def symbols(self, rank_key: str) -> SymbolTable:
        return self.tables_of_symbols.setdefault(rank_key, SymbolTable())

    def rows(self, table: str, rank_key: str | None = None) -> list[dict[str, Any]]:
        """All rows of one table as dictionaries; kernels also have their name."""
        found: list[dict[str, Any]] = []
        for (key, name), batches in self.batches.items():
            if name == table and rank_key in (None, key):
                for row in pa.concat_tables(batches).to_pylist():
                    if table == "kernels":
                        row["name"] = self.symbols(key).names[row["symbol_id"]]
                    found.append(row)
        return found

    def everything(self) -> dict[str, Any]:
        """All rows in a form that can be compared."""
        return {table: self.rows(table) for table in TABLES}


def kernel(
    name: str, ts: float, dur: float, dev: int = 0, stream: int = 7, corr: int = 0, **args: Any
) -> dict[str, Any]:
    """A kernel event as Kineto writes it."""
    given = {"device": dev, "stream": stream, "correlation": corr} | args
    return {"ph": "X", "cat": "kernel", "name": name, "pid": dev, "tid": stream, "ts": ts, "dur": dur, "args": given}


def launch(name: str, ts: float, dur: float, corr: int, tid: int = 900) -> dict[str, Any]:
    """A runtime API event as Kineto writes it."""
    args = {"correlation": corr}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 900, "tid": tid, "ts": ts, "dur": dur, "args": args}


def trace(events: list[Any] | None, rank: int | None = None, world_size: int = 2, **members: Any) -> str:
    """A trace document."""
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world_size}}
    return json.dumps({"schemaVersion": 1, **info, **members, "traceEvents": events})


def write(path: Path, text: str | bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path
