"""Which ranks, layers or M are meant: ``all``, ``last``, numbers, or several of these joined by ``+``.

Nothing here imports a library outside Python's own: the capture hook reads it in processes that are not ours.
"""

from __future__ import annotations

import re
from typing import Literal

from alphamoe_tracers.errors import UsageError

Which = tuple[int | Literal["last"], ...] | Literal["all"]
_WORDS = re.compile(r"(?:[0-9]{1,7}|last)(?:\+(?:[0-9]{1,7}|last))*\Z")


def parse_which(text: str, option: str) -> Which:
    """Read a selection.

    Args:
        option: how a message calls it.

    Raises:
        UsageError: it is none.
    """
    if text == "all":
        return "all"
    if not _WORDS.match(text):
        raise UsageError(f"{option} is a number, last, all, or several as in 0+last, not {text!r}")
    return tuple("last" if part == "last" else int(part) for part in text.split("+"))


def among(item: int | None, which: Which, count: int) -> bool:
    """Say whether an item, null for one without a number, is meant among ``count`` numbered from 0."""
    return which == "all" or (item is not None and (item in which or (item == count - 1 and "last" in which)))
