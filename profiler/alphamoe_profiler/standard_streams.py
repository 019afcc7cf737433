"""Standard output and error that never end a command: its exit code survives a full disk and a closed stream."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Kept(io.FileIO):
    """A descriptor that remembers what it lost instead of raising."""

    lost: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self.fileno() == 1:
                raise  # the reader of a report left: head, less
            self.lost = error
            return memoryview(data).nbytes


def keep_streams() -> None:
    """Put streams of this kind in place of the process's own; one that a test or a host program put there stays."""
    sys.stdout, sys.stderr = _kept(sys.stdout, 1), _kept(sys.stderr, 2)


def lost_output() -> OSError | None:
    """Flush both streams, and say what was lost on standard output.

    Raises:
        BrokenPipeError: its reader left.
    """
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    raw = _raw(sys.stdout)
    return raw.lost if isinstance(raw, _Kept) else None


def _kept(stream: TextIO | None, number: int) -> TextIO:
    # Null where the descriptor was closed at the start.
    if stream is None:
        # Taken, so that no file of the command gets its number; what is written is lost, as it is to a full disk.
        os.dup2(os.open(os.devnull, os.O_RDONLY), number)
        return _text(number, "utf-8")
    if isinstance(stream, io.TextIOWrapper):
        raw = _raw(stream)
        if type(raw) is io.FileIO and raw.fileno() == number:
            return _text(number, stream.encoding, stream.line_buffering, stream.write_through, raw is not stream.buffer)
        if not isinstance(raw, _Kept):
            stream.reconfigure(errors="backslashreplace")
    return stream


def _raw(stream: TextIO) -> object:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)  # with python -u there is no buffer


def _text(
    number: int, encoding: str, line_buffering: bool = False, write_through: bool = False, buffered: bool = True
) -> TextIO:
    raw = cast(io.RawIOBase, _Kept(number, "w", closefd=False))
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if buffered else cast(io.BufferedWriter, raw),
        encoding=encoding,
        errors="backslashreplace",  # a prompt's letters may be none of the locale's
        line_buffering=line_buffering,
        write_through=write_through,
    )
