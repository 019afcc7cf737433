"""Read the XML records of compute-sanitizer. They hold no summary, so they confirm a log and never replace it.

The file is read with expat as a stream, one record at a time. A document type is refused before anything in it is read:
the tool writes none, and entities are how XML grows without bound.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from xml.parsers import expat

from alphamoe_profiler.printable import printable_line
from alphamoe_sanitizer_replays.results import Access, Finding, FindingKind, Position, Severity, Tool
from alphamoe_sanitizer_replays.tool.blocks import KIND_OF_TOOL, MAX_TEXT, hazard_of, in_target
from alphamoe_sanitizer_replays.tool.log import Folded
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.symbols import base_name, demangle

ROOT = "ComputeSanitizerOutput"
MAX_XML_BYTES = 256 << 20
MAX_DEPTH = 32
MAX_RECORD_ELEMENTS = 10_000
_CHUNK_BYTES = 1 << 16
_OF_TOOL = ("analysis", "hazard", "race", "precise", "imprecise", "memcheck", "synccheck", "initcheck", "racecheck")
"""Kinds of record that are what the tool looks for: ``Precise`` is memcheck's word for an access with its place."""
_KINDS: dict[str, FindingKind] = {"api": "api", "leak": "leak", "internal": "internal"}
_SEVERITIES: dict[str, Severity] = {"error": "error", "warning": "warning", "info": "info"}


@dataclass(frozen=True)
class XmlRecords:
    """What an XML file holds."""

    findings: tuple[Finding, ...]
    """Equal ones folded, as in a log."""
    records: int
    """Before folding."""
    cut: bool
    """The file ends before its root element does."""


def parse_xml(path: Path, tool: Tool, target: tuple[str, ...], filtered: bool) -> XmlRecords:
    """Read a file of records; see :func:`tool.log.parse_log` for the arguments.

    Raises:
        EvidenceError: it is missing, larger than ``MAX_XML_BYTES``, not this tool's XML, malformed other than by an
            early end, or holds a document type.
    """
    reader = _Reader(path, tool, target, filtered)
    left = MAX_XML_BYTES
    ended = False
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    raise EvidenceError(f"{path}: larger than {MAX_XML_BYTES >> 20} MiB", "lower the print limit")
                reader.parser.Parse(chunk, False)
            ended = True
            reader.parser.Parse(b"", True)
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}") from error
    except expat.ExpatError as error:
        if ended and reader.root_open:  # well-formed as far as it goes: the tool was killed while it wrote
            return XmlRecords(reader.found.findings(), reader.records, cut=True)
        raise EvidenceError(f"{path}: byte {reader.parser.ErrorByteIndex}: {error}", "was the tool killed?") from error
    except (LookupError, ValueError) as error:  # an encoding that expat asks Python for
        raise EvidenceError(f"{path}: {error}", "it should be UTF-8") from error
    return XmlRecords(reader.found.findings(), reader.records, cut=False)


class _Reader:
    def __init__(self, path: Path, tool: Tool, target: tuple[str, ...], filtered: bool) -> None:
        self._path = path
        self._tool = tool
        self._target = target
        self._filtered = filtered
        self.found = Folded()
        self.records = 0
        self.root_open = False
        self._depth = 0
        self._elements = 0
        self._record: ET.TreeBuilder | None = None
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text

    def _doctype(self, *_: object) -> None:
        raise EvidenceError(f"{self._path}: it holds a document type, which the tool never writes", "do not use it")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth == 1:
            if name != ROOT:
                raise EvidenceError(f"{self._path}: its root element is {name[:100]!r}, not {ROOT}")
            self.root_open = True
        elif self._depth == 2 and name == "record":
            self._record = ET.TreeBuilder()
            self._elements = 0
        elif self._depth == 2:
            raise EvidenceError(f"{self._path}: an element {name[:100]!r} where only records are due")
        self._elements += 1
        if self._depth > MAX_DEPTH or self._elements > MAX_RECORD_ELEMENTS:
            raise EvidenceError(f"{self._path}: record {self.records + 1} is nested too deeply or too large")
        if self._record is not None:
            self._record.start(name, attributes)

    def _text(self, text: str) -> None:
        if self._record is not None:
            self._record.data(text)

    def _end(self, name: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.root_open = False
        if self._record is None:
            return
        self._record.end(name)
        if self._depth == 1:
            record, self._record = self._record.close(), None
            self.records += 1
            self.found.add(_finding(record, self._tool, self._target, self._filtered))


def _finding(record: ET.Element, tool: Tool, target: tuple[str, ...], filtered: bool) -> Finding:
    text = ": ".join(filter(None, (_text_of(record, "what/text"), _text_of(record, "what/type")))) or "record"
    host_access = text.startswith("Host API memory access error")
    kind = KIND_OF_TOOL[tool] if host_access else _kind(record, tool)
    # The analysis has a source and what races with it, the report of single hazards two threads.
    first = _access(record.find("what/source")) or _access(record.find("what/thread0"))
    others = (*record.iterfind("what/destination"), *record.iterfind("what/thread1"))
    raced = [access for node in others if (access := _access(node)) is not None]
    hazard = _text_of(record, "what/common/type")
    where = first or _place(record, "where")
    frames = [name for frame in record.iterfind("deviceStack/frame") if (name := _text_of(frame, "func"))]
    kernel = frames[-1] if frames else None
    if kernel is None and tool != "racecheck" and where is not None:
        kernel = where.function
    accesses = [*([] if where is None else [where]), *raced]
    return Finding(
        tool=tool,
        severity=_SEVERITIES.get((_text_of(record, "level") or "error").lower(), "error"),
        kind=kind,
        text=text,
        hazard=hazard if hazard in ("RAW", "WAR", "WAW") else hazard_of(accesses) if first is not None else None,
        kernel=None if kernel is None else base_name(demangle(kernel)),
        kernel_truncated=any("..." in name for name in (*frames, *(access.function for access in accesses))),
        where=where,
        other=raced[0] if raced else None,
        thread=_position(record, "who/threadIdx") or _position(record, "what/thread0/threadIdx"),
        other_thread=_position(record, "what/thread1/threadIdx"),
        block=_position(record, "who/blockIdx") or _position(record, "what/common/blockIdx"),
        address=_text_of(record, "what/address") or _text_of(record, "what/common/address"),
        api=_text_of(record, "what/api"),
        count=sum(_number(node.text) or 0 for node in record.iterfind("what/destination/count")) or 1,
        in_target=False if host_access else in_target(kind, kernel, accesses, target, filtered),
    )


def _kind(record: ET.Element, tool: Tool) -> FindingKind:
    named = (_text_of(record, "kind") or "").lower()
    if named in _OF_TOOL:
        return KIND_OF_TOOL[tool]
    return next((kind for start, kind in _KINDS.items() if named.startswith(start)), "other")


def _access(node: ET.Element | None) -> Access | None:
    place = None if node is None else _place(node, "where")
    if node is None or place is None:
        return None
    return Access(
        place.function, place.file, place.line, place.offset, _text_of(node, "direction") or _text_of(node, "access")
    )


def _place(node: ET.Element, path: str) -> Access | None:
    where = node.find(path)
    function = None if where is None else _text_of(where, "func")
    if where is None or function is None:
        return None
    file, offset = _text_of(where, "path"), _text_of(where, "pc")
    return Access(
        function=function,
        file=None if file is None else file.rsplit("/", 1)[-1],
        line=_number(_text_of(where, "line")),
        offset=None if offset is None else f"+{offset}",
    )


def _position(record: ET.Element, path: str) -> Position | None:
    node = record.find(path)
    if node is None:
        return None
    x, y, z = (_number(_text_of(node, axis)) for axis in "xyz")
    return None if x is None or y is None or z is None else (x, y, z)


def _text_of(node: ET.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return printable_line(text[:MAX_TEXT]) or None


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
