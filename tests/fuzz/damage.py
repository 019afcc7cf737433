"""Ways to damage any bytes, any text and any JSON value: seeded, small, and without a plan."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320,
    "", "0", "-1", "7", "stream 7", "x" * 3000, "\x1b[31m\u202e", "a\nb", "\ud800", "../../etc/passwd", [], {}, [[]],
    [1, "x"], {"a": {}}, {"": None},
)  # fmt: skip
ODD_TOKENS = (
    b"NaN", b"Infinity", b"-Infinity", b"N/A", b"1e999", b"-", b"0123", b"1.", b"9" * 400, b'"', b"\\", b"\\u12",
    b"\xff\xfe",    b"\x00", b"{", b"}", b"[", b"]", b",", b":", b"nul", b"tru", b"/*", b"'", b"\xef\xbb\xbf",
    b"[" * 2000, b'{"a":' * 2000,    b"\t", b"\n", b"\x1f\x8b", b"1", b"-1", b"1e5", b'"X"', b'"kernel"',
)  # fmt: skip


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return the bytes with one to three small accidents."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(_BYTE_ACCIDENTS)(rng, content)
    return content


def cut_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return a beginning of the bytes that lacks more than white space."""
    whole = len(content.rstrip())
    return content[: rng.randrange(whole)]


def _flip(rng: random.Random, content: bytes) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 4, 32))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _delete(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.choice((1, 2, 8, 64, 1024)) :]


def _insert(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice((rng.choice(ODD_TOKENS), rng.randbytes(rng.randrange(1, 9)))) + content[at:]


def _repeat(rng: random.Random, content: bytes) -> bytes:
    first, second = sorted((rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)))
    return content[:second] + content[first:]


def _move(rng: random.Random, content: bytes) -> bytes:
    first, second = sorted((rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)))
    piece, rest = content[first:second], content[:first] + content[second:]
    at = rng.randrange(len(rest) + 1)
    return rest[:at] + piece + rest[at:]


def _cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _zero(rng: random.Random, content: bytes) -> bytes:
    at, size = rng.randrange(len(content) + 1), rng.choice((1, 16, 512))
    return content[:at] + b"\0" * len(content[at : at + size]) + content[at + size :]


def _pad(rng: random.Random, content: bytes) -> bytes:
    return content + rng.choice((b"\0" * 512, b"garbage", gzip.compress(b"{}"), content))


_BYTE_ACCIDENTS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _flip, _delete, _insert, _insert, _repeat, _move, _cut, _zero, _pad,
)  # fmt: skip


def damaged_json(rng: random.Random, document: Any) -> Any:
    """Return a copy of a JSON document with one to four odd values, lost keys, repeated items or renamed keys."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 4))):
        _damage_inside(rng, document)
    return document


def _damage_inside(rng: random.Random, document: Any) -> None:
    holder = document
    while True:
        inner = [value for value in _values(holder) if isinstance(value, (dict, list)) and value]
        if not inner or rng.random() < 0.25:
            break
        holder = rng.choice(inner)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    if not keys:
        return
    key = rng.choice(keys)
    kind = rng.choice(("value", "value", "value", "lose", "rename", "repeat", "swap"))
    if kind == "value":
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif kind == "lose":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[rng.choice((str(key).upper(), str(key) + "_", "dur", "ts", "args", "rank"))] = holder.pop(key)
    elif kind == "repeat" and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 50)))]
    elif kind == "swap":
        other = rng.choice(keys)
        holder[key], holder[other] = holder[other], holder[key]


def _values(holder: Any) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else list(holder) if isinstance(holder, list) else []


def json_bytes(document: Any) -> bytes:
    """Write a document that may hold what UTF-8 cannot."""
    return json.dumps(document).encode("utf-8", errors="surrogatepass")
