"""What the capture hook is asked to do, as environment variables: read in the captured process, written by the command.

Nothing here imports torch or a library outside Python's own: it runs in every process that inherits the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from alphamoe_sanitizer_replays.captures.selection import among, parse_which
from alphamoe_tracers.errors import UsageError

PREFIX = "ALPHAMOE_CAPTURE_"
CALLABLE = PREFIX + "CALLABLE"
OP = PREFIX + "OP"
OUT = PREFIX + "OUT"
FIRST = PREFIX + "FIRST"
M = PREFIX + "M"
M_FROM = PREFIX + "M_FROM"
RANK = PREFIX + "RANK"
PLUGIN = PREFIX + "PLUGIN"
SYMBOL = PREFIX + "SYMBOL"
IMPORT = PREFIX + "IMPORT"
WHEN = PREFIX + "WHEN"
MAX_BYTES = PREFIX + "MAX_BYTES"
ROOT = PREFIX + "ROOT"
"""Process that says at its end what was captured: set by the command, or by the first process that has the hook."""
TOLD = PREFIX + "TOLD"
"""What a process has said of wrong variables, so that its children, which inherit them, do not repeat it."""

VARIABLES = (CALLABLE, OP, OUT, FIRST, M, M_FROM, RANK, PLUGIN, SYMBOL, IMPORT, WHEN, MAX_BYTES)

DEFAULT_OUT = "alphamoe-captures"
DEFAULT_MAX_BYTES = 16 << 30

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_CALLABLE = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*\Z")
_OP = re.compile(rf"{_NAME}::{_NAME}(\.{_NAME})?\Z")
_M_FROM = re.compile(rf"({_NAME}|[0-9]+):(-?[0-9]+)\Z")
_SIZE = re.compile(r"([0-9]+)([KMGT]?)i?B?\Z", re.IGNORECASE)


@dataclass(frozen=True)
class HookSettings:
    """One request to capture calls in a process that is not ours."""

    callables: tuple[str, ...] = ()
    """Import paths ``module:name``."""
    ops: tuple[str, ...] = ()
    """Torch operators ``namespace::name`` or ``namespace::name.overload``."""
    out: Path = Path(DEFAULT_OUT)
    first: int = 1
    """Calls taken for each target, M and process."""
    only_m: tuple[int, ...] = ()
    """Values of M that are taken; empty: all."""
    m_from: tuple[str, int] | None = None
    """Argument (name, or position) and dimension that give M; null: the first tensor's first dimension."""
    ranks: str = "all"
    """``all``, ``last``, a number, or several as in ``0+last``."""
    plugin: str | None = None
    """Replay plug-in written into the captures; null: ``callable`` or ``torch_op``."""
    symbols: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    """Modules that a replay imports before it looks an operator up, beside the one that registered it."""
    when: Path | None = None
    """Calls are taken only while this file exists; null: always."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Of all captures that one process writes."""

    def __post_init__(self) -> None:
        """Check every part.

        Raises:
            UsageError: a part is not what it should be.
        """
        if not self.callables and not self.ops:
            raise UsageError("nothing to capture", "name --callable MODULE:NAME or --op NAMESPACE::NAME")
        for target in self.callables:
            if not _CALLABLE.match(target):
                raise UsageError(f"{target!r} is no import path", "write MODULE:NAME, as in package.module:function")
            if target.startswith("__main__:"):
                raise UsageError("functions of __main__ cannot be captured", "put it into a module that is imported")
        for target in self.ops:
            if not _OP.match(target):
                raise UsageError(
                    f"{target!r} names no torch operator", "write NAMESPACE::NAME, as in vllm::moe_forward"
                )
        if self.first < 1:
            raise UsageError(f"--first {self.first}: take one call or more")
        if self.max_bytes < 1:
            raise UsageError(f"--max-bytes {self.max_bytes}: nothing fits into that")
        parse_which(self.ranks, "--rank")

    def wants_rank(self, rank: int, world_size: int | None) -> bool:
        """Whether calls of this rank are taken; a process of unknown world size is its own last rank."""
        return among(rank, parse_which(self.ranks, "--rank"), world_size or rank + 1)

    def to_environment(self) -> dict[str, str]:
        """Give the variables that :func:`from_environment` reads back."""
        variables = {
            CALLABLE: ",".join(self.callables),
            OP: ",".join(self.ops),
            OUT: str(self.out.absolute()),
            FIRST: str(self.first),
            M: ",".join(map(str, self.only_m)),
            M_FROM: f"{self.m_from[0]}:{self.m_from[1]}" if self.m_from else "",
            RANK: self.ranks,
            PLUGIN: self.plugin or "",
            SYMBOL: ",".join(self.symbols),
            IMPORT: ",".join(self.imports),
            WHEN: str(self.when.absolute()) if self.when else "",
            MAX_BYTES: str(self.max_bytes),
        }
        return {name: value for name, value in variables.items() if value}


def from_environment(environ: Mapping[str, str]) -> HookSettings | None:
    """Read the request; null where no target is named, which is how the hook is off.

    Raises:
        UsageError: a variable is not what it should be.
    """
    callables, ops = _words(environ.get(CALLABLE, "")), _words(environ.get(OP, ""))
    if not callables and not ops:
        return None
    when = environ.get(WHEN, "")
    return HookSettings(
        callables=callables,
        ops=ops,
        out=Path(environ.get(OUT) or DEFAULT_OUT).absolute(),
        first=_integer(environ.get(FIRST) or "1", FIRST),
        only_m=tuple(_integer(word, M) for word in _words(environ.get(M, ""))),
        m_from=parse_m_from(environ.get(M_FROM, "")),
        ranks=environ.get(RANK) or "all",
        plugin=environ.get(PLUGIN) or None,
        symbols=_words(environ.get(SYMBOL, "")),
        imports=_words(environ.get(IMPORT, "")),
        when=Path(when).absolute() if when else None,
        max_bytes=parse_bytes(environ.get(MAX_BYTES) or str(DEFAULT_MAX_BYTES)),
    )


def unknown_variables(environ: Mapping[str, str]) -> str:
    """Tell of variables that begin as the hook's do and are none of them, misspelt ones; empty where there are none."""
    known = {*VARIABLES, ROOT, TOLD}
    found = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    told = f"no variable of the hook, and ignored: {', '.join(found)} (known are {', '.join(VARIABLES)})"
    return told if found else ""


def parse_m_from(text: str) -> tuple[str, int] | None:
    """Read ``ARG:DIM``, as in ``hidden_states:0`` or ``2:0``; null for an empty text.

    Raises:
        UsageError: it is neither.
    """
    if not text:
        return None
    match = _M_FROM.match(text)
    if match is None:
        raise UsageError(f"--m-from {text!r} is not ARG:DIM", "as in hidden_states:0, or 2:0 for the third argument")
    return match[1], int(match[2])


def parse_bytes(text: str) -> int:
    """Read a number of bytes, plain or with K, M, G or T (powers of 1024).

    Raises:
        UsageError: it is none.
    """
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is no number of bytes", "as in 500M or 16G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def _integer(text: str, name: str) -> int:
    if not re.match(r"[0-9]{1,9}\Z", text):
        raise UsageError(f"{name}={text!r} is no whole number")
    return int(text)
