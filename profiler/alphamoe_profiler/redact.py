"""Takes secrets out of arguments and environment variables before they are written into a bundle."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

REDACTED = "[redacted]"

# Words of an option's or variable's name. "token" is one secret; "tokens" (--max-new-tokens) is a count.
_SECRET_WORDS = frozenset(
    {"accesskey", "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase"}
    | {"passwd", "password", "privatekey", "pwd", "secret", "secrets", "token", "userpass"}
)
_KEY_OWNERS = frozenset({"access", "api", "encryption", "private", "secret", "signing"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_OPTION = re.compile(r"(?P<name>--?[A-Za-z][\w.-]*)=(?P<value>.*)\Z", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)\Z", re.DOTALL)

_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|x-api-key|api-key|cookie|x-auth-token)(\s*[:=]\s*)[^\r\n\"']+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_USERINFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s?#]+@")
_QUERY = re.compile(r"(?P<lead>[?&;])(?P<name>[\w.-]+)=(?P<value>[^&;#\s]*)")
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{12,}"
    r"|sk-[A-Za-z0-9_-]{12,}"
    r"|nvapi-[A-Za-z0-9_-]{12,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}"
    r"|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|A(?:KI|SI)A[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)


def names_a_secret(name: str) -> bool:
    """Say whether an option or variable of this name holds a secret (``--api-key``, ``HF_TOKEN``, ``userPassword``)."""
    words = [word.lower() for word in _WORD.findall(name)]
    return not _SECRET_WORDS.isdisjoint(words) or any(
        owner in _KEY_OWNERS and key == "key" for owner, key in itertools.pairwise(words)
    )


def redact_text(text: str) -> str:
    """Return the text without credentials of a known shape: headers, bearers, URL user info, queries, API keys."""
    text = _HEADER.sub(lambda match: f"{match[1]}{match[2]}{REDACTED}", text)
    text = _BEARER.sub(lambda match: f"{match[1]} {REDACTED}", text)
    text = _USERINFO.sub(lambda match: f"{match['scheme']}{REDACTED}@", text)
    text = _QUERY.sub(
        lambda match: f"{match['lead']}{match['name']}={REDACTED}" if names_a_secret(match["name"]) else match[0], text
    )
    return _KNOWN_SHAPES.sub(REDACTED, text)


def redact_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with the values of secret options removed, whether they follow the option or its ``=``."""
    clean: list[str] = []
    value_is_secret = False
    for argument in argv:
        if value_is_secret and not argument.startswith("--"):
            clean.append(REDACTED)
            value_is_secret = False
            continue
        value_is_secret = False
        match = _OPTION.match(argument) or _ASSIGNMENT.match(argument)
        if match is not None and names_a_secret(match["name"]):
            clean.append(f"{match['name']}={REDACTED}")
            continue
        value_is_secret = argument.startswith("-") and match is None and names_a_secret(argument)
        clean.append(redact_text(argument))
    return tuple(clean)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables sorted by name, with the values of secret ones removed and secrets inside values masked."""
    return {
        name: REDACTED if value and names_a_secret(name) else redact_text(value)
        for name, value in sorted(environment.items())
    }
