"""The commands of ``alphamoe-trace``, one module each: ``prepare_parser(parser)`` and ``run(args) -> int``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def write_json(document: Any, target: str) -> None:
    """Write one JSON document to a file, or to stdout when the target is ``-``.

    Args:
        document: structs or plain data.
        target: ``-`` or a path, which is replaced as a whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from alphamoe_profiler.bundle_files import encode_json, replacing

    content = encode_json(document, "the report", indent=2)
    if target == "-":
        sys.stdout.write(content.decode())
        return
    with replacing(Path(target)) as stream:
        stream.write(content)
    sys.stderr.write(f"Wrote {target}\n")
