"""Decimal text becomes integers without a rounding step in between."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphamoe_tracers.kineto_numbers import read_numbers


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20))
def test_three_decimals_are_exact_at_any_magnitude(values_ns: list[int]) -> None:
    tokens = [str(Decimal(value).scaleb(-3)).encode() for value in values_ns]
    numbers = read_numbers(tokens, 3)
    assert numbers.values.tolist() == values_ns
    assert numbers.known.all()
    assert numbers.finer == 0


@pytest.mark.parametrize(
    ("token", "value"),
    [
        (b"1700000000000000.123", 1_700_000_000_000_000_123),
        (b"9223372036854775.807", 2**63 - 1),
        (b"12", 12_000),
        (b"-3", -3_000),
        (b"1.7e15", 1_700_000_000_000_000_000),
        (b"1E-3", 1),
        (b'"2.5"', 2_500),
        (b"0", 0),
        (b"-0.0", 0),
    ],
)
def test_every_spelling_of_a_number_is_read(token: bytes, value: int) -> None:
    numbers = read_numbers([token, b"1.000"], 3)
    assert (numbers.values.tolist(), numbers.known.all()) == ([value, 1000], True)


@pytest.mark.parametrize(
    "token", [b"", b"null", b"true", b'"x"', b"[1]", b"9223372036854775.808", b"1e400", b"1e999999999", b"9" * 200]
)
def test_what_is_no_usable_number_is_unknown_and_its_neighbours_stay(token: bytes) -> None:
    numbers = read_numbers([b"1.5", token, b"2.5"], 3)
    assert numbers.known.tolist() == [True, False, True]
    assert numbers.values.tolist() == [1500, 0, 2500]


def test_digits_below_a_nanosecond_are_rounded_down_and_counted() -> None:
    numbers = read_numbers([b"1.2349", b"-1.2341", b"1.2340", b"1e-300"], 3)
    assert numbers.values.tolist() == [1234, -1235, 1234, 0]
    assert numbers.finer == 3


@given(
    st.lists(st.from_regex(r"-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,3})?", fullmatch=True), max_size=8)
)
def test_any_json_number_is_read_as_decimal_arithmetic_reads_it(texts: list[str]) -> None:
    numbers = read_numbers([text.encode() for text in texts], 3)
    for text, value, known in zip(texts, numbers.values.tolist(), numbers.known.tolist(), strict=True):
        number = Decimal(text)
        small = number == 0 or number.adjusted() < 25
        exact = int((number * 1000).to_integral_value("ROUND_FLOOR")) if small else 2**64
        if abs(exact) >= 2**63:
            assert not known
        else:
            assert (known, value) == (True, exact)
