"""Small traces of other tools, made by hand, and a shortcut through the whole import command."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.cli import main

Event = dict[str, Any]


def kernel(name: str, ts: float, dur: float, corr: int, stream: int = 7, **args: Any) -> Event:
    """A kernel event of device 0."""
    inner = {"device": 0, "stream": stream, "correlation": corr} | args
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": inner}


def launch(ts: float, corr: int, api: str = "cudaLaunchKernel", tid: int = 900) -> Event:
    """A launch call of process 900."""
    event = {"ph": "X", "cat": "cuda_runtime", "name": api, "pid": 900, "tid": tid, "ts": ts, "dur": 2}
    return event | {"args": {"correlation": corr}}


def annotation(name: str, ts: float, dur: float, tid: int = 900) -> Event:
    """A range that a program pushed."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 900, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def run_of(name: str = "moe_gemm", at: int = 100) -> list[Event]:
    """One launched kernel."""
    return [launch(at, 41), kernel(name, at + 5, 3, 41)]


def trace(path: Path, events: Sequence[Event], rank: int | None = None, world: int | None = None) -> Path:
    """Write a Kineto trace, with ``distributedInfo`` when a rank is given."""
    document: dict[str, Any] = {"schemaVersion": 1}
    if rank is not None:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document | {"traceEvents": list(events)}))
    return path


def sqlite(path: Path, tables: dict[str, tuple[str, Sequence[Sequence[object]]]]) -> Path:
    """Write a SQLite export from (comma-separated columns, rows) by table."""
    connection = sqlite3.connect(path)
    for name, (columns, rows) in tables.items():
        connection.execute(f"CREATE TABLE {name} ({columns})")
        connection.executemany(f"INSERT INTO {name} VALUES ({','.join('?' * len(columns.split(',')))})", rows)  # noqa: S608
    connection.commit()
    connection.close()
    return path


def imported(out: Path, *words: str | Path | int, code: int = 0) -> RunBundle:
    """Run ``alphamoe-trace import`` and open what it wrote."""
    assert main(["import", *map(str, words), "--out", str(out)]) == code
    return RunBundle.open(out)


def refused(out: Path, *words: str | Path | int) -> None:
    """Run an import that must be a usage error and leave nothing behind."""
    before = sorted(out.parent.rglob("*"))
    assert main(["import", *map(str, words), "--out", str(out)]) == 2
    assert sorted(out.parent.rglob("*")) == before
