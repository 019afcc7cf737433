"""``alphamoe-trace gate``: judge a run, or traces of other tools, by a witness policy."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError

if TYPE_CHECKING:
    from alphamoe_profiler.gate_records import GateReport
    from alphamoe_profiler.policy import PlacedPolicy

_EXAMPLES = """\
examples:
  alphamoe-trace gate RUN --require-backend flashinfer_alphamoe
  alphamoe-trace gate RUN --policy witness.toml --junit gate.xml --markdown "$GITHUB_STEP_SUMMARY"
  alphamoe-trace gate RUN --policy pyproject.toml --expect-commit "$(git rev-parse HEAD)"
  alphamoe-trace gate traces/ --ranks 8 --require-backend triton        (traces of other tools, imported first)

Without a policy the run is judged for the MoE backend that it was recorded with. docs/gate.md describes policies.

exit codes: 0 PASS, 1 FAIL, 2 usage or CONFIG_ERROR, 3 INCONCLUSIVE
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gate``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN|TRACE", help="directory of a run bundle, or traces to import first"
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--policy", type=Path, action="append", default=[], metavar="FILE", help="a TOML policy")
    asked.add_argument("--require-backend", metavar="NAME", help="the built-in policy of a MoE backend")
    asked.add_argument("--expect-commit", metavar="C", help="the commit that the run must have been recorded at")
    asked.add_argument("--expect-tree", metavar="H", help="the tree hash in run.json that the run must have")
    traces = parser.add_argument_group("traces of other tools")
    traces.add_argument("--ranks", type=int, metavar="N", help="world size of the recorded run")
    traces.add_argument("--map", action="append", default=[], metavar="FILE=RANK", help="rank of a file")
    told = parser.add_argument_group("reports")
    told.add_argument("--json", nargs="?", const="-", metavar="FILE", help="one JSON document, to stdout or to FILE")
    told.add_argument("--junit", metavar="FILE", help="JUnit XML: a suite a rank, a case a rule")
    told.add_argument("--markdown", metavar="FILE", help="markdown; added to the file that GITHUB_STEP_SUMMARY names")


def run(args: argparse.Namespace) -> int:
    """Judge, report, and return the verdict's exit code."""
    from alphamoe_profiler.commands import claim_targets

    targets = {option: getattr(args, option[2:]) for option in ("--json", "--junit", "--markdown")}
    claim_targets(targets, (*args.paths, *args.policy))
    policies: tuple[str, ...] = tuple(str(path) for path in args.policy)
    try:
        report = _report(args)
    except AlphaMoEError as error:
        # A gate that could not judge must not leave the reports of an earlier one behind, or none.
        from alphamoe_profiler.gate_records import unreadable
        from alphamoe_profiler.verdicts import Verdict

        verdict = Verdict.INCONCLUSIVE if isinstance(error, EvidenceError) else Verdict.CONFIG_ERROR
        target = ", ".join(str(path) for path in args.paths)
        _write(args, unreadable(target, policies, verdict, str(error), error.hint))
        _annotate_error(error, args)
        if verdict.exit_code == error.exit_code:
            raise
        raise UsageError(str(error), error.hint) from error
    if args.json != "-":
        from alphamoe_profiler.reports.gate_terminal import print_gate

        print_gate(report)
    _write(args, report)
    from alphamoe_profiler.reports.annotations import error_lines, on_github

    if on_github():
        stream = sys.stderr if args.json == "-" else sys.stdout
        stream.write("".join(f"{line}\n" for line in error_lines(report)))
    return report.exit_code


def _report(args: argparse.Namespace) -> GateReport:
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.gate import Expected, evaluate

    for option, value, least in (("--expect-commit", args.expect_commit, 7), ("--expect-tree", args.expect_tree, 64)):
        # An empty variable of a workflow must not read as "stale".
        if value is not None and re.fullmatch(rf"[0-9a-fA-F]{{{least},64}}", value) is None:
            raise UsageError(
                f"{option} {value!r} is no hash of at least {least} digits", "for example git rev-parse HEAD"
            )
    expected = Expected(args.expect_commit, args.expect_tree)
    if len(args.paths) == 1 and (args.paths[0] / "run.json").is_file():
        if args.ranks is not None or args.map:
            raise UsageError("--ranks and --map are of traces, and this is a run bundle", "leave them out")
        bundle = RunBundle.open(args.paths[0])
        return evaluate(bundle, _policies(args, bundle.run.moe_runner_backend), expected)
    if any((path / "run.json").is_file() for path in args.paths):
        raise UsageError("a gate judges one run bundle at a time", "name one, or only traces")
    missing = next((path for path in args.paths if not path.exists()), None)
    if missing is not None:
        raise UsageError(f"{missing}: there is no such file or directory", "name a run bundle or traces")
    policies = _policies(args, None)
    if args.ranks is None:
        raise UsageError(
            f"{args.paths[0]}: no run.json, so this is no run bundle", "for traces state the world size with --ranks N"
        )
    from alphamoe_profiler.importing import ImportConfig, run_import

    with tempfile.TemporaryDirectory(prefix="alphamoe-trace-gate-") as folder:
        out = Path(folder) / "run"
        config = ImportConfig(
            paths=tuple(args.paths), ranks=args.ranks, out=out, mapping=tuple(args.map), argv=tuple(args.argv)
        )
        imported = run_import(config, lambda plan: lambda index, done, size: None)
        report = evaluate(RunBundle.open(out), policies, expected)
    from dataclasses import replace

    notes = tuple(dict.fromkeys((*imported.notes, *report.notes)))
    return replace(report, run=", ".join(str(path) for path in args.paths), notes=notes)


def _policies(args: argparse.Namespace, recorded_for: str | None) -> list[PlacedPolicy]:
    from alphamoe_profiler.policy_source import builtin_names, builtin_policy, load_policy

    found = [load_policy(path) for path in args.policy]
    backend = args.require_backend or (recorded_for if not found else None)
    if backend is not None:
        found.append(builtin_policy(backend))
    if not found:
        raise UsageError(
            "nothing is asked: no --policy and no --require-backend", f"backends: {', '.join(builtin_names())}"
        )
    return found


def _write(args: argparse.Namespace, report: GateReport) -> None:
    from alphamoe_profiler.commands import write_json, write_text

    if args.json is not None:
        from alphamoe_profiler.reports.gate_json import gate_document

        write_json(gate_document(report), args.json)
    if args.junit is not None:
        from alphamoe_profiler.reports.junit import junit_xml

        write_text(Path(args.junit), _encoded(junit_xml(report)))
    if args.markdown is not None:
        from alphamoe_profiler.reports.markdown import markdown

        write_text(Path(args.markdown), _encoded(markdown(report)))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="backslashreplace")


def _annotate_error(error: AlphaMoEError, args: argparse.Namespace) -> None:
    from alphamoe_profiler.reports.annotations import error_line, on_github

    if on_github():
        line = getattr(error, "line", None)
        path = str(args.policy[0]) if line is not None and args.policy else None
        sys.stderr.write(error_line(str(error), path, line, "not judged") + "\n")
