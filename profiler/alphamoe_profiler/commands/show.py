"""``alphamoe-trace show``: print the report of a recorded run again."""

from __future__ import annotations

import argparse
from pathlib import Path

from alphamoe_profiler.commands import claim_targets, write_json
from alphamoe_tracers.errors import AlphaMoEError, UsageError

_EXAMPLES = """\
examples:
  alphamoe-trace show alphamoe-runs/20260131T120000Z-gsm8k-17-1f2e3d
  alphamoe-trace show RUN --json | jq .verdict
  alphamoe-trace show RUN --json report.json
  alphamoe-trace show RUN --launch-shapes

exit codes: 0 printed, whatever the verdict; 2 not a run bundle; 3 damaged beyond reading
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``show``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="directory of a run bundle")
    parser.add_argument(
        "--launch-shapes",
        action="store_true",
        help="print kernels by name and launch shape instead: one name in two configurations is two rows",
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print one JSON document instead, or write it to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    run, target = args.run, args.json
    if run is None and target not in (None, "-") and Path(target).is_dir():
        # "show --json RUN": the option's own value is optional, so it took the only word there was.
        run, target = Path(target), "-"
    if run is None:
        raise UsageError("the following arguments are required: RUN", "name the directory of a recorded run")
    claim_targets({"--json": target}, (run,))
    if args.launch_shapes:
        launch_shapes(run, target)
    else:
        report(run, target)
    return 0


def launch_shapes(path: Path, json_target: str | None) -> None:
    """Print the kernels of a run bundle by name and launch shape; arguments and errors are those of :func:`report`."""
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.launch_shapes import kernels_by_launch_shape
    from alphamoe_profiler.reports.launch_shapes import print_launch_shapes

    table = kernels_by_launch_shape(RunBundle.open(path))
    if json_target is None:
        print_launch_shapes(table)
    else:
        write_json({"launch_shapes": table.to_dict("records")}, json_target)


def report(path: Path, json_target: str | None) -> None:
    """Print the report of a run bundle, or write it as one JSON document.

    Args:
        path: directory of the bundle.
        json_target: null for the terminal, ``-`` for JSON on stdout, else a file.

    Raises:
        UsageError: it is no run bundle, or its files contradict each other.
        EvidenceError: it is damaged beyond reading.
    """
    from alphamoe_profiler.bundle import RunBundle
    from alphamoe_profiler.inspection import inspect_run
    from alphamoe_profiler.reports.json_report import json_document
    from alphamoe_profiler.reports.terminal import print_report

    found = inspect_run(RunBundle.open(path))
    captures = _captures(path)
    if json_target is None:
        print_report(found, captures=captures)
    else:
        document = json_document(found)
        write_json(document | {"captures": captures} if captures else document, json_target)


def _captures(run: Path) -> list[dict[str, object]]:
    """List the captures of a run bundle; what cannot be opened, or only looks like one, has its reason instead."""
    if not (run / "captures").is_dir():
        return []
    from alphamoe_sanitizer_replays.captures.store import look_for_captures, open_capture

    listed: list[dict[str, object]] = []
    found = look_for_captures(run)
    for folder in found.captures:
        row: dict[str, object] = {"path": folder.relative_to(run).as_posix()}
        try:
            own = open_capture(folder).capture
        except AlphaMoEError as error:
            listed.append(row | {"error": str(error)})
            continue
        variant = own.launch.variant if own.launch is not None else None
        facts = {"rank": own.rank, "layer": own.layer, "M": own.M, "variant": variant, "bytes": own.bytes}
        listed.append(row | facts)
    listed += [{"path": own.path.relative_to(run).as_posix(), "error": own.why} for own in found.left_out]
    return listed
