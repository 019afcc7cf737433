"""What the kinds of a trace mean: text of names, streams, processes and shapes turned into the tables' integers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.kineto_chunk import text_of
from alphamoe_tracers.kineto_names import parse_label

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_INTEGER = re.compile(r"-?\d{1,19}")
_STREAM = re.compile(r"(?:stream\s+)?(-?\d{1,10})", re.IGNORECASE)
_NAMED_STREAM = -1000
"""Streams without a number ("default", null, ...) count down from here: each stays a stream of its own."""
_NAMED_LANE = -(1 << 62)
"""Threads and processes without a number count up from here, away from thread ids (which can be negative)."""


@dataclass
class Identities:
    """Integers for the processes, threads and streams of one file; equal text gives equal integers."""

    labels: dict[str, str] = field(default_factory=dict)
    """Rank label by process, where metadata gives it and the process itself does not."""
    _streams: dict[str, int] = field(default_factory=dict)
    _lanes: dict[str, int] = field(default_factory=dict)

    def add_labels(self, found: Sequence[tuple[bytes, str]], name: str) -> None:
        """Take the rank labels that metadata gives to processes.

        Raises:
            EvidenceError: two labels claim one process, so its records cannot be told apart.
        """
        for pid, text in found:
            label = parse_label(text)
            if label is None:
                continue
            process = text_of(pid)
            if self.labels.setdefault(process, label[0]) != label[0]:
                message = f"{name}: process {process} is labelled [{self.labels[process]}] and [{label[0]}]"
                raise EvidenceError(message, hint="the merge mixed two ranks; import the files of the single ranks")

    def label_of(self, process: str) -> str:
        """Return the rank label of a process ("TP00"), or an empty string."""
        label = parse_label(process)
        return label[0] if label is not None else self.labels.get(process, "")

    def lane(self, text: str) -> int:
        """Return the integer of a process or thread."""
        number = unlabelled(text)
        if _INTEGER.fullmatch(number) and abs(int(number)) <= _INT64:
            return int(number)
        return self._lanes.setdefault(text, _NAMED_LANE + len(self._lanes))

    def stream(self, text: str) -> int:
        """Return the integer of a stream: "7", 7 and "stream 7" are one; "default", -1 and null are not."""
        found = _STREAM.fullmatch(text.strip())
        if found is not None and abs(int(found[1])) <= _INT32:
            return int(found[1])
        return self._streams.setdefault(text, _NAMED_STREAM - len(self._streams))


def unlabelled(process: str) -> str:
    """Remove the rank label that a merge put before a process id."""
    return process.rsplit("]", 1)[1].strip() if process.startswith("[") and "]" in process else process.strip()


def int32_of(token: bytes, unknown: int) -> int:
    """Return a small integer, or what stands for an unknown one."""
    text = text_of(token) if token else ""
    if _INTEGER.fullmatch(text) and abs(int(text)) <= _INT32:
        return int(text)
    return unknown


def shape_of(token: bytes) -> tuple[int, int, int]:
    """Return the three extents of a grid or block; zeros where the trace does not say."""
    try:
        extents = msgspec.json.decode(token, type=list[int]) if token else []
    except msgspec.DecodeError:
        return 0, 0, 0
    if not 1 <= len(extents) <= 3 or not all(0 <= extent <= _INT32 for extent in extents):
        return 0, 0, 0
    x, y, z = [*extents, 1, 1][:3]
    return x, y, z


def column(values: Sequence[int], dtype: type[np.int32 | np.int64] = np.int32) -> npt.NDArray[np.int32 | np.int64]:
    """Return one value for each kind as an array to index with codes."""
    return np.array(values, dtype)
