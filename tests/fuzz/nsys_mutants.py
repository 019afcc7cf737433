"""Mutants of Nsight Systems exports of two ranks: damaged pages, odd rows, lost tables, removed evidence."""

# ruff: noqa: S608 -- every statement is made of the names above
from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from tempfile import mkdtemp

from damage import cut_bytes, damaged_bytes
from judge import CountingSink, Mutant

from alphamoe_tracers.nsys import read_nsys

RANKS, STEPS = 2, 8
SYMBOL, FORBIDDEN = "moe_gemm", "fused_moe_kernel"
KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
POLICY = f"""
[[require]]
symbol = "{SYMBOL}"
at_least = {3 * STEPS}
[[forbid]]
symbol = "{FORBIDDEN}"
match = "triton"
"""
GRAPH_TRACE = (
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE "
    "(start INTEGER, end INTEGER, correlationId INTEGER, graphId INTEGER, globalPid INTEGER)"
)
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    RUNTIME: "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER",
    KERNEL: "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, "
    "globalPid INTEGER, demangledName INTEGER, shortName INTEGER, mangledName INTEGER, gridX INTEGER, gridY INTEGER, "
    "gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER, graphNodeId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, "
    "domainId INTEGER, int64Value INTEGER",
}
STRINGS = ((1, "cudaLaunchKernel_v7000"), (2, SYMBOL), (3, "norm_kernel"), (4, "cudaGraphLaunch_v10000"), (5, "spare"))
ODD = (None, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 0.5, 1e300, "text", "", b"\xff\x00", "x" * 5000, 10**15)


def make(rng: random.Random, folder: Path) -> Mutant:
    """Write one mutant into an empty folder."""
    if rng.random() < 0.17:
        kind = rng.choice(list(REMOVALS))
        paths = _copies(folder)
        REMOVALS[kind](rng, paths)
        return _gated(folder, f"nsys: {kind}", True)
    paths = _copies(folder)
    rank = rng.randrange(RANKS)
    kind = rng.choice(("pages", "pages", "rows", "rows", "tables"))
    if kind == "pages":
        paths[rank].write_bytes(damaged_bytes(rng, paths[rank].read_bytes()))
    else:
        _sql(paths[rank], partial(_odd_rows if kind == "rows" else _odd_tables, rng))
    if rng.random() < 0.1:
        return _gated(folder, f"nsys: {kind}, gated", False)
    return Mutant(f"nsys: {kind}, read", read=partial(read_nsys, paths[rank], CountingSink()))


def untouched(folder: Path) -> Mutant:
    """The sound seed, which must be a PASS."""
    _copies(folder)
    return _gated(folder, "nsys: sound", False)


def _gated(folder: Path, kind: str, removed: bool) -> Mutant:
    (folder / "policy.toml").write_text(POLICY)
    mapping = [word for rank in range(RANKS) for word in ("--map", f"own{rank}.sqlite={rank}")]
    if not all((folder / f"traces/own{rank}.sqlite").is_file() for rank in range(RANKS)):
        mapping = [
            word
            for rank in range(RANKS)
            if (folder / f"traces/own{rank}.sqlite").is_file()
            for word in mapping[2 * rank : 2 * rank + 2]
        ]
    words = ("gate", str(folder / "traces"), "--ranks", str(RANKS), *mapping, "--policy", str(folder / "policy.toml"))
    return Mutant(kind, words, removed=removed)


@lru_cache(maxsize=1)
def _seeds() -> tuple[Path, ...]:
    folder = Path(mkdtemp(prefix="alphamoe-fuzz-nsys-"))
    return tuple(_seed(folder / f"own{rank}.sqlite", rank) for rank in range(RANKS))


def _seed(path: Path, rank: int) -> Path:
    pid = 1 << 56 | (500 + rank) << 24
    runtime, kernels, ranges = [], [], []
    correlation = 0
    for step in range(STEPS):
        start = 1_000_000 + 50_000 * step + 7 * rank
        name = f"execute_context_1({8 + step})_generation_0(0)"
        ranges.append((start - 100, start + 20_000, 59, name, None, pid | 1, 0, None))
        for place, symbol in enumerate((3, 2, 2, 2)):
            correlation += 1
            at = start + 1000 * place
            node = None
            runtime.append((at, at + 50, 0, pid | 1, correlation, 1))
            shape = (8, 1, 1, 128, 1, 1)
            kernels.append((at + 100, at + 400, 0, 1, 7, correlation, pid, symbol, symbol, symbol, *shape, node))
    connection = sqlite3.connect(path)
    for table, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({columns})")
    for table, rows in {
        "StringIds": STRINGS,
        "META_DATA_EXPORT": (("EXPORT_PRODUCT_VERSION", "2026.2.1"), ("EXPORT_SCHEMA_VERSION", "3.25.0")),
        RUNTIME: runtime,
        KERNEL: kernels,
        "NVTX_EVENTS": ranges,
    }.items():
        connection.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
    connection.commit()
    connection.close()
    return path


def _copies(folder: Path) -> list[Path]:
    (folder / "traces").mkdir(parents=True)
    return [Path(shutil.copy(path, folder / "traces" / path.name)) for path in _seeds()]


def _sql(path: Path, change: Callable[[sqlite3.Connection], None]) -> None:
    connection = sqlite3.connect(path)
    try:
        change(connection)
        connection.commit()
    finally:
        connection.close()


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _odd_rows(rng: random.Random, connection: sqlite3.Connection) -> None:
    for _ in range(rng.choice((1, 1, 2, 5))):
        table = rng.choice(list(TABLES))
        column = rng.choice(_columns(connection, table))
        value = rng.choice(ODD)
        where = rng.choice(("1", f"rowid % {rng.randrange(1, 9)} = 0", f"rowid = {rng.randrange(1, 40)}"))
        kind = rng.choice(("set", "set", "set", "delete", "double"))
        sql = {
            "set": f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}",
            "delete": f"DELETE FROM {table} WHERE {where} AND ? IS NOT 7",
            "double": f"INSERT OR IGNORE INTO {table} SELECT * FROM {table} WHERE {where} AND ? IS NOT 7",
        }[kind]
        try:
            connection.execute(sql, (value,))
        except (sqlite3.IntegrityError, OverflowError):
            continue  # a primary key: the table would not hold it


def _odd_tables(rng: random.Random, connection: sqlite3.Connection) -> None:
    table = rng.choice(list(TABLES))
    column = rng.choice(_columns(connection, table))
    statements = (
        f"DROP TABLE {table}",
        f"ALTER TABLE {table} RENAME TO {table}_OLD",
        f"ALTER TABLE {table} RENAME COLUMN {column} TO {column}_old",
        f"CREATE TABLE spare AS SELECT * FROM {table}; DROP TABLE {table}; CREATE VIEW {table} AS SELECT * FROM spare",
        f"CREATE TABLE spare AS SELECT {column}, * FROM {table}; DROP TABLE {table}; "
        f"ALTER TABLE spare RENAME TO {table}",
        f"DROP TABLE {table}; CREATE VIEW {table} AS SELECT * FROM other; CREATE VIEW other AS SELECT * FROM {table}",
        f"CREATE TABLE {GRAPH_TRACE}",
        f"CREATE TABLE {table}_two AS SELECT * FROM {table}",
        f"DELETE FROM {table}",
    )
    try:
        connection.executescript(rng.choice(statements))
    except sqlite3.Error:
        connection.execute("CREATE TABLE StringIds_again AS SELECT * FROM StringIds")


Removal = Callable[[random.Random, list[Path]], None]


def _statement(sql: str) -> Removal:
    def remove(rng: random.Random, paths: list[Path]) -> None:
        chosen = rng.choice(("demangledName = 2", f"demangledName = 2 AND correlationId % 8 = {rng.choice((2, 3, 4))}"))
        _sql(
            rng.choice(paths),
            lambda connection: connection.executescript(sql.format(kernel=KERNEL, runtime=RUNTIME, chosen=chosen)),
        )  # type: ignore[arg-type,return-value]

    return remove


def _file(rng: random.Random, paths: list[Path]) -> None:
    rng.choice(paths).unlink()


def _cut(rng: random.Random, paths: list[Path]) -> None:
    path = rng.choice(paths)
    path.write_bytes(cut_bytes(rng, path.read_bytes()))


def _clone(rng: random.Random, paths: list[Path]) -> None:
    shutil.copy(paths[0], paths[1])


REMOVALS: dict[str, Removal] = {
    "required kernels gone": _statement("DELETE FROM {kernel} WHERE {chosen}"),
    "required kernels and their launches gone": _statement(
        "DELETE FROM {runtime} WHERE correlationId IN (SELECT correlationId FROM {kernel} WHERE {chosen}); "
        "DELETE FROM {kernel} WHERE {chosen}"
    ),
    "required kernels renamed": _statement(
        "UPDATE {kernel} SET demangledName = 5, shortName = 5, mangledName = 5 WHERE {chosen}"
    ),
    "required kernels without a name": _statement(
        "UPDATE {kernel} SET demangledName = NULL, shortName = NULL, mangledName = NULL WHERE {chosen}"
    ),
    "required name gone": _statement("DELETE FROM StringIds WHERE id = 2"),
    "required name changed": _statement("UPDATE StringIds SET value = 'moe_gemm_v2' WHERE id = 2"),
    "launches gone": _statement("DELETE FROM {runtime}"),
    "launch table gone": _statement("DROP TABLE {runtime}"),
    "kernel table gone": _statement("DROP TABLE {kernel}"),
    "correlation ids gone": _statement("UPDATE {kernel} SET correlationId = 0 WHERE {chosen}"),
    "a forbidden kernel": _statement("UPDATE StringIds SET value = 'fused_moe_kernel_0d1d2de3' WHERE id = 3"),
    "a name cut": _statement("UPDATE StringIds SET value = 'fused_mo...' WHERE id = 3"),
    "a graph traced as one block": _statement(
        "DELETE FROM {kernel} WHERE {chosen}; CREATE TABLE "
        + GRAPH_TRACE
        + "; UPDATE {runtime} SET nameId = 4 WHERE correlationId NOT IN "
        "(SELECT correlationId FROM {kernel}); INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE SELECT start, end, "
        "correlationId, 3, globalTid - globalTid % 16777216 FROM {runtime} WHERE nameId = 4"
    ),
    "a rank's file gone": _file,
    "a file cut": _cut,
    "a rank cloned": _clone,
}
