"""Which code runs: commit, dirty or not, and a hash over the files of the packages under test."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from pathlib import Path

from alphamoe_profiler.run_records import SourceRevision

PACKAGES = (
    "alphamoe_backend",
    "alphamoe_dashboards",
    "alphamoe_profiler",
    "alphamoe_sanitizer_replays",
    "alphamoe_tracers",
)
_GIT_TIMEOUT_S = 10.0


def package_folder(package: str) -> Path | None:
    """Return the folder that a package is imported from, or null where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def tree_sha256(folders: dict[str, Path]) -> str:
    """Hash the files of packages, the same from a checkout and from a wheel.

    The hash covers one line a file, ``sha256 two-spaces package/relative/path``, sorted by path; byte code is left out.

    Args:
        folders: folder by package name.
    """
    lines = []
    for package, folder in folders.items():
        for path in folder.rglob("*"):
            relative = path.relative_to(folder)
            if path.suffix == ".pyc" or "__pycache__" in relative.parts or not path.is_file():
                continue
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            lines.append((f"{package}/{relative.as_posix()}", digest))
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in sorted(lines)).encode()).hexdigest()


def source_revision() -> SourceRevision:
    """Return the revision of the code under test; commit and dirty are null where it was not run from a checkout."""
    found = ((package, package_folder(package)) for package in PACKAGES)
    folders = {package: folder for package, folder in found if folder is not None}
    commit, dirty = _git_state(folders)
    return SourceRevision(commit=commit, dirty=dirty, tree_sha256=tree_sha256(folders))


def _git_state(folders: dict[str, Path]) -> tuple[str | None, bool | None]:
    here = folders["alphamoe_profiler"]
    # A wheel installed inside somebody's repository is not that repository's code: ask whether the file is tracked.
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(here, "rev-parse", "--verify", "HEAD")
    paths = [str(path) for path in folders.values()]
    changes = _git(here, "status", "--porcelain", "--untracked-files=all", "--", *paths)
    return (commit.strip() if commit else None), (None if changes is None else bool(changes.strip()))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],  # noqa: S607 -- git is found on PATH, as everywhere
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
