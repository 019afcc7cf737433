"""A folder that one session alone writes into: two would read each other's logs and results as their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from alphamoe_tracers.errors import UsageError


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """Make a folder where it is missing, and hold it: a second holder is refused. One that stays empty is removed.

    The lock is the kernel's and ends with the process, however that ends; no file of it is left.

    Raises:
        UsageError: another process holds it, it cannot be made, or its disk cannot lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror or error}", "name another with --out") from error
    held = False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(handle), folder.stat())  # its last holder may have removed it
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            told = f"{folder} cannot be locked: {error.strerror or error}"
            raise UsageError(told, "name a folder on a local disk with --out") from error
        if not held:
            raise UsageError(f"{folder} is in use by another session", "wait for its end, or name another with --out")
        yield folder
    finally:
        if held:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        os.close(handle)
