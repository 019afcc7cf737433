"""The three forms of a kernel's name (mangled, full, base) and the class that a name belongs to.

A base name has no namespace, no template arguments, no return type and no parameters. Identity may live in the template
arguments only (every CUTLASS kernel is ``device_kernel`` or ``Kernel``), so a rule must say which form it matches.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from importlib import resources

_ANONYMOUS = "(anonymous namespace)"
_OPENING = {"<": ">", "(": ")", "{": "}", "[": "]"}
_TRITON_SIGNATURE = re.compile(r"_0[dce\d]*$")


@lru_cache(maxsize=65536)
def demangle(name: str) -> str:
    """Turn a mangled name into its full form; a name that is not mangled, or not valid, comes back as it is."""
    if not name.startswith("_Z"):
        return name
    try:
        import cxxfilt  # it looks for libstdc++ when imported, which not every machine has
    except (ImportError, OSError):
        return name
    try:
        return str(cxxfilt.demangle(name))
    except cxxfilt.Error:
        return name


def is_truncated(name: str) -> bool:
    """Say whether a tool cut this name with an ellipsis: such a name cannot prove absence."""
    return name.endswith(("…", "..."))


@lru_cache(maxsize=65536)
def base_name(full: str) -> str:
    """Return the base name of a full (demangled) name.

    ``void cutlass::device_kernel<ns::Gemm<e4m3, 128>>(P)`` becomes ``device_kernel``. A name whose brackets do not
    close (cut by a tool) is read as far as it goes; a name without any of the decorations is its own base name.
    """
    text = full.strip()
    head = text[: _parameters_start(text)].rstrip()
    start = 0
    for position, character in _top_level(head):
        if character == " " or (character == ":" and head[position - 1 : position] == ":"):
            start = position + 1
    base = head[start:]
    if base.startswith("operator"):
        return base
    cut = base.find("<")
    return base[:cut] if cut > 0 else base or text


def triton_base(base: str) -> str:
    """Remove the argument signature that Triton appended to kernel names (``fused_moe_kernel_0d1d2de3``)."""
    match = _TRITON_SIGNATURE.search(base)
    if match is None or not re.search(r"\d[dce]", match.group()):
        return base
    return base[: match.start()]


def symbol_class(base: str, full: str) -> str | None:
    """Return the class of a kernel by the table in ``symbol_classes.toml``; the first rule that matches wins.

    Args:
        base: the base name, which ``base`` patterns search.
        full: the full name, which ``full`` patterns search.

    Returns:
        The class, for example ``alphamoe.w8a8``, or None when no rule knows the name.
    """
    return _class_of(triton_base(base), full)


def class_names() -> tuple[str, ...]:
    """Return the classes of the packaged table, in its order."""
    return tuple(dict.fromkeys(name for name, _, _ in _class_rules()))


@lru_cache(maxsize=65536)
def _class_of(base: str, full: str) -> str | None:
    for name, base_pattern, full_pattern in _class_rules():
        if base_pattern is not None and base_pattern.search(base):
            return name
        if full_pattern is not None and full_pattern.search(full):
            return name
    return None


@cache
def _class_rules() -> tuple[tuple[str, re.Pattern[str] | None, re.Pattern[str] | None], ...]:
    text = resources.files("alphamoe_tracers").joinpath("symbol_classes.toml").read_text(encoding="utf-8")
    return tuple(
        (rule["name"], _any_of(rule.get("base", ())), _any_of(rule.get("full", ())))
        for rule in tomllib.loads(text)["class"]
    )


def _any_of(patterns: list[str] | tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def _parameters_start(text: str) -> int:
    """Index of the top-level parenthesis that opens the parameter list, or the length of the text."""
    for position, character in _top_level(text):
        if character == "(":
            return position
    return len(text)


def _top_level(text: str) -> list[tuple[int, str]]:
    """Characters outside every bracket, with their positions; opening brackets at the top level are included."""
    found: list[tuple[int, str]] = []
    closing: list[str] = []
    position = 0
    while position < len(text):
        if text.startswith(_ANONYMOUS, position):
            position += len(_ANONYMOUS)
            continue
        if not closing and text.startswith("operator", position) and text[position + 8 : position + 9] in "()<>-=":
            # operator() and operator<< hold brackets that open nothing.
            symbol = re.match(r"operator(?:\(\)|<<|>>|->|<=|>=|<|>|=+|-)", text[position:])
            position += len(symbol.group()) if symbol else 8
            continue
        character = text[position]
        if not closing:
            found.append((position, character))
        if closing and character == closing[-1]:
            closing.pop()
        elif character in _OPENING and not (character == "<" and closing and closing[-1] == ")"):
            # Inside parentheses "<" may be a comparison, so only brackets that must pair are followed there.
            closing.append(_OPENING[character])
        position += 1
    return found
