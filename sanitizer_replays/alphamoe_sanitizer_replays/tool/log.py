"""Read the text log of compute-sanitizer: banner, findings, summaries, and every line that is none of these.

Nothing is dropped but blank lines: the tool alone writes to this file. A line that this module does not know becomes a
notice, with or without the tool's mark before it, and a run with notices is not clean.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from alphamoe_profiler.printable import printable_line
from alphamoe_sanitizer_replays.results import Finding, Summary, Tool, ToolLog
from alphamoe_sanitizer_replays.tool.blocks import MAX_TEXT, finding_of

MAX_LOG_BYTES = 64 << 20
MAX_LINE = 16_384
"""Characters of a line that are read; the rest of it is passed over."""
MAX_DISTINCT = 2_000
"""Findings that a log keeps apart; all further ones are folded by severity, kind and place."""
MAX_NOTICES = 50
MAX_BLOCK_LINES = 200
"""Lines of one block that are read: a deep recursion has many frames."""
_PREFIX = "========="
_BANNER = "COMPUTE-SANITIZER"
_NUMBER = r"([0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})"
_NOT_PRINTED = re.compile(
    rf"(?:ERROR|RACECHECK) SUMMARY: {_NUMBER} (?:errors?|hazards?|warnings?) (?:was|were) not printed\b"
)
_ERRORS = re.compile(rf"ERROR SUMMARY: {_NUMBER} errors?")
_HAZARDS = re.compile(
    rf"RACECHECK SUMMARY: {_NUMBER} hazards? displayed "
    rf"\({_NUMBER} errors?, {_NUMBER} warnings?(?:, {_NUMBER} infos?)?\)"
)
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")


def parse_log(
    source: str | Path, tool: Tool, target: tuple[str, ...], filtered: bool, *, limit_bytes: int = MAX_LOG_BYTES
) -> ToolLog:
    """Read a log, line by line.

    Args:
        source: the log's text, or its file.
        tool: the tool that was asked for; a summary of another kind does not count as its own.
        target: base names of the kernels under test.
        filtered: the tool was told to watch only those.
        limit_bytes: what lies behind this many bytes of the file is not read, and the log counts as cut.

    Raises:
        OSError: the file cannot be read.
    """
    reader = _Reader(tool, target, filtered)
    if isinstance(source, str):
        reader.read(io.StringIO(source))
        return reader.log()
    with source.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        reader.read(stream, limit_bytes)
    return reader.log()


class Folded:
    """Findings, equal ones folded: they may differ in thread, block and address alone."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Take one more finding."""
        key: tuple[object, ...] = (
            *(finding.severity, finding.kind, _HEXADECIMAL.sub("0x", finding.text), finding.hazard, finding.kernel),
            *(finding.where, finding.other, finding.api, finding.in_target),
        )
        if key not in self._found and len(self._found) >= MAX_DISTINCT:
            key = (finding.severity, finding.kind, finding.in_target)
            finding = Finding(
                tool=finding.tool,
                severity=finding.severity,
                kind=finding.kind,
                text="further findings",
                shown=finding.shown,
                count=finding.count,
                in_target=finding.in_target,
            )
        known = self._found.get(key)
        if known is not None:
            finding = msgspec.structs.replace(
                known, shown=known.shown + finding.shown, count=known.count + finding.count
            )
        self._found[key] = finding

    def findings(self) -> tuple[Finding, ...]:
        """Give what was taken, in the order of first sight."""
        return tuple(self._found.values())


class _Reader:
    def __init__(self, tool: Tool, target: tuple[str, ...], filtered: bool) -> None:
        self._tool = tool
        self._target = target
        self._filtered = filtered
        self._banner = False
        self._summaries: list[Summary] = []
        self._not_printed = 0
        self._findings = Folded()
        self._notices: dict[str, int] = {}
        self._block: list[str] = []
        self._cut = False

    def read(self, stream: TextIO, limit_bytes: int | None = None) -> None:
        for number, line in enumerate(_lines(stream, limit_bytes)):
            text = printable_line(line.rstrip("\r\n"))
            if not line.endswith("\n"):  # "0 error" may be the start of "0 errors"
                self._cut = True
            if len(line) > MAX_LINE:
                self._note(f"a line of more than {MAX_LINE} characters")
            if number == 0 and text.rstrip() == f"{_PREFIX} {_BANNER}":
                self._banner = True
            elif text.startswith(_PREFIX):
                self._line(text[len(_PREFIX) :])
            elif text.strip():
                self._note(f"a line without the tool's mark: {text.strip()}")
        self._cut = self._cut or bool(self._block)
        self._close()

    def _line(self, text: str) -> None:
        words = text.lstrip(" ")
        if not words:
            self._close()
        elif len(text) - len(words) > 1:
            if not self._block:
                self._note(f"a line under no head: {words.rstrip()}")
            elif len(self._block) < MAX_BLOCK_LINES:
                self._block.append(words.rstrip())
        else:
            self._close()
            self._head(words.rstrip())

    def _head(self, text: str) -> None:
        if text == _BANNER:
            self._note("the tool's first line, further down: logs of two runs in one file, or of something else")
        elif match := _NOT_PRINTED.match(text):
            self._not_printed += _number(match[1])
        elif match := _ERRORS.fullmatch(text):
            self._summary(Summary(errors=_number(match[1])), own=self._tool != "racecheck", text=text)
        elif match := _HAZARDS.fullmatch(text):
            hazards, errors, warnings, infos = (_number(number) for number in match.groups("0"))
            summary = Summary(errors=errors, warnings=warnings, infos=infos, hazards=hazards)
            self._summary(summary, own=self._tool == "racecheck", text=text)
        else:
            self._block = [text]

    def _summary(self, summary: Summary, *, own: bool, text: str) -> None:
        if own:
            self._summaries.append(summary)
        else:
            self._note(f"a summary of another tool: {text}")

    def _close(self) -> None:
        if not self._block:
            return
        finding = finding_of(self._tool, self._block, self._target, self._filtered)
        if finding is None:
            self._note(self._block[0])
        else:
            self._findings.add(finding)
        self._block = []

    def _note(self, text: str) -> None:
        text = text[:MAX_TEXT]
        if text in self._notices or len(self._notices) < MAX_NOTICES:
            self._notices[text] = self._notices.get(text, 0) + 1

    def log(self) -> ToolLog:
        return ToolLog(
            tool=self._tool,
            banner=self._banner,
            summaries=tuple(self._summaries),
            findings=self._findings.findings(),
            not_printed=self._not_printed,
            notices=tuple(text if times == 1 else f"{text} ({times} times)" for text, times in self._notices.items()),
            cut=self._cut,
        )


def _lines(stream: TextIO, limit_bytes: int | None) -> Iterator[str]:
    """Give the lines, long ones cut but with their line end; at the limit an empty one without, which says cut."""
    left = limit_bytes
    for line in _bounded(stream):
        if left is not None:
            left -= len(line)
            if left < 0:
                yield ""
                return
        yield line


def _bounded(stream: TextIO) -> Iterable[str]:
    while line := stream.readline(MAX_LINE):
        if not line.endswith("\n") and len(line) == MAX_LINE:
            while (rest := stream.readline(MAX_LINE)) and not rest.endswith("\n"):
                pass
            line += rest[-1:] if rest else ""
        yield line


def _number(text: str) -> int:
    return int(text.replace(",", ""))
