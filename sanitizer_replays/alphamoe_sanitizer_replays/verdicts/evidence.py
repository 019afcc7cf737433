"""Whether one run is evidence at all: everything that keeps a log without findings from meaning that there are none."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from alphamoe_sanitizer_replays.results import ReplayResult, Severity, ToolLog, ToolRun, Witness
from alphamoe_sanitizer_replays.tool.blocks import names_target
from alphamoe_tracers.symbols import base_name, demangle

_NEEDS_BARE_ALLOCATIONS = ("memcheck", "initcheck")
_ON_CPU = "no GPU: it ran on the CPU, where no kernel is launched"


def evidence_problems(run: ToolRun, target: tuple[str, ...]) -> list[str]:
    """Say why a run proves nothing, one sentence each; empty for one that can prove absence.

    Args:
        run: one run, under a tool or under none.
        target: base names of the kernels under test; empty where the capture does not know them.
    """
    # The replay's own word comes first, then how it ended: exit code and missing files follow from these.
    told = [*_failure(run.result), *_ending(run), *run.problems]
    if run.tool != "none":
        told += _of_log(run)
    return list(dict.fromkeys([*told, *_of_result(run, target)]))


def _ending(run: ToolRun) -> list[str]:
    if run.timed_out:
        return [f"timed out after {run.timeout_s:g} s and was killed with its children"]
    if run.signal is not None:
        return [f"ended by {run.signal}"]
    if run.exit_code is None:
        return [] if run.problems else ["nothing says how it ended"]
    if run.tool == "none":
        return [] if run.exit_code == 0 else [f"the program ended with exit code {_code(run.exit_code)}"]
    if run.error_exitcode is None:
        return ["the tool was given no exit code for findings"]
    found = _found(run.log)
    if run.exit_code == 0:
        return [f"exit code 0, although the log holds {found} findings"] if found else []
    if run.exit_code == run.error_exitcode:
        return [] if found else [f"exit code {run.exit_code} says that something was found, and the log holds nothing"]
    return [f"the tool ended with exit code {_code(run.exit_code)}"]


def _of_log(run: ToolRun) -> list[str]:
    told = [] if run.tool_version is not None else ["the tool does not say its version"]
    log = run.log
    if log is None:
        return told if run.problems else [*told, "there is no log"]
    if log.tool != run.tool:
        told.append(f"the log was read as one of {log.tool}")
    if not log.banner and not run.problems:
        told.append("the log does not begin with the tool's first line")
    if log.cut:
        told.append("the log is cut")
    if len(log.summaries) != 1:
        told.append(f"{len(log.summaries) or 'no'} summaries in the log, where one process owes one")
    told += [f"the tool says: {notice}" for notice in log.notices]
    told += _counts(run, log)
    return told


def _counts(run: ToolRun, log: ToolLog) -> list[str]:
    """Compare the three counts of the same thing: the summaries', the log's and the XML's."""
    told = []
    if log.not_printed:
        told.append(f"{log.not_printed} findings were not printed")
    if log.summaries:
        severities: list[tuple[Severity, int]] = [("error", log.found_errors)]
        if run.tool == "racecheck":
            severities += [("warning", log.found_warnings), ("info", log.found_infos)]
        for severity, counted in severities:
            shown = sum(finding.shown for finding in log.findings if finding.severity == severity)
            if counted != shown and counted != shown + log.not_printed:
                told.append(f"the summary counts {counted} {severity}s, the log shows {shown}")
        hazards = [summary.hazards for summary in log.summaries if summary.hazards is not None]
        if sum(hazards) > log.found_errors + log.found_warnings + log.found_infos:
            told.append(f"the summary counts {sum(hazards)} hazards, and fewer errors, warnings and infos")
    if run.xml_records is None:
        told += [] if run.problems else ["there are no XML records"]
    elif run.xml_records != log.shown:
        told.append(f"the XML holds {run.xml_records} records, the log shows {log.shown}")
    return told


def _failure(result: ReplayResult | None) -> list[str]:
    if result is None or result.status == "launched":
        return []
    return [f"the replay failed: {result.error or 'it does not say why'}"]


def _of_result(run: ToolRun, target: tuple[str, ...]) -> list[str]:
    result = run.result
    if result is None:
        return ["the replay wrote no result: it died, or it never began"]
    if result.status != "launched":
        return []
    told = [_ON_CPU] if result.device == "cpu" else _of_launch(run, result, target)
    if result.device is None:
        told.insert(0, "the replay does not say on which GPU it ran")
    if run.tool != "none" and result.collector != "off":
        told.append(f"a collector ({result.collector}) ran beside the tool, which makes either of them blind")
    if run.tool in _NEEDS_BARE_ALLOCATIONS and result.caching_allocator:
        told.append(f"torch's caching allocator was on, which hides faults from {run.tool}")
    return told


def _of_launch(run: ToolRun, result: ReplayResult, target: tuple[str, ...]) -> list[str]:
    """Ask that the kernel under test ran, in the variant that was asked for, and that a tool watched it."""
    if result.launches is not None and result.launches < 1:
        return [f"the replay says that it launched {result.launches or 'no'} kernels"]
    wanted = target or result.symbols
    if not wanted:
        seen = sorted({base_name(demangle(name)) for name in run.witness.kernels}) if run.witness is not None else []
        launched = f"; without the tool it launched {', '.join(seen)}" if seen else ""
        return [f"neither capture nor replay names the kernel under test (capture again with --symbol){launched}"]
    told = _of_unknown_launches(run.witness, result, wanted)
    absent = [symbol for symbol in wanted if symbol not in result.symbols]
    if absent:
        told.append(f"the replay did not launch {', '.join(absent)}")
    unwatched = [symbol for symbol in wanted if run.symbols and not any(part in symbol for part in run.symbols)]
    if unwatched:
        told.append(f"the tool was told to watch {', '.join(run.symbols)}, and not {', '.join(unwatched)}")
    if run.variant is not None and result.variant != run.variant:
        told.append(f"the replay launched the variant {result.variant or 'unknown'}, not {run.variant}")
    return told


def _of_unknown_launches(witness: Witness | None, result: ReplayResult, wanted: tuple[str, ...]) -> list[str]:
    """Ask, where the plug-in cannot say what its call launches, that the target was seen to be launched in this run.

    What another process launched without the tool proves nothing of this one: a call may step aside under a slow tool.
    """
    unseen = _unseen(result, wanted)
    if not unseen:
        return []
    named = " and ".join(unseen)
    if witness is None:
        return [f"nothing tells that {named} was launched"]
    if witness.problem:
        return [f"nothing tells that {named} was launched; in a run without the tool: {witness.problem}"]
    absent = [symbol for symbol in unseen if not launches_of(symbol, witness.kernels)]
    seen = ", ".join(sorted({base_name(demangle(name)) for name in witness.kernels}))
    told = [f"a run without the tool did not launch {', '.join(absent)}, it launched {seen}"] if absent else []
    launched = [symbol for symbol in unseen if symbol not in absent]
    # Where Triton's hook tells of a kernel without the tool, it would tell of it under the tool.
    gone = [symbol for symbol in launched if launches_of(symbol, witness.seen)]
    if gone:
        told.append(f"the call launched {', '.join(gone)} without the tool, and not under it")
    unknown = [symbol for symbol in launched if symbol not in gone]
    if unknown:
        told.append(
            f"the call launched {', '.join(unknown)} without the tool, and nothing shows that it did under it "
            "(a plug-in that counts its launches would)"
        )
    return told


def _unseen(result: ReplayResult, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Give the kernels under test of which neither plug-in nor process says that they were launched in this run."""
    if result.launches is not None:
        return ()
    return tuple(symbol for symbol in wanted if not launches_of(symbol, result.seen or {}))


def launches_of(symbol: str, kernels: Mapping[str, int]) -> int:
    """Count the launches of one kernel among those that were seen, by full names."""
    return sum(count for name, count in kernels.items() if names_target(name, (symbol,)))


def _found(log: ToolLog | None) -> int:
    return 0 if log is None else max(log.found_errors + log.found_warnings, log.shown)


def _code(code: int) -> str:
    """Name the signal that a shell or wrapper turned into an exit code."""
    try:
        return f"{code} (128 + {signal.Signals(code - 128).name})" if code > 128 else str(code)
    except ValueError:
        return str(code)
