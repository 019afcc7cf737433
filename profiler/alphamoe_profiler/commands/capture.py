"""``alphamoe-trace capture``: capture real inputs of a callable or torch operator in another program's processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphamoe_profiler.commands import check_outside_runs
from alphamoe_profiler.printable import printable
from alphamoe_tracers.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.hooks.settings import HookSettings

_EPILOG = """\
examples:
  alphamoe-trace capture --callable flashinfer.fused_moe:alphamoe_fp8_block_scale_aligned_moe \\
      --symbol kernel_alpha_moe_w8a8_up_down -- python -m sglang.launch_server --model-path MODEL --tp 4
  alphamoe-trace capture --op vllm::moe_forward --symbol fused_moe_kernel --m-from hidden_states:0 --M 1 --M 8 -- \\
      vllm serve MODEL
  alphamoe-trace capture --callable my_moe:forward --symbol my_kernel --when /tmp/go -- python serve.py
                                                                        (touch /tmp/go after warm-up)

Only eager calls are taken: never one that a CUDA graph is captured from or that torch.compile traces. The same by hand:
docs/sanitizer-captures.md.

exit codes: 0 every target was captured; 3 of one nothing was; 2 usage; the program's own where it failed
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of a capture in another program."""
    parser.epilog = _EPILOG
    parser.usage = "alphamoe-trace capture (--callable M:N | --op NS::NAME)... [OPTIONS] -- PROGRAM [ARGUMENTS]"
    what = parser.add_argument_group("what is captured")
    what.add_argument("--callable", action="append", default=[], metavar="M:N", help="a function by its import path")
    what.add_argument("--op", action="append", default=[], metavar="NS::NAME", help="a torch operator by its name")
    what.add_argument("--first", type=_integer, default=1, metavar="N", help="calls of each target, M and process (1)")
    what.add_argument("--M", type=_integer, action="append", default=[], metavar="N", help="only this M; repeatable")
    what.add_argument(
        "--m-from", default="", metavar="ARG:DIM", help="where M is read (default: first tensor, dimension 0)"
    )
    what.add_argument("--rank", default="all", metavar="R", help="all (default), last, a number, or several as in 0+3")
    what.add_argument("--when", type=Path, metavar="FILE", help="take calls only while FILE exists")
    how = parser.add_argument_group("how it is replayed")
    how.add_argument("--plugin", metavar="NAME", help="replay plug-in of every target (default: callable or torch_op)")
    how.add_argument(
        "--symbol",
        action="append",
        default=[],
        metavar="KERNEL",
        help="base name of a kernel that the call launches and sanitize judges; without one it can never give PASS",
    )
    how.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE", help="to replay an op")
    where = parser.add_argument_group("where it goes")
    where.add_argument(
        "--out", type=Path, default=Path("alphamoe-captures"), metavar="DIR", help="(default %(default)s)"
    )
    where.add_argument("--add", action="store_true", help="add to captures that are in DIR already")
    where.add_argument("--max-bytes", default="16G", metavar="SIZE", help="of one process's captures (default 16G)")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="what is run, as it is")


def run(args: argparse.Namespace) -> int:
    """Run the program with the hook in its environment, then say what was captured."""
    from alphamoe_sanitizer_replays.hooks.report import summary
    from alphamoe_sanitizer_replays.hooks.settings import HookSettings, parse_bytes, parse_m_from, unknown_variables

    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise UsageError("no program to run", "write it after --, as in -- python -m sglang.launch_server ...")
    settings = HookSettings(
        callables=tuple(args.callable),
        ops=tuple(args.op),
        out=args.out.absolute(),
        first=args.first,
        only_m=tuple(args.M),
        m_from=parse_m_from(args.m_from),
        ranks=args.rank,
        plugin=args.plugin,
        symbols=tuple(args.symbol),
        imports=tuple(args.imports),
        when=args.when.absolute() if args.when else None,
        max_bytes=parse_bytes(args.max_bytes),
    )
    _check_plugin(settings)
    check_outside_runs(args.out, "--out")
    if told_of_variables := unknown_variables(os.environ):
        _note(told_of_variables)
    with _folder(settings.out, args.add):
        root = f"{os.getpid()}-capture-{os.urandom(4).hex()}"
        code, interrupted = _run(program, _environment(settings, root))
        told = summary(settings, root)
        for line in told.lines:
            sys.stderr.write(printable(f"{line[:1].upper()}{line[1:]}\n"))
        if told.captured:
            sys.stderr.write(printable(f"{_next_step(settings.out)}\n"))
    # A server is ended by a signal: that is no failure of its own.
    if code and not interrupted:
        sys.stderr.write(f"the program ended with {code}\n")
        return code
    return 3 if told.missing else 0


def _check_plugin(settings: HookSettings) -> None:
    """Look at the replay plug-in now, where it can be imported; say what its captures will lack.

    Raises:
        UsageError: it is here, and is no plug-in, or none for one of the targets.
    """
    from importlib.util import find_spec

    name = settings.plugin
    if name is not None:
        from alphamoe_sanitizer_replays.plugins.generic_call import check_kind
        from alphamoe_sanitizer_replays.plugins.protocol import find_plugin

        module, colon, _ = name.partition(":")
        try:
            here = not colon or find_spec(module) is not None
        except (ImportError, ValueError):
            here = False
        if here:
            plugin = find_plugin(name)
            for target in (*settings.callables, *settings.ops):
                check_kind(plugin, name, target)
        else:
            _note(f"the plug-in {name} cannot be imported here, so it is not checked; a replay needs it in PYTHONPATH")
    if not settings.symbols:
        unless = "" if name is None else f", unless the plug-in {name} names its kernels"
        _note(
            f"no --symbol KERNEL was named, so sanitize can find faults in these captures and never give PASS{unless}"
        )


def _note(text: str) -> None:
    sys.stderr.write(printable(f"note: {text}\n"))


def _environment(settings: HookSettings, root: str) -> dict[str, str]:
    from importlib.util import find_spec

    from alphamoe_sanitizer_replays.hooks.settings import PREFIX, ROOT

    spec = find_spec("alphamoe_sanitizer_replays")
    folders = list(spec.submodule_search_locations or []) if spec else []
    inject = str(Path(folders[0]) / "hooks" / "inject")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    path = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = f"{inject}{os.pathsep}{path}" if path else inject
    return environment | settings.to_environment() | {ROOT: root}


def _strangers(out: Path) -> bool:
    from alphamoe_sanitizer_replays.hooks.report import FOLDER

    return any(entry.name != FOLDER and not entry.name.startswith("rank=") for entry in out.iterdir())


@contextlib.contextmanager
def _folder(out: Path, add: bool) -> Iterator[None]:
    """Make the folder of the captures; where none was made, nothing of it stays.

    Raises:
        UsageError: it cannot be used.
    """
    from alphamoe_sanitizer_replays.captures.store import find_captures
    from alphamoe_sanitizer_replays.hooks.report import FOLDER
    from alphamoe_sanitizer_replays.tool.folder_lock import missing_folders, remove_empty

    made = missing_folders(out)
    _check_out(out, add)
    try:
        yield
    finally:
        if not find_captures(out):
            shutil.rmtree(out / FOLDER, ignore_errors=True)
            remove_empty((*out.glob("rank=*"), *made))


def _next_step(out: Path) -> str:
    """Say what can be done with captures: without a GPU there is no kernel to judge."""
    from alphamoe_sanitizer_replays.captures.store import find_captures, open_capture

    for path in find_captures(out):
        with contextlib.suppress(EvidenceError):  # a damaged one is told by whoever replays it
            if open_capture(path).capture.gpu_name is not None:
                return f"Next: alphamoe-trace sanitize {out}, or replay with one of its captures"
    return (
        "These calls ran without a GPU, so no kernel was launched that sanitize could judge: capture on a GPU for "
        "that. Next: alphamoe-trace replay CAPTURE compares the output of one"
    )


def _check_out(out: Path, add: bool) -> None:
    from alphamoe_sanitizer_replays.captures.store import find_captures

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is no directory")
    # A capture that got nothing leaves the hook's own notes, and perhaps a rank's folder: nothing that is kept.
    if out.is_dir() and not add and (_strangers(out) or find_captures(out)):
        raise UsageError(f"--out {out} is not empty", "name another directory, or add to it with --add")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise UsageError(f"--out {out} cannot be written")


def _run(program: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Run the program to its end and pass signals on; gives its exit code, and whether a signal came."""
    try:
        process = subprocess.Popen(program, env=environment)
    except OSError as error:
        raise UsageError(f"{program[0]} cannot be run: {error.strerror}") from error
    with _passing_on(process) as signals:
        code = process.wait()
    return (128 - code if code < 0 else code), bool(signals)


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(number)
        # Ctrl-C reaches the whole process group by itself; a second one would end many servers halfway.
        if number != signal.SIGINT:
            process.send_signal(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield seen
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _integer(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)
