"""Numbers of a trace, read from their decimal text: exact to the nanosecond whatever their magnitude.

A double cannot hold 1.7e15 microseconds with three decimals, so no time passes through one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, DecimalException, localcontext
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]
Token = bytes | msgspec.Raw
INT64_MAX = 2**63 - 1

_INT64_DIGITS = 19
_MAX_CHARACTERS = 80
_MAX_PLAIN_CHARACTERS = 28
"""Longer text wraps around silently in Arrow's 128 bits (200 nines read as -1)."""


@dataclass(frozen=True)
class Numbers:
    """Integers read from decimal text."""

    values: Int64s
    """[n], 0 where the text was absent or no number that fits."""
    known: npt.NDArray[np.bool_]
    """[n], whether the text was a number that fits an int64."""
    finer: int = 0
    """Numbers with digits beyond the last one kept; they were rounded down."""


def read_numbers(tokens: Sequence[Token], decimals: int) -> Numbers:
    """Read JSON numbers as integers of ``10**-decimals``.

    Args:
        tokens: [n] JSON values as text; empty for a value that was absent. A number inside a string is read too.
        decimals: 3 turns microseconds into nanoseconds, 0 reads plain integers.
    """
    lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
    known = lengths > 0
    values = np.zeros(len(tokens), np.int64)
    fast = _read_plain(b"".join(tokens), lengths[known], decimals)
    if fast is not None:
        values[known] = fast
        return Numbers(values, known)
    finer = 0
    for row in np.flatnonzero(known).tolist():
        exact, is_finer = _read_any(bytes(tokens[row]), decimals)
        values[row] = 0 if exact is None else exact
        known[row] = exact is not None
        finer += is_finer
    return Numbers(values, known, finer)


def _read_plain(text: bytes, lengths: npt.NDArray[np.int32], decimals: int) -> Int64s | None:
    """Read numbers that lie end to end; None where one of them is unusual, for example finer than can be kept."""
    if len(lengths) and lengths.max() > _MAX_PLAIN_CHARACTERS:
        return None
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    texts = pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets.tobytes()), pa.py_buffer(text))
    try:
        exact: Any = texts.cast(pa.decimal128(_INT64_DIGITS, decimals))
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    # Little-endian pairs of 64-bit words; a value fits an int64 when the high word only repeats the sign.
    words = np.frombuffer(exact.buffers()[1], np.int64)[: 2 * len(lengths)]
    low, high = words[::2], words[1::2]
    return low if bool((high == low >> 63).all()) else None


def _read_any(text: bytes, decimals: int) -> tuple[int | None, bool]:
    """Read one text of any form; None when it is absent, no number, or does not fit an int64."""
    text = text.strip(b'" ')
    if not text or len(text) > _MAX_CHARACTERS:
        return None, False
    try:
        number = Decimal(text.decode("ascii"))
    except (DecimalException, UnicodeDecodeError):
        return None, False
    if number == 0:
        return 0, False
    if not number.is_finite() or number.adjusted() > _INT64_DIGITS:
        return None, False
    if number.adjusted() < -_MAX_CHARACTERS:
        return (-1 if number < 0 else 0), True
    with localcontext() as context:
        context.prec = 3 * _MAX_CHARACTERS
        scaled = number.scaleb(decimals)
        whole = int(scaled.to_integral_value(rounding="ROUND_FLOOR"))
    if not -INT64_MAX <= whole <= INT64_MAX:
        return None, False
    return whole, whole != scaled
