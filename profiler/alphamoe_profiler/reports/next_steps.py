"""The last lines of a report: what to type next, never broken over lines, as this program was called."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from alphamoe_profiler.inspection import PROGRAM


def print_next(console: Console, *commands: str) -> None:
    """Print the block; commands begin with the program's own name."""
    for command in commands:
        console.print(Text.assemble(("next: ", "dim"), _as_typed(command)), soft_wrap=True)


def _as_typed(command: str) -> str:
    """Name the program as it was named just now where its bare name would not be found (a .venv not activated)."""
    program = sys.argv[0]
    if command.split(" ", 1)[0] != PROGRAM or Path(program).name != PROGRAM or shutil.which(PROGRAM):
        return command
    return shlex.quote(program) + command.removeprefix(PROGRAM)
