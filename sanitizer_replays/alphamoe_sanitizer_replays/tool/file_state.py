"""Whether a file that a session rests on is still the one that was proven, without reading it again."""

from __future__ import annotations

from pathlib import Path

FileState = tuple[int, int, int, int] | None
"""Device, inode, bytes and time of the last change in ns; null for a file that is not there."""


def file_state(path: Path) -> FileState:
    """Give what tells a file from one that was changed or put into its place since."""
    try:
        own = path.stat()
    except OSError:
        return None
    return own.st_dev, own.st_ino, own.st_size, own.st_mtime_ns
