"""The bytes of a trace file, plain or gzip, in blocks: read and inflated ahead by a thread while others parse."""

from __future__ import annotations

import hashlib
import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.trace_files import Progress

GZIP_MAGIC = b"\x1f\x8b"
_READ_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 20
_BLOCKS_AHEAD = 4


def inflate(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield a file's content in blocks of at most 1 MiB; gzip is known by its magic bytes, never by the name.

    Several gzip members follow one another; zeros after the last member are padding.

    Raises:
        EvidenceError: a gzip stream is damaged, ends early, or is followed by something else.
    """
    data = file.read(_READ_BYTES)
    if not data.startswith(GZIP_MAGIC):
        while data:
            yield data
            data = file.read(_BLOCK_BYTES)
        return
    member = zlib.decompressobj(wbits=31)
    position = 0  # of `data` in the file
    while True:
        try:
            block = member.decompress(data, _BLOCK_BYTES)
        except zlib.error as error:
            # The library does not say where in its input it stopped.
            message = f"{name}: damaged gzip data near byte {position} of the compressed file ({error})"
            raise EvidenceError(message, hint="copy the file again, or record this rank again") from None
        if block:
            yield block
        rest = member.unused_data if member.eof else member.unconsumed_tail
        position += len(data) - len(rest)
        data = rest
        if member.eof:
            data, skipped = _skip_padding(file, data)
            position += skipped
            if not data:
                return
            if len(data) == 1:
                data += file.read(_READ_BYTES)
            if not data.startswith(GZIP_MAGIC):
                message = f"{name}: after the gzip data, at byte {position} of the file, something else follows"
                raise EvidenceError(message, hint="two writers may have used one file name; record this rank again")
            member = zlib.decompressobj(wbits=31)
        elif not data and len(block) < _BLOCK_BYTES:
            data = file.read(_READ_BYTES)
            if not data:
                message = f"{name}: the gzip data is cut at byte {position} of the compressed file"
                raise EvidenceError(message, hint="the writer was killed or the copy stopped; record this rank again")


def _skip_padding(file: BinaryIO, data: bytes) -> tuple[bytes, int]:
    """Drop zeros between members; return what follows them and how many were dropped."""
    skipped = 0
    while data:
        rest = data.lstrip(b"\0")
        skipped += len(data) - len(rest)
        if rest:
            return rest, skipped
        data = file.read(_READ_BYTES)
    return b"", skipped


class _Hashed:
    """A file that hashes what is read from it and reports how far it got."""

    def __init__(self, file: BinaryIO, size: int, progress: Progress | None) -> None:
        self._file = file
        self._size = size
        self._progress = progress
        self._hash = hashlib.sha256()
        self._position = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        self._position += len(data)
        if self._progress is not None:
            self._progress(self._position, self._size)
        return data

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class Blocks:
    """The blocks of one trace file; inflated by a thread, since zlib and hashing leave the interpreter free.

    Use as a context manager. The progress callback is called on the reading thread.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self._path = path
        self._progress = progress
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"read {path.name}", daemon=True)
        self.sha256 = ""
        """Hash of the file as it lies on disk, known when every block was taken."""
        self.size_bytes = 0

    def __enter__(self) -> Blocks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(0.05)

    def __iter__(self) -> Iterator[bytes]:
        while (block := self._queue.get()) is not None:
            if isinstance(block, BaseException):
                raise block
            yield block

    def _run(self) -> None:
        try:
            with self._path.open("rb") as raw:
                self.size_bytes = self._path.stat().st_size
                file = _Hashed(raw, self.size_bytes, self._progress)
                for block in inflate(file, str(self._path)):  # type: ignore[arg-type]
                    self._queue.put(block)
                    if self._stopped.is_set():
                        return
                self.sha256 = file.hexdigest()
            self._queue.put(None)
        except OSError as error:
            message = f"{self._path}: cannot be read ({error.strerror or error})"
            self._queue.put(EvidenceError(message, hint="give the path of a trace file that you may read"))
        except Exception as error:  # raised again on the thread that takes the blocks
            self._queue.put(error)

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return
