"""Read a witness policy from TOML: strictly, with the line of every mistake and the nearest key of a misspelt one."""

from __future__ import annotations

import difflib
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from alphamoe_profiler.policy import (
    ClassRule,
    DispatchRule,
    ForbidRule,
    KnownGap,
    MSet,
    PlacedPolicy,
    Policy,
    RequireRule,
)
from alphamoe_tracers.errors import UsageError

PYPROJECT_TABLE = ("tool", "alphamoe-trace", "witness")
MAX_POLICY_BYTES = 4 << 20
_TABLES: dict[str, type[msgspec.Struct]] = {
    "require": RequireRule,
    "forbid": ForbidRule,
    "dispatch": DispatchRule,
    "known_gap": KnownGap,
    "class": ClassRule,
}
_HEADER = re.compile(r"^\s*\[(\[?)\s*([^\[\]]+?)\s*\]?\]\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*(?:"([^"]+)"|'([^']+)'|([\w-]+))\s*(?:\.[^=]*)?=""")
_PATH = re.compile(r"`\$((?:\.\w+|\[[^\]]*\])*)`$")


def builtin_names() -> tuple[str, ...]:
    """Return the MoE backends that have a built-in policy."""
    folder = resources.files("alphamoe_profiler").joinpath("policies")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def builtin_policy(backend: str) -> PlacedPolicy:
    """Return the built-in policy of a MoE backend.

    Raises:
        UsageError: there is none.
    """
    names = builtin_names()
    if backend not in names:
        near = difflib.get_close_matches(backend, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built-in policies: {', '.join(names)}"
        raise UsageError(f"no built-in policy for backend {backend!r}", hint)
    text = resources.files("alphamoe_profiler").joinpath("policies", f"{backend}.toml").read_text(encoding="utf-8")
    return parse_policy(text, f"built-in policy {backend}")


def load_policy(path: Path) -> PlacedPolicy:
    """Read a policy file, or the table ``[tool.alphamoe-trace.witness]`` of a pyproject.toml.

    Raises:
        UsageError: it cannot be read, is no TOML, or holds a key or value that a policy does not have.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_POLICY_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--policy {path}: {error.strerror or error}", "name a TOML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8", "a policy is a TOML file") from error
    if len(content) > MAX_POLICY_BYTES:
        raise UsageError(f"{path}: larger than {MAX_POLICY_BYTES >> 20} MiB", "this is not a policy")
    table = PYPROJECT_TABLE if path.name == "pyproject.toml" else ()
    return parse_policy(text, str(path), table, str(path))


def parse_policy(text: str, source: str, table: tuple[str, ...] = (), path: str | None = None) -> PlacedPolicy:
    """Parse a policy.

    Args:
        text: TOML.
        source: how messages call it.
        table: where in the document the policy is; empty for the whole document.
        path: the file, where there is one.

    Raises:
        UsageError: with the line of the mistake.
    """
    try:
        document: Any = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
        raise UsageError(f"{source}: {error}", "the file is not valid TOML") from error
    for name in table:
        if not isinstance(document, dict) or name not in document:
            raise UsageError(f"{source}: no table [{'.'.join(table)}]", "write the policy there, or name another file")
        document = document[name]
    if not isinstance(document, dict):
        raise UsageError(f"{source}: [{'.'.join(table)}] is not a table", "write the policy there")
    lines = _Lines(text, table)
    _refuse_unknown(document, source, lines)
    try:
        policy = msgspec.convert(document, Policy, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(error, source, lines) from error
    except RecursionError as error:
        raise UsageError(f"{source}: nested too deeply") from error
    found = {
        (name, index): lines.of_rule(name, index) for name in _TABLES for index in range(lines.count(document, name))
    }
    return PlacedPolicy(policy, source, path, found | {("", 0): lines.start})


def _refuse_unknown(document: dict[str, Any], source: str, lines: _Lines) -> None:
    _unknown_in(document, Policy, source, "", lines.of_key(None, 0))
    for name, kind in _TABLES.items():
        entries = document.get(name, ())
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            if not isinstance(entry, dict):
                continue
            finder = lines.of_key(name, index)
            _unknown_in(entry, kind, source, f"[[{name}]] ", finder)
            if isinstance(entry.get("M"), dict):
                _unknown_in(entry["M"], MSet, source, f"[[{name}]] M: ", lambda _key, f=finder: f("M"))


def _unknown_in(entry: dict[str, Any], kind: type[msgspec.Struct], source: str, where: str, line_of: Any) -> None:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise PolicyError(f"{source}:{line_of(key)}: {where}unknown key {key!r}", hint, line_of(key))


class PolicyError(UsageError):
    """A mistake in a policy, with its line."""

    def __init__(self, message: str, hint: str, line: int) -> None:
        super().__init__(message, hint)
        self.line = line


def _invalid(error: msgspec.ValidationError, source: str, lines: _Lines) -> PolicyError:
    """Turn a validation error, which names a path like ``$.require[0].at_least``, into one with a line."""
    text = str(error)
    found = _PATH.search(text)
    words = re.findall(r"\.(\w+)|\[(\d+)\]", found.group(1)) if found else []
    table, index, key = None, 0, None
    if words and words[0][0] in _TABLES:
        table = words[0][0]
        index = int(words[1][1]) if len(words) > 1 and words[1][1] else 0
        key = next((name for name, _ in words[1:] if name), None)
    elif words:
        key = words[0][0]
    line = lines.of_key(table, index)(key) if key else (lines.of_rule(table, index) if table else lines.start)
    what = text[: found.start()].removesuffix(" - at ") if found else text
    place = found.group(1).lstrip(".") if found else ""
    shown = f"{place}: {what}" if place else what
    return PolicyError(f"{source}:{line}: {shown}", "docs/gate.md describes every key", line)


class _Lines:
    """Where tables and keys of a TOML text are written. tomllib does not say, so the text is read by line."""

    def __init__(self, text: str, table: tuple[str, ...]) -> None:
        self._prefix = table
        self._keys: dict[tuple[str, int, str], int] = {}
        self._rules: dict[tuple[str, int], int] = {}
        self.start = 1
        counts: dict[str, int] = {}
        here: tuple[str, int] | None = ("", 0) if not table else None
        for number, line in enumerate(text.splitlines(), start=1):
            header = _HEADER.match(line)
            if header is not None and "=" not in header.group(2):
                here = self._enter(header, counts, number)
                continue
            key = _KEY.match(line)
            if key is not None and here is not None:
                name = key.group(1) or key.group(2) or key.group(3)
                self._keys.setdefault((*here, name), number)

    def _enter(self, header: re.Match[str], counts: dict[str, int], number: int) -> tuple[str, int] | None:
        path = tuple(part.strip().strip("\"'") for part in header.group(2).split("."))
        if path == self._prefix:
            self.start = number
            return "", 0
        if path[: len(self._prefix)] != self._prefix:
            return None
        own = path[len(self._prefix) :]
        if not own:
            return None
        if header.group(1) and len(own) == 1:
            index = counts[own[0]] = counts.get(own[0], -1) + 1
            self._rules[own[0], index] = number
            return own[0], index
        if own[0] in counts:
            self._keys.setdefault((own[0], counts[own[0]], own[1]), number)
            return own[0], counts[own[0]]
        self._keys.setdefault(("", 0, own[0]), number)
        return own[0], 0

    def of_rule(self, table: str, index: int) -> int:
        """Return the line of ``[[table]]`` number ``index``, or of the key where the table is written inline."""
        return self._rules.get((table, index), self._keys.get(("", 0, table), self.start))

    def of_key(self, table: str | None, index: int) -> Any:
        """Return a function that gives the line of a key of a rule, or of the policy itself."""
        if table is None:
            return lambda key: self._keys.get(("", 0, key), self._rules.get((key, 0), self.start))
        return lambda key: self._keys.get((table, index, key), self.of_rule(table, index))

    @staticmethod
    def count(document: dict[str, Any], table: str) -> int:
        """Return how many rules a table has."""
        entries = document.get(table, ())
        return len(entries) if isinstance(entries, list) else 0
