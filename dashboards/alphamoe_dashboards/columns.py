"""Page data: typed columns as base64 of little-endian arrays, texts as indices into one string table.

The page's ``data.js`` unpacks what :func:`pack` wrote; :func:`unpack` is the same in Python, so that tests read the
numbers of a page as the page does. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Columns = dict[str, Array]

_KINDS: dict[str, str] = {
    "u8": "<u1", "u16": "<u2", "u32": "<u4", "i8": "<i1", "i16": "<i2", "i32": "<i4", "f64": "<f8",
}  # fmt: skip
_UNSIGNED, _SIGNED = ("u8", "u16", "u32"), ("i8", "i16", "i32")
MISSING = -1
"""Null in every integer column of a page: no count, index, M, layer or time of a page is below 0."""


class Strings:
    """A string table: each distinct text once, in the order of first use."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, text: str | None) -> int:
        """Return the index of a text, MISSING for null."""
        if text is None:
            return MISSING
        if text not in self._index:
            self._index[text] = len(self.values)
            self.values.append(text)
        return self._index[text]

    def column(self, texts: Iterable[str | None]) -> Array:
        """Return [n] the indices of texts."""
        return np.array([self.add(text) for text in texts], np.int64)


def narrow(values: Array) -> tuple[str, bytes]:
    """Return the smallest kind that holds an array exactly, and its little-endian bytes.

    Args:
        values: [n] integers, booleans or floats. JavaScript has no exact 64-bit integers outside BigInt: integers that
            need more than 32 bits become float64, exact up to 2**53.

    Raises:
        ValueError: an integer is too large to be exact.
    """
    if values.dtype == bool:
        values = values.astype(np.uint8)
    if values.dtype.kind == "f":
        return "f64", values.astype("<f8").tobytes()
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for kind in _UNSIGNED if low >= 0 else _SIGNED:
        info = np.iinfo(_KINDS[kind])
        if info.min <= low and high <= info.max:
            return kind, values.astype(_KINDS[kind]).tobytes()
    if max(-low, high) > 2**53:
        raise ValueError(f"{max(-low, high)} is not exact in JavaScript")
    return "f64", values.astype("<f8").tobytes()


def pack(columns: Mapping[str, Array]) -> dict[str, Any]:
    """Return a table as plain data: ``{"rows": n, "columns": {name: [kind, base64]}}``.

    Raises:
        ValueError: the columns differ in length.
    """
    sizes = {len(values) for values in columns.values()}
    if len(sizes) > 1:
        raise ValueError(f"columns of {sorted(sizes)} rows are no table")
    packed = {}
    for name, values in columns.items():
        kind, content = narrow(np.asarray(values))
        packed[name] = [kind, base64.b64encode(content).decode("ascii")]
    return {"rows": sizes.pop() if sizes else 0, "columns": packed}


def unpack(table: Mapping[str, Any]) -> Columns:
    """Return the columns of a packed table."""
    packed = table["columns"].items()
    return {name: np.frombuffer(base64.b64decode(content), _KINDS[kind]) for name, (kind, content) in packed}


def concat(parts: list[Columns]) -> Columns:
    """Return tables of equal columns one below the other; no part gives no columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
