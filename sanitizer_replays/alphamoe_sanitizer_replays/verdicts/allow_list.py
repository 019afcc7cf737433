"""Findings that a team has looked at and accepts for a while: a TOML file that says which, why, and until when.

    [[allow]]
    symbol = "cub::BlockStore::Store"    # kernel or function: base name, or qualified without template arguments
    hazard = "RAW/WAR"                   # or WAW, a kind of finding (memory, ...), or the tool's own first line
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
MAX_DAYS = 731
"""From today to an entry's last day: two years, after which somebody has to look again."""
MIN_LETTERS = 3
"""Of a reason: fewer say nothing, and some characters cannot even be seen."""
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
        return not self.differences(finding, tool_version)

    def differences(self, finding: Finding, tool_version: str | None) -> dict[str, str]:
        """Give the keys in which this entry is not that finding's, with what the finding has instead."""
        conditions = {
            "symbol": (
                self._of_symbol(finding),
                finding.kernel or (finding.where.function if finding.where else "none"),
            ),
            "tool": (finding.tool == self.tool, finding.tool),
            "tool_versions": (self._of_version(tool_version), tool_version or "unknown"),
            "hazard": (self._of_hazard(finding), " or ".join(filter(None, (finding.hazard, finding.kind)))),
            "file" if self.line is None else "file and line": (self._of_place(finding), _places(finding)),
        }
        return {key: found for key, (same, found) in conditions.items() if not same}

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

    def notes(
        self,
        used: Iterable[AllowEntry],
        today: datetime.date,
        findings: Iterable[Finding] = (),
        tool_version: str | None = None,
    ) -> tuple[str, ...]:
        """Name the entries that expired, and those that no finding needed, with what kept them from the nearest one.

        Args:
            used: entries that allowed a finding.
            today: the day on which entries may have expired.
            findings: all that the session found.
            tool_version: of its compute-sanitizer.
        """
        needed, found = set(used), tuple(findings)
        return tuple(
            f"allow-list entry expired: {entry.told()}"
            if entry.expired(today)
            else f"allow-list entry not used: {entry.told()}; {_why_unused(entry, found, tool_version)}"
            for entry in self.entries
            if entry.expired(today) or entry not in needed
        )


def load_allow_list(path: Path | None, today: datetime.date) -> AllowList:
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
    return parse_allow_list(text, str(path), today)


def parse_allow_list(text: str, source: str, today: datetime.date) -> AllowList:
    """Parse an allow-list.

    Args:
        text: TOML.
        source: how messages call it.
        today: from which on an entry may hold for two years.

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
        tuple(_entry(table, f"{source}: [[allow]] number {n}", today) for n, table in enumerate(tables, 1)), source
    )


def _entry(table: object, where: str, today: datetime.date) -> AllowEntry:
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
            f"an accepted finding needs {', '.join(key for key in known if key not in _OPTIONAL)}",
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
    if sum(map(str.isalnum, entry.reason)) < MIN_LETTERS:
        raise UsageError(f"{where}: the reason {entry.reason!a} has no word", "say why the finding is accepted")
    if (entry.expires - today).days > MAX_DAYS:
        latest = today + datetime.timedelta(days=MAX_DAYS)
        raise UsageError(f"{where}: expires {entry.expires} is too far away", f"two years at most: {latest}")
    versions = _RANGE.fullmatch(entry.tool_versions)
    if versions is None or _numbers(versions[1])[: len(_numbers(versions[2]))] > _numbers(versions[2]):
        raise UsageError(f"{where}: tool_versions {entry.tool_versions!r}", 'write a range, like "2025.1..2025.4"')
    if _numbers(versions[2])[0] - _numbers(versions[1])[0] > 1:
        raise UsageError(
            f"{where}: tool_versions {entry.tool_versions!r} spans years", "one and the next at most: 2025.1..2026.4"
        )
    if entry.line is not None and entry.file is None:
        raise UsageError(f"{where}: a line without a file")
    return entry


def _why_unused(entry: AllowEntry, findings: tuple[Finding, ...], tool_version: str | None) -> str:
    of_symbol = [own for finding in findings if "symbol" not in (own := entry.differences(finding, tool_version))]
    if not of_symbol:
        return "no finding is of this symbol alone" if findings else "nothing was found"
    nearest = min(of_symbol, key=len)
    if not nearest:
        return "another entry covers what it would"
    told = "; ".join(f"{key} did not: the finding's is {found}" for key, found in nearest.items())
    return f"symbol matched, {told}"


def _places(finding: Finding) -> str:
    places = [access for access in (finding.where, finding.other) if access is not None and access.file is not None]
    return " and ".join(f"{access.file}:{access.line}" for access in places) or "unknown"


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
