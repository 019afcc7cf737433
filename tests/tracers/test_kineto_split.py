"""However a text is cut into blocks and pieces, the same records come out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_sinks import KeptRows, kernel, launch, trace, write

from alphamoe_tracers import kineto
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.kineto_header import open_document
from alphamoe_tracers.kineto_rows import TraceRows
from alphamoe_tracers.kineto_split import Malformed, Splitter

NAMES = st.text(st.sampled_from('ab{}[],:"\\ \n\té\0'), max_size=12)
NESTED: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(0, 9) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """A valid trace with brackets, quotes and boundaries in every place where they mean nothing."""
    events: list[Any] = []
    for at in range(draw(st.integers(0, 6))):
        event = kernel(draw(NAMES), at + 1.5, 1, corr=at + 1, extra=draw(NESTED))
        events.append(event if draw(st.booleans()) else {"args": event.pop("args"), **event, "list": [event, event]})
    members = {"note": draw(NESTED), "deviceProperties": [{"id": 0}, {"id": 1}]}
    document = {"traceEvents": events} | members if draw(st.booleans()) else members | {"traceEvents": events}
    indent = draw(st.sampled_from([None, 1]))
    ascii_only = draw(st.booleans())
    return json.dumps(events if draw(st.booleans()) else document, indent=indent, ensure_ascii=ascii_only).encode()


def rows_of(text: bytes, sizes: list[int], chunk_bytes: int) -> tuple[TraceRows, bool]:
    """Read a document that comes in blocks of the given sizes, again and again."""

    def blocks() -> Iterator[bytes]:
        at = 0
        for size in itertools.cycle(sizes):
            if at >= len(text):
                return
            yield text[at : at + size]
            at += size

    rows = TraceRows()
    _, unclosed = kineto._read(Splitter(blocks(), chunk_bytes), rows, None)
    return rows, unclosed


def comparable(rows: TraceRows) -> tuple[Any, ...]:
    kernels = rows.kernels.finish()
    kinds = [kernels.kinds[code] for code in kernels.codes.tolist()]
    return kinds, kernels.start_ns.tolist(), kernels.correlation.tolist(), rows.events, +rows.odd


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents(), st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 200))
def test_any_split_of_the_bytes_gives_the_same_records(text: bytes, sizes: list[int], chunk_bytes: int) -> None:
    whole, unclosed = rows_of(text, [len(text)], 1 << 20)
    pieces, also_unclosed = rows_of(text, sizes, chunk_bytes)
    assert comparable(pieces) == comparable(whole)
    assert (unclosed, also_unclosed) == (False, False)
    document = json.loads(text)
    events = document if isinstance(document, list) else document["traceEvents"]
    assert sum(whole.events.values()) == len(events)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents(), st.data())
def test_any_split_of_a_damaged_text_gives_the_same_answer(text: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from([b"", b"}", b"]", b'"', b"\\", b",", b"{", b"\xff", b"\0"]))
    damaged = text[:at] + change + text[at + data.draw(st.integers(0, 30)) :]
    answers = []
    for sizes, chunk_bytes in (([len(damaged) + 1], 1 << 20), ([7], 1), ([64], 90)):
        try:
            rows, unclosed = rows_of(damaged, sizes, chunk_bytes)
        except Malformed:
            answers.append(None)
        else:
            answers.append((comparable(rows), unclosed))
    assert answers[0] == answers[1] == answers[2]


@settings(max_examples=40, deadline=None)
@given(documents(), st.binary(max_size=40), st.integers(0, 2**16))
def test_no_text_gives_anything_but_rows_or_an_evidence_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, noise: bytes, at: int
) -> None:
    at %= len(text)
    path = write(tmp_path_factory.mktemp("noise") / "t.json", text[:at] + noise + text[at:])
    sink = KeptRows()
    try:
        kineto.read_kineto(path, sink, chunk_bytes=100)
    except EvidenceError:
        assert sink.batches == {}


def test_a_boundary_inside_arguments_is_no_boundary(tmp_path: Path) -> None:
    inside = [{"ph": "X", "name": "in arguments"}] * 50
    events = [kernel("a", at + 1, 1, corr=at + 1, list=inside, text='}, {"ph": "X"}, {') for at in range(20)]
    sink = KeptRows()
    (summary,) = kineto.read_kineto(write(tmp_path / "t.json", trace(events)), sink, chunk_bytes=256)
    assert (summary.kernels, summary.whole) == (20, True)


def test_a_second_process_changes_nothing_where_cuts_were_wrong(tmp_path: Path) -> None:
    events: list[Any] = [
        kernel(f"k{at % 7}", at + 1, 1, corr=at + 1, list=[{"ph": "X"}] * (at % 9)) for at in range(300)
    ]
    events += [launch("cudaLaunchKernel", at + 0.5, 1, at + 1) for at in range(300)]
    path = write(tmp_path / "t.json", trace(events) + " " * 3000)
    one, two = KeptRows(), KeptRows()
    first = kineto.read_kineto(path, one, chunk_bytes=512)
    assert first == kineto.read_kineto(path, two, chunk_bytes=512, workers=2)
    assert one.everything() == two.everything()
    assert first[0].kernels == 300


def test_a_second_process_gives_the_same_error(tmp_path: Path) -> None:
    text = trace([kernel("a", at + 1, 1, corr=at + 1) for at in range(200)])
    at = text.index('"dur"', 9000)
    path = write(tmp_path / "t.json", text[:at] + "N/A" + text[at:])
    told = []
    for workers in (1, 2):
        with pytest.raises(EvidenceError) as caught:
            kineto.read_kineto(path, KeptRows(), chunk_bytes=512, workers=workers)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert f"at byte {at}" in told[0]


def test_a_record_without_an_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphamoe_tracers.kineto_split.MAX_RECORD_BYTES", 1 << 16)
    splitter = Splitter(itertools.chain([b'{"traceEvents":[{"name":"'], itertools.repeat(b"x" * 4096)), 1024)
    with pytest.raises(Malformed, match="longer than"):
        kineto._read(splitter, TraceRows(), None)


def test_a_header_without_an_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphamoe_tracers.kineto_header.MAX_RECORD_BYTES", 1 << 17)
    with pytest.raises(Malformed, match="no traceEvents in the first"):
        open_document(Splitter(itertools.chain([b'{"note":"'], itertools.repeat(b"x" * 4096))))


def test_a_large_header_and_footer_are_read(tmp_path: Path) -> None:
    devices = [{"id": at, "name": "GPU"} for at in range(5000)]
    text = trace([kernel("a", 1, 1, corr=1)], rank=1, deviceProperties=devices)
    after = json.dumps({"traceEvents": [kernel("a", 1, 1, corr=1)], "deviceProperties": devices, "x": "}, {"})
    for content, rank in ((text, 1), (after, None)):
        (summary,) = kineto.read_kineto(write(tmp_path / "t.json", content), KeptRows(), chunk_bytes=512)
        assert (summary.kernels, summary.rank, summary.whole) == (1, rank, True)
