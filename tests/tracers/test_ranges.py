"""NVTX ranges: pushing without a tool, pairing of marker records, nesting, and enclosing ranges."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from alphamoe_tracers.range_pairing import (
    MARKER_DTYPE,
    MARKER_END,
    MARKER_START,
    OBJECT_PROCESS,
    OBJECT_THREAD,
    PAYLOAD_DTYPE,
    RangePairer,
    enclosing,
    with_depths,
)
from alphamoe_tracers.ranges import RangeDomain
from alphamoe_tracers.records import check_table

STRINGS = ["", "alphamoe", "a", "b", "c", "d"]
NO_PAYLOADS = np.empty(0, PAYLOAD_DTYPE)


def markers(*rows: tuple[int, int, int, int, str]) -> np.ndarray:
    """Rows of (flags, time, id, thread, name)."""
    return np.array(
        [(flags, OBJECT_THREAD, at, key, 9, thread, STRINGS.index(name), 1) for flags, at, key, thread, name in rows],
        MARKER_DTYPE,
    )


def start(at: int, key: int, name: str, thread: int = 1) -> tuple[int, int, int, int, str]:
    return (MARKER_START, at, key, thread, name)


def end(at: int, key: int, thread: int = 1) -> tuple[int, int, int, int, str]:
    return (MARKER_END, at, key, thread, "")


def spans(table: pa.Table) -> list[tuple[Any, ...]]:
    return [(row["name"], row["start_ns"], row["end_ns"], row["depth"]) for row in table.to_pylist()]


def test_imbalance_is_paired_by_stack_and_reported_with_its_thread() -> None:
    """A stray end and a range never closed are counted for their thread; the others pair up (case N1)."""
    pairer = RangePairer()
    rows = markers(start(0, 1, "a"), start(10, 2, "b"), end(20, 2), end(30, 1), end(40, 99), start(50, 3, "c"))
    closed = pairer.add(rows, NO_PAYLOADS, STRINGS)
    left = pairer.finish(STRINGS)
    assert sorted(spans(closed)) == [("a", 0, 30, 0), ("b", 10, 20, 1)]
    assert spans(left) == [("c", 50, None, 0)]
    assert pairer.problems == ("thread 1: 1 range ends without a start", "thread 1: 1 ranges never closed")
    assert check_table("ranges", pa.concat_tables([closed, left]).unify_dictionaries()) == []


def test_pairing_spans_batches_and_threads() -> None:
    """A range that opens in one batch closes in another, and threads do not disturb each other."""
    pairer = RangePairer()
    first = pairer.add(markers(start(0, 1, "a"), start(5, 2, "b", thread=2), start(6, 3, "c")), NO_PAYLOADS, STRINGS)
    assert first.num_rows == 0
    second = pairer.add(markers(end(7, 3), end(8, 2, thread=2)), NO_PAYLOADS, STRINGS)
    third = pairer.add(markers(end(9, 1)), NO_PAYLOADS, STRINGS)
    assert sorted(spans(second)) == [("b", 5, 8, 0), ("c", 6, 7, 1)]
    assert spans(third) == [("a", 0, 9, 0)]
    assert pairer.problems == ()


def test_end_may_arrive_before_its_start() -> None:
    """A range that ends on another thread may have its end delivered first; it is no stray end."""
    pairer = RangePairer()
    assert pairer.add(markers(end(9, 1, thread=2)), NO_PAYLOADS, STRINGS).num_rows == 0
    (row,) = pairer.add(markers(start(3, 1, "a", thread=1)), NO_PAYLOADS, STRINGS).to_pylist()
    assert (row["start_ns"], row["end_ns"], row["kind"]) == (3, 9, "start_end")
    pairer.finish(STRINGS)
    assert pairer.problems == ()


def test_payload_belongs_to_its_range_alone() -> None:
    """A payload record is joined by id, wherever in the batches it came; ranges without one read null."""
    pairer = RangePairer()
    pairer.add(markers(start(0, 1, "a"), start(1, 2, "b")), np.array([(1, 42)], PAYLOAD_DTYPE), STRINGS)
    rows = pairer.add(markers(end(2, 2), end(3, 1)), NO_PAYLOADS, STRINGS).to_pylist()
    assert {row["name"]: row["payload"] for row in rows} == {"a": 42, "b": None}


def test_markers_delivered_twice_are_counted_once() -> None:
    """Repeated starts and ends are duplicates, also across batches, and no imbalance (case T7)."""
    pairer = RangePairer()
    rows = markers(start(0, 1, "a"), start(0, 1, "a"), end(5, 1), end(5, 1))
    assert pairer.add(rows, NO_PAYLOADS, STRINGS).num_rows == 1
    assert pairer.add(markers(end(5, 1)), NO_PAYLOADS, STRINGS).num_rows == 0
    assert (pairer.duplicates, pairer.problems) == (3, ())


def test_start_end_ranges_are_no_part_of_the_stack() -> None:
    """A range of the process, or one that ends on another thread, has kind start_end and encloses nothing."""
    pairer = RangePairer()
    rows = markers(start(0, 1, "a"), start(1, 2, "b"), end(8, 1, thread=2), start(2, 3, "c"), end(3, 3), end(9, 2))
    rows["object_kind"][1] = OBJECT_PROCESS
    table = pairer.add(rows, NO_PAYLOADS, STRINGS)
    assert {row["name"]: row["kind"] for row in table.to_pylist()} == {
        "a": "start_end",
        "b": "start_end",
        "c": "push_pop",
    }
    assert (enclosing(table, 9, 1, [2]) >= 0).sum() == 1


def test_instantaneous_markers_are_ignored() -> None:
    """A mark is not a range."""
    pairer = RangePairer()
    assert pairer.add(markers((1, 5, 7, 1, "a")), NO_PAYLOADS, STRINGS).num_rows == 0
    assert pairer.finish(STRINGS).num_rows == 0


def test_overlap_without_nesting_gets_free_depths() -> None:
    """Ranges of two domains may interleave; no two ranges of one depth overlap then."""
    pairer = RangePairer()
    rows = markers(start(0, 1, "a"), start(1, 2, "b"), end(2, 1), start(3, 3, "c"), end(4, 2), end(5, 3))
    table = pairer.add(rows, NO_PAYLOADS, STRINGS)
    assert {row["name"]: row["depth"] for row in table.to_pylist()} == {"a": 0, "b": 1, "c": 0}


def test_depths_computed_anew_agree_with_a_stack() -> None:
    """On random balanced ranges the depths are those that a stack gives."""
    rng = np.random.default_rng(11)
    rows, stack, expected, now, key = [], [], {}, 0, 0
    for _ in range(4000):
        now += int(rng.integers(1, 5))
        if stack and rng.random() < 0.5:
            rows.append(end(now, stack.pop()))
        else:
            key += 1
            expected[now] = len(stack)
            stack.append(key)
            rows.append(start(now, key, "a"))
    pairer = RangePairer()
    parts = [pairer.add(markers(*rows[at : at + 97]), NO_PAYLOADS, STRINGS) for at in range(0, len(rows), 97)]
    table = with_depths(pa.concat_tables([*parts, pairer.finish(STRINGS)]).unify_dictionaries())
    assert {row["start_ns"]: row["depth"] for row in table.to_pylist()} == expected


def test_enclosing_gives_the_path_from_outermost_to_innermost() -> None:
    """Each moment finds the ranges of its own thread that were open then, an unclosed one included."""
    pairer = RangePairer()
    rows = markers(
        start(0, 1, "a"), start(10, 2, "b"), end(20, 2), start(30, 3, "c"), end(40, 3), end(50, 1), start(5, 4, "d", 2)
    )
    table = pa.concat_tables([pairer.add(rows, NO_PAYLOADS, STRINGS), pairer.finish(STRINGS)]).unify_dictionaries()
    names = np.array([row["name"] for row in table.to_pylist()])
    path = enclosing(table, 9, [1, 1, 1, 1, 1, 2, 2, 3], [15, 25, 40, 50, 51, 4, 900, 15])
    found = [[str(names[row]) for row in line if row >= 0] for line in path.tolist()]
    assert found == [["a", "b"], ["a"], ["a", "c"], ["a"], [], [], ["d"], []]
    assert enclosing(table, 8, 1, 15).max() == -1


def test_enclosing_without_ranges_has_no_columns() -> None:
    """An empty table answers every query with an empty path."""
    empty = RangePairer().finish(STRINGS)
    assert enclosing(empty, 9, 1, [1, 2, 3]).shape == (3, 0)


class _Domain:
    """Stands for nvtx's domain; its push returns -1 as some tools do."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, int | None]] = []
        self.pops = 0

    def get_event_attributes(self, name: str, payload: int | None = None) -> tuple[str, int | None]:
        return (name, payload)

    def push_range(self, attributes: tuple[str, int | None]) -> int:
        self.pushed.append(attributes)
        return -1

    def pop_range(self) -> int:
        self.pops += 1
        return -2


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> _Domain:
    nvtx = pytest.importorskip("nvtx")
    stub = _Domain()
    monkeypatch.setattr(nvtx, "get_domain", lambda name: stub)
    return stub


def test_pops_equal_pushes_whatever_the_tool_returns(domain: _Domain) -> None:
    """The wrapper ignores return values (case N2), and pops when the body raises."""
    ranges = RangeDomain()
    with pytest.raises(KeyError), ranges.range("step", 3), ranges.range("layer", 1):
        raise KeyError
    ranges.push("experts")
    ranges.pop()
    assert domain.pushed == [("step", 3), ("layer", 1), ("experts", None)]
    assert domain.pops == 3
    assert ranges.listening


def test_disabled_domain_never_asks_nvtx(domain: _Domain) -> None:
    """Switched off, nothing reaches the tool."""
    ranges = RangeDomain(enabled=False)
    with ranges.range("step", 1):
        ranges.push("layer")
        ranges.pop()
    assert (domain.pushed, domain.pops, ranges.listening) == ([], 0, False)


def test_domain_without_the_nvtx_package_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A serving process without nvtx runs the same code."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    ranges = RangeDomain()
    with ranges.range("step", 1):
        assert not ranges.listening
