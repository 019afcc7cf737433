"""The part of the terminal report that lists the dispatches whose inputs a run kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from alphamoe_profiler.printable import printable_line
from alphamoe_profiler.reports.fitting import print_fitting, titled_table

Captured = Mapping[str, object]
"""``path`` below the run, and either ``error`` or ``rank``, ``layer``, ``M``, ``variant`` and ``bytes``."""
_MOST_ROWS = 24
ON_A_CPU = "captured on a CPU: under a tool of sanitize they can only be INCONCLUSIVE, so record them on a GPU for it"


def print_captures(console: Console, captures: Sequence[Captured], device_kind: str | None) -> None:
    """Print one row for each capture, and what those of a CPU cannot show.

    Args:
        console: where to.
        captures: what the run's folder of captures holds.
        device_kind: ``cpu`` or ``cuda``, what the run was recorded on.
    """
    if not captures:
        return
    readable = [own for own in captures if "error" not in own]
    columns = [name for name in ("rank", "layer", "M", "variant") if any(own.get(name) is not None for own in readable)]
    table = titled_table(console, f"Captures: {len(captures)}", *columns, "bytes", "directory")
    for own in readable[:_MOST_ROWS]:
        facts = ["-" if own.get(name) is None else str(own[name]) for name in columns]
        table.add_row(*facts, f"{own['bytes']:,}", Text(printable_line(str(own["path"]))))
    if readable:
        print_fitting(console, table, keys=len(columns))
    if len(readable) > _MOST_ROWS:
        console.print(f"and {len(readable) - _MOST_ROWS} more (--json lists all)")
    for own in captures:
        if "error" in own:
            console.print(Text(printable_line(f"{own['path']}: {own['error']}"), style="yellow"))
    if device_kind == "cpu":
        console.print(Text(ON_A_CPU))
    console.print()
