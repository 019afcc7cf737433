"""Names of kernels, paths and messages come from files of others: nothing in them may steer the reader's terminal.

No rich at the top: the command line tells its one-line errors through here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls (escape sequences), formats (text that runs backwards, zero widths), surrogates, odd line breaks."""


def printable(text: str) -> str:
    """Return text with everything that steers a terminal shown as an escape; line breaks stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(letter) for letter in text)


def printable_line(text: str) -> str:
    """Return text as :func:`printable` does, on one line: a line break in a name must not draw a line of a report."""
    return printable(text).replace("\n", "\\n")


def _shown(letter: str) -> str:
    if letter == "\n" or unicodedata.category(letter) not in _STEERING:
        return letter
    return letter.encode("unicode_escape").decode()


def printable_console(**settings: Any) -> Console:
    """Return a rich console that writes its own styles, and of what it is given only :func:`printable` text."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return PrintableConsole(**settings)


def print_drawn(draw: Callable[[Console], None], file: TextIO | None = None, width: int | None = None) -> None:
    """Print what ``draw`` puts on a console; without a terminal it is plain text without trailing spaces.

    Args:
        draw: given the console once.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    console = printable_console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if console.is_terminal:
        draw(console)
        return
    with console.capture() as captured:
        draw(console)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1]))
