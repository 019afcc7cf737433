"""``alphamoe-trace trace``: record one traced run on all ranks and say what was witnessed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_profiler.commands import check_outside_runs, check_targets
from alphamoe_profiler.faults import PHASES
from alphamoe_profiler.printable import printable
from alphamoe_tracers.errors import AlphaMoEError, UsageError

if TYPE_CHECKING:
    from alphamoe_profiler.run_records import RunInfo
    from alphamoe_profiler.supervisor import Target

_EXAMPLES = """\
examples:
  alphamoe-trace --ranks 4 --prompt gsm8k:17
  alphamoe-trace --ranks 2 --prompt gsm8k:0 --prompt gsm8k:1 --max-new-tokens 8
  alphamoe-trace --prompt "text:Write a haiku about kernels" --out runs/haiku
  alphamoe-trace --ranks 4 --prompt gsm8k:17 --moe-runner-backend triton
  alphamoe-trace --ranks 4 --prompt gsm8k:17 --capture layer=0,M=1 --capture layer=last,M=prefill
  alphamoe-trace --ranks 4 --prompt gsm8k:17 --inject-fault fallback:rank=2    (a negative control: FAIL, naming rank 2)

exit codes: 0 the recording is complete, whatever it witnessed; 1 it was cut short; 2 usage
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of a traced run."""
    parser.epilog = _EXAMPLES
    what = parser.add_argument_group("what is served")
    what.add_argument("--ranks", type=_integer, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    what.add_argument(
        "--prompt",
        action="append",
        dest="prompts",
        metavar="SPEC",
        help="gsm8k:ROW (0-based, five-shot), text:WORDS or file:PATH; may be repeated",
    )
    what.add_argument(
        "--prompt-file",
        action="append",
        dest="prompts",
        type=lambda path: f"file:{path}",
        metavar="PATH",
        help="the same as --prompt file:PATH",
    )
    what.add_argument("--max-new-tokens", type=_integer, default=32, metavar="N", help="per prompt (default 32)")
    what.add_argument(
        "--model",
        metavar="PRESET",
        help="tiny or qwen3-next-80b (default: tiny on a CPU, else what the GPU has room for)",
    )
    what.add_argument(
        "--layers", type=_integer, metavar="N", help="decoder layers to build (default 4 of qwen3-next-80b, 2 of tiny)"
    )
    what.add_argument("--seed", type=_integer, default=0, metavar="N", help="of the model's weights (default 0)")
    how = parser.add_argument_group("how it is served")
    how.add_argument(
        "--moe-runner-backend",
        default="flashinfer_alphamoe",
        metavar="NAME",
        help="flashinfer_alphamoe (default) or triton, the stock path",
    )
    how.add_argument(
        "--executions",
        type=_words,
        metavar="A,B",
        help="eager,prefill_graph_replay,decode_graph_replay (default: all on a GPU, eager on a CPU)",
    )
    how.add_argument(
        "--cuda-graph-bs-decode", type=_integers, metavar="N,N", help="batch sizes that get a decode graph"
    )
    how.add_argument(
        "--cuda-graph-bs-prefill", type=_integers, metavar="N,N", help="token counts that get a prefill graph"
    )
    how.add_argument("--device", default="auto", metavar="KIND", help="auto (default), cpu or cuda")
    how.add_argument(
        "--dtype", metavar="NAME", help="bfloat16 or float32 (default: bfloat16 on a GPU, float32 on a CPU)"
    )
    how.add_argument(
        "--inject-fault",
        metavar="KIND:rank=R",
        help="plant a fault, to see it noticed: fallback:rank=2 dispatches the stock path on that rank; kill, "
        f"exception or disk-full strike as in kill:rank=1,phase=decode; phases: {', '.join(PHASES)}",
    )
    how.add_argument(
        "--timeout", type=_seconds, default=1800.0, metavar="S", help="end the run after S seconds (default 1800)"
    )
    record = parser.add_argument_group("what is recorded")
    record.add_argument(
        "--out", type=Path, metavar="DIR", help="run bundle to write (default alphamoe-runs/TIME-PROMPT-ID)"
    )
    record.add_argument("--force", action="store_true", help="replace the run bundle that is there")
    record.add_argument("--no-collector", action="store_true", help="record no GPU witnesses")
    record.add_argument("--no-nvtx", action="store_true", help="push no NVTX ranges")
    record.add_argument("--no-receipts", action="store_true", help="write no receipts")
    record.add_argument(
        "--capture",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="store the inputs and output of chosen eager dispatches, for alphamoe-trace sanitize and replay, as in "
        "layer=0,M=1; keys are layer (a number, last, all), M (a number, decode, prefill, all), rank (0+last, all), "
        "execution (eager, the only one), every (bucket: one for each M, else only the first of each rank and layer, "
        "so layer=0 alone takes one prefill) and purpose (witness by default, warmup, capture); may be repeated",
    )
    record.add_argument(
        "--capture-weights",
        action="store_true",
        help="store expert weights with the captures instead of their hash and seed",
    )
    record.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print one JSON document instead, or write it to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Record the run, print its report, and return 0 when it is complete, 1 when it was cut short."""
    from alphamoe_profiler.progress import TerminalProgress
    from alphamoe_profiler.session import run_session
    from alphamoe_profiler.trace_config import TraceConfig, check_numbers

    if not args.prompts:
        raise UsageError("a run needs a prompt", "for example --prompt gsm8k:17, or --prompt text:Hello")
    files = [own.removeprefix("file:") for own in args.prompts if own.startswith("file:")]
    check_outside_runs(args.out, "--out")
    check_targets({"--json": args.json}, files, args.out)
    target, before = _captures(args.capture, args.capture_weights)
    config = TraceConfig(
        prompts=tuple(args.prompts),
        ranks=args.ranks,
        model=args.model,
        layers=args.layers,
        max_new_tokens=args.max_new_tokens,
        moe_runner_backend=args.moe_runner_backend,
        executions=args.executions,
        cuda_graph_bs_decode=args.cuda_graph_bs_decode,
        cuda_graph_bs_prefill=args.cuda_graph_bs_prefill,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        out=args.out,
        force=args.force,
        inject_fault=args.inject_fault,
        collector=not args.no_collector,
        nvtx=not args.no_nvtx,
        receipts=not args.no_receipts,
        timeout_s=args.timeout,
        argv=tuple(args.argv),
    )
    check_numbers(config)
    with TerminalProgress(config.ranks) as progress:
        result = run_session(config, progress, target, _before(before))
    for note in result.notes:
        _say(note)
    if args.capture:
        from alphamoe_sanitizer_replays.captures.recording import summary

        _say(summary(result.path) or "nothing was captured")
    from alphamoe_profiler.commands.show import report

    try:
        report(result.path, args.json)
    except AlphaMoEError:
        # A run that was cut short may leave too little to report on; why it was cut is the message that counts.
        if result.complete:
            raise
    if not result.complete:
        raise AlphaMoEError(f"the run was cut short: {result.error}", f"what was recorded is in {result.path}")
    return 0


def _before(captures: Callable[[RunInfo, Path], None] | None) -> Callable[[RunInfo, Path], None]:
    """Make what is said and checked before anything is written."""
    from alphamoe_profiler.trace_config import CPU_MODEL

    def begin(run: RunInfo, path: Path) -> None:
        if run.device_kind == "cpu" and run.model != CPU_MODEL:
            _say(f"{run.model} on a CPU is slow: torch computes its experts; --model {CPU_MODEL} is the quick one")
        if captures is not None:
            captures(run, path)

    return begin


def _captures(specs: list[str], store_weights: bool) -> tuple[Target, Callable[[RunInfo, Path], None] | None]:
    """Give what each rank runs and what is checked before; a plain run where nothing is captured."""
    if not specs:
        if store_weights:
            raise UsageError("--capture-weights without --capture", "say what to capture: --capture layer=0,M=1")
        from alphamoe_profiler.rank_main import run_rank

        return run_rank, None
    from alphamoe_sanitizer_replays.captures.recording import RankWithCaptures, announce
    from alphamoe_sanitizer_replays.captures.request import parse_capture

    requests = tuple(dict.fromkeys(parse_capture(spec) for spec in specs))
    return RankWithCaptures(requests, store_weights), announce(requests, store_weights, _say)


def _say(line: str) -> None:
    sys.stderr.write(printable(f"note: {line}") + "\n")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(word) for word in _words(text))
