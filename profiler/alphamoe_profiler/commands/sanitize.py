"""``alphamoe-trace sanitize``: replay captures under compute-sanitizer, with positive controls, and judge them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from rich.status import Status

    from alphamoe_sanitizer_replays.reports.records import SanitizeReport
    from alphamoe_sanitizer_replays.session.plan import Plan, SessionOptions

_EXAMPLES = """\
examples:
  alphamoe-trace --ranks 4 --prompt gsm8k:17 --capture layer=0,M=1    records a run with captures in it
  alphamoe-trace sanitize RUN                                         every capture, every tool
  alphamoe-trace sanitize RUN --ranks 0 last --layers 0 last --tool synccheck racecheck
  alphamoe-trace sanitize RUN --variants all --source kernel.cu       a changed kernel on the same inputs
  alphamoe-trace sanitize CAPTURE --tool none                         the output check and times, no tool

The report goes to RUN/reports/sanitizer, or to ./sanitizer-report for captures outside a run: report.json, junit.xml,
report.md, and every tool's log and XML. A clean result counts only when the planted faults of its tool were caught in
the same session.

exit codes: 0 PASS, 1 FAIL, 2 usage or CONFIG_ERROR, 3 INCONCLUSIVE
"""
_BUNDLE_PLACE = Path("reports") / "sanitizer"
_OWN_NAMES = frozenset({"report.json", "junit.xml", "report.md", "controls", "replays", "inputs"})


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``sanitize``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN|CAPTURE", help="a run bundle, captures, or folders of captures"
    )
    chosen = parser.add_argument_group("what is replayed")
    chosen.add_argument(
        "--tool",
        nargs="+",
        default=["all"],
        metavar="TOOL",
        help="synccheck, racecheck, memcheck, initcheck; all (default) or none",
    )
    chosen.add_argument("--ranks", nargs="+", default=["all"], metavar="N", help="numbers, last or all (default)")
    chosen.add_argument("--layers", nargs="+", default=["all"], metavar="N", help="numbers, last or all (default)")
    chosen.add_argument("--M", nargs="+", default=["all"], metavar="N", help="numbers, last or all (default)")
    chosen.add_argument(
        "--variants",
        nargs="+",
        default=["rule"],
        metavar="V",
        help="rule (default: the variant that was captured), all, or names",
    )
    chosen.add_argument("--source", type=Path, metavar="FILE.cu", help="compile this instead of the kernel's source")
    how = parser.add_argument_group("how")
    how.add_argument("--sanitizer", metavar="PATH", help="the compute-sanitizer to use")
    how.add_argument("--timeout", type=float, metavar="S", help="seconds for one process (default 300)")
    how.add_argument("--jobs", type=int, metavar="N", help="processes at a time (default: half the CPUs, 1 to 8)")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    how.add_argument("--allow-list", type=Path, metavar="FILE", help="TOML of findings that are known and why")
    told = parser.add_argument_group("reports")
    told.add_argument("--out", type=Path, metavar="DIR", help="folder of the report")
    told.add_argument("--force", action="store_true", help="replace a report that is there already")
    told.add_argument("--keep-inputs", action="store_true", help="keep inputs and outputs of the replays in it")
    told.add_argument("--json", nargs="?", const="-", metavar="FILE", help="one JSON document, to stdout or to FILE")
    told.add_argument("--junit", metavar="FILE", help="JUnit XML: a suite a rank, a case a capture and tool")
    told.add_argument("--markdown", metavar="FILE", help="markdown; added to the file that GITHUB_STEP_SUMMARY names")


def run(args: argparse.Namespace) -> int:
    """Run a session, report, and return the verdict's exit code."""
    from alphamoe_profiler.commands import check_json_target
    from alphamoe_sanitizer_replays.session.plan import plan_session
    from alphamoe_sanitizer_replays.session.run import run_session, write_reports

    for target in (args.json, args.junit, args.markdown):
        check_json_target(target)
    options = _options(args)
    plan = plan_session(options)
    folder = report_folder(options, plan)
    progress = _Progress()
    try:
        with progress:
            report = run_session(options, plan, folder, progress)
        write_reports(report, folder)
    except BaseException:
        # A session that could not begin leaves no folder that the next one would stumble over.
        if not any(folder.iterdir()):
            folder.rmdir()
        raise
    if args.json != "-":
        from alphamoe_sanitizer_replays.reports.terminal import print_report

        print_report(report)
    _write(args, report)
    sys.stderr.write(f"Wrote {folder}\n")
    return report.exit_code


def _options(args: argparse.Namespace) -> SessionOptions:
    """Read the options.

    Raises:
        UsageError: a number that cannot be, an unknown tool, a source or allow-list that is not there.
    """
    from alphamoe_sanitizer_replays.session.plan import DEFAULT_TIMEOUT_S, SessionOptions, parse_tools

    if args.timeout is not None and not 0 < args.timeout <= 86_400:
        raise UsageError(f"--timeout {args.timeout:g} is no time", "seconds, up to a day")
    if args.jobs is not None and not 1 <= args.jobs <= 256:
        raise UsageError(f"--jobs {args.jobs} cannot be", "1 to 256")
    for option, path in (("--source", args.source), ("--allow-list", args.allow_list)):
        if path is not None and not path.is_file():
            raise UsageError(f"{option} {path}: there is no such file")
    options = SessionOptions(
        paths=tuple(args.paths),
        tools=parse_tools(args.tool),
        ranks=tuple(args.ranks),
        layers=tuple(args.layers),
        Ms=tuple(args.M),
        variants=tuple(args.variants),
        timeout_s=DEFAULT_TIMEOUT_S if args.timeout is None else args.timeout,
        sanitizer=args.sanitizer,
        allow_list=args.allow_list,
        source=args.source,
        out=args.out,
        force=args.force,
        keep_inputs=args.keep_inputs,
        device=args.device,
    )
    if args.jobs is None:
        return options
    from dataclasses import replace

    return replace(options, jobs=args.jobs)


def report_folder(options: SessionOptions, plan: Plan) -> Path:
    """Make the folder of the report, empty.

    Raises:
        UsageError: one is there and ``--force`` was not given, or what is there is no report.
    """
    folder = options.out or (plan.run / _BUNDLE_PLACE if plan.run is not None else Path("sanitizer-report"))
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} is no folder", "name another with --out")
    if folder.is_dir() and any(folder.iterdir()):
        strangers = sorted(entry.name for entry in folder.iterdir() if entry.name not in _OWN_NAMES)
        if strangers:
            raise UsageError(f"{folder} holds {strangers[0]}, which is of no report", "name another folder with --out")
        if not options.force:
            raise UsageError(f"{folder} holds a report already", "replace it with --force, or name another with --out")
        inputs = {own.stored.path.resolve() for own in plan.captures}
        if any(path.is_relative_to(folder.resolve()) for path in inputs):
            raise UsageError(f"{folder} holds captures of this session", "name another folder with --out")
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(args: argparse.Namespace, report: SanitizeReport) -> None:
    from alphamoe_profiler.bundle_files import replacing

    if args.json is not None:
        from alphamoe_profiler.commands import write_json
        from alphamoe_sanitizer_replays.reports.records import report_document

        write_json(report_document(report), args.json)
    if args.junit is not None:
        from alphamoe_sanitizer_replays.reports.junit import junit_xml

        with replacing(Path(args.junit)) as stream:
            stream.write(junit_xml(report).encode("utf-8", errors="backslashreplace"))
        sys.stderr.write(f"Wrote {args.junit}\n")
    if args.markdown is not None:
        from alphamoe_sanitizer_replays.reports.markdown import markdown

        text = markdown(report)
        if args.markdown == os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(args.markdown).open("a", encoding="utf-8", errors="backslashreplace") as summary:
                summary.write(text)
        else:
            with replacing(Path(args.markdown)) as stream:
                stream.write(text.encode("utf-8", errors="backslashreplace"))
        sys.stderr.write(f"Wrote {args.markdown}\n")


class _Progress:
    """One line on stderr that says what was done last; nothing at all where stderr is not a terminal."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from alphamoe_profiler.printable import printable_console

            self._status = printable_console(file=sys.stderr, markup=False).status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, last: str, done: int, total: int) -> None:
        """Say what was done last, and how much of how much."""
        if self._status is not None:
            self._status.update(f"{done} of {total}: {last}")
