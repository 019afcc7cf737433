"""One piece of a trace's event array, decoded into columns.

Values stay text (:class:`msgspec.Raw`) until they are needed: most of a trace (host operators, Python frames, flow
arrows) is only checked for being valid JSON. Repeated values of a record (name, shape, stream, ...) are looked up
together as one *kind*, so that a kernel costs one dictionary lookup.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from alphamoe_tracers.kineto_numbers import Int64s, read_numbers

Raw = msgspec.Raw
_ABSENT = Raw(b"")
_SEPARATOR = b"\0"  # cannot occur in valid JSON text

_LATEST_NS = 1 << 62

KERNEL_CATEGORIES = frozenset({"kernel"})
TRANSFER_CATEGORIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
API_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "hip_api"})
ANNOTATION_CATEGORIES = frozenset({"user_annotation", "nvtx"})

_LOADING = re.compile(rb"lazy|loading|jit|compil", re.IGNORECASE)
"""What CUPTI's overhead records are named where code was loaded or compiled: a first use inside the window."""

KERNEL_FIELDS = ("pid", "tid", "name", "device", "context", "stream", "grid", "block", "registers", "shared", "cluster")
TRANSFER_FIELDS = ("pid", "tid", "name", "device", "stream", "category")
CALL_FIELDS = ("pid", "tid", "name")


class Args(msgspec.Struct, gc=False):
    """The fields of an event's arguments that matter here."""

    device: Raw = _ABSENT
    context: Raw = _ABSENT
    stream: Raw = _ABSENT
    correlation: Raw = _ABSENT
    grid: Raw = _ABSENT
    block: Raw = _ABSENT
    cluster: Raw = _ABSENT
    bytes: Raw = _ABSENT
    registers: Raw = msgspec.field(default=_ABSENT, name="registers per thread")
    shared: Raw = msgspec.field(default=_ABSENT, name="shared memory")
    graph: Raw = msgspec.field(default=_ABSENT, name="graph id")
    node: Raw = msgspec.field(default=_ABSENT, name="graph node id")
    name: Raw = _ABSENT
    labels: Raw = _ABSENT


class Event(msgspec.Struct, gc=False):
    """The fields of a trace event that matter here, undecoded but for its phase and category."""

    ph: str = ""
    cat: str = ""
    name: Raw = _ABSENT
    pid: Raw = _ABSENT
    tid: Raw = _ABSENT
    ts: Raw = _ABSENT
    dur: Raw = _ABSENT
    args: Args | None = None


class _AnyEvent(msgspec.Struct, gc=False):
    """The same where nothing is known of any value."""

    ph: Raw = _ABSENT
    cat: Raw = _ABSENT
    name: Raw = _ABSENT
    pid: Raw = _ABSENT
    tid: Raw = _ABSENT
    ts: Raw = _ABSENT
    dur: Raw = _ABSENT
    args: Raw = _ABSENT


_EVENTS = msgspec.json.Decoder(list[Event])
_ITEMS = msgspec.json.Decoder(list[Raw])
_ANY_EVENT = msgspec.json.Decoder(_AnyEvent)
_ARGS: msgspec.json.Decoder[Args | None] = msgspec.json.Decoder(Args | None)
_NO_ARGS = Args()
_TS, _DUR, _CORRELATION = attrgetter("ts"), attrgetter("dur"), attrgetter("correlation")


@dataclass
class Rows:
    """Records of one table: codes of their kinds, and what differs from record to record."""

    kinds: list[bytes]
    """Distinct combinations of the table's fields, as JSON text joined with NUL, in order of appearance."""
    codes: npt.NDArray[np.int32]
    """[n] index into ``kinds``."""
    start_ns: Int64s
    end_ns: Int64s
    """[n] with start and end both 0 where the record has no usable time."""
    correlation: Int64s
    """[n], 0 for none."""
    extra: dict[str, Int64s] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.codes)


@dataclass
class ChunkRows:
    """What one piece of the event array holds."""

    kernels: Rows | None = None
    transfers: Rows | None = None
    calls: Rows | None = None
    annotations: Rows | None = None
    marks: Rows | None = None
    """Begin and end events; ``extra["is_end"]`` tells them apart, ``start_ns`` is their time."""
    labels: list[tuple[bytes, str]] = field(default_factory=list)
    """Labels with a bracket that metadata gives to processes: (pid as JSON text, label)."""
    events: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    """Records with something wrong in them, or that a reader should know of, by what it is."""


def parse_events(text: bytes) -> ChunkRows:
    """Decode a JSON array of trace events.

    Raises:
        msgspec.DecodeError: the text is not valid JSON; the message names the byte.
        RecursionError: it is nested too deeply.
    """
    chunk = ChunkRows()
    try:
        events = _EVENTS.decode(text)
    except msgspec.DecodeError as error:
        # Two kinds of error are about values, not about JSON: their records can still be told apart.
        if not isinstance(error, msgspec.ValidationError) and "UTF-8" not in str(error):
            raise
        events = _tolerant(text, chunk.odd)
    # One pass over all events counts both phase and category; a phase is one character.
    counts = Counter([event.ph + event.cat if len(event.ph) == 1 else f"?{event.cat}" for event in events])
    tables: dict[str, str] = {}
    for key, count in counts.items():
        phase, category = key[0], key[1:]
        chunk.events[category or "(none)" if phase == "X" else f"ph={phase}"] += count
        if phase == "X" and (table := _table_of(category.lower())) is not None:
            tables[category] = table
    if "Xoverhead" in counts:
        loading = sum(event.cat == "overhead" and _LOADING.search(event.name) is not None for event in events)
        chunk.odd["marks of code that was loaded or compiled while recording"] += loading
    phases = {key[0] for key in counts}
    if not phases.isdisjoint("MBE"):
        _other_phases([event for event in events if event.ph in ("M", "B", "E")], chunk)
    wanted = [event for event in events if event.cat in tables and event.ph == "X"]
    by_table = {table: [e for e in wanted if tables[e.cat] == table] for table in set(tables.values())}
    kernels, transfers = by_table.get("kernels", []), by_table.get("transfers", [])
    calls, annotations = by_table.get("calls", []), by_table.get("annotations", [])
    # Numbers of all tables are read together: small calls cost more than what they do.
    device = len(kernels) + len(transfers)
    members = [*kernels, *transfers, *calls, *annotations]
    start_ns, end_ns = _times(members, chunk.odd)
    args = [event.args or _NO_ARGS for event in members[: device + len(calls)]]
    correlation = np.zeros(len(members), np.int64)
    correlation[: len(args)] = _ids(map(_CORRELATION, args))

    def rows(keys: list[bytes], first: int) -> Rows:
        part = slice(first, first + len(keys))
        return _rows(keys, start_ns[part], end_ns[part], correlation[part])

    if kernels:
        chunk.kernels = rows(_kernel_kinds(kernels, args), 0)
        _add_extra(chunk.kernels, args[: len(kernels)], ("graph", "node"))
    if transfers:
        chunk.transfers = rows(_transfer_kinds(transfers, args[len(kernels) :]), len(kernels))
        _add_extra(chunk.transfers, args[len(kernels) : device], ("bytes", "node"))
    if calls:
        chunk.calls = rows(_call_kinds(calls), device)
    if annotations:
        chunk.annotations = rows(_call_kinds(annotations), device + len(calls))
    return chunk


def text_of(token: bytes) -> str:
    """Return a string's content (bytes that are not UTF-8 replaced), or any other JSON value as it is written."""
    if not token.startswith(b'"'):
        return token.decode("utf-8", "replace")
    if b"\\" not in token:
        return token[1:-1].decode("utf-8", "replace")
    return msgspec.json.decode(token.decode("utf-8", "replace"), type=str)


def _table_of(category: str) -> str | None:
    if category in KERNEL_CATEGORIES:
        return "kernels"
    if category in TRANSFER_CATEGORIES:
        return "transfers"
    if category in API_CATEGORIES:
        return "calls"
    return "annotations" if category in ANNOTATION_CATEGORIES else None


def _tolerant(text: bytes, odd: Counter[str]) -> list[Event]:
    """Decode event by event where one of them is no object, or a value in it is not of the usual type."""
    events = []
    for item in _ITEMS.decode(text):
        try:
            event = _ANY_EVENT.decode(item)
        except msgspec.ValidationError:
            odd["records that are no objects"] += 1
            continue
        try:
            args = _ARGS.decode(event.args) if event.args is not _ABSENT else None
        except msgspec.ValidationError:
            odd["records whose args are no object"] += 1
            args = None
        phase, category = text_of(bytes(event.ph)), text_of(bytes(event.cat))
        events.append(Event(phase, category, event.name, event.pid, event.tid, event.ts, event.dur, args))
    return events


def _other_phases(others: Iterable[Event], chunk: ChunkRows) -> None:
    """Keep rank labels, begin and end events."""
    for event in others:
        if event.ph == "M" and event.args is not None:
            label = text_of(bytes(event.args.labels) or bytes(event.args.name))
            if "[" in label:
                chunk.labels.append((bytes(event.pid), label))
    marks = [event for event in others if event.ph != "M" and _table_of(event.cat.lower()) != "kernels"]
    if marks:
        start_ns, end_ns = _times(marks, chunk.odd, durations=False)
        chunk.marks = _rows(_call_kinds(marks), start_ns, end_ns, np.zeros(len(marks), np.int64))
        chunk.marks.extra["is_end"] = np.array([mark.ph == "E" for mark in marks], np.int64)


def _kernel_kinds(events: Sequence[Event], args: Sequence[Args]) -> list[bytes]:
    return [
        _SEPARATOR.join(
            (e.pid, e.tid, e.name, a.device, a.context, a.stream, a.grid, a.block, a.registers, a.shared, a.cluster)
        )
        for e, a in zip(events, args, strict=False)
    ]


def _transfer_kinds(events: Sequence[Event], args: Sequence[Args]) -> list[bytes]:
    return [
        _SEPARATOR.join((e.pid, e.tid, e.name, a.device, a.stream, e.cat.lower().encode()))
        for e, a in zip(events, args, strict=False)
    ]


def _call_kinds(events: Sequence[Event]) -> list[bytes]:
    return [_SEPARATOR.join((e.pid, e.tid, e.name)) for e in events]


def _ids(tokens: Iterable[Raw]) -> Int64s:
    """Read ids, of which only positive ones are ids."""
    return np.maximum(read_numbers(list(tokens), 0).values, 0)


def _add_extra(rows: Rows, args: Sequence[Args], names: tuple[str, ...]) -> None:
    for name in names:
        tokens = list(map(attrgetter(name), args))
        if any(map(len, tokens)):
            rows.extra[name] = _ids(tokens)


def _times(events: Sequence[Event], odd: Counter[str], *, durations: bool = True) -> tuple[Int64s, Int64s]:
    """Return start and end, both 0 where there is no usable time."""
    n = len(events)
    tokens = list(map(_TS, events))
    if durations:
        tokens += map(_DUR, events)
    numbers = read_numbers(tokens, 3)
    start_ns, timed = numbers.values[:n], numbers.known[:n]
    duration_ns = np.zeros(n, np.int64)
    if durations:
        duration_ns, timed = numbers.values[n:], timed & numbers.known[n:]
    end_ns = start_ns + duration_ns
    # Beyond this (the year 2116) no clock goes, and a time base may still be added to a stored time.
    for values in (start_ns, duration_ns, end_ns):
        timed = timed & (np.abs(values) < _LATEST_NS)
    odd["times finer than a nanosecond, rounded down"] += numbers.finer
    odd["records without a readable time"] += n - int(timed.sum())
    return np.where(timed, start_ns, 0), np.where(timed, end_ns, 0)


def _rows(keys: list[bytes], start_ns: Int64s, end_ns: Int64s, correlation: Int64s) -> Rows:
    codes: dict[bytes, int] = {}
    numbered = [codes.setdefault(key, len(codes)) for key in keys]
    return Rows(list(codes), np.array(numbered, np.int32), start_ns, end_ns, correlation)
