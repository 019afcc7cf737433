"""Reads PyTorch (Kineto) Chrome traces, of 2021 to today, into the tables of a run bundle.

A thread inflates the file, this process parses it in pieces of half a mebibyte, and with ``workers=2`` a second
process parses about every other piece. Memory grows by about 45 bytes for each kernel (5 % of the text) and by nothing
for the rest. Rows reach the sink only when the whole document turned out to be valid.

Stored times are the trace's own, in nanoseconds, plus its ``baseTimeNanoseconds`` where it has one, which makes them
Unix times. A key that an event repeats counts with its last value, as everywhere in JSON.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.kineto_chunk import Rows
from alphamoe_tracers.kineto_header import Document, Header, close_document, contradictions, open_document, read_header
from alphamoe_tracers.kineto_kinds import Identities
from alphamoe_tracers.kineto_names import TraceName, parse_label, parse_trace_name
from alphamoe_tracers.kineto_rank import RankRows, put_rank
from alphamoe_tracers.kineto_rows import TraceRows, with_rows
from alphamoe_tracers.kineto_split import CHUNK_BYTES, Malformed, Piece, Splitter
from alphamoe_tracers.kineto_stream import Blocks, inflate
from alphamoe_tracers.kineto_tables import labels_of
from alphamoe_tracers.kineto_worker import Result, Ticket, Worker, try_piece
from alphamoe_tracers.trace_files import Clock, Progress, TraceSink, TraceSummary

UNCLOSED = "file was not closed: the run may have been cut"
_TABLES = ("kernels", "transfers", "calls", "annotations", "marks")
_PIECES_AHEAD = 8
_LOOK_AHEAD_BYTES = 1 << 16
_UNIX_US = 10**15  # 2001 in microseconds; a machine has not run that long
_BOOT_US = (10**6, 3 * 10**14)


def read_kineto(
    path: Path,
    sink: TraceSink,
    *,
    progress: Progress | None = None,
    workers: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[TraceSummary]:
    """Read one trace file, plain or gzip, and return one summary for each rank in it.

    Args:
        path: the file.
        sink: where rows go.
        progress: called on another thread while the file is read.
        workers: 2 parses in a second process too.
        chunk_bytes: size of the pieces.

    Raises:
        EvidenceError: the file cannot be read or is no valid trace; nothing was put into the sink.
    """
    rows = TraceRows()
    with ExitStack() as stack:
        blocks = stack.enter_context(Blocks(path, progress))
        worker = stack.enter_context(Worker(chunk_bytes)) if workers > 1 else None
        splitter = Splitter(iter(blocks), chunk_bytes)
        try:
            document, unclosed = _read(splitter, rows, worker)
        except Malformed as error:
            raise _evidence_error(path, error) from None
        sha256, size_bytes = blocks.sha256, blocks.size_bytes
    if contradicting := contradictions(document):
        message = f"{path}: {', '.join(contradicting)} stands there twice, with different values"
        raise EvidenceError(message, hint="the file says two things of who recorded it; record this rank again")
    return _summaries(path, sink, rows, document, unclosed, {"sha256": sha256, "size_bytes": size_bytes})


def _read(splitter: Splitter, rows: TraceRows, worker: Worker | None) -> tuple[Document, bool]:
    """Read the whole document; say whether it was left open."""
    document = open_document(splitter)
    unclosed = False
    if document.has_events:
        unclosed = _read_events(splitter, rows, worker)
        offset = splitter.offset
        closed = close_document(splitter.rest(), offset, document)
        unclosed = unclosed or not closed
    return document, unclosed


def _read_events(splitter: Splitter, rows: TraceRows, worker: Worker | None) -> bool:
    """Read the event array and leave the splitter just behind it; say whether it was left open.

    Results are used in the order of the file. What a later piece gave means nothing when an earlier one turns out to
    have been cut in the wrong place, or to hold the array's end.
    """
    pending: deque[tuple[Piece, Ticket | Result]] = deque()
    more = True
    while True:
        while more and len(pending) < (_PIECES_AHEAD if worker else 1):
            piece = splitter.next_piece()
            more = piece is not None and not piece.last
            if piece is not None:
                ticket = worker.submit(piece.data, piece.first, piece.last) if worker else None
                pending.append((piece, ticket or try_piece(piece.data, piece.first, piece.last)))
        if not pending:
            return True
        piece, work = pending.popleft()
        outcome = work.result() if isinstance(work, Ticket) else work
        if isinstance(outcome, Malformed):
            raise Malformed(piece.offset + outcome.at, outcome.reason)
        if outcome.bad_cut:
            if splitter.careful:
                raise Malformed(piece.offset + len(piece.data), "a record does not end")
            later = [other.data for other, _ in pending]
            splitter.restart_at(b"".join([piece.data, *later]), first=piece.first)
            pending.clear()
            more = True
            continue
        if outcome.rows is not None:
            rows.add(outcome.rows)
        if outcome.end is not None:
            later = [other.data for other, _ in pending]
            splitter.push_back(b"".join([piece.data[outcome.end :], *later]))
            return outcome.unclosed


def _evidence_error(path: Path, error: Malformed) -> EvidenceError:
    """Turn a malformed document into one line with file, byte and line, and say what may have happened."""
    line, documents, position = 1, 0, 0
    with path.open("rb") as file:
        for block in inflate(file, str(path)):
            line += block.count(b"\n", 0, max(error.at - position, 0))
            documents += block.count(b'"traceEvents"')
            position += len(block)
            if position > error.at + _LOOK_AHEAD_BYTES:
                break
    if documents > 1:
        hint = "two writers may have written to this one file name; record this rank again with a name of its own"
    elif "escape" in error.reason or "character" in error.reason:
        hint = "the writer did not escape a name; record this rank again, without Python stacks or with a newer torch"
    else:
        hint = "the writer was stopped or the file was changed; record this rank again"
    return EvidenceError(f"{path}: no valid trace at byte {error.at}, line {line}: {error.reason}", hint=hint)


def _summaries(
    path: Path, sink: TraceSink, rows: TraceRows, document: Document, unclosed: bool, file: dict[str, Any]
) -> list[TraceSummary]:
    """Put the rows of each rank into the sink and summarise it."""
    header, name = read_header(document), parse_trace_name(path)
    identities = Identities()
    identities.add_labels(rows.labels, str(path))
    base_ns = header.base_ns
    tables = {table: getattr(rows, table).finish() for table in _TABLES}
    labels = {table: labels_of(part, identities) for table, part in tables.items()}
    found = sorted({label for names in labels.values() for label in names}) or [""]
    merged = found != [""]
    if merged and len(tables["kernels"]) + len(tables["calls"]) > 0:
        found = [label for label in found if label or _has_rows(tables, labels, label)]
    cut = UNCLOSED if unclosed else None if document.has_events else "no traceEvents"
    common: dict[str, Any] = {
        "path": str(path),
        "format": "kineto",
        "format_version": header.format_version,
        "world_size": header.world_size,
        "whole": cut is None,
        "cut": cut,
        "capture_only": name.capture,
        "clock": _clock(tables, header),
        "base_ns": base_ns,
        "versions": header.versions,
        "events": dict(sorted(rows.events.items())),
        **file,
    }
    summaries = []
    for label in found:
        key = f"{path}[{label}]" if merged else str(path)
        parts = {table: _of_label(part, labels[table], label) for table, part in tables.items()}
        counts = put_rank(RankRows(**parts), key, sink, identities, base_ns)
        notes = (*_notes(rows, header, cut, name), *counts.pop("notes"))
        ranks = _rank_of(label, merged, header, name)
        summaries.append(TraceSummary(key=key, notes=notes, **common, **ranks, **counts))
    return summaries


def _rank_of(label: str, merged: bool, header: Header, name: TraceName) -> dict[str, Any]:
    if merged:
        # A merge keeps the distributedInfo of its first file: it says nothing of the others.
        parsed = parse_label(f"[{label}]")
        return {"rank": None if parsed is None else parsed[1], "rank_source": None if parsed is None else "label"}
    if header.rank is not None:
        return {"rank": header.rank, "rank_source": "distributedInfo", "name_rank": name.rank}
    return {
        "rank": name.rank,
        "rank_source": None if name.rank is None else "file name",
        "name_rank": name.rank,
    }


def _of_label(rows: Rows, labels: list[str], label: str) -> Rows:
    if all(other == label for other in labels):
        return rows
    return with_rows(rows, np.array([other == label for other in labels], bool)[rows.codes])


def _has_rows(tables: dict[str, Rows], labels: dict[str, list[str]], label: str) -> bool:
    return any(len(_of_label(tables[table], labels[table], label)) for table in ("kernels", "calls"))


def _notes(rows: TraceRows, header: Header, cut: str | None, name: TraceName) -> list[str]:
    notes = [] if cut is None else [cut]
    notes += [f"{count} {what}" for what, count in sorted(rows.odd.items()) if count]
    if name.capture:
        notes.append("recorded while graphs were captured: shapes only, never executions")
    if name.tp is not None and name.rank is None:
        notes.append(f"the name gives tensor-parallel rank {name.tp}; the rank in the world needs a map")
    return [*notes, *header.notes]


def _clock(tables: dict[str, Rows], header: Header) -> Clock:
    """Say what zero of time the stored times have: known from a time base, else from their size."""
    if header.base_ns:
        return "unix"
    times = np.concatenate([part.start_ns[part.start_ns > 0] for part in tables.values()])
    if not len(times):
        return "unknown"
    earliest_us = int(times.min()) // 1000
    if earliest_us >= _UNIX_US:
        return "unix"
    return "boot" if _BOOT_US[0] <= earliest_us < _BOOT_US[1] else "unknown"
