"""The allow-list: what it must say, and how little it covers."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest

from alphamoe_sanitizer_replays.results import Access, Finding
from alphamoe_sanitizer_replays.verdicts.allow_list import load_allow_list, parse_allow_list
from alphamoe_tracers.errors import UsageError

TODAY = datetime.date(2026, 6, 1)
STORE = "void cub::V1::BlockStore<float, (int)64>::Store<float *>(T1, float (&)[1], int)"
ENTRY = """
[[allow]]
symbol = "cub::V1::BlockStore::Store"
hazard = "hazard"
tool = "racecheck"
tool_versions = "2025.1..2025.4"
reason = "known in the library"
expires = 2026-12-31
"""
RACE = Finding(
    tool="racecheck",
    severity="error",
    kind="hazard",
    text="Race reported",
    where=Access(STORE, "block_store.cuh", 980, "+0x10", "Write"),
    other=Access(STORE, "block_store.cuh", 991, "+0x20", "Read"),
)


def test_a_whole_entry_covers_its_finding_until_its_last_day() -> None:
    allow = parse_allow_list(ENTRY, "a.toml", TODAY)
    assert allow.match(RACE, "2025.3.1.0", TODAY) == ("allowed", allow.entries[0])
    assert allow.match(RACE, "2025.3.1.0", datetime.date(2026, 12, 31))[0] == "allowed"
    assert allow.match(RACE, "2025.3.1.0", datetime.date(2027, 1, 1)) == ("expired", allow.entries[0])


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2025.1", "allowed"),
        ("2025.4.9.9", "allowed"),
        ("2025.0.9", "open"),
        ("2025.5", "open"),
        ("2025.10", "open"),
        (None, "open"),
        ("x", "open"),
    ],
)
def test_an_entry_holds_for_its_versions_and_for_no_unknown_one(version: str | None, state: str) -> None:
    assert parse_allow_list(ENTRY, "a.toml", TODAY).match(RACE, version, TODAY)[0] == state


def test_an_entry_may_hold_for_two_years_and_over_one_turn_of_the_year() -> None:
    text = ENTRY.replace("2026-12-31", "2028-06-01").replace("2025.4", "2026.4")
    assert parse_allow_list(text, "a.toml", TODAY).match(RACE, "2026.2", TODAY)[0] == "allowed"


@pytest.mark.parametrize("key", ["symbol", "hazard", "tool", "tool_versions", "reason", "expires"])
def test_an_entry_without_one_of_its_fields_is_a_usage_error(key: str) -> None:
    text = "\n".join(line for line in ENTRY.splitlines() if not line.startswith(f"{key} "))
    with pytest.raises(UsageError, match=key) as raised:
        parse_allow_list(text, "a.toml", TODAY)
    assert raised.value.hint.endswith("symbol, hazard, tool, tool_versions, reason, expires")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"known in the library"', '"  "'),
        ('"known in the library"', '"."'),
        ('"known in the library"', '"\\u200b\\u200b\\u200b"'),
        ("2026-12-31", "2028-06-02"),
        ("2025.1..2025.4", "0..999999"),
        ("2025.1..2025.4", "2025.1..2027.1"),
        ("2026-12-31", '"soon"'),
        ("2026-12-31", "2026-12-31T10:00:00Z"),
        ("2025.1..2025.4", "2025.4..2025.1"),
        ("2025.1..2025.4", "all"),
        ('"racecheck"', '"any"'),
        ("reason =", "reasn ="),
        ("[[allow]]", "[[allowed]]"),
        ("[[allow]]", "[allow]"),
        ("expires =", "line = 3\nexpires ="),
        ("expires =", "expires"),
    ],
)
def test_a_bad_value_is_a_usage_error(old: str, new: str) -> None:
    assert old in ENTRY
    with pytest.raises(UsageError):
        parse_allow_list(ENTRY.replace(old, new), "a.toml", TODAY)


def test_a_race_between_the_library_and_our_own_code_is_not_the_librarys() -> None:
    ours = Finding(
        tool="racecheck", severity="error", kind="hazard", text="x", where=RACE.where, other=Access("moe_gemm")
    )
    assert parse_allow_list(ENTRY, "a.toml", TODAY).match(ours, "2025.3", TODAY)[0] == "open"


@pytest.mark.parametrize("symbol", ["cub", "BlockStore", "cub::V1::BlockStore", "Stor", "store"])
def test_a_part_of_a_name_covers_nothing(symbol: str) -> None:
    text = ENTRY.replace("cub::V1::BlockStore::Store", symbol)
    assert parse_allow_list(text, "a.toml", TODAY).match(RACE, "2025.3", TODAY)[0] == "open"


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ('file = "block_store.cuh"', "allowed"),
        ('file = "cub/block/block_store.cuh"\nline = 991', "allowed"),
        ('file = "block_store.cuh"\nline = 5', "open"),
        ('file = "store.cuh"', "open"),
    ],
)
def test_a_file_and_line_narrow_an_entry(more: str, state: str) -> None:
    assert parse_allow_list(ENTRY + more, "a.toml", TODAY).match(RACE, "2025.3", TODAY)[0] == state


@pytest.mark.parametrize(
    ("hazard", "state"),
    [
        ("RAW/WAR", "allowed"),
        ("hazard", "allowed"),
        ("WAR", "open"),
        ("RAW", "open"),
        ("WAW", "open"),
        ("Race", "open"),
    ],
)
def test_a_race_that_the_tool_did_not_order_is_covered_by_both_orders_only(hazard: str, state: str) -> None:
    race = msgspec.structs.replace(RACE, hazard="RAW/WAR")
    allow = parse_allow_list(ENTRY.replace('hazard = "hazard"', f'hazard = "{hazard}"'), "a.toml", TODAY)
    assert allow.match(race, "2025.3", TODAY)[0] == state


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('hazard = "hazard"', 'hazard = "WAR"', "symbol matched, hazard did not: the finding's is RAW/WAR or hazard"),
        ("2025.1..2025.4", "2024.1..2024.4", "symbol matched, tool_versions did not: the finding's is 2025.3"),
        (
            "expires =",
            'file = "block_store.cuh"\nline = 5\nexpires =',
            "symbol matched, file and line did not: the finding's is block_store.cuh:980 and block_store.cuh:991",
        ),
        ("cub::V1", "cub::V2", "no finding is of this symbol alone"),
        ("2026-12-31", "2026-12-30", "another entry covers what it would"),
    ],
)
def test_an_entry_that_was_not_used_says_what_kept_it_from_the_nearest_finding(old: str, new: str, why: str) -> None:
    race = msgspec.structs.replace(RACE, hazard="RAW/WAR")
    allow = parse_allow_list(ENTRY.replace(old, new), "a.toml", TODAY)
    (note,) = allow.notes([], TODAY, [race], "2025.3")
    assert note.startswith("allow-list entry not used: cub::V")
    assert note.endswith(f"; {why}")
    assert allow.notes([], TODAY)[0].endswith("; nothing was found")


def test_expired_and_unused_entries_are_named() -> None:
    allow = parse_allow_list(ENTRY + ENTRY.replace("2026-12-31", "2020-01-01"), "a.toml", TODAY)
    assert [note.split(":")[0] for note in allow.notes([allow.entries[0]], TODAY)] == ["allow-list entry expired"]
    assert len(allow.notes([], TODAY)) == 2


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = [" + b"[" * 5000, b"x" * (2 << 20)])
def test_a_file_that_is_no_allow_list_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        load_allow_list(path, TODAY)
    with pytest.raises(UsageError):
        load_allow_list(tmp_path / "none.toml", TODAY)
    assert load_allow_list(None, TODAY).entries == ()
