"""A replay process that tells a kernel that does not end from a machine that is slow, and ends itself then.

    python -P -m watched_replay SPEC.json SECONDS

It is `alphamoe_sanitizer_replays.replays.process` with one addition: between the launch and the arrival of the outputs,
so many seconds may pass at most. What starting Python, CUDA and a tool takes does not count. When they are up,
``hang.txt`` beside the specification says where the process was, and it exits with code 1 whatever it waits for.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alphamoe_sanitizer_replays.plugins.protocol import PreparedReplay, ReplayPlugin, find_plugin
from alphamoe_sanitizer_replays.replays import process

HANG_FILE = "hang.txt"


class Watched:
    """A plug-in whose launches are watched."""

    def __init__(self, plugin: ReplayPlugin, file: Path, seconds: float) -> None:
        self._plugin, self._stream, self._seconds = plugin, file.open("w"), seconds

    def prepare(self, *arguments: Any) -> PreparedReplay:
        """Prepare the call and put the watch around its launch and its outputs."""
        prepared = self._plugin.prepare(*arguments)

        def launch() -> None:
            # A thread in C that needs no lock of the interpreter's: a hung call may hold it.
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stream)
            prepared.launch()

        def outputs() -> dict[str, Any]:
            made = prepared.outputs()
            faulthandler.cancel_dump_traceback_later()
            return made

        return dataclasses.replace(prepared, launch=launch, outputs=outputs)


def main(argv: list[str]) -> int:
    """Replay the specification ``argv[0]``, watched for ``argv[1]`` seconds."""
    file = Path(argv[0]).with_name(HANG_FILE)

    def find(name: str) -> Any:
        return Watched(find_plugin(name), file, float(argv[1]))

    place: Callable[[str], Any] = find
    setattr(process, "find_plugin", place)  # noqa: B010  (a plain assignment is an error to the type checker)
    return process.main(argv[:1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
