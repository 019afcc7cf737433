"""The folder of a session's report: its own, empty, and held until the report is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from alphamoe_sanitizer_replays.session.plan import Plan, SessionOptions
from alphamoe_sanitizer_replays.tool.folder_lock import clear_folder, locked_folder
from alphamoe_tracers.errors import UsageError

_BUNDLE_PLACE = Path("reports") / "sanitizer"
_OWN_NAMES = frozenset({"report.json", "junit.xml", "report.md", "controls", "replays", "inputs"})


@contextlib.contextmanager
def report_folder(options: SessionOptions, plan: Plan) -> Iterator[Path]:
    """Make the folder of the report, empty, and hold it; it is removed again where nothing was written into it.

    Raises:
        UsageError: another session writes into it, it lies within a report, a report is there and ``--force`` was not
            given, what is there is no report, or a link leads to it out of its run.
    """
    folder = options.out or (plan.run / _BUNDLE_PLACE if plan.run is not None else Path("sanitizer-report"))
    inside_run = [plan.run / _BUNDLE_PLACE.parent] if options.out is None and plan.run is not None else []
    for place in (folder, *inside_run):
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise UsageError(f"{place} is no folder", "a link is none; name another with --out")
    whole = folder.resolve()
    for parent in whole.parents:
        if whole.relative_to(parent).parts[0] in _OWN_NAMES and (parent / "report.json").is_file():
            raise UsageError(f"{folder} lies in the report {parent}", "name another folder with --out")
    with locked_folder(folder):
        clear_folder(folder, _OWN_NAMES.__contains__, options.force, (*options.paths, *plan.found), "report")
        yield folder
