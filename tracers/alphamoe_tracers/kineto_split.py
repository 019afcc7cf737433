"""A trace document cut into pieces at event boundaries, and the meaning of the places where parsing a piece stops.

A cut is guessed (``},`` followed by ``{``) and proven by parsing: a piece that begins at an event boundary and parses
as a complete array ends at one too, because a cut inside a string or a nested value leaves something open. The few
wrong guesses are parsed again after an exact scan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from alphamoe_tracers.kineto_chunk import ChunkRows, parse_events

CHUNK_BYTES = 1 << 19
"""Small enough for the caches: pieces of 8 MiB parse at half the speed."""
MAX_RECORD_BYTES = 64 << 20
"""The largest single event, and the most text before and after the events."""

_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENT_BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|args)")')
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_WINDOW_BYTES = 1 << 14
_SPACE = b" \t\r\n"
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_AT_BYTE = re.compile(r"^(?:JSON is malformed: )?(.*?) \(byte (\d+)\)$")


class Malformed(Exception):  # noqa: N818 - always turned into an EvidenceError that knows the file
    """A document that is no valid JSON, with the place in its text."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(at, reason)
        self.at = at
        """Byte of the inflated text, or of the piece while a piece is parsed."""
        self.reason = reason


@dataclass(frozen=True)
class Piece:
    """Consecutive text of the event array."""

    data: bytes
    """Begins right after the array's opening bracket, or right after an event."""
    offset: int
    """Where it begins in the inflated text."""
    first: bool
    last: bool
    """The text ends with this piece."""


@dataclass
class Outcome:
    """What parsing a piece gave."""

    rows: ChunkRows | None = None
    end: int | None = None
    """The array closed just before this byte of the piece; null when it goes on."""
    unclosed: bool = False
    """The array ended without its bracket, or after a comma that nothing follows."""
    bad_cut: bool = False


class Splitter:
    """Cuts a text that comes in blocks of any size."""

    def __init__(self, blocks: Iterator[bytes], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._buffer = b""
        self._at = 0  # what was taken of the buffer
        self._ended = False
        self._first = True
        self.offset = 0
        """Bytes of the text taken so far."""
        self.careful = False
        """Find cuts by an exact scan, not by a guess."""

    def peek(self, size: int) -> bytes:
        """Return up to ``size`` bytes that come next, or all there is, without taking them."""
        self._fill(size)
        return self._buffer[self._at : self._at + size]

    @property
    def ended(self) -> bool:
        """Whether the text goes no further than what was peeked at."""
        return self._ended

    def take(self, size: int) -> bytes:
        """Return and consume the next ``size`` bytes."""
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        self.offset += len(data)
        return data

    def push_back(self, data: bytes) -> None:
        """Undo :meth:`take`: give back the text just before the present place."""
        self._buffer = data + self._buffer[self._at :]
        self._at = 0
        self.offset -= len(data)

    def rest(self) -> bytes:
        """Return and consume everything to the end of the text."""
        data = self.peek(MAX_RECORD_BYTES)
        if not self._ended or self._remaining > MAX_RECORD_BYTES:
            raise Malformed(self.offset, f"more than {MAX_RECORD_BYTES >> 20} MiB follow the events")
        return self.take(len(data))

    def next_piece(self) -> Piece | None:
        """Return the next piece of the event array, or None at the end of the text."""
        size = self._chunk_bytes
        while True:
            self._fill(size + 1)
            if self._ended and self._remaining <= size:
                if not self._remaining:
                    return None
                return self._piece(self._remaining, last=True)
            cut = self._cut(size)
            if cut:
                return self._piece(cut, last=False)
            if size >= MAX_RECORD_BYTES:
                raise Malformed(self.offset, f"a record is longer than {MAX_RECORD_BYTES >> 20} MiB")
            size = min(size * 2, MAX_RECORD_BYTES)

    @property
    def _remaining(self) -> int:
        return len(self._buffer) - self._at

    def _fill(self, size: int) -> None:
        if self._remaining >= size or self._ended:
            return
        parts, have = [self._buffer[self._at :]], self._remaining
        while have < size:
            block = next(self._blocks, None)
            if block is None:
                self._ended = True
                break
            parts.append(block)
            have += len(block)
        self._buffer, self._at = b"".join(parts), 0

    def _piece(self, size: int, *, last: bool) -> Piece:
        piece = Piece(b"", self.offset, self._first, last)
        self._first = False
        return Piece(self.take(size), piece.offset, piece.first, last)

    def _cut(self, size: int) -> int:
        """Return how many bytes to take, at most ``size``, or 0 when no boundary shows."""
        start, stop = self._at, self._at + size
        if self.careful:
            return _exact_cut(self._buffer, start, stop)
        window = max(start, stop - _WINDOW_BYTES)
        for pattern, begin in ((_EVENT_BOUNDARY, window), (_BOUNDARY, window), (_BOUNDARY, start)):
            cuts = [found.start() + 1 for found in pattern.finditer(self._buffer, begin, stop)]
            if cuts:
                return cuts[-1] - start
        return 0

    def restart_at(self, data: bytes, *, first: bool) -> None:
        """Give back the text of pieces whose cut was wrong and find cuts exactly from here on."""
        self.push_back(data)
        self._first = first
        self.careful = True


def _exact_cut(text: bytes, start: int, stop: int) -> int:
    """Find the last event boundary by reading every string and bracket; 0 when there is none."""
    depth, cut = 0, 0
    for token in _TOKEN.finditer(text, start, stop):
        character = text[token.start()]
        if character in b"{[":
            depth += 1
        elif character in b"}]":
            depth -= 1
            if depth < 0:  # the array closes here: its bracket stays for the next piece
                return cut
            if depth == 0:
                cut = token.end() - start
    return cut


def parse_piece(data: bytes, *, first: bool, last: bool) -> Outcome:
    """Parse one piece of the event array.

    Raises:
        Malformed: the text is not valid JSON, whatever may follow it; ``at`` counts from the start of the piece.
    """
    at = len(data) - len(data.lstrip(_SPACE))
    if data[at : at + 1] == b"]":
        return Outcome(end=at + 1)
    if not first and at < len(data):
        if data[at : at + 1] != b",":
            raise Malformed(at, "expected ',' or ']' after a record")
        at += 1
        after = data[at:].lstrip(_SPACE)
        if after.startswith(b"]"):
            return Outcome(end=len(data) - len(after) + 1, unclosed=True)
        if not after and last:
            return Outcome(end=len(data), unclosed=True)
    elif at == len(data):
        return Outcome(end=len(data), unclosed=True) if last else Outcome(bad_cut=True)
    text = b"[" + data[at:] + (b"" if last else b"]")
    try:
        rows = parse_events(text)
    except RecursionError:
        raise Malformed(at, "values are nested too deeply") from None
    except msgspec.DecodeError as error:
        return _stopped(text, str(error), at - 1, last=last, size=len(data))
    return Outcome(rows, end=len(data) if last else None)


def _stopped(text: bytes, message: str, shift: int, *, last: bool, size: int) -> Outcome:
    """Say what it means that the parser stopped.

    Args:
        text: what was parsed.
        message: the parser's own words.
        shift: what to add to a byte of ``text`` to get a byte of the piece.
        last: whether the text of the file ends here.
        size: bytes of the piece.
    """
    found = _AT_BYTE.match(message)
    if found is not None and found[1] == "trailing characters":
        end = text.rindex(b"]", 0, int(found[2]) - 1) + 1
        return Outcome(parse_events(text[:end]), end=end + shift)
    if found is None and (surrogate := _LONE_SURROGATE.search(text)):
        raise Malformed(surrogate.start() + shift, "half of a surrogate pair")
    if found is None or (not last and int(found[2]) >= len(text) - 1):
        if not last:
            return Outcome(bad_cut=True)
        body = text.rstrip(_SPACE)
        try:
            return Outcome(parse_events(body.removesuffix(b",") + b"]"), end=size, unclosed=True)
        except msgspec.DecodeError:
            raise Malformed(size, "the file ends inside a record") from None
    stop = int(found[2])
    if text[stop : stop + 1] == b"]" and (before := text[:stop].rstrip(_SPACE)).endswith(b","):
        try:
            return Outcome(parse_events(before[:-1] + b"]"), end=stop + 1 + shift, unclosed=True)
        except msgspec.DecodeError:
            pass
    raise Malformed(stop + shift, found[1])
