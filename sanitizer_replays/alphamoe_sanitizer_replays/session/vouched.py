"""Captures that lie in a run bundle are those of its run and rank, whole and unchanged, or they prove nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_sanitizer_replays.captures.store import looks_like_run
from alphamoe_tracers.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle


def bundle_of(path: Path) -> Path | None:
    """Give the run bundle that a path is, or whose folder of captures it lies in, however deep."""
    path = path.absolute()
    for folder in (path, *path.parents):
        if looks_like_run(folder) and path.relative_to(folder).parts[:1] in ((), ("captures",)):
            return folder
    return None


def place_within(path: Path, root: Path) -> Path | None:
    """Give a path relative to a bundle that it lies in, or that a link leads it into; null where it does not."""
    if path.resolve().is_relative_to(root.resolve()):
        return path.resolve().relative_to(root.resolve())
    return path.absolute().relative_to(root.absolute()) if path.absolute().is_relative_to(root.absolute()) else None


def open_bundle(path: Path, captures: Sequence[Path]) -> RunBundle:
    """Open a run bundle whose files agree with each other.

    Args:
        path: the bundle.
        captures: folders of captures found in it, relative to it.

    Raises:
        UsageError: its files contradict each other, or a capture is reached through a link out of it.
        EvidenceError: run.json is gone or damaged.
    """
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.bundle_check import contradictions
    from alphamoe_profiler.bundle_files import inside

    if not (path / "run.json").is_file():
        raise EvidenceError(f"{path / 'run.json'}: gone, or no plain file", "was the run cut short?")
    bundle = RunBundle.open(path)
    for folder in captures:
        inside(path, (folder / "capture.json").as_posix())
    found = contradictions(bundle)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UsageError(f"{path}: {found[0]}{more}", "its parts are not of one run; nothing of it is judged")
    return bundle


def unproven_captures(bundle: RunBundle, ranks: Iterable[int]) -> list[str]:
    """Say which captures of some ranks are gone, changed, added, or vouched for by nothing.

    What else is missing of the run is no matter here: a capture needs its rank's file and its own hashes.
    """
    from alphamoe_profiler.bundle_check import capture_problems

    return [problem for rank in ranks for problem in capture_problems(bundle, rank)]
