"""The receipts of one rank as columns, and the match of kernels to the submissions that they prove."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from alphamoe_profiler.range_paths import NONE, Ints, coded
from alphamoe_tracers.records import Receipt, Submission


@dataclass(frozen=True)
class Match:
    """One entry for each kernel."""

    row: Ints
    """Row of ``SubmissionTable.rows``, NONE where the receipt has no submission of this symbol for this layer."""
    M: Ints
    """Kernel M of that submission, NONE where there is none."""


class SubmissionTable:
    """Receipts by step and their submissions by (step, layer, symbol)."""

    def __init__(self, receipts: list[Receipt]) -> None:
        self.contradictory_steps = _contradictory(receipts)
        unique = list({receipt.step: receipt for receipt in reversed(receipts)}.values())[::-1]
        self.receipts = unique
        self._steps = pd.Index(np.array([receipt.step for receipt in unique], np.int64))
        self._eager = np.array([receipt.execution == "eager" for receipt in unique], bool)
        self.geometries: list[Submission] = []
        """One submission for each distinct shape; ``rows.shape`` points here."""
        self.rows = self._expand(unique)
        """receipt, layer, symbol, M, shape: one row a submission, in order."""
        self.symbols = pd.Index(sorted({item.symbol for item in self.geometries}), dtype=object)
        keys = self._keys(
            self.rows["receipt"].to_numpy(),
            self.rows["layer"].to_numpy(),
            self.symbols.get_indexer(pd.Index(self.rows["symbol"])),
        )
        order = np.argsort(keys, kind="stable")
        self._order, self._sorted = order, keys[order]

    def _expand(self, receipts: list[Receipt]) -> pd.DataFrame:
        shapes: dict[tuple[int, int, int, int, int, int, str], int] = {}
        lists: dict[int, tuple[list[int], list[str], list[int], list[int]]] = {}
        parts: tuple[list[int], list[int], list[str], list[int], list[int]] = ([], [], [], [], [])
        for number, receipt in enumerate(receipts):
            # Replays of one graph share one tuple of submissions: it is unpacked once.
            columns = lists.get(id(receipt.kernels))
            if columns is None:
                columns = ([], [], [], [])
                for item in receipt.kernels:
                    key = (item.M, item.E, item.H, item.I_local, item.top_k, item.block_m, item.symbol)
                    if key not in shapes:
                        shapes[key] = len(shapes)
                        self.geometries.append(item)
                    for target, value in zip(columns, (item.layer, item.symbol, item.M, shapes[key]), strict=True):
                        target.append(value)  # type: ignore[attr-defined]
                lists[id(receipt.kernels)] = columns
            parts[0].extend([number] * len(receipt.kernels))
            for whole, part in zip(parts[1:], columns, strict=True):
                whole.extend(part)  # type: ignore[attr-defined]
        names = ("receipt", "layer", "symbol", "M", "shape")
        kinds = (np.int64, np.int64, object, np.int64, np.int64)
        return pd.DataFrame(
            {name: np.array(part, dtype=kind) for name, part, kind in zip(names, parts, kinds, strict=True)}
        )

    def _keys(self, receipt: Ints, layer: Ints, symbol: npt.NDArray[np.intp]) -> Ints:
        layers = int(self.rows["layer"].max()) + 2 if len(self.rows) else 2
        inside = (receipt >= 0) & (layer >= 0) & (layer < layers - 1) & (symbol >= 0)
        width = max(len(self.symbols), 1)
        return np.where(inside, (receipt * layers + layer) * width + symbol, NONE).astype(np.int64)

    def receipt_rows(self, steps: Ints) -> Ints:
        """Return the row of the receipt of each step, NONE where the step left none."""
        if not len(self._steps):
            return np.full(len(steps), NONE, np.int64)
        return np.asarray(self._steps.get_indexer(pd.Index(steps)), np.int64)

    def eager(self, receipt: Ints) -> npt.NDArray[np.bool_]:
        """Say which receipts are of eager forwards; False for NONE."""
        return np.where(receipt >= 0, self._eager[receipt], False) if len(self._eager) else np.zeros(len(receipt), bool)

    def judged(self, base: pd.Series) -> npt.NDArray[np.bool_]:
        """Say which kernels have a symbol that some receipt of this rank submits: those must match a submission."""
        known = np.asarray(base.cat.categories.isin(self.symbols), bool)
        codes = base.cat.codes.to_numpy()
        return np.where(codes >= 0, known[codes], False) if len(known) else np.zeros(len(codes), bool)

    def match(self, receipt: Ints, layer: Ints, base: pd.Series) -> Match:
        """Match each kernel to the submission of its (step, layer, symbol).

        Where a layer submitted one symbol several times in one step, at different M, kernels take the submissions in
        the order in which they are given.
        """
        count = len(receipt)
        if not len(self.rows):
            nothing = np.full(count, NONE, np.int64)
            return Match(nothing, nothing)
        symbol = self.symbols.get_indexer(base.cat.categories)
        codes = base.cat.codes.to_numpy()
        of_kernel = np.where(codes >= 0, symbol[codes], NONE) if len(symbol) else np.full(count, NONE)
        keys = self._keys(receipt, layer, of_kernel)
        first = np.searchsorted(self._sorted, keys, side="left")
        size = np.searchsorted(self._sorted, keys, side="right") - first
        hit = (keys >= 0) & (size > 0)
        place = np.zeros(count, np.int64)
        several = hit & (size > 1)
        if several.any():
            place[several] = pd.Series(keys[several]).groupby(keys[several]).cumcount().to_numpy()
        place = np.minimum(place, np.maximum(size - 1, 0))
        row = np.where(hit, self._order[np.where(hit, first + place, 0)], NONE)
        return Match(row, np.where(hit, self.rows["M"].to_numpy()[row], NONE))

    def add_receipt_columns(self, frame: pd.DataFrame, receipt: Ints) -> None:
        """Add what the receipt of its step says to each kernel; null where there is none."""
        columns: dict[str, list[str]] = {
            "purpose": [r.purpose for r in self.receipts],
            "execution": [r.execution for r in self.receipts],
            "forward_mode": [r.forward_mode for r in self.receipts],
            "requests": [",".join(r.request_ids) for r in self.receipts],
        }
        for name, values in columns.items():
            labels = pd.Categorical(values)
            codes = np.where(receipt >= 0, labels.codes[receipt], NONE) if len(labels) else np.full(len(receipt), NONE)
            frame[name] = coded(codes, labels.categories)
        for name, numbers in (
            ("dispatch_M", [r.M for r in self.receipts]),
            ("real_tokens", [r.real_tokens for r in self.receipts]),
        ):
            known = np.array([NONE if number is None else number for number in numbers], np.int64)
            taken = (
                np.where(receipt >= 0, known[receipt], NONE) if len(known) else np.full(len(receipt), NONE, np.int64)
            )
            frame[name] = pd.arrays.IntegerArray(taken.astype(np.int64), taken < 0)


def submission_table(receipts: list[Receipt]) -> SubmissionTable:
    """Return the receipts of one rank as columns. Of several receipts for one step the first is taken."""
    return SubmissionTable(receipts)


def _contradictory(receipts: list[Receipt]) -> tuple[int, ...]:
    seen: set[int] = set()
    twice: set[int] = set()
    for receipt in receipts:
        (twice if receipt.step in seen else seen).add(receipt.step)
    return tuple(sorted(twice))
