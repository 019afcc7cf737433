"""Documents that are no valid JSON, or say two things (trace-cases T1, T2, T3, A1, A5, A6, A14, M7)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trace_sinks import KeptRows, kernel, launch, trace, write

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.kineto import UNCLOSED, read_kineto

GOOD = json.dumps(kernel("moe_gemm", 12, 3, 0, 7, 41))


def refused(tmp_path: Path, text: str | bytes, *, chunk_bytes: int = 1 << 20) -> EvidenceError:
    """Read a document that must be refused, plain and gzip, leaving no rows behind."""
    data = text.encode() if isinstance(text, str) else text
    told = []
    for content in (data, gzip.compress(data)):
        sink = KeptRows()
        with pytest.raises(EvidenceError) as caught:
            read_kineto(write(tmp_path / "trace.json", content), sink, chunk_bytes=chunk_bytes)
        assert sink.batches == {}
        assert "\n" not in str(caught.value)
        assert caught.value.hint
        told.append(str(caught.value))
    assert told[0] == told[1]
    return caught.value


def between(name: str, *, before: str = GOOD, after: str = GOOD) -> str:
    """A trace whose middle event has a name written without escaping."""
    return f'{{"schemaVersion":1,\n"traceEvents":[\n{before},\n{{"ph":"X","cat":"cpu_op","name":"{name}"}},\n{after}]}}'


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 64])
@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("D:\\moe\\ep.py(3): f", "moe", "invalid escaped character"),
        ('{"dtype": "bf16"}(7): run', "dtype", "expected ',' or '}'"),
        ("a\tb", "\t", "invalid character"),
        ("a\nb", "\nb", "invalid character"),
        ("\\ud800 padded", "padded", "unexpected end of hex escape"),
        ("\\udc9f", "\\udc9f", "invalid utf-16 surrogate pair"),
        ("\\u12", '"}', "invalid character in unicode escape"),
    ],
)
def test_a_name_that_was_not_escaped_is_told_with_byte_and_line(
    tmp_path: Path, name: str, bad: str, reason: str, chunk_bytes: int
) -> None:
    text = between(name)
    error = refused(tmp_path, text, chunk_bytes=chunk_bytes)
    at = int(str(error).split("at byte ")[1].split(",")[0])
    event = text.index('"cpu_op"')
    assert event < at <= text.index(bad, event) + len(bad) + 2
    assert f", line {text.count(chr(10), 0, at) + 1}: {reason}" in str(error)


def test_a_backslash_that_happens_to_be_an_escape_is_read_as_it_stands(tmp_path: Path) -> None:
    sink = KeptRows()
    text = trace([kernel("#", 12, 3, corr=41)]).replace("#", "D:\\run\\tp.py")
    read_kineto(write(tmp_path / "t.json", text), sink)
    assert sink.rows("kernels")[0]["name"] == "D:\run\tp.py"


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "N/A", "nan", "01", "1.", "+1", "'x'", "undefined"])
@pytest.mark.parametrize("place", ['"dur":{}', '"args":{{"grid":{}}}', '"name":"copy N/A to host","x":[{}]'])
def test_tokens_that_json_does_not_have_are_refused_where_they_stand(tmp_path: Path, token: str, place: str) -> None:
    event = f'{{"ph":"X","cat":"kernel",{place.format(token)}}}'
    text = f'{{"traceEvents":[{GOOD},{event},{GOOD}]}}'
    at = int(str(refused(tmp_path, text)).split("at byte ")[1].split(",")[0])
    start = text.index(event) + event.rindex(token)
    assert start <= at <= start + len(token)


def test_a_token_in_quotes_is_a_name(tmp_path: Path) -> None:
    sink = KeptRows()
    read_kineto(write(tmp_path / "t.json", trace([kernel("copy N/A NaN Infinity", 1, 1, corr=1)])), sink)
    assert sink.rows("kernels")[0]["name"] == "copy N/A NaN Infinity"


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_such_tokens_outside_the_events_are_refused_too(tmp_path: Path, token: str) -> None:
    for text in (f'{{"overhead": {token}, "traceEvents":[{GOOD}]}}', f'{{"traceEvents":[{GOOD}],"overhead":{token}}}'):
        error = refused(tmp_path, text)
        assert f"at byte {text.index(token)}, line 1" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        f"[\n{GOOD},\n",
        f"[\n{GOOD}\n",
        f"[\n{GOOD},\n]",
        f'{{"traceEvents":[{GOOD},\n]}}',
        f'{{"traceEvents":[{GOOD},\n',
        f'{{"traceEvents":[{GOOD}',
        f'{{"traceEvents":[{GOOD}]',
        f'{{"traceEvents":[{GOOD}]\n',
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 16])
def test_an_array_that_was_not_closed_is_read_and_proves_no_absence(
    tmp_path: Path, text: str, chunk_bytes: int
) -> None:
    sink = KeptRows()
    (summary,) = read_kineto(write(tmp_path / "t.json", text), sink, chunk_bytes=chunk_bytes)
    assert (summary.kernels, summary.whole, summary.cut) == (1, False, UNCLOSED)
    assert UNCLOSED in summary.notes


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_file_cut_inside_a_record_is_refused(tmp_path: Path, cut: int) -> None:
    text = f'{{"traceEvents":[{GOOD},{GOOD}'[:-cut]
    error = refused(tmp_path, text)
    assert f"at byte {len(text)}, line 1" in str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("  \n", "the file is empty"),
        ("hello", "no JSON object or list"),
        ('"x"', "no JSON object or list"),
        ('{"schemaVersion":1}', "no traceEvents"),
        ('{"traceEvents":5}', "traceEvents is no list"),
        ('{"traceEvents":{"a":[]}}', "traceEvents is no list"),
        ('{"a":{"traceEvents":[1]}}', "no traceEvents"),
        ('{"a" 1,"traceEvents":[]}', "Expecting ':' delimiter"),
        ('{"traceEvents":[{}]}x', "Extra data"),
        ("[{}]x", "something follows"),
        ('{"traceEvents":[{} {}]}', "expected ',' or ']'"),
        ('{"traceEvents":[{},,{}]}', ""),
        ('{"traceEvents":[{"a":[1,]}]}', "trailing comma"),
        ('{"traceEvents":[{}],"a":{}', "Expecting"),
        ('{"traceEvents":[{"a":' + "[" * 5000 + "]" * 5000 + "}]}", "nested too deeply"),
        ('{"a":' + "[" * 50_000 + "]" * 50_000 + ',"traceEvents":[]}', "nested too deeply"),
        ('{"a":' + "9" * 5000 + ',"traceEvents":[]}', "digits"),
    ],
)
def test_other_documents_are_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in str(refused(tmp_path, text))


def test_half_of_a_surrogate_pair_at_the_very_end_of_a_name_is_told(tmp_path: Path) -> None:
    for chunk_bytes in (1 << 20, 64):
        text = between("x\\ud800")
        error = refused(tmp_path, text, chunk_bytes=chunk_bytes)
        at = int(str(error).split("at byte ")[1].split(",")[0])
        assert text.index("\\ud800") <= at <= text.index("\\ud800") + 12


def test_events_under_a_key_that_is_spelled_with_escapes_are_not_silently_lost(tmp_path: Path) -> None:
    assert "traceEvents is no list" in str(refused(tmp_path, '{"traceEvent\\u0073":[{}]}'))


def test_two_writers_in_one_file_are_suspected(tmp_path: Path) -> None:
    text = '{"schemaVersion":1,"traceEvents":[{"ph":"X","na{"schemaVersion":1,"traceEvents":[]}'
    assert "two writers" in refused(tmp_path, text).hint
    assert "two writers" in refused(tmp_path, trace([kernel("a", 1, 1)]) * 2).hint
    assert "two writers" not in refused(tmp_path, between("D:\\moe")).hint


@pytest.mark.parametrize(
    "text",
    [
        '{"distributedInfo":{"rank":0},"traceEvents":[],"distributedInfo":{"rank":3}}',
        '{"distributedInfo":{"rank":0,"rank":3},"traceEvents":[]}',
        '{"traceEvents":[],"traceEvents":[{}]}',
        '{"baseTimeNanoseconds":1,"traceEvents":[],"baseTimeNanoseconds":2}',
    ],
)
def test_a_file_that_says_two_things_of_who_recorded_it_is_refused(tmp_path: Path, text: str) -> None:
    assert "stands there twice" in str(refused(tmp_path, text))


def test_a_repeated_key_that_says_the_same_or_matters_little_is_read(tmp_path: Path) -> None:
    text = '{"distributedInfo":{"rank":1},"x":1,"x":2,"traceEvents":[],"distributedInfo":{"rank":1}}'
    (summary,) = read_kineto(write(tmp_path / "t.json", text), KeptRows())
    assert summary.rank == 1
    assert summary.notes == ("repeated with other values, the last one taken: x",)


@pytest.mark.parametrize("rank", ["3", True, -1, 3.0, None, [3]])
def test_a_rank_of_the_wrong_type_is_no_rank(tmp_path: Path, rank: object) -> None:
    text = json.dumps({"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": []})
    (summary,) = read_kineto(write(tmp_path / "t.json", text), KeptRows())
    assert (summary.rank, summary.rank_source, summary.world_size) == (None, None, 4)
    assert any("rank that is no count" in note for note in summary.notes)


def test_name_and_content_are_both_told_when_they_disagree(tmp_path: Path) -> None:
    (summary,) = read_kineto(write(tmp_path / "p-TP-1.trace.json", trace([], rank=0)), KeptRows())
    assert (summary.rank, summary.rank_source, summary.name_rank) == (0, "distributedInfo", 1)
    (named,) = read_kineto(write(tmp_path / "q-TP-1.trace.json", trace([])), KeptRows())
    assert (named.rank, named.rank_source, named.name_rank) == (1, "file name", 1)


def test_a_device_index_is_never_a_rank(tmp_path: Path) -> None:
    (summary,) = read_kineto(write(tmp_path / "t.json", trace([kernel("a", 1, 1, dev=3, corr=1)])), KeptRows())
    assert (summary.rank, summary.rank_source) == (None, None)


def test_a_merged_trace_gives_each_labelled_rank_its_own_rows(tmp_path: Path) -> None:
    events = []
    for rank, name in ((0, "a"), (2, "b")):
        pair = (kernel(name, 10, 1, corr=5), launch("cudaLaunchKernel", 5, 1, 5))
        events += [event | {"pid": f"[TP{rank:02d}] {event['pid']}"} for event in pair]
    sink = KeptRows()
    found = read_kineto(write(tmp_path / "merged-1.trace.json", trace(events, rank=0)), sink)
    assert [(one.rank, one.rank_source, one.kernels, one.launches_without_kernel) for one in found] == [
        (0, "label", 1, 0),
        (2, "label", 1, 0),
    ]
    assert [sink.rows("kernels", one.key)[0]["name"] for one in found] == ["a", "b"]
    assert [len(sink.symbols(one.key)) for one in found] == [1, 1]
    assert {row["process"] for row in sink.rows("kernels")} == {900}
    assert {row["device"] for row in sink.rows("kernels")} == {0}


def test_labels_of_processes_in_metadata_split_a_merged_trace_too(tmp_path: Path) -> None:
    events = [kernel("a", 10, 1, dev=16, corr=5), kernel("b", 10, 1, dev=18, corr=5)]
    for pid, label in ((16, "[TP00]"), (18, "[TP02]")):
        events.append({"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": label}})
    found = read_kineto(write(tmp_path / "t.json", trace(events)), KeptRows())
    assert [(one.rank, one.kernels) for one in found] == [(0, 1), (2, 1)]
    events.append({"ph": "M", "name": "process_labels", "pid": 16, "args": {"labels": "[TP01]"}})
    with pytest.raises(EvidenceError, match=r"process 16 is labelled \[TP00\] and \[TP01\]"):
        read_kineto(write(tmp_path / "t.json", trace(events)), KeptRows())


def test_ordinary_process_labels_are_no_ranks(tmp_path: Path) -> None:
    meta = {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU [0]"}}
    (summary,) = read_kineto(write(tmp_path / "t.json", trace([kernel("a", 1, 1, corr=1), meta])), KeptRows())
    assert (summary.rank, summary.kernels) == (None, 1)


def test_a_capture_trace_is_told_as_shapes_only(tmp_path: Path) -> None:
    (tmp_path / "capture_traces").mkdir()
    path = write(tmp_path / "capture_traces" / "bs_8_rank0.json", trace([kernel("moe_gemm", 1, 1, corr=1)]))
    (summary,) = read_kineto(path, KeptRows())
    assert (summary.capture_only, summary.rank) == (True, 0)
    assert any("never executions" in note for note in summary.notes)


def test_kernels_go_to_the_process_that_launched_them(tmp_path: Path) -> None:
    calls = [launch("cudaLaunchKernel", 1, 1, 1), launch("cudaLaunchKernel", 2, 1, 2)]
    calls.append(launch("cudaLaunchKernel", 3, 1, 7) | {"pid": 901})
    sink = KeptRows()
    events = [*(kernel("a", 9, 1, stream=corr, corr=corr) for corr in (1, 2, 7, 8)), *calls]
    (summary,) = read_kineto(write(tmp_path / "t.json", trace(events)), sink)
    assert [row["process"] for row in sink.rows("kernels")] == [900, 900, 901, 900]
    assert any("2 processes launched kernels" in note for note in summary.notes)
