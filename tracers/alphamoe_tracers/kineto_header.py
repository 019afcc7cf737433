"""What a trace says outside its events: who recorded it, on which rank, from which zero of time."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from alphamoe_tracers.kineto_split import MAX_RECORD_BYTES, Malformed, Splitter

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*(?=\S)')
_PLACEHOLDER = b'"traceEvents":0}'
_FOOTER_START = b'{"traceEvents":0'
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_IDENTITY = ("distributedInfo", "baseTimeNanoseconds", "traceEvents", "rank", "world_size")
_LATEST_BASE_NS = 1 << 62
_NO_EVENTS = object()


@dataclass
class Document:
    """The members of the trace object, its events left out."""

    is_list: bool = False
    """The document is a bare list of events and says nothing of itself."""
    has_events: bool = True
    members: dict[str, Any] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)


class Header(msgspec.Struct, frozen=True):
    """What the members say, in our words."""

    rank: int | None
    world_size: int | None
    base_ns: int
    format_version: str | None
    versions: dict[str, str]
    notes: tuple[str, ...]


def strict_object(text: bytes, document: Document) -> Any:
    """Read a JSON object into a document's members, strictly: no NaN; keys repeated with other values are noted.

    Returns:
        The value of ``traceEvents``, which is no member; :data:`_NO_EVENTS` when there is none.

    Raises:
        Malformed: with the byte of ``text``.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and found[key] != value:
                document.repeated.add(key)
            found[key] = value
        return found

    def refuse(token: str) -> None:
        raise Malformed(max(text.find(token.encode()), 0), f"{token} is no JSON value")

    # Every byte becomes one character, so that places in the text are places in the file.
    readable = text.decode("latin-1")
    try:
        value = json.loads(readable, object_pairs_hook=members, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise Malformed(error.pos, error.msg) from None
    except RecursionError:
        raise Malformed(0, "values are nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise Malformed(0, str(error)) from None
    for key in value:
        if key in document.members and key != "traceEvents" and document.members[key] != value[key]:
            document.repeated.add(key)
    events = value.pop("traceEvents", _NO_EVENTS)
    document.members.update(value)
    return events


def open_document(splitter: Splitter) -> Document:
    """Read up to the first event and leave the splitter just behind the bracket that opens the events.

    Raises:
        Malformed: what comes before the events is no JSON.
    """
    if splitter.peek(3) == _BYTE_ORDER_MARK:
        splitter.take(3)
    start = splitter.peek(4096)
    space = len(start) - len(start.lstrip(b" \t\r\n"))
    splitter.take(space)
    kind = splitter.peek(1)
    if kind == b"[":
        splitter.take(1)
        return Document(is_list=True)
    if kind != b"{":
        reason = "the file is empty" if not kind and splitter.offset == space else "the text is no JSON object or list"
        raise Malformed(splitter.offset, reason)
    size, searched = 1 << 16, 0
    while True:
        text = splitter.peek(size)
        for found in _EVENTS_KEY.finditer(text, searched):
            document = Document()
            if not _is_member(text[: found.start()], document, splitter.offset):
                continue
            if text[found.end() : found.end() + 1] == b"[":
                splitter.take(found.end() + 1)
                return document
            return _without_events(splitter)
        if splitter.ended and len(text) < size:
            return _without_events(splitter)
        if size >= MAX_RECORD_BYTES:
            raise Malformed(splitter.offset, f"no traceEvents in the first {size >> 20} MiB")
        searched = max(len(text) - 256, 0)
        size *= 2


def close_document(rest: bytes, offset: int, document: Document) -> bool:
    """Read what follows the events; say whether the document was closed.

    Raises:
        Malformed: something else than the rest of the document follows.
    """
    if document.is_list:
        extra = rest.lstrip(b" \t\r\n")
        if extra:
            raise Malformed(offset + len(rest) - len(extra), "something follows the list of events")
        return True
    if not rest.strip(b" \t\r\n"):
        return False
    try:
        strict_object(_FOOTER_START + rest, document)
    except Malformed as error:
        raise Malformed(offset + max(error.at - len(_FOOTER_START), 0), error.reason) from None
    return True


def read_header(document: Document) -> Header:
    """Read rank, world size, time base and versions; values of the wrong type count as absent and are noted."""
    members, notes = document.members, []
    info = members.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world_size = _count(info.get("rank")), _count(info.get("world_size"))
    for key, value in (("rank", rank), ("world_size", world_size)):
        if key in info and value is None:
            notes.append(f"distributedInfo gives a {key} that is no count: {str(info[key])[:40]}")
    base = members.get("baseTimeNanoseconds")
    base_ns = base if isinstance(base, int) and not isinstance(base, bool) and 0 <= base < _LATEST_BASE_NS else 0
    if base is not None and base_ns != base:
        notes.append("baseTimeNanoseconds is no usable time and was not added")
    versions = {
        key: str(value)[:80]
        for key, value in members.items()
        if key.lower().endswith("version") and isinstance(value, (str, int, float)) and key != "schemaVersion"
    }
    if document.repeated:
        notes.append("repeated with other values, the last one taken: " + ", ".join(sorted(document.repeated))[:200])
    version = members.get("schemaVersion")
    return Header(rank, world_size, base_ns, None if version is None else str(version)[:40], versions, tuple(notes))


def contradictions(document: Document) -> list[str]:
    """Name the repeated members that say who recorded the trace, or when: such a file proves nothing."""
    return sorted(document.repeated.intersection(_IDENTITY))


def _is_member(before: bytes, document: Document, offset: int) -> bool:
    """Say whether the key that follows ``before`` is one of the outermost object; read the members before it."""
    try:
        strict_object(before + _PLACEHOLDER, document)
    except Malformed as error:
        # An error before the key is one whatever follows; at or after it, the key lies deeper or in a string.
        if error.at < len(before):
            raise Malformed(offset + error.at, error.reason) from None
        return False
    return True


def _without_events(splitter: Splitter) -> Document:
    """Read a whole document that has no list of events."""
    document, offset = Document(has_events=False), splitter.offset
    text = splitter.rest()
    try:
        events = strict_object(text, document)
    except Malformed as error:
        raise Malformed(offset + error.at, error.reason) from None
    if events is _NO_EVENTS and document.members:
        raise Malformed(offset, "no traceEvents: this is no Chrome trace")
    if events is not _NO_EVENTS and events is not None:
        found = _EVENTS_KEY.search(text)
        raise Malformed(offset + (found.end() if found else 0), "traceEvents is no list")
    return document


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 20 else None
