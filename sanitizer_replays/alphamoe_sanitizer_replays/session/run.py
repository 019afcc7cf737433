"""A sanitize session: controls first, then every (capture, variant, tool) in a process of its own, then one report.

Nothing is PASS because nothing was seen: without a tool, a GPU or a caught control the report is INCONCLUSIVE and says
so. Ctrl-C ends what runs and reports what there is.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from alphamoe_profiler.run_identity import utc_now
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport, many, overall
from alphamoe_sanitizer_replays.reports.scope import with_scope
from alphamoe_sanitizer_replays.results import ControlReport
from alphamoe_sanitizer_replays.session.entries import entry_of, open_entry
from alphamoe_sanitizer_replays.session.plan import Plan, SessionOptions
from alphamoe_sanitizer_replays.session.progress import Told, nothing_told
from alphamoe_sanitizer_replays.session.work import Made, SessionWork, of_one_build
from alphamoe_sanitizer_replays.tool.interrupts import Interrupts
from alphamoe_sanitizer_replays.tool.sanitizer import ToolPath, find_tool
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowEntry, AllowList, load_allow_list
from alphamoe_tracers.errors import EvidenceError


def run_session(
    options: SessionOptions,
    plan: Plan,
    folder: Path,
    told: Told = nothing_told,
    interrupts: Interrupts | None = None,
) -> SanitizeReport:
    """Run a session into a folder that exists and is its own.

    Args:
        options: what was asked.
        plan: the captures.
        folder: for logs, XML and results; paths in the report are relative to it.
        told: progress.
        interrupts: what stops it; held from the moment that all is done, so that the report can be written.

    Returns:
        The report. It is complete in the sense that every replay that was asked for has an entry.

    Raises:
        UsageError: the named tool is not there, or the allow-list is malformed or out of date.
        OSError: the folder cannot be written.
    """
    began_s = time.monotonic()
    today = datetime.date.today()
    allow = load_allow_list(options.allow_list, today)
    device, device_name, trouble = choose_device(options.device, bool(options.tools))
    tool_path: ToolPath | None = None
    if options.tools:
        try:
            tool_path = find_tool(options.sanitizer)
        except EvidenceError as error:
            trouble = "; ".join(filter(None, (trouble, f"{error}: {error.hint}")))
    if trouble and device == "cpu" and plan.captures and all(own.facts.gpu_name is None for own in plan.captures):
        trouble += "; the captures name no GPU either: record them on one"
    work = SessionWork(options, plan, folder, device, tool_path, told)
    if not trouble:
        work.run(interrupts or Interrupts())
    made_runs = of_one_build(work.made)
    if tool_path is not None and made_runs and (changed := tool_path.changed()):
        made_runs = [own.with_problem(changed) for own in made_runs]
    judged = [_judged(made, work.controls, allow, today, options) for made in made_runs]
    reason = trouble or ("interrupted before every replay was made" if work.interrupted else "")
    entries = {(entry.capture, entry.variant, entry.tool): entry for entry in (*(e for e, _ in judged), *work.failed)}
    ordered = tuple(
        entries.get(wanted.key) or open_entry(*wanted, reason or "it was not run") for wanted in work.wanted
    )
    work.remove_inputs(ordered)
    verdict, why = overall(ordered, len(work.wanted), trouble or _of_plan(plan) or reason)
    told_of_entries = allow.notes(
        [item for _, used in judged for item in used],
        today,
        [finding for entry in ordered for finding in (*entry.findings, *entry.other_findings)],
        tool_path.version if tool_path is not None else None,
    )
    report = SanitizeReport(
        verdict=verdict,
        reason=why,
        run_id=plan.run_id,
        targets=tuple(str(path) for path in options.paths),
        device=_device_told(work) or device_name,
        tool_path=str(tool_path.path) if tool_path is not None else None,
        tool_version=tool_path.version if tool_path is not None else None,
        tools=options.tools or ("none",),
        controls=work.controls,
        captures=tuple(own.facts for own in plan.captures),
        entries=ordered,
        source=str(options.source) if options.source is not None else None,
        allow_list=str(options.allow_list) if options.allow_list is not None else None,
        notes=(*plan.damaged, *plan.unproven, *plan.notes, *told_of_entries),
        interrupted=work.interrupted,
        controls_wall_s=work.controls_wall_s,
        wall_s=time.monotonic() - began_s,
        created=utc_now(),
    )
    return with_scope(report)


def _judged(
    made: Made, controls: tuple[ControlReport, ...], allow: AllowList, today: datetime.date, options: SessionOptions
) -> tuple[ReplayEntry, tuple[AllowEntry, ...]]:
    """Judge one replay, now that the controls of its tool are known; gives the allow-list's entries it used too."""
    own, variant, tool = made.wanted
    of_tool = next((report for report in controls if report.tool == tool), None)
    return entry_of(own, variant, made.run, made.output, of_tool, allow, made.ahead.seconds, today, options)


def _device_told(work: SessionWork) -> str | None:
    """Name the GPU as the replays and the planted faults themselves do; null where none of them ran on one."""
    results = [made.run.result for made in work.made]
    told = [result.device for result in results if result is not None] + [own.device for own in work.controls]
    return " and ".join(sorted({name for name in told if name is not None and name != "cpu"})) or None


def _of_plan(plan: Plan) -> str:
    """Say why the captures themselves leave the session open, or nothing."""
    told = []
    if plan.damaged:
        told.append(f"{many(len(plan.damaged), 'capture')} left out, damaged or out of place: {plan.damaged[0]}")
    if plan.unproven:
        more = f" (and {len(plan.unproven) - 1} more)" if len(plan.unproven) > 1 else ""
        told.append(f"captures of the run are not proven to be its own: {plan.unproven[0]}{more}")
    return "; ".join(told)


def choose_device(asked: str, with_tools: bool) -> tuple[str, str | None, str]:
    """Choose where replays run.

    Returns:
        (torch's name of it, the GPU's name, why no tool can watch anything there or nothing).
    """
    from alphamoe_profiler.memory import survey_gpus

    survey = survey_gpus()
    name = survey.gpus[0].info.name if survey.gpus else None
    if asked == "cpu" or (asked == "auto" and not survey.gpus):
        why = "asked to replay on the CPU" if asked == "cpu" else f"no GPU here ({survey.reason or 'none is visible'})"
        alone = f"{why}, and the tools watch kernels on a GPU alone (--tool none compares outputs here)"
        return "cpu", None, alone if with_tools else ""
    if not survey.gpus:
        return "cuda", None, f"no GPU here ({survey.reason or 'none is visible'})"
    return "cuda", name, ""


def report_files(report: SanitizeReport) -> dict[str, Callable[[], bytes]]:
    """Give the files of a report by name, each made when it is asked for."""
    from alphamoe_profiler.bundle_files import encode_json
    from alphamoe_sanitizer_replays.reports.junit import junit_xml
    from alphamoe_sanitizer_replays.reports.markdown import markdown
    from alphamoe_sanitizer_replays.reports.records import report_document

    return {
        "report.json": lambda: encode_json(report_document(report), "the report", indent=2),
        "junit.xml": lambda: junit_xml(report).encode("utf-8", errors="backslashreplace"),
        "report.md": lambda: markdown(report).encode("utf-8", errors="backslashreplace"),
    }


def read_report(path: Path) -> SanitizeReport:
    """Read a ``report.json`` again.

    Raises:
        EvidenceError: it is missing, damaged or of another schema.
    """
    from alphamoe_profiler.bundle_files import read_json

    plain = read_json(path, dict)
    plain.pop("exit_code", None)
    try:
        return msgspec.convert(plain, SanitizeReport)
    except msgspec.ValidationError as error:
        raise EvidenceError(f"{path}: {error}", "it was written by another version") from error
