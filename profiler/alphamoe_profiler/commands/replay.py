"""``alphamoe-trace replay``: launch one capture again, check its output and time it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_profiler.commands import check_outside_runs, claim_targets, deliver, write_json
from alphamoe_tracers.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.replays.single import ReplayReport

_TOOLS = ("none", "synccheck", "racecheck", "memcheck", "initcheck")
_EXAMPLES = """\
examples:
  alphamoe-trace replay RUN/captures/rank=0/layer=0-M=1-step=5 --repeats 100
  alphamoe-trace replay CAPTURE --variant t16_c4
  alphamoe-trace replay CAPTURE --source my_kernel.cu --repeats 100     (a copy of the kernel's source, changed)
  alphamoe-trace replay CAPTURE --tool racecheck --out racecheck-logs

The verdict is that of alphamoe-trace sanitize --tool none. Whether the output is that of the capture is told beside it,
also where the verdict is INCONCLUSIVE: on a CPU no kernel is launched, and the output of a reference is compared.
A tool that finds nothing here proves nothing: alphamoe-trace sanitize runs its controls too.

exit codes: 0 PASS (the kernel was launched, and the output is that of the capture), 1 FAIL (the output is another one,
or a tool found something), 2 usage, 3 INCONCLUSIVE
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``replay``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("capture", type=Path, nargs="?", metavar="CAPTURE", help="directory of one capture")
    what = parser.add_argument_group("what is launched")
    what.add_argument("--variant", metavar="V", help="a variant of the kernel instead of the captured one")
    what.add_argument("--plugin", metavar="NAME", help="replay plug-in instead of the one that the capture names")
    what.add_argument("--source", type=Path, metavar="FILE.cu", help="compile this instead of the kernel's own source")
    what.add_argument("--repeats", type=int, default=0, metavar="N", help="launch N times more and time each")
    what.add_argument("--device", default="auto", metavar="D", help="auto (the default), cuda, cuda:N or cpu")
    tools = parser.add_argument_group("tools")
    tools.add_argument("--tool", nargs="+", metavar="TOOL", default=["none"], help=f"{', '.join(_TOOLS)}")
    tools.add_argument("--sanitizer", metavar="PATH", help="the compute-sanitizer to use")
    tools.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each process (120)")
    told = parser.add_argument_group("reports")
    told.add_argument("--out", type=Path, metavar="DIR", help="keep logs, outputs and drawn weights in DIR")
    told.add_argument("--force", action="store_true", help="replace an earlier replay in DIR")
    told.add_argument("--json", nargs="?", const="-", metavar="FILE", help="one JSON document, to stdout or to FILE")


def run(args: argparse.Namespace) -> int:
    """Replay, report, and return the verdict's exit code."""
    for tool in args.tool:
        if tool not in _TOOLS:
            hint = "name the capture before --tool" if Path(tool).exists() else ", ".join(_TOOLS)
            raise UsageError(f"--tool {tool}: there is no such tool", hint)
    if args.capture is None:
        raise UsageError("no capture is named", "name it before the options, which take what follows them")
    if args.repeats < 0 or not args.timeout > 0:
        raise UsageError("--repeats cannot be negative, --timeout must be positive")
    if args.repeats and "none" not in args.tool:
        raise UsageError("--repeats times launches, which a tool would slow down", "leave out --tool, or --repeats")
    if args.device != "auto" and args.device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device {args.device}: no such device", "auto, cuda, cuda:N or cpu")
    check_outside_runs(args.out, "--out")
    claim_targets({"--json": args.json}, (args.capture, args.source, args.sanitizer), args.out)
    from alphamoe_sanitizer_replays.replays.single import replay_capture
    from alphamoe_sanitizer_replays.tool.interrupts import Interrupts

    with Interrupts() as interrupts:
        report = replay_capture(
            _capture(args.capture),
            tools=tuple(dict.fromkeys(args.tool)),
            variant=args.variant,
            source=args.source,
            plugin=args.plugin,
            repeats=args.repeats,
            device=args.device,
            timeout_s=args.timeout,
            sanitizer=args.sanitizer,
            out=args.out,
            force=args.force,
        )
        interrupts.hold()
        outputs: dict[str, Callable[[], object]] = {"standard output": lambda: _tell(report, args.json == "-")}
        if args.json not in (None, "-"):
            outputs[args.json] = lambda: write_json(report, args.json)
        return deliver(outputs, report.exit_code)


def _tell(report: ReplayReport, as_json: bool) -> None:
    if as_json:
        write_json(report, "-")
    else:
        from alphamoe_profiler.printable import printable
        from alphamoe_sanitizer_replays.replays.single import describe

        sys.stdout.write(printable(describe(report)))
    sys.stdout.flush()


def _capture(path: Path) -> Path:
    """Give the one capture that a path stands for.

    Raises:
        UsageError: there is none, or several, or one beside what may be others.
        EvidenceError: what lies here looks like a capture and is none.
    """
    from alphamoe_sanitizer_replays.captures.store import look_for_captures

    captures, left_out, _ = look_for_captures(path)
    if not captures:
        if left_out:
            raise EvidenceError(f"{path}: no capture that can be replayed lies here: {left_out[0]}", "record it again")
        raise UsageError(f"{path}: no capture lies here", "record one: alphamoe-trace --capture layer=0,M=1 ...")
    if len(captures) > 1:
        names = ", ".join(map(str, captures[:3]))
        raise UsageError(
            f"{path} holds {len(captures)} captures, and one is replayed at a time", f"for example {names}"
        )
    if left_out and captures[0] != path:
        raise UsageError(f"{path} may hold more than one capture: {left_out[0]}", f"name the one: {captures[0]}")
    return captures[0]
