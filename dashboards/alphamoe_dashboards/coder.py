"""Integer codes for the texts and symbols of one rank."""

from __future__ import annotations

import numpy as np
import pandas as pd

from alphamoe_dashboards.columns import MISSING
from alphamoe_dashboards.histograms import Ints


class Coder:
    """Codes of texts and symbols of one rank."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.texts: list[str] = []
        self.symbols: list[tuple[str, str, str | None]] = []
        """(full, base, class) of each distinct symbol."""
        self._index: dict[str, int] = {}
        self.symbol = self._coded_symbols(frame)
        """[n] index into ``symbols`` of each kernel."""

    def text(self, text: str | None) -> int:
        """Return the code of a text, MISSING for null."""
        if text is None:
            return MISSING
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]

    def category(self, values: pd.Series) -> Ints:
        """Return [n] the codes of a categorical column."""
        names = np.array([self.text(str(name)) for name in values.cat.categories], np.int64)
        codes = values.cat.codes.to_numpy()
        found = names[codes] if len(names) else np.full(len(codes), MISSING, np.int64)
        return np.asarray(np.where(codes >= 0, found, MISSING), np.int64)

    def _coded_symbols(self, frame: pd.DataFrame) -> Ints:
        codes = [frame[name].cat.codes.to_numpy().astype(np.int64) for name in ("full", "base", "class")]
        sizes = [len(frame[name].cat.categories) + 1 for name in ("full", "base", "class")]
        key = ((codes[0] + 1) * sizes[1] + codes[1] + 1) * sizes[2] + codes[2] + 1
        known, inverse = np.unique(key, return_inverse=True)
        names = [[None, *frame[name].cat.categories.tolist()] for name in ("full", "base", "class")]
        for value in known.tolist():
            full = names[0][value // (sizes[1] * sizes[2])]
            base = names[1][value // sizes[2] % sizes[1]]
            kind = names[2][value % sizes[2]]
            unknown = "(symbol unknown)"
            self.symbols.append((full or base or unknown, base or full or unknown, kind))
        return np.asarray(inverse.reshape(-1), np.int64)
