"""Names, atomic writes and bounded strict reads of the files of a run bundle."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import msgspec

from alphamoe_tracers.errors import EvidenceError, UsageError
from alphamoe_tracers.strict_json import INT64_MAX, integers_outside, repeated_key

T = TypeVar("T")

MAX_JSON_BYTES = 64 << 20
"""A JSON document of a bundle is small; anything above this is not one of ours."""
_DAMAGED = "the file is damaged or was written by something else"
_RANK_NAME = re.compile(r"rank=(0|[1-9][0-9]{0,5})(\.jsonl)?\Z")
_RANK_FILE_NAME = re.compile(r"(0|[1-9][0-9]{0,5})\.json\Z")


def rank_of_name(name: str) -> int | None:
    """Return the rank in ``rank=3``, ``rank=3.jsonl`` or ``3.json``, null for any other spelling (``rank=03``)."""
    match = _RANK_NAME.match(name) or _RANK_FILE_NAME.match(name)
    return int(match.group(1)) if match else None


def inside(root: Path, relative: str) -> Path:
    """Return the path of a name that a bundle gives, refusing one that leads out of it.

    Raises:
        UsageError: the name is absolute, climbs with ``..`` or passes through a link that leaves the bundle.
    """
    pure = PurePosixPath(relative)
    if not relative or pure.is_absolute() or ".." in pure.parts or "\\" in relative or "\0" in relative:
        raise UsageError(f"{root}: the name {relative!r} leads out of the bundle", "do not use this bundle")
    path = root / pure
    if not path.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{root}: {relative} is a link out of the bundle", "do not use this bundle")
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path`` that takes its name, synced, when the block ends without an exception.

    Raises:
        AlphaMoEError subclasses: none; an ``OSError`` (a full disk) is passed on after the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some filesystems cannot sync a directory; the rename itself is done
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def refuse_non_finite(value: Any, where: str) -> None:
    """Raise when a float anywhere in plain data is NaN or infinite.

    msgspec writes those as null, which would turn a broken measurement into a missing one without a word.

    Raises:
        EvidenceError: with the path of the first such value.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise EvidenceError(f"{where} is {value}", "a measurement that is not a number is not written")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_non_finite(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            refuse_non_finite(item, f"{where}[{index}]")


def encode_json(record: Any, where: str, *, indent: int = 0) -> bytes:
    """Encode a struct or plain data as one JSON document: sorted keys, no NaN; ``indent`` 0 gives one line.

    Raises:
        EvidenceError: a float is NaN or infinite.
    """
    plain = msgspec.to_builtins(record)
    refuse_non_finite(plain, where)
    try:
        text = msgspec.json.encode(plain, order="sorted")
    except UnicodeEncodeError:  # half a character in somebody's trace: JSON can escape one, UTF-8 cannot hold it
        text = msgspec.json.encode(_writable(plain), order="sorted")
    return msgspec.json.format(text, indent=indent) + b"\n" if indent else text + b"\n"


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: Path, kind: type[T]) -> T:
    """Read one JSON document strictly: no coercion, no unknown field, no NaN.

    Raises:
        EvidenceError: it is missing, unreadable, larger than ``MAX_JSON_BYTES``, or not of this kind.
    """
    try:
        with open(path, "rb", opener=_at_once) as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}", "was the run cut short?") from error
    if len(text) > MAX_JSON_BYTES:
        raise EvidenceError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB", "this is not a file of a run bundle")
    return decode_json(text, kind, str(path))


def is_of_a_run(document: Path) -> bool:
    """Say whether a ``run.json`` is that of a run bundle, or may have been: other programs write files of that name.

    One that is gone or cannot be read may have been.
    """
    try:
        return "schema_version" in read_json(document, dict[str, Any])
    except EvidenceError:
        return True


def _at_once(path: str, flags: int) -> int:
    """Open a plain file; a pipe of that name would be waited for without end."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return handle


def decode_json(text: bytes, kind: type[T], where: str) -> T:
    """Decode one JSON document strictly.

    Raises:
        EvidenceError: it is malformed (with the byte where msgspec gives one), not of this kind, holds a key twice, or
            holds an integer of more than 64 bits.
    """
    try:
        record = msgspec.json.decode(text, type=kind, strict=True)
        repeated = repeated_key(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EvidenceError(f"{where}: {error}", _DAMAGED) from error
    if repeated is not None:
        raise EvidenceError(f"{where}: the key {repeated!r} is there twice", _DAMAGED)
    refuse_integers(record, -INT64_MAX - 1, where)
    return record


def refuse_integers(record: Any, least: int, where: str) -> None:
    """Raise when a record holds an integer below ``least`` or of more than 64 bits.

    Raises:
        EvidenceError: with the path of the first such value.
    """
    for problem in integers_outside(msgspec.to_builtins(record), least):
        raise EvidenceError(f"{where}: {problem}", _DAMAGED)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
