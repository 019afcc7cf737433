"""Small bridges between numpy columns and Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def strings_by_code(codes: np.ndarray, strings: Sequence[str], kind: pa.DataType) -> Any:
    """Return a dictionary column whose row i reads ``strings[codes[i]]``; only strings in use are kept.

    Args:
        codes: [n] indices into ``strings``.
        strings: what the indices mean.
        kind: the dictionary type that the column must have.
    """
    used, dense = np.unique(codes, return_inverse=True)
    values = pa.array([strings[code] for code in used.tolist()], pa.string())
    indices: np.ndarray = dense.reshape(-1).astype(np.int32)
    return pa.DictionaryArray.from_arrays(indices, values).cast(kind)


def column(table: pa.Table, name: str, null: int = 0) -> np.ndarray:
    """Return an integer column as numpy, with ``null`` where it has none."""
    values: Any = table.column(name)
    return np.asarray(values.fill_null(null).to_numpy())


def texts(table: pa.Table, name: str) -> np.ndarray:
    """Return a string or dictionary column as a numpy array of Python strings."""
    values: Any = table.column(name)
    return np.asarray(values.cast(pa.string()).to_numpy(zero_copy_only=False))
