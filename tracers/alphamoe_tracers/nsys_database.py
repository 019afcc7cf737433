"""Opening of an Nsight Systems SQLite export, read-only, and probing of what its schema has.

Tables and columns differ from schema 2.9 (nsys 2022.2) to 3.25 and later: nothing is assumed from a version number.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alphamoe_tracers.errors import EvidenceError

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_EXPORT_AGAIN = "export it again: nsys export --type sqlite --force-overwrite true REPORT.nsys-rep"
_BUSY_TIMEOUT_S = 2.0
# A damaged schema may be quoted in a message that is not UTF-8 itself.
_SQLITE_ERRORS = (sqlite3.Error, OverflowError, UnicodeDecodeError)
BATCH_ROWS = 16_384
"""Rows that are Python objects at one time: some hundred bytes each."""

Row = tuple[Any, ...]


class NsysDatabase:
    """One export, with the tables and columns that it really has."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Use :func:`open_database`."""
        self.path = path
        self._connection = connection
        self.columns: dict[str, frozenset[str]] = {}
        for name, sql in self.rows("SELECT name, sql FROM sqlite_master WHERE type = 'table'"):
            # An export has ordinary tables only: a view or a virtual table would run somebody's code.
            if (
                isinstance(name, str)
                and re.fullmatch(r"\w+", name)
                and not re.match(r"\s*CREATE\s+VIRTUAL", str(sql), re.IGNORECASE)
            ):
                self.columns[name] = frozenset(row[1] for row in self.rows(f'PRAGMA table_info("{name}")'))
        self.meta = self._meta()

    @property
    def schema_version(self) -> str | None:
        """The export's schema version, for example ``3.25.0``."""
        return self.meta.get("EXPORT_SCHEMA_VERSION")

    @property
    def tool(self) -> str:
        """The tool and schema that wrote the export, for messages."""
        version = self.meta.get("EXPORT_PRODUCT_VERSION")
        return f"nsys {version or 'of unknown version'}, schema {self.schema_version or 'unknown'}"

    def has(self, table: str, *columns: str) -> bool:
        """Say whether the export has a table and all of these columns."""
        return table in self.columns and self.columns[table].issuperset(columns)

    def first_of(self, *tables: str) -> str | None:
        """Return the first of these tables that the export has."""
        return next((table for table in tables if table in self.columns), None)

    def need(self, table: str, *columns: str) -> None:
        """Check that a table and its columns are there.

        Raises:
            EvidenceError: naming the table or column that is missing, and the tool's version.
        """
        if table not in self.columns:
            raise EvidenceError(f"{self.path}: table {table} is missing ({self.tool})", "record with --trace=cuda,nvtx")
        missing = [column for column in columns if column not in self.columns[table]]
        if missing:
            raise EvidenceError(f"{self.path}: table {table} has no column {missing[0]} ({self.tool})", _EXPORT_AGAIN)

    def column(self, table: str, name: str, otherwise: str = "NULL") -> str:
        """Return a column's SQL, or a constant where the schema does not have it."""
        return f'"{table}"."{name}"' if name in self.columns.get(table, ()) else otherwise

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> Iterator[Row]:
        """Yield the rows of a query.

        Raises:
            EvidenceError: the database is damaged, locked or of another schema.
        """
        for batch in self.batches(sql, parameters):
            yield from batch

    def batches(self, sql: str, parameters: Sequence[object] = ()) -> Iterator[list[Row]]:
        """Yield the rows of a query in lists of at most ``BATCH_ROWS``.

        Raises:
            EvidenceError: the database is damaged, locked or of another schema.
        """
        try:
            cursor = self._connection.execute(sql, parameters)
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield batch
        except _SQLITE_ERRORS as error:
            raise _told(self.path, error) from error

    def damage(self) -> str | None:
        """Return what SQLite finds wrong with the file's structure, or None. Damage may hide rows without an error."""
        found = [str(row[0]) for row in self.rows("PRAGMA quick_check(1)")]
        return None if found == ["ok"] else (found[0].splitlines()[-1] if found and found[0] else "no answer")

    def _meta(self) -> dict[str, str]:
        """Return the export's own records about itself; the table has two names."""
        table = self.first_of("META_DATA_EXPORT", "EXPORT_META_DATA")
        if table is None or not self.has(table, "name", "value"):
            return {}
        return {str(name): str(value) for name, value in self.rows(f'SELECT name, value FROM "{table}"')}  # noqa: S608


@contextmanager
def open_database(path: Path) -> Iterator[NsysDatabase]:
    """Open an export for reading only; the file is never written and gets no journal beside it.

    Raises:
        EvidenceError: it is missing, empty, no SQLite database, cut, locked or damaged.
    """
    _check_header(path)
    journal = any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal"))
    # Immutable skips every lock, which is right for an export at rest and wrong for one that is being written.
    uri = f"file:{quote(str(path.resolve()))}?mode=ro" + ("" if journal else "&immutable=1")
    try:
        if not journal:
            _refuse_locked(path)
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)
    except _SQLITE_ERRORS as error:
        raise _told(path, error) from error
    try:
        # Bytes that are not UTF-8 are kept readable; their ASCII part still matches rules.
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA cache_size = -32768")
        connection.execute("PRAGMA temp_store = FILE")
        connection.execute("PRAGMA trusted_schema = OFF")
        yield NsysDatabase(path, connection)
    except _SQLITE_ERRORS as error:
        raise _told(path, error) from error
    finally:
        connection.close()


def _check_header(path: Path) -> None:
    """Refuse what is no whole SQLite file before SQLite sees it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = stream.read(_HEADER_BYTES)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}", "is the path right?") from error
    if not size:
        raise EvidenceError(f"{path}: the file is empty (0 bytes)", _EXPORT_AGAIN)
    if not header.startswith(_MAGIC):
        raise EvidenceError(f"{path}: not a SQLite database (byte 0 begins {header[:8]!r})", _EXPORT_AGAIN)
    if len(header) < _HEADER_BYTES:
        raise EvidenceError(f"{path}: cut inside its header at byte {size}", _EXPORT_AGAIN)
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    pages = int.from_bytes(header[28:32], "big")
    in_header_valid = header[24:28] == header[92:96]
    if in_header_valid and pages and size < pages * page:
        raise EvidenceError(f"{path}: cut at byte {size}, its header says {pages * page} bytes", _EXPORT_AGAIN)


def _refuse_locked(path: Path) -> None:
    """Raise sqlite3.OperationalError when another process holds the database for writing."""
    probe = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
    try:
        probe.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    finally:
        probe.close()


def _told(path: Path, error: Exception) -> EvidenceError:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if "locked" in text or "busy" in text:
        return EvidenceError(f"{path}: the database is locked by another process", "wait until nsys has finished it")
    if "malformed" in text or "not a database" in text or "disk I/O" in text:
        return EvidenceError(f"{path}: the database is damaged ({text})", _EXPORT_AGAIN)
    return EvidenceError(f"{path}: cannot be read as an nsys export ({text})", _EXPORT_AGAIN)
