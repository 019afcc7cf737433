"""The folder of a session's report: its own, empty, and held until the report is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from alphamoe_sanitizer_replays.session.plan import Plan, SessionOptions
from alphamoe_sanitizer_replays.tool.folder_lock import locked_folder
from alphamoe_tracers.errors import UsageError

_BUNDLE_PLACE = Path("reports") / "sanitizer"
_OWN_NAMES = frozenset({"report.json", "junit.xml", "report.md", "controls", "replays", "inputs"})


@contextlib.contextmanager
def report_folder(options: SessionOptions, plan: Plan) -> Iterator[Path]:
    """Make the folder of the report, empty, and hold it; it is removed again where nothing was written into it.

    Raises:
        UsageError: another session writes into it, a report is there and ``--force`` was not given, what is there is
            no report, or a link leads to it out of its run.
    """
    folder = options.out or (plan.run / _BUNDLE_PLACE if plan.run is not None else Path("sanitizer-report"))
    inside_run = [plan.run / _BUNDLE_PLACE.parent] if options.out is None and plan.run is not None else []
    for place in (folder, *inside_run):
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise UsageError(f"{place} is no folder", "a link is none; name another with --out")
    with locked_folder(folder):
        _clear(folder, options.force, plan)
        yield folder


def _clear(folder: Path, force: bool, plan: Plan) -> None:
    found = sorted(folder.iterdir())
    strangers = [entry.name for entry in found if entry.name not in _OWN_NAMES]
    if strangers:
        raise UsageError(f"{folder} holds {strangers[0]}, which is of no report", "name another folder with --out")
    if found and not force:
        raise UsageError(f"{folder} holds a report already", "replace it with --force, or name another with --out")
    inputs = {own.stored.path.resolve() for own in plan.captures}
    if any(path.is_relative_to(folder.resolve()) for path in inputs):
        raise UsageError(f"{folder} holds captures of this session", "name another folder with --out")
    for entry in found:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
