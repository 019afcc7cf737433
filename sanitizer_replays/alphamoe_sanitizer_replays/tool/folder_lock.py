"""A folder that one session alone writes into: two would read each other's logs and results as their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
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


def clear_folder(folder: Path, own: Callable[[str], bool], force: bool, kept: Iterable[Path], kind: str) -> None:
    """Empty a folder that is written anew, where it holds nothing but what was written there before.

    Args:
        folder: a folder that is there.
        own: says of a name whether it is one that is written there.
        force: remove what is there.
        kept: paths that must not lie in it.
        kind: of what lies there, in one word.

    Raises:
        UsageError: it holds something else, a path of ``kept``, or anything without ``force``.
    """
    found = sorted(folder.iterdir())
    strangers = [entry.name for entry in found if not own(entry.name)]
    if strangers:
        raise UsageError(f"{folder} holds {strangers[0]}, which is of no {kind}", "name another folder with --out")
    if found and not force:
        raise UsageError(f"{folder} holds a {kind} already", "replace it with --force, or name another with --out")
    if any(path.resolve().is_relative_to(folder.resolve()) for path in kept):
        raise UsageError(f"{folder} holds captures that this {kind} reads", "name another folder with --out")
    for entry in found:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
