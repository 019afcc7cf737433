"""The commands of ``alphamoe-trace``, one module each: ``prepare_parser(parser)`` and ``run(args) -> int``."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alphamoe_tracers.errors import AlphaMoEError, UsageError


def check_json_target(target: str | None, option: str = "--json") -> None:
    """Refuse a report's target that cannot be written, before the work that it would hold is done.

    Args:
        target: null, ``-`` or a path in a folder that is there.
        option: the option that named it.

    Raises:
        UsageError: it is a directory, or its folder is not there or cannot be written.
    """
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{option} {target} is a directory", "name a file, or none for standard output")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {target}: there is no folder {folder}", "make it first, or name another file")
    try:
        # Permission bits do not tell of a disk that is read-only, or of /proc.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        told = f"{option} {target}: cannot write in {folder}: {error.strerror or error}"
        raise UsageError(told, "name another file, or none for standard output") from error


def remove_earlier(target: str | None) -> None:
    """Remove a report that an earlier command left, so that it does not stand for one that ends without any.

    Args:
        target: as :func:`check_json_target` took it. The file that GITHUB_STEP_SUMMARY names is added to, and stays.

    Raises:
        UsageError: it cannot be removed.
    """
    if target is None or target in ("-", os.environ.get("GITHUB_STEP_SUMMARY")):
        return
    path = Path(target)
    try:
        if path.is_symlink() or path.is_file():  # and not /dev/null
            path.unlink()
    except OSError as error:
        raise UsageError(f"{target} cannot be replaced: {error.strerror or error}", "name another file") from error


def deliver(outputs: Mapping[str, Callable[[], object]], exit_code: int) -> int:
    """Bring a judged report to each of its places, whatever becomes of the others, and give the exit code.

    A full disk must not hide a verdict, or pass for one: an exit code of 0 becomes 3 where a place was not reached.

    Args:
        outputs: by place, in order; the verdict's own words first.
        exit_code: the verdict's.

    Raises:
        BrokenPipeError: the reader of standard output left; every other place was reached first.
    """
    failures, left = [], None
    for place, write in outputs.items():
        try:
            write()
        except BrokenPipeError as error:
            left = error
        except (OSError, AlphaMoEError) as error:
            failures.append(f"{place}: {(isinstance(error, OSError) and error.strerror) or error}")
    with contextlib.suppress(OSError):
        for failure in failures:
            sys.stderr.write(f"alphamoe-trace: could not write {failure}\n")
        if failures and exit_code == 0:
            sys.stderr.write("alphamoe-trace: exit code 3, because a PASS without its report proves nothing\n")
    if left is not None:
        raise left
    return 3 if failures and exit_code == 0 else exit_code


def write_json(document: Any, target: str) -> None:
    """Write one JSON document to a file, or to stdout when the target is ``-``.

    Args:
        document: structs or plain data.
        target: ``-`` (UTF-8, whatever the locale) or a path, which is replaced as a whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from alphamoe_profiler.bundle_files import encode_json, replacing

    content = encode_json(document, "the report", indent=2)
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        return
    with replacing(Path(target)) as stream:
        stream.write(content)
    sys.stderr.write(f"Wrote {target}\n")
