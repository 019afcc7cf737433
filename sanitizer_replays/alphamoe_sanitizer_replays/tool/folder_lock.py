"""A folder that one session alone writes into: two would read each other's logs and results as their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from alphamoe_tracers.errors import UsageError

MARK = ".alphamoe-trace"
"""An empty file in a folder that this program writes, and so may empty again."""


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """Make a folder where it is missing, and hold it: a second holder is refused. One that stays empty is removed.

    The lock is the kernel's and ends with the process, however that ends; no file of it is left. Who holds a folder
    holds all below it.

    Raises:
        UsageError: another process holds it or a folder that it lies in, it cannot be made, or its disk cannot lock.
    """
    try:
        made = missing_folders(folder)
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
        if not held or any(_is_held(parent) for parent in folder.resolve().parents):
            raise UsageError(f"{folder} is in use by another session", "wait for its end, or name another with --out")
        yield folder
    finally:
        if held:
            with contextlib.suppress(OSError):  # gone
                if [entry.name for entry in folder.iterdir()] == [MARK]:
                    (folder / MARK).unlink()
            remove_empty((folder, *made))
        os.close(handle)


def missing_folders(folder: Path) -> tuple[Path, ...]:
    """List what would have to be made for a folder to be there, the innermost first."""
    return tuple(path for path in (folder, *folder.parents) if not path.exists())


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those folders in which nothing lies, in this order."""
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty, or gone
            folder.rmdir()


def _is_held(folder: Path) -> bool:
    """Say whether another session holds a folder; one that cannot be opened or locked is held by none."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def clear_folder(folder: Path, own: Callable[[str], bool], force: bool, kept: Iterable[Path], kind: str) -> None:
    """Empty a folder that is written anew, where it holds nothing but what was written there before.

    Args:
        folder: a folder that is there.
        own: says of a name whether it is one that is written there.
        force: remove what is there.
        kept: paths that must not lie in it.
        kind: of what lies there, in one word.

    Raises:
        UsageError: it holds something else, a path of ``kept``, what another session holds, or anything without
            ``force``.
    """
    found = sorted(entry for entry in folder.iterdir() if entry.name != MARK)
    strangers = [entry.name for entry in found if not own(entry.name)]
    if strangers:
        raise UsageError(f"{folder} holds {strangers[0]}, which is of no {kind}", "name another folder with --out")
    for name, *_ in (below for entry in found if not entry.is_symlink() for below in os.walk(entry)):
        if _is_held(Path(name)):
            raise UsageError(f"{name} is in use by another session", "wait for its end, or name another with --out")
    if found and not (folder / MARK).is_file():
        told = f"{folder} holds {found[0].name}, and nothing says that a {kind} of this program wrote it"
        raise UsageError(told, "name another folder with --out")
    if found and not force:
        raise UsageError(f"{folder} holds a {kind} already", "replace it with --force, or name another with --out")
    whole = folder.resolve()
    if any(Path(os.path.realpath(path)).is_relative_to(whole) for path in kept):  # a link may lead back to itself
        raise UsageError(f"{folder} holds captures that this {kind} reads", "name another folder with --out")
    try:
        (folder / MARK).touch()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}", "name another with --out") from error
    for entry in found:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
