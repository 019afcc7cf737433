"""Captures on disk: a directory with ``capture.json`` and safetensors, hashed tensor by tensor. Never pickle.

A capture appears whole or not at all: it is written beside its place and renamed. Weights that are stored lie in a file
of their own, named by their content, which captures of the same layer and rank share.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from alphamoe_profiler.bundle_files import decode_json, encode_json, read_json, replacing
from alphamoe_sanitizer_replays.captures.labels import label_problems
from alphamoe_sanitizer_replays.captures.records import CAPTURE_SCHEMA, Capture, TensorInfo, TensorRole
from alphamoe_sanitizer_replays.captures.tensors import (
    NATIVE_DTYPES,
    bytes_of,
    on_host,
    raw_bytes,
    save_tensors,
    tensor_sha256,
)
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

CAPTURE_FILE = "capture.json"
TENSORS_FILE = "tensors.safetensors"
ROOM_KEPT_BYTES = 64 << 20
"""What a capture leaves free on its disk, so that the run's own evidence can still be written."""

_SCHEMA = re.compile(r"alphamoe-trace-capture-v([1-9][0-9]{0,5})\Z")
# The only file outside its directory that a capture may name lies beside it.
_FILE = re.compile(r"tensors\.safetensors\Z|(\.\./)?weights-[0-9a-f]{12}\.safetensors\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_PARTS = frozenset({CAPTURE_FILE, TENSORS_FILE})
# As write_capture names what it has not renamed yet.
_UNFINISHED = re.compile(r"\..*\.tmp\Z")
_DAMAGED = "the capture is damaged; record it again"


_SMALLER = "capture fewer layers or M, or leave out --capture-weights"


def check_room(directory: Path, needed_bytes: int, what: str = "a capture", advice: str = _SMALLER) -> None:
    """Refuse to begin what the disk cannot take.

    Args:
        directory: where it will be written; it need not exist yet.
        needed_bytes: what will be written. ``ROOM_KEPT_BYTES`` stay free beside it.
        what: is written, for the message.
        advice: how it would fit.

    Raises:
        AlphaMoEError: with both numbers.
    """
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise AlphaMoEError(f"{place}: the free space cannot be told ({error.strerror})") from error
    if free < needed_bytes + ROOM_KEPT_BYTES:
        raise AlphaMoEError(
            f"{what} of {needed_bytes} bytes does not fit on the disk of {place}, which has {free} bytes free",
            f"{ROOM_KEPT_BYTES >> 20} MiB are kept free; {advice}",
        )


def check_path(path: Path) -> None:
    """Refuse a path that is not UTF-8: safetensors cannot open it, and no JSON file could name it.

    Raises:
        UsageError: it is none, by the encoding that this process reads paths with.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{str(path)!a}: the path is not UTF-8, and safetensors reads no other",
            "move it, or run with a UTF-8 locale (LC_ALL=C.UTF-8)",
        ) from error


def write_capture(
    directory: Path,
    capture: Capture,
    tensors: Mapping[str, tuple[TensorRole, Tensor]],
    *,
    weights: Mapping[str, Tensor] | None = None,
    weights_directory: Path | None = None,
    weights_sha256: Mapping[str, str] | None = None,
) -> Capture:
    """Write one capture, whole or not at all.

    Args:
        directory: the capture's own directory, which must not exist yet.
        capture: what is known of it; ``tensors``, ``bytes`` and ``wall_s`` are filled in here.
        tensors: role and tensor by name, on any device, in any layout; they are stored in C order.
        weights: tensors that are stored apart in ``weights_directory``, or only hashed when that is None.
        weights_directory: ``directory`` or the folder that it lies in.
        weights_sha256: hashes of ``weights`` where they are known already, so that none is copied without need.

    Returns:
        The capture as it was written.

    Raises:
        UsageError: there is a capture of that name, a name is taken twice, or the path is not UTF-8.
        AlphaMoEError: the disk has no room. An ``OSError`` of the writing itself is passed on; nothing half is left.
    """
    weights = weights or {}
    check_path(directory)
    if os.path.lexists(directory):
        raise UsageError(f"{directory} is there already", "remove it, or capture into another directory")
    if weights_directory is not None and weights_directory.absolute() not in (
        directory.absolute(),
        directory.absolute().parent,
    ):
        raise UsageError(f"the weights of {directory} must lie in it or beside it, not in {weights_directory}")
    if both := sorted(set(tensors) & set(weights)):
        raise UsageError(f"{directory}: {both[0]} is both a weight and a tensor of the call")
    started_s = time.monotonic()
    stored = {name: on_host(tensor) for name, (_, tensor) in tensors.items()}
    copied_s = time.monotonic()
    infos = [_info(name, role, stored[name], TENSORS_FILE) for name, (role, _) in tensors.items()]
    hashes = dict(weights_sha256) if weights_sha256 is not None and set(weights_sha256) >= set(weights) else None
    if hashes is None:
        hashes = {name: tensor_sha256(tensor) for name, tensor in weights.items()}
    file = None
    if weights and weights_directory is not None:
        file = f"weights-{_digest(hashes)}.safetensors"
    prefix = "../" if weights_directory is not None and weights_directory.absolute() != directory.absolute() else ""
    for name, tensor in weights.items():
        infos.append(_info(name, "weight", tensor, f"{prefix}{file}" if file else None, hashes[name]))
    total = bytes_of(tensors) + (bytes_of(weights) if file else 0)
    shared = bool(prefix and file and (directory.parent / file).is_file())
    check_room(directory.parent, total - (bytes_of(weights) if shared else 0))
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent))
    try:
        temporary.chmod(0o755)
        save_tensors(temporary / TENSORS_FILE, stored)
        if file is not None and weights_directory is not None:
            place = temporary if not prefix else weights_directory
            if not shared:
                save_tensors(place / file, {name: on_host(tensor) for name, tensor in weights.items()})
        walls = {"copy": copied_s - started_s, "write": time.monotonic() - copied_s}
        written = msgspec.structs.replace(
            capture, tensors=tuple(infos), bytes=total, wall_s={**walls, **capture.wall_s}
        )
        with replacing(temporary / CAPTURE_FILE) as stream:
            stream.write(encode_json(written, CAPTURE_FILE, indent=2))
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


@dataclass(frozen=True)
class StoredCapture:
    """One capture on disk. Tensors are read when they are asked for."""

    path: Path
    capture: Capture
    sha256: str
    """Of its ``capture.json``, as it was read."""

    def missing(self) -> tuple[str, ...]:
        """List the tensors of which only the hash is kept."""
        return tuple(info.name for info in self.capture.tensors if info.file is None)

    def load(self, name: str) -> Tensor:
        """Read one tensor onto the CPU and verify its hash.

        Raises:
            EvidenceError: the capture has none of that name, holds its hash only, or its file is gone, cut or changed.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        try:
            info = self.capture.tensor(name)
        except KeyError:
            names = ", ".join(item.name for item in self.capture.tensors)
            raise EvidenceError(f"{self.path}: no tensor {name!r} was captured", f"it holds {names}") from None
        if info.file is None:
            raise EvidenceError(f"{self.path}: of {name} only the hash was kept", "record again with --capture-weights")
        path = self.path / info.file
        if path.is_symlink() or not path.is_file():
            raise EvidenceError(f"{path}: missing, or not a plain file", _DAMAGED)
        try:
            with safe_open(path, framework="pt") as file:
                # Into memory of its own: the file's is aligned to 8 bytes, less than kernels and vector copies need.
                tensor: Tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise EvidenceError(f"{path}: {name} cannot be read ({reason})", _DAMAGED) from error
        dtype = getattr(torch, info.dtype, None)
        raw = raw_bytes(tensor)
        if not isinstance(dtype, torch.dtype):
            raise EvidenceError(f"{self.path}: {name} is of the dtype {info.dtype!r}, which torch does not know")
        if raw.numel() != dtype.itemsize * math.prod(info.shape) or (
            info.dtype in NATIVE_DTYPES and tensor.dtype != dtype
        ):
            raise EvidenceError(f"{path}: {name} is not {info.dtype} {list(info.shape)} as recorded", _DAMAGED)
        found = hashlib.sha256(raw.numpy().data).hexdigest()
        if found != info.sha256:
            raise EvidenceError(
                f"{path}: {name} was changed after it was written (sha256 {found[:12]}, recorded {info.sha256[:12]})",
                _DAMAGED,
            )
        return raw.view(dtype).reshape(info.shape)

    def verify(self) -> None:
        """Read every tensor that is stored; raises EvidenceError for the first that is not what was recorded."""
        for info in self.capture.tensors:
            if info.file is not None:
                self.load(info.name)


def open_capture(directory: Path, plugin: str | None = None) -> StoredCapture:
    """Open a capture; no tensor is read yet and torch is not imported.

    Args:
        directory: the capture's own.
        plugin: replays it instead of the plug-in that it names.

    Raises:
        UsageError: it is of a newer format, or its path is not UTF-8.
        EvidenceError: there is none, or its ``capture.json`` is damaged, names files that a capture does not have, or
            says of itself what cannot be; see :mod:`captures.labels`.
    """
    check_path(directory)
    path = directory / CAPTURE_FILE
    plain = read_json(path, dict[str, Any])
    schema = plain.get("schema")
    match = _SCHEMA.match(schema) if isinstance(schema, str) else None
    if match is None:
        raise EvidenceError(f"{path}: not a capture (schema {schema!r})", f"it should be {CAPTURE_SCHEMA}")
    if schema != CAPTURE_SCHEMA:
        raise UsageError(f"{path}: schema {schema} is newer than {CAPTURE_SCHEMA}", "use a newer alphamoe-trace")
    text = path.read_bytes()
    capture = decode_json(text, Capture, str(path))
    if plugin is not None:
        capture = msgspec.structs.replace(capture, plugin=plugin)
    for problem in _problems(capture):
        raise EvidenceError(f"{path}: {problem}", _DAMAGED)
    return StoredCapture(directory, capture, hashlib.sha256(text).hexdigest())


class LeftOut(NamedTuple):
    """A place that looks like a capture, or a part of one, and is none that can be replayed."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class FoundCaptures(NamedTuple):
    """What a path holds."""

    captures: tuple[Path, ...]
    """Sorted, numbers by value."""
    left_out: tuple[LeftOut, ...]
    """Sorted by path."""
    bundles: tuple[Path, ...]
    """Run bundles below the path."""


def find_captures(path: Path) -> list[Path]:
    """List the captures that a path stands for; see :func:`look_for_captures`."""
    return list(look_for_captures(path).captures)


def looks_like_run(folder: Path) -> bool:
    """Say whether a folder is a run bundle, or what is left of one whose ``run.json`` is gone or no plain file."""
    return os.path.lexists(folder / "run.json") or ((folder / "ranks").is_dir() and (folder / "captures").is_dir())


def look_for_captures(path: Path) -> FoundCaptures:
    """Find the captures that a path stands for: itself, those below a folder, or those of a run bundle.

    Links are not followed, and nothing outside the path is looked at. There may be none.

    Raises:
        UsageError: the path is no directory.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is no directory", "name a run bundle, a capture, or a folder of captures")
    is_run = looks_like_run(path) and not (path / CAPTURE_FILE).is_file()
    root = path / "captures" if is_run else path
    found: list[Path] = []
    left_out: list[LeftOut] = []
    bundles: list[Path] = []

    def unread(error: OSError) -> None:
        left_out.append(LeftOut(Path(error.filename), f"the folder cannot be read: {error.strerror or error}"))

    for name, names, files in os.walk(root, onerror=unread) if root.exists() else ():
        folder = Path(name)
        parts = folder.relative_to(root).parts
        if looks_like_run(folder):
            bundles.append(folder)
        if any(folder.is_relative_to(capture) for capture in found[-1:]):
            why = "it lies within a capture"
        elif any(part.startswith(".") for part in parts):
            why = "it was not written to its end" if parts[-1].endswith(".tmp") else "it lies in a hidden folder"
        else:
            why = "" if CAPTURE_FILE in files else f"it has no {CAPTURE_FILE}"
        if why and (_PARTS & set(files) or (parts and _UNFINISHED.match(parts[-1]))):
            left_out.append(LeftOut(folder, why))
        elif CAPTURE_FILE in files:
            found.append(folder)
        links = [own for own in map(folder.joinpath, (*names, *files)) if own.is_symlink()]
        left_out += [LeftOut(link, why) for link in links if (why := _not_followed(link, root))]
    return FoundCaptures(tuple(sorted(found, key=_natural)), tuple(sorted(left_out)), tuple(bundles))


def _not_followed(link: Path, root: Path) -> str:
    """Say why a link may hide captures, or nothing: it leads to a file, or to a folder that is walked itself."""
    try:
        target = link.resolve(strict=True)
        folder = target.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        return f"a link that leads nowhere ({getattr(error, 'strerror', None) or 'it leads back to itself'})"
    outside = folder and not target.is_relative_to(root.resolve())
    return f"links are not followed, and this one leads out to {target}: name that, without the link" if outside else ""


def _natural(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]


def _problems(capture: Capture) -> list[str]:
    problems = label_problems(capture)
    seen: set[str] = set()
    for info in capture.tensors:
        if info.name in seen:
            problems.append(f"the tensor {info.name!r} is listed twice")
        seen.add(info.name)
        if info.file is not None and not _FILE.match(info.file):
            problems.append(f"{info.name!r} names the file {info.file!r}, which no capture has")
        if not _SHA256.match(info.sha256) or any(size < 0 for size in info.shape):
            problems.append(f"the description of {info.name!r} cannot be")
    return problems


def _info(name: str, role: TensorRole, tensor: Tensor, file: str | None, sha256: str | None = None) -> TensorInfo:
    return TensorInfo(
        name=name,
        role=role,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        sha256=sha256 or tensor_sha256(tensor),
        file=file,
    )


def _digest(hashes: Mapping[str, str]) -> str:
    text = "\n".join(f"{name}={hashes[name]}" for name in sorted(hashes))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
