"""Arrow columns from numpy without ``pa.array``, which imports pandas (half a second) to see whether it got any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_KINDS = {"int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64()}


def integers(values: np.ndarray, null: npt.NDArray[np.bool_] | None = None) -> Any:
    """Return an integer column, null where ``null`` says so."""
    validity = None
    if null is not None and null.any():
        validity = pa.py_buffer(np.packbits(~null, bitorder="little").tobytes())
    data = pa.py_buffer(np.ascontiguousarray(values).tobytes())
    return pa.Array.from_buffers(_KINDS[values.dtype.name], len(values), [validity, data])


def strings(values: Sequence[str]) -> Any:
    """Return a string column without nulls."""
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    data = pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets.tobytes()), data)


def words(codes: np.ndarray, values: Sequence[str], kind: pa.DataType) -> Any:
    """Return a dictionary column of type ``kind`` whose row i reads ``values[codes[i]]``; only what is used is kept."""
    used, dense = np.unique(codes, return_inverse=True)
    indices = integers(dense.reshape(-1).astype(np.int32))
    return pa.DictionaryArray.from_arrays(indices, strings([values[code] for code in used.tolist()])).cast(kind)
