"""Receipts on disk: JSON Lines, one record a line, flushed as written, so that a killed rank keeps what it dispatched.

A line is either a list of kernel submissions, stored once, or a receipt that refers to one::

    {"type":"kernels","id":0,"kernels":[{"layer":0,...}, ...]}
    {"type":"receipt","run_id":"...","rank":0,"step":4,...,"kernels_id":0}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.records import (
    RECEIPT_SCHEMA,
    Execution,
    ForwardMode,
    Purpose,
    Receipt,
    ReceiptAttribution,
    Submission,
)
from alphamoe_tracers.strict_json import INT64_MAX, repeated_key


class _KernelsLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="kernels", tag_field="type"):
    id: int
    kernels: tuple[Submission, ...]


class _ReceiptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="receipt", tag_field="type"):
    schema: str
    run_id: str
    rank: int
    purpose: Purpose
    request_ids: tuple[str, ...]
    step: int
    forward_mode: ForwardMode
    execution: Execution
    M: int | None
    real_tokens: int | None
    batch_size: int | None
    attribution: ReceiptAttribution
    graph_key: str | None
    kernels_id: int


_FIELDS = tuple(name for name in _ReceiptLine.__struct_fields__ if name != "kernels_id")


class ReceiptWriter:
    """Appends receipts to one file. It is not shared between threads or processes."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        self._kernel_ids: dict[tuple[Submission, ...], int] = {}
        self._last: tuple[tuple[Submission, ...], int] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive creation: two writers of one name would interleave their lines.
        self._file: BinaryIO = path.open("xb")

    def write(self, receipt: Receipt) -> None:
        """Append one receipt and hand it to the operating system; raises OSError when the disk is full."""
        lines = []
        # The registered list of a graph is one tuple object for every replay: comparing identities skips its hash.
        if self._last is not None and self._last[0] is receipt.kernels:
            kernels_id = self._last[1]
        else:
            known = self._kernel_ids.get(receipt.kernels)
            kernels_id = len(self._kernel_ids) if known is None else known
            if known is None:
                self._kernel_ids[receipt.kernels] = kernels_id
                lines.append(self._encoder.encode(_KernelsLine(kernels_id, receipt.kernels)) + b"\n")
            self._last = (receipt.kernels, kernels_id)
        line = _ReceiptLine(**{name: getattr(receipt, name) for name in _FIELDS}, kernels_id=kernels_id)
        lines.append(self._encoder.encode(line) + b"\n")
        self._file.write(b"".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


@dataclass(frozen=True)
class ReceiptFile:
    """What one receipt file holds."""

    receipts: list[Receipt]
    """Each distinct receipt once, in the order of the file."""
    duplicates: int
    """Lines that repeated an earlier receipt exactly."""
    cut: bool
    """The last line was not finished: the writer was killed or the file was truncated."""
    problems: tuple[str, ...]
    """Lines that were refused, one sentence each with the line number."""


def read_receipts(path: Path) -> ReceiptFile:
    """Read a receipt file strictly: no coercion (``"100"`` or ``true`` for M is refused), unknown is null.

    Raises:
        EvidenceError: the file cannot be read at all.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EvidenceError(f"{path}: cannot read receipts: {error.strerror}", "record the run again") from error
    decoder = msgspec.json.Decoder(_KernelsLine | _ReceiptLine)
    receipts: list[Receipt] = []
    problems: list[str] = []
    kernels: dict[int, tuple[Submission, ...]] = {}
    seen: set[_ReceiptLine] = set()
    canonical: dict[tuple[Submission, ...], int] = {}
    duplicates = 0
    lines = data.split(b"\n")
    unfinished = lines.pop()
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"line {number}: {error}")
            continue
        wrong = _impossible(line, raw)
        if wrong is not None:
            problems.append(f"line {number}: {wrong}")
        elif isinstance(line, _KernelsLine):
            if kernels.get(line.id, line.kernels) != line.kernels:
                problems.append(f"line {number}: kernel list {line.id} is defined twice with different contents")
            kernels.setdefault(line.id, line.kernels)
            canonical.setdefault(line.kernels, line.id)
        elif line.schema != RECEIPT_SCHEMA:
            problems.append(f"line {number}: receipt schema {line.schema!r} is not {RECEIPT_SCHEMA!r}")
        elif line.kernels_id not in kernels:
            problems.append(f"line {number}: kernel list {line.kernels_id} is not in the file")
        else:
            submissions = kernels[line.kernels_id]
            line = msgspec.structs.replace(line, kernels_id=canonical[submissions])
            if line in seen:
                duplicates += 1
                continue
            seen.add(line)
            receipts.append(Receipt(**{name: getattr(line, name) for name in _FIELDS}, kernels=submissions))
    return ReceiptFile(receipts, duplicates, bool(unfinished.strip()), tuple(problems))


def _impossible(line: _KernelsLine | _ReceiptLine, raw: bytes) -> str | None:
    """Say what a decoded line cannot be: numbers that no forward has, or a key that the line holds twice."""
    if isinstance(line, _KernelsLine):
        positive = ("M", "E", "H", "I_local", "top_k", "block_m")
        numbers = [(name, getattr(item, name), 1) for item in line.kernels for name in positive]
        numbers += [("layer", item.layer, 0) for item in line.kernels] + [("id", line.id, 0)]
        keys = 3 + len(Submission.__struct_fields__) * len(line.kernels)
    else:
        numbers = [("step", line.step, 0), ("rank", line.rank, 0), ("M", line.M, 1)]
        numbers += [("real_tokens", line.real_tokens, 0), ("batch_size", line.batch_size, 0)]
        keys = 1 + len(_ReceiptLine.__struct_fields__)
    for name, value, least in numbers:
        if value is not None and not least <= value <= INT64_MAX:
            return f"{name} {value if abs(value) < 2**70 else 'of more than 64 bits'} cannot be"
    # Each key has its colon: a line with no more colons than keys repeats none, and most lines are such.
    repeated = repeated_key(raw) if raw.count(b":") > keys else None
    return None if repeated is None else f"the key {repeated!r} is there twice"
