"""The command line ``alphamoe-trace``: picks a command, catches once, and keeps tracebacks from users.

Nothing heavy is imported here: ``--help`` must answer in a few times the start-up time of Python itself.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, Protocol, cast

from alphamoe_profiler.printable import printable
from alphamoe_profiler.standard_streams import keep_streams, lost_output
from alphamoe_tracers.errors import AlphaMoEError, UsageError

PROGRAM = "alphamoe-trace"
DEBUG_VARIABLE = "ALPHAMOE_TRACE_DEBUG"
DEFAULT_COMMAND = "trace"

# Name, module, one line of help. A command's module is imported only when it is the one that runs.
COMMANDS: dict[str, tuple[str, str]] = {
    "trace": ("alphamoe_profiler.commands.trace", "record one traced run on all ranks and say what was witnessed"),
    "show": ("alphamoe_profiler.commands.show", "print the report of a recorded run again"),
    "import": ("alphamoe_profiler.commands.import_traces", "bring traces of other tools into a run bundle"),
    "gate": ("alphamoe_profiler.commands.gate", "judge a run, or traces, by a witness policy"),
    "selftest": ("alphamoe_profiler.commands.selftest", "prove on this machine that the gate can fail"),
    "dashboard": ("alphamoe_profiler.commands.dashboard", "write one HTML page of a run's M buckets, or of two runs"),
    "capture": ("alphamoe_profiler.commands.capture", "capture real inputs of a kernel in another program's process"),
    "replay": ("alphamoe_profiler.commands.replay", "launch one capture again: check its output and time it"),
    "sanitize": ("alphamoe_profiler.commands.sanitize", "replay captures under compute-sanitizer and judge them"),
    "doctor": ("alphamoe_profiler.commands.doctor", "say what this machine can do and what is missing"),
}

_EPILOG = f"""\
examples:
  {PROGRAM} --ranks 4 --prompt gsm8k:17      row 17 of the GSM8K test set, five-shot, on four ranks
  {PROGRAM} --prompt "text:Hello" --ranks 2  any text; without a known command the words are those of "trace"
  {PROGRAM} show alphamoe-runs/RUN           the same report again, from the files of the run
  {PROGRAM} sanitize alphamoe-runs/RUN       its captures under compute-sanitizer (record with --capture)
  {PROGRAM} doctor                           before the first run, or when a run was INCONCLUSIVE
  {PROGRAM} trace --help                     all options of a command

exit codes: 0 done, 1 failed or cut short, 2 usage, 3 evidence missing or damaged, or a result that could not be told
"""


class Command(Protocol):
    """What the module of one command offers."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options, description and examples."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code; raise AlphaMoEError for what a user can mend."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises one-line usage errors instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the message.

        Raises:
            UsageError: always.
        """
        raise UsageError(message, f"{self.prog} --help lists the options")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; the process's own when null.

    Returns:
        The exit code, whatever becomes of stderr; 3 where it is 0 and standard output could not be written. Failures
        are told in one line on stderr; with ``ALPHAMOE_TRACE_DEBUG=1`` tracebacks are shown.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    keep_streams()
    try:
        code = _dispatch(words)
        lost = lost_output()
    except AlphaMoEError as error:
        return _fail(error, str(error), error.hint, error.exit_code)
    except KeyboardInterrupt as error:
        return _fail(error, "interrupted", "", 130)
    except BrokenPipeError:
        # The reader of our output (head, less) left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:  # the last line of defence: a bug is told in one line too
        return _unexpected(error)
    if lost is None:
        return code
    hint = "" if code else "exit code 3: the result was not told"
    return _fail(lost, f"could not write standard output: {lost.strerror}", hint, code or 3)


def _dispatch(words: list[str]) -> int:
    if not words:
        sys.stderr.write(_top_help())
        return 2
    if words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_top_help())
        return 0
    if words[0] in ("-V", "--version"):
        from importlib.metadata import PackageNotFoundError, version

        try:
            sys.stdout.write(f"{PROGRAM} {version(PROGRAM)}\n")
        except PackageNotFoundError:
            sys.stdout.write(f"{PROGRAM} (not installed: run from a source folder)\n")
        return 0
    if words[0] in COMMANDS:
        return _run(words[0], words[1:])
    if not words[0].startswith("-"):
        raise _unknown_command(words[0])
    try:
        return _run(DEFAULT_COMMAND, words)
    except UsageError as error:
        behind = next((own for before, own in pairwise(words) if own in COMMANDS and before != "--out"), None)
        if behind is None or any(word.startswith("--prompt") for word in words):
            raise
        # Without a prompt this is no run either: an option stands before the command that was meant.
        others = shlex.join(word for word in words if word != behind)
        hint = f"a command comes first: {PROGRAM} {behind} {others}"
        raise UsageError(str(error), f"{error.hint}; {hint}" if error.hint else hint) from error


def _run(name: str, words: list[str]) -> int:
    module, summary = COMMANDS[name]
    # A module is the object that implements the protocol: mypy cannot see that through import_module.
    command = cast(Command, importlib.import_module(module))
    parser = Parser(
        prog=f"{PROGRAM} {name}",
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.prepare_parser(parser)
    try:
        args = parser.parse_args(words)
    except SystemExit as end:  # only --help ends so: errors raise
        return int(end.code or 0)
    args.argv = [PROGRAM, *([name] if name != DEFAULT_COMMAND else []), *words]
    return command.run(args)


def _top_help() -> str:
    listed = "\n".join(f"  {name:<9} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        f"usage: {PROGRAM} [COMMAND] [OPTIONS]\n\n"
        "Evidence that a fused MoE kernel really ran: on every rank, in every execution mode, at every M.\n"
        f"\ncommands:\n{listed}\n\n"
        "options:\n  -h, --help     this text\n  -V, --version  the version\n\n" + _EPILOG
    )


def _unknown_command(word: str) -> UsageError:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    commands = ", ".join(COMMANDS)
    return UsageError(
        f"unknown command {word!r}", f"did you mean {near[0]!r}?" if near else f"the commands are {commands}"
    )


def _fail(error: BaseException, message: str, hint: str, code: int) -> int:
    if _debugging():
        import traceback

        traceback.print_exception(error)
    line = " ".join(message.split()).rstrip(".")
    told = f"{PROGRAM}: {line}" + (f" ({hint.strip().rstrip('.')})" if hint else "")
    sys.stderr.write(printable(told).replace("\n", " ") + "\n")
    return code


def _unexpected(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno is not None and _is_a_machine_limit(error.errno):
        place = f"{error.filename}: " if error.filename else ""
        few_files = error.errno in (errno.EMFILE, errno.ENFILE)
        hint = "raise the limit: ulimit -n 1024" if few_files else "make room or choose another directory with --out"
        return _fail(error, f"{place}{error.strerror}", hint, 1)
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"{PROGRAM}-", suffix=".traceback", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as stream:
            stream.write(text)
        where = f"the traceback is in {stream.name}"
    except OSError:
        where = f"set {DEBUG_VARIABLE}=1 to see the traceback"
    return _fail(error, f"unexpected {type(error).__name__}: {error}", where, 1)


def _is_a_machine_limit(number: int) -> bool:
    return number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
    )


def _debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
