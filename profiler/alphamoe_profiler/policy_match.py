"""Which kernel names a rule matches: one name form a rule, never a substring of something else."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from alphamoe_profiler.policy import ClassRule, MatchKind
from alphamoe_tracers.symbols import base_name, is_truncated, symbol_class, triton_base
from alphamoe_tracers.tables import UNRESOLVED

if TYPE_CHECKING:
    import pandas as pd

Bools = npt.NDArray[np.bool_]
_WORD = re.compile(r"\w")


@dataclass(frozen=True)
class Selector:
    """The kernels that one symbol of one rule means."""

    symbol: str
    match: MatchKind = "base"
    classes: tuple[ClassRule, ...] = ()
    """Classes of the user's own."""

    @property
    def told(self) -> str:
        """Name it with its match kind where that is not the usual one."""
        if self.match == "regex":
            return f"/{self.symbol}/"
        return self.symbol if self.match == "base" else f"{self.symbol} ({self.match})"

    @property
    def form(self) -> str:
        """The column of a kernel frame that this selector reads."""
        return {"base": "base", "triton": "base", "mangled": "mangled"}.get(self.match, "full")

    def matches(self, name: str) -> bool:
        """Say whether one name, in the form that this selector reads, is meant."""
        match self.match:
            case "base" | "mangled":
                return name == self.symbol
            case "triton":
                return triton_base(name) == triton_base(self.symbol)
            case "full":
                return _whole_words(self.symbol).search(name) is not None
            case "regex":
                return compiled(self.symbol).search(name) is not None
            case "class":
                return _in_class(self.symbol, _class_of(name, self.classes))

    def may_be(self, name: str) -> bool:
        """Say whether a name that a tool cut with an ellipsis may have been a name that is meant.

        The base name is whole when the cut lies in the template arguments or the parameters.
        """
        head = name.rstrip(".…")
        if self.match in ("base", "triton") and re.search(r"[<(]", head):
            return self.matches(base_name(head))
        if self.match == "mangled":
            return self.symbol.startswith(head)
        return True

    def mask(self, frame: pd.DataFrame) -> Bools:
        """Return [n] which kernels of an attributed frame are meant."""
        return by_category(frame, self.form, self.matches)

    def truncated(self, frame: pd.DataFrame) -> Bools:
        """Return [n] which kernels have no known name, or one that was cut and that may hide this symbol."""
        cut = by_category(
            frame, "full", lambda name: name in ("", UNRESOLVED) or (is_truncated(name) and self.may_be(name))
        )
        return cut | frame["full"].isna().to_numpy()


def by_category(frame: pd.DataFrame, column: str, wanted: Callable[[str], bool]) -> Bools:
    """Return [n] whether the row's name satisfies a predicate, which is asked once a distinct name."""
    names = frame[column].cat.categories
    hit = np.array([bool(wanted(str(name))) for name in names], bool)
    codes = frame[column].cat.codes.to_numpy()
    return np.where(codes >= 0, hit[codes], False) if len(hit) else np.zeros(len(codes), bool)


@lru_cache(maxsize=1024)
def _whole_words(symbol: str) -> re.Pattern[str]:
    """Match a piece of a full name that begins and ends where an identifier does."""
    before = r"(?<!\w)" if _WORD.match(symbol[0]) else ""
    after = r"(?!\w)" if _WORD.match(symbol[-1]) else ""
    return re.compile(f"{before}{re.escape(symbol)}{after}")


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of a policy; what a later Python may read otherwise is no warning of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return re.compile(pattern)


def _in_class(wanted: str, found: str | None) -> bool:
    if found is None:
        return False
    return found == wanted or (wanted.endswith(".*") and found.startswith(wanted[:-1]))


@lru_cache(maxsize=65536)
def _class_of(full: str, classes: tuple[ClassRule, ...]) -> str | None:
    base = base_name(full)
    for own in classes:
        if any(compiled(p).search(triton_base(base)) for p in own.base):
            return own.name
        if any(compiled(p).search(full) for p in own.full):
            return own.name
    return symbol_class(base, full)
