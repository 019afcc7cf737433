"""Names of a symbols table against each other: every rule is asked of one form, so no form may say another name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from alphamoe_tracers.columns import texts
from alphamoe_tracers.records import TABLES
from alphamoe_tracers.symbols import base_name, demangle

if TYPE_CHECKING:
    from alphamoe_profiler.tables import TableRead


def with_true_bases(read: TableRead, shown: str) -> TableRead:
    """Return a symbols table whose base names are those of its full names, with a problem for each that was not.

    A mangled name must have the same base name too, where it can be demangled on this machine.

    Args:
        read: rows of the symbols table.
        shown: how messages call it.
    """
    table = read.table
    mangled, full, base = (texts(table, name).tolist() for name in ("mangled", "full", "base"))
    true = [base_name(name) for name in full]
    problems = _told(shown, [(own, name) for own, name, right in zip(base, full, true, strict=True) if own != right])
    other = [(own, name) for own, name, right in zip(mangled, full, true, strict=True) if not _same(own, name, right)]
    problems += _told(shown, other)
    if not problems:
        return read
    at = table.column_names.index("base")
    field = TABLES["symbols"].field("base")
    whole = table.set_column(at, field, pa.array(true, pa.string()).cast(field.type))
    return replace(read, table=whole, problems=(*read.problems, *problems))


def _same(mangled: str, full: str, base: str) -> bool:
    if mangled == full:
        return True
    plain = demangle(mangled)
    cannot_tell = plain == mangled and mangled.startswith("_Z")
    return cannot_tell or base_name(plain) == base


def _told(shown: str, wrong: list[tuple[str, str]]) -> list[str]:
    if not wrong:
        return []
    own, full = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return [f"{shown}: the names of one symbol contradict each other: {own[:80]!r} against {full[:80]!r}{more}"]
