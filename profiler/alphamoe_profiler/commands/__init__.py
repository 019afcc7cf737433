"""The commands of ``alphamoe-trace``, one module each: ``prepare_parser(parser)`` and ``run(args) -> int``."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from alphamoe_tracers.errors import AlphaMoEError, UsageError

_REPORTS = "reports"
"""The folder of a run that holds what is derived from it, and that no command reads evidence from."""


def claim_targets(
    targets: Mapping[str, str | None], inputs: Iterable[Path | str | None] = (), out: Path | None = None
) -> None:
    """Check where reports go, then remove what earlier commands left there: it must not stand for this one's.

    To be called when the command line is accepted, before work begins.

    Args:
        targets: by option, as :func:`check_target` takes them. The file that GITHUB_STEP_SUMMARY names stays.
        inputs: files and folders that the command reads; null for none.
        out: a folder that the command makes.

    Raises:
        UsageError: one cannot be written or is an input. Nothing was removed.
    """
    check_targets(targets, inputs, out)
    for target in targets.values():
        if target is None or target == "-" or is_step_summary(Path(target)):
            continue
        path = Path(target)
        try:
            if path.is_symlink() or path.is_file():  # and not /dev/null
                path.unlink()
        except OSError as error:
            raise UsageError(f"{target} cannot be replaced: {error.strerror or error}", "name another file") from error


def check_targets(
    targets: Mapping[str, str | None], inputs: Iterable[Path | str | None] = (), out: Path | None = None
) -> None:
    """Check where reports go, and remove nothing; arguments and errors are those of :func:`claim_targets`."""
    read = [Path(own) for own in inputs if own is not None]
    # A capture is read with the files of the run around it.
    around = {parent for own in read for parent in own.absolute().parents if (parent / "run.json").is_file()}
    read += [run / name for run in around for name in ("run.json", "outcome.json", "ranks", "captures")]
    for option, target in targets.items():
        check_target(target, option, out)
        if target is None or target == "-":
            continue
        for own in read:
            if _is_part_of(Path(target), own):
                hint = f"name a file elsewhere, or below {own}/reports" if own.is_dir() else "name another file"
                raise UsageError(f"{option} {target} would replace a part of {own}, which is read", hint)


def check_outside_runs(place: Path | None, option: str) -> None:
    """Refuse to make something within a run bundle, outside ``reports`` in it: it would pass for evidence of the run.

    Args:
        place: a file or folder that the command makes; null for none. The bundle itself is no place within it.
        option: the option that named it.

    Raises:
        UsageError: it lies in one.
    """
    from alphamoe_profiler.bundle_files import is_of_a_run

    if place is None:
        return
    whole = Path(os.path.realpath(place))
    for folder in whole.parents:
        within = whole.relative_to(folder).parts[0] != _REPORTS and os.path.lexists(folder / "run.json")
        if within and is_of_a_run(folder / "run.json"):
            raise UsageError(
                f"{option} {place} lies in the run {folder}", f"name a place elsewhere, or below {folder / _REPORTS}"
            )


def _is_part_of(target: Path, source: Path) -> bool:
    """Say whether a target is a file to be read, or lies in a folder that is, outside ``reports`` in it."""
    whole, own = target.resolve(), source.resolve()
    if not own.is_dir():
        return whole == own or _same(target, source)
    if whole.is_relative_to(own):
        return _REPORTS not in whole.relative_to(own).parts
    # Links of the folder may lead to it.
    return target.is_file() and any(
        _same(target, path) for path in own.rglob("*") if _REPORTS not in path.relative_to(own).parts
    )


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def is_step_summary(path: Path) -> bool:
    """Say whether GITHUB_STEP_SUMMARY names this file, however it is spelt: reports are added to it."""
    named = os.environ.get("GITHUB_STEP_SUMMARY")
    return named is not None and named != "" and (path.resolve() == Path(named).resolve() or _same(path, Path(named)))


def write_text(path: Path, content: bytes) -> None:
    """Write a report to a file, which is replaced as a whole or not at all; the step summary is added to.

    Raises:
        OSError: the file cannot be written.
    """
    from alphamoe_profiler.bundle_files import replacing

    with path.open("ab") if is_step_summary(path) else replacing(path) as stream:
        stream.write(content)
    sys.stderr.write(f"Wrote {path}\n")


def check_target(target: str | None, option: str = "--json", out: Path | None = None) -> None:
    """Refuse a report's target that cannot be written, before the work that it would hold is done.

    Args:
        target: null, ``-`` or a path in a folder that is there, or that is made on the way to ``out``.
        option: the option that named it.
        out: a folder that the command makes.

    Raises:
        UsageError: it is a directory, or its folder is not there or cannot be written.
    """
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{option} {target} is a directory", "name a file, or none for standard output")
    folder = path.absolute().parent
    made = out.absolute().parents if out is not None else ()
    while folder in made and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{option} {target}: there is no folder {folder}", "make it first, or name another file")
    try:
        # Permission bits do not tell of a disk that is read-only, or of /proc.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        told = f"{option} {target}: cannot write in {folder}: {error.strerror or error}"
        raise UsageError(told, "name another file, or none for standard output") from error


def deliver(outputs: Mapping[str, Callable[[], object]], exit_code: int) -> int:
    """Bring a judged report to each of its places, whatever becomes of the others, and give the exit code.

    A full disk must not hide a verdict, or pass for one: an exit code of 0 becomes 3 where a place was not reached.

    Args:
        outputs: by place, in order; the verdict's own words first.
        exit_code: the verdict's.

    Raises:
        BrokenPipeError: the reader of standard output left; every other place was reached first.
    """
    failures, left = [], None
    for place, write in outputs.items():
        try:
            write()
        except BrokenPipeError as error:
            left = error
        except (OSError, AlphaMoEError) as error:
            failures.append(f"{place}: {(isinstance(error, OSError) and error.strerror) or error}")
    with contextlib.suppress(OSError):
        for failure in failures:
            sys.stderr.write(f"alphamoe-trace: could not write {failure}\n")
        if failures and exit_code == 0:
            sys.stderr.write("alphamoe-trace: exit code 3, because a PASS without its report proves nothing\n")
    if left is not None:
        raise left
    return 3 if failures and exit_code == 0 else exit_code


def write_json(document: Any, target: str) -> None:
    """Write one JSON document to a file, or to stdout when the target is ``-``.

    Args:
        document: structs or plain data.
        target: ``-`` (UTF-8, whatever the locale) or a path, which is replaced as a whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from alphamoe_profiler.bundle_files import encode_json, replacing

    content = encode_json(document, "the report", indent=2)
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        return
    with replacing(Path(target)) as stream:
        stream.write(content)
    sys.stderr.write(f"Wrote {target}\n")
