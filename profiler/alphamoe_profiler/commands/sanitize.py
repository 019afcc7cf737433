"""``alphamoe-trace sanitize``: replay captures under compute-sanitizer, with positive controls, and judge them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_profiler.commands import check_outside_runs, claim_targets, deliver, write_json, write_text
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.reports.records import SanitizeReport
    from alphamoe_sanitizer_replays.session.plan import SessionOptions

_EXAMPLES = """\
examples:
  alphamoe-trace --ranks 4 --prompt gsm8k:17 --capture layer=0,M=1    records a run with captures in it
  alphamoe-trace sanitize RUN                                         every capture, every tool
  alphamoe-trace sanitize RUN --ranks 0 last --layers 0 last --tool synccheck racecheck
  alphamoe-trace sanitize RUN --variants all --source kernel.cu       a changed kernel on the same inputs
  alphamoe-trace sanitize CAPTURE --tool none                         launch, output and times, no tool

The report goes to RUN/reports/sanitizer, or to ./sanitizer-report for captures outside a run: report.json, junit.xml,
report.md, and every tool's log and XML. A clean result counts only when the planted faults of its tool were caught in
the same session. Without a GPU everything is INCONCLUSIVE; --tool none compares the outputs there all the same.

exit codes: 0 PASS, 1 FAIL, 2 usage or CONFIG_ERROR, 3 INCONCLUSIVE
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``sanitize``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "paths", type=Path, nargs="*", metavar="RUN|CAPTURE", help="a run bundle, captures, or folders of captures"
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
    chosen.add_argument("--plugin", metavar="NAME", help="replay plug-in instead of the one that a capture names")
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
    from alphamoe_sanitizer_replays.session.folder import report_folder
    from alphamoe_sanitizer_replays.session.plan import plan_session
    from alphamoe_sanitizer_replays.session.progress import SessionProgress
    from alphamoe_sanitizer_replays.session.run import run_session
    from alphamoe_sanitizer_replays.tool.interrupts import Interrupts

    options = _options(args)
    plan = plan_session(options)
    with report_folder(options, plan) as folder, Interrupts() as interrupts:
        with SessionProgress() as progress:
            report = run_session(options, plan, folder, progress, interrupts)
        interrupts.hold()
        return deliver(_outputs(args, report, folder), report.exit_code)


def _options(args: argparse.Namespace) -> SessionOptions:
    """Read the options.

    Raises:
        UsageError: a number that cannot be, an unknown tool, nothing to replay, a file that is not there or cannot be
            written.
    """
    from alphamoe_sanitizer_replays.replays.job import check_file
    from alphamoe_sanitizer_replays.session.plan import DEFAULT_TIMEOUT_S, SessionOptions, parse_tools

    if not args.paths:
        raise UsageError("no run and no capture is named", "name it before the options, which take what follows them")
    if args.timeout is not None and not 0 < args.timeout <= 86_400:
        raise UsageError(f"--timeout {args.timeout:g} is no time", "seconds, up to a day")
    if args.jobs is not None and not 1 <= args.jobs <= 256:
        raise UsageError(f"--jobs {args.jobs} cannot be", "1 to 256")
    check_file(args.source, "--source")
    check_file(args.allow_list, "--allow-list")
    if args.plugin is not None:
        from alphamoe_sanitizer_replays.plugins.protocol import find_plugin

        find_plugin(args.plugin)
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
        plugin=args.plugin,
        out=args.out,
        force=args.force,
        keep_inputs=args.keep_inputs,
        device=args.device,
    )
    targets = {option: getattr(args, option[2:]) for option in ("--json", "--junit", "--markdown")}
    check_outside_runs(args.out, "--out")
    claim_targets(targets, (*args.paths, args.allow_list, args.source, args.sanitizer), args.out)
    if args.jobs is None:
        return options
    from dataclasses import replace

    return replace(options, jobs=args.jobs)


def _outputs(args: argparse.Namespace, report: SanitizeReport, folder: Path) -> dict[str, Callable[[], object]]:
    """Give every place that the report goes to, the one that tells the verdict at once first."""
    from alphamoe_sanitizer_replays.reports.records import report_document
    from alphamoe_sanitizer_replays.session.run import report_files

    files = report_files(report)
    outputs: dict[str, Callable[[], object]] = {"standard output": lambda: _tell(report, args.json == "-")}
    outputs |= {str(folder / name): partial(_replace, folder / name, content) for name, content in files.items()}
    outputs["standard error"] = lambda: sys.stderr.write(f"Wrote {folder}\n")
    if args.json not in (None, "-"):
        outputs[args.json] = lambda: write_json(report_document(report), args.json)
    for target, name in ((args.junit, "junit.xml"), (args.markdown, "report.md")):
        if target is not None:
            outputs[target] = partial(_write, Path(target), files[name])
    return outputs


def _tell(report: SanitizeReport, as_json: bool) -> None:
    if as_json:
        from alphamoe_sanitizer_replays.reports.records import report_document

        write_json(report_document(report), "-")
    else:
        from alphamoe_sanitizer_replays.reports.terminal import print_report

        print_report(report)
    sys.stdout.flush()


def _replace(path: Path, content: Callable[[], bytes]) -> None:
    from alphamoe_profiler.bundle_files import replacing

    with replacing(path) as stream:
        stream.write(content())


def _write(path: Path, content: Callable[[], bytes]) -> None:
    write_text(path, content())
