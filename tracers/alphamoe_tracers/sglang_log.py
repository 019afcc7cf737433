"""Reader of SGLang server logs: the dispatch evidence that its AlphaMoE backend writes as log lines.

``ALPHAMOE_RUNTIME_EXECUTION {json}`` is one kind of execution that was dispatched, ``ALPHAMOE_NVFP4_RUNTIME_SHAPE
{json}`` one shape of the NVFP4 operator. Both are written once for equal contents and process, and name no step and no
layer: they prove which sets of M were dispatched, never how often. The rank is in the line's prefix
(``[2026-01-31 12:00:00 TP0]``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.records import Execution, ReceiptAttribution

RUNTIME_SCHEMA = "sglang-flashinfer-alphamoe-runtime-v2"
SHAPE_SCHEMA = "sglang-flashinfer-alphamoe-nvfp4-runtime-shape-v1"
MAX_LINE_BYTES = 1 << 20
"""A longer line is none that SGLang's backend writes; it is skipped in pieces, so that memory stays bounded."""
_MAX_PROBLEMS = 100

_MARKER = re.compile(rb"\b(ALPHAMOE_RUNTIME_EXECUTION|ALPHAMOE_NVFP4_RUNTIME_SHAPE)\b[ :]*")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_GROUPS = re.compile(r"(?<![A-Za-z0-9])(DP|TP|EP|PP|ATTN_DP|ATTN_TP)(\d{1,6})(?![A-Za-z0-9])")

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]


class LoggedKernel(msgspec.Struct, frozen=True):
    """One operator that was dispatched; field names are the log's own."""

    kernel: str
    M: Count
    E: Size
    H: Size
    I_local: Size
    top_k: Size
    block_m: Size
    captured: bool | None = None
    device: int | str | None = None


class LoggedExecution(msgspec.Struct, frozen=True):
    """One execution as the log states it. The older field set has no attribution and no graph fields."""

    schema: str
    execution: Execution
    forward_mode: str
    M: Count | None
    real_tokens: Count | None
    batch_size: Count | None
    kernels: tuple[LoggedKernel, ...]
    attribution: ReceiptAttribution | None = None
    graph_backend: str | None = None
    graph_key: Any = None

    def problems(self) -> list[str]:
        """Say which of the record's own numbers contradict each other."""
        found = []
        if self.real_tokens is not None and self.M is not None and self.real_tokens > self.M:
            found.append(f"{self.real_tokens} real tokens exceed M {self.M}")
        if self.attribution is not None and (self.attribution == "capture_registration") != (self.execution != "eager"):
            found.append(f"execution {self.execution} with attribution {self.attribution}")
        return found


class LoggedShape(msgspec.Struct, frozen=True):
    """One shape of the NVFP4 operator as the log states it."""

    schema: str
    kernel: str
    M: Count
    E: Size
    H: Size
    I_local: Size
    top_k: Size
    block_m: Size
    shared_fused: bool | int | None = None
    tp: int | None = None
    ep: int | None = None
    device: int | str | None = None

    def problems(self) -> list[str]:
        """Nothing in a shape can contradict itself."""
        return []


class LoggedLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One distinct record of one rank: either an execution or a shape."""

    rank: int | None
    """From the line's prefix; null where it has none, or where several TP groups share the log."""
    line: int
    """1-based number of its first line."""
    execution: LoggedExecution | None = None
    shape: LoggedShape | None = None


@dataclass(frozen=True)
class SglangLog:
    """What one server log holds."""

    path: str
    lines: int
    records: tuple[LoggedLine, ...]
    """Each distinct (rank, record) once, in order of appearance."""
    duplicates: int
    """Lines that repeated an earlier record of their rank exactly. The log is deduplicated by its writer: a count of
    lines is no count of executions."""
    problems: tuple[str, ...]
    """Lines that were refused or contradict themselves, one sentence each with the line number."""
    cut: bool
    """The last line that holds a record has no end: the file was cut inside it."""

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The ranks that wrote records."""
        return tuple(dict.fromkeys(item.rank for item in self.records))


def read_sglang_log(path: Path, progress: Callable[[int, int], None] | None = None) -> SglangLog:
    """Read the AlphaMoE lines of a server log strictly: nothing is coerced, unknown is null, other lines are ignored.

    Args:
        path: a text file.
        progress: called as (bytes read, size in bytes).

    Raises:
        EvidenceError: the file cannot be read.
    """
    decoders: dict[bytes, tuple[str, msgspec.json.Decoder[Any]]] = {
        b"ALPHAMOE_RUNTIME_EXECUTION": (RUNTIME_SCHEMA, msgspec.json.Decoder(LoggedExecution)),
        b"ALPHAMOE_NVFP4_RUNTIME_SHAPE": (SHAPE_SCHEMA, msgspec.json.Decoder(LoggedShape)),
    }
    records: dict[tuple[int | None, bytes], LoggedLine] = {}
    problems: list[str] = []
    number = duplicates = done = 0
    cut = middle_of_line = False
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES):
                done += len(raw)
                begins, middle_of_line = not middle_of_line, not raw.endswith(b"\n")
                number += begins
                found = _MARKER.search(raw) if begins else None
                if found is None:
                    continue
                if progress is not None:
                    progress(done, size)
                schema, decoder = decoders[found[1]]
                rank, unknown = _rank(raw[: found.start()])
                try:
                    record = decoder.decode(_COLOUR.sub(b"", raw[found.end() :]).strip())
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    cut = middle_of_line and done == size
                    problems.append(f"line {number}: {'cut inside the record' if cut else error}")
                    continue
                if record.schema != schema:
                    problems.append(f"line {number}: schema {record.schema!r} is not {schema!r}")
                    continue
                problems += [f"line {number}: {problem}" for problem in record.problems()]
                if unknown is not None:
                    problems.append(f"line {number}: {unknown}")
                key = (rank, msgspec.json.encode(record, order="sorted"))
                duplicates += key in records
                is_shape = isinstance(record, LoggedShape)
                entry = LoggedLine(rank, number, None if is_shape else record, record if is_shape else None)
                records.setdefault(key, entry)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}", "is it the server's log?") from error
    if len(problems) > _MAX_PROBLEMS:
        problems = [*problems[:_MAX_PROBLEMS], f"and {len(problems) - _MAX_PROBLEMS} more"]
    return SglangLog(str(path), number, tuple(records.values()), duplicates, tuple(problems), cut)


def _rank(prefix: bytes) -> tuple[int | None, str | None]:
    """Return the TP rank of a line's prefix, or why it gives none although it names groups."""
    text = _COLOUR.sub(b"", prefix).decode("utf-8", "replace")
    groups = {name.removeprefix("ATTN_"): int(value) for name, value in _GROUPS.findall(text)}
    if "TP" not in groups:
        return None, None
    several = [name for name in ("DP", "PP") if name in groups]
    if several:
        return None, f"TP{groups['TP']} of several {' and '.join(several)} groups: the prefix gives no global rank"
    return groups["TP"], None
