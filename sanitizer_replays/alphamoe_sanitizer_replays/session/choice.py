"""Which captures the filters of a session leave, and which words of a filter name none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.captures.selection import Which, among, parse_which
from alphamoe_tracers.errors import UsageError


class Choice(NamedTuple):
    """What filters leave."""

    identities: frozenset[int]
    """Of the captures that pass."""
    unmatched: tuple[UsageError, ...]
    """One for each word that no capture which passes the other filters is of."""


def choose(captures: Sequence[Capture], ranks: Sequence[str], layers: Sequence[str], Ms: Sequence[str]) -> Choice:
    """Choose the captures that pass the filters, each a list of words.

    Raises:
        UsageError: a word of a filter is no number.
    """
    worlds = [capture.world_size for capture in captures if capture.world_size is not None]
    last_rank = max([*(world - 1 for world in worlds), *(capture.rank for capture in captures)], default=0)
    last_layer = max((capture.layer for capture in captures if capture.layer is not None), default=0)
    last_M = max((capture.M for capture in captures), default=0)
    filters: list[tuple[str, Sequence[str], Callable[[Capture], int | None], int]] = [
        ("--ranks", ranks, lambda capture: capture.rank, last_rank),
        ("--layers", layers, lambda capture: capture.layer, last_layer),
        ("--M", Ms, lambda capture: capture.M, last_M),
    ]
    chosen = [
        capture
        for capture in captures
        if all(among(value(capture), which_of(words, option), last + 1) for option, words, value, last in filters)
    ]
    unmatched = []
    for option, words, value, last in filters:
        which = which_of(words, option)
        for wanted in () if which == "all" else which:
            if not any(among(value(capture), (wanted,), last + 1) for capture in chosen):
                there = "; ".join(dict.fromkeys(capture.label for capture in captures))
                word = f"last ({last})" if wanted == "last" else wanted
                unmatched.append(UsageError(f"{option} {word}: no capture passes with it", f"there are {there[:400]}"))
    return Choice(frozenset(map(id, chosen)), tuple(unmatched))


def which_of(words: Sequence[str], option: str) -> Which:
    """Read the words of a filter.

    Raises:
        UsageError: one of them is no number, ``all`` is not alone, or there is none.
    """
    names = split_words(words, option, "numbers, last or all")
    if "all" in names and set(names) != {"all"}:
        raise UsageError(f"{option} all stands alone", "leave it out, or the other words")
    return "all" if "all" in names else parse_which("+".join(names), option)


def split_words(words: Sequence[str], option: str, known: str) -> list[str]:
    """Split words at commas.

    Raises:
        UsageError: there is nothing but commas.
    """
    names = [part for word in words for part in word.split(",") if part]
    if not names:
        raise UsageError(f"{option} names nothing", known)
    return names
