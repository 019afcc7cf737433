"""What a strict JSON decoder lets pass and no record of ours may hold: repeated keys and numbers beyond 64 bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

INT64_MAX = 2**63 - 1


def repeated_key(text: bytes | str) -> str | None:
    """Return a key that some object of a valid JSON document holds twice, else None.

    Decoders keep the last value without a word, so that a document can say rank 0 to one reader and rank 3 to another.
    """
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)

    # Numbers are not needed here, and an integer of many digits would be refused.
    json.loads(text, object_pairs_hook=note, parse_int=len, parse_float=len)
    return found[0] if found else None


def integers_outside(value: Any, least: int, where: str = "") -> Iterator[str]:
    """Yield one sentence for each integer of plain data that is below ``least`` or needs more than 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not least <= value <= INT64_MAX:
            shown = str(value) if abs(value) < 2**70 else "an integer of more than 64 bits"
            yield f"{where} is {shown}, which cannot be"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from integers_outside(item, least, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from integers_outside(item, least, f"{where}[{index}]")
