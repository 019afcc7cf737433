"""The commands of ``alphamoe-trace``, one module each: ``prepare_parser(parser)`` and ``run(args) -> int``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from alphamoe_tracers.errors import UsageError


def check_json_target(target: str | None) -> None:
    """Refuse a ``--json`` target that cannot be written, before the work that it would hold is done.

    Args:
        target: null, ``-`` or a path whose missing folders will be made.

    Raises:
        UsageError: it is a directory, or its folder cannot be written or made.
    """
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"--json {target} is a directory", "name a file, or none for standard output")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--json {target}: cannot write in {folder}", "name another file, or none for standard output")


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
