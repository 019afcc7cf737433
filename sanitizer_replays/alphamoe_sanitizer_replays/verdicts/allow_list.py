"""Findings that a team has looked at and accepts for a while: a TOML file that says which, why, and until when.

    [[allow]]
    symbol = "cub::BlockStore::Store"    # kernel or function: base name, or qualified without template arguments
    hazard = "WAR"                       # or RAW, WAW, a kind of finding (memory, ...), the tool's own text
    tool = "racecheck"
    tool_versions = "2025.1..2025.4"     # both ends belong to it, with all their updates
    reason = "known in the library, reported there; this path writes equal values"
    expires = 2027-01-31
    file = "block_store.cuh"             # optional, with or without a line
    line = 980

An allowed finding stays in every total and is listed apart with its reason.
"""

from __future__ import annotations

import datetime
import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from alphamoe_sanitizer_replays.results import Finding, Tool
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.symbols import base_name, triton_base

MAX_BYTES = 1 << 20
_RANGE = re.compile(r"(\d{1,6}(?:\.\d{1,6})*)\.\.(\d{1,6}(?:\.\d{1,6})*)")
_OPTIONAL = ("file", "line")
_ANONYMOUS = "(anonymous namespace)"


class AllowEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accepted finding."""

    symbol: str
    hazard: str
    tool: Tool
    tool_versions: str
    reason: str
    expires: datetime.date
    file: str | None = None
    line: int | None = None

    def expired(self, today: datetime.date) -> bool:
        """Say whether the entry's last day has gone by."""
        return today > self.expires

    def told(self) -> str:
        """The entry in one line."""
        return (
            f"{self.symbol}, {self.hazard}, {self.tool} {self.tool_versions}: {self.reason} "
            f"(until {self.expires.isoformat()})"
        )

    def covers(self, finding: Finding, tool_version: str | None) -> bool:
        """Say whether a finding is the one that this entry accepts, whatever the day."""
        return (
            finding.tool == self.tool
            and self._of_version(tool_version)
            and self._of_hazard(finding)
            and self._of_symbol(finding)
            and self._of_place(finding)
        )

    def _of_version(self, version: str | None) -> bool:
        match = _RANGE.fullmatch(self.tool_versions)
        if match is None or version is None or not re.fullmatch(r"\d+(\.\d+)*", version):
            return False
        lowest, highest, given = _numbers(match[1]), _numbers(match[2]), _numbers(version)
        return given >= lowest and given[: len(highest)] <= highest

    def _of_hazard(self, finding: Finding) -> bool:
        wanted = self.hazard.strip().casefold()
        return wanted in {finding.kind, (finding.hazard or "").casefold() or None, finding.text.casefold()}

    def _of_symbol(self, finding: Finding) -> bool:
        if finding.kernel is not None and self.symbol in (finding.kernel, triton_base(finding.kernel)):
            return True
        places = [access for access in (finding.where, finding.other) if access is not None]
        # Both accesses: a race between the library's code and ours is ours.
        return bool(places) and all(self.symbol in _names(access.function) for access in places)

    def _of_place(self, finding: Finding) -> bool:
        if self.file is None:
            return True
        name = self.file.rsplit("/", 1)[-1]
        return any(
            access.file == name and self.line in (None, access.line)
            for access in (finding.where, finding.other)
            if access is not None
        )


@dataclass(frozen=True)
class AllowList:
    """All entries of one file."""

    entries: tuple[AllowEntry, ...] = ()
    source: str = "no allow-list"

    def match(
        self, finding: Finding, tool_version: str | None, today: datetime.date
    ) -> tuple[Literal["allowed", "expired", "open"], AllowEntry | None]:
        """Say what the list makes of a finding, and by which entry."""
        covering = [entry for entry in self.entries if entry.covers(finding, tool_version)]
        for entry in covering:
            if not entry.expired(today):
                return "allowed", entry
        return ("expired", covering[0]) if covering else ("open", None)

    def notes(self, used: Iterable[AllowEntry], today: datetime.date) -> tuple[str, ...]:
        """Name the entries that expired, and those that no finding needed."""
        needed = set(used)
        return tuple(
            f"allow-list entry {'expired' if entry.expired(today) else 'not used'}: {entry.told()}"
            for entry in self.entries
            if entry.expired(today) or entry not in needed
        )


def load_allow_list(path: Path | None) -> AllowList:
    """Read an allow-list; no path gives an empty one.

    Raises:
        UsageError: it cannot be read, is no TOML, or an entry lacks a field, has an unknown one or a bad value.
    """
    if path is None:
        return AllowList()
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--allow-list {path}: {error.strerror or error}", "name a TOML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8", "an allow-list is a TOML file") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB", "this is no allow-list")
    return parse_allow_list(text, str(path))


def parse_allow_list(text: str, source: str) -> AllowList:
    """Parse an allow-list.

    Args:
        text: TOML.
        source: how messages call it.

    Raises:
        UsageError: as :func:`load_allow_list`.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: {error}", "the file is not valid TOML") from error
    extra = sorted(set(document) - {"allow"})
    tables = document.get("allow", [])
    if extra or not isinstance(tables, list):
        raise UsageError(f"{source}: {', '.join(extra) or 'allow'}: only [[allow]] tables belong here")
    return AllowList(
        tuple(_entry(table, f"{source}: [[allow]] number {n}") for n, table in enumerate(tables, 1)), source
    )


def _entry(table: object, where: str) -> AllowEntry:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is no table")
    known = AllowEntry.__struct_fields__
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UsageError(f"{where}: unknown key {key!r}", f"did you mean {near[0]!r}?" if near else "")
    missing = [key for key in known if key not in table and key not in _OPTIONAL]
    if missing:
        raise UsageError(
            f"{where} has no {', '.join(missing)}",
            "an accepted finding needs symbol, hazard, tool, versions, reason, end",
        )
    if isinstance(table["expires"], datetime.datetime):  # a datetime is a date to Python
        raise UsageError(f"{where}: expires is a moment", "write a day: expires = 2027-01-31")
    try:
        entry = msgspec.convert(table, AllowEntry, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error
    empty = [key for key in ("symbol", "hazard", "reason") if not getattr(entry, key).strip()]
    if empty:
        raise UsageError(f"{where}: {', '.join(empty)} is empty", "say what is accepted and why")
    versions = _RANGE.fullmatch(entry.tool_versions)
    if versions is None or _numbers(versions[1])[: len(_numbers(versions[2]))] > _numbers(versions[2]):
        raise UsageError(f"{where}: tool_versions {entry.tool_versions!r}", 'write a range, like "2025.1..2025.4"')
    if entry.line is not None and entry.file is None:
        raise UsageError(f"{where}: a line without a file")
    return entry


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _names(function: str) -> frozenset[str]:
    """Give a function's names for an entry: as printed, base, and qualified without template arguments."""
    plain: list[str] = []
    depth = 0
    for character in function.replace(_ANONYMOUS, "{anonymous}"):
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            plain.append(character)
    qualified = "".join(plain).strip().rpartition(" ")[2].replace("{anonymous}", _ANONYMOUS)
    return frozenset({function, base_name(function), qualified})
