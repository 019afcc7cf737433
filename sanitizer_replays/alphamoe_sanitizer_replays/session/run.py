"""A sanitize session: controls first, then every (capture, variant, tool) in a process of its own, then one report.

Nothing is PASS because nothing was seen: without a tool, a GPU or a caught control the report is INCONCLUSIVE and says
so. Ctrl-C ends what runs and reports what there is.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alphamoe_profiler.run_identity import utc_now
from alphamoe_sanitizer_replays.controls.judge import ControlRun
from alphamoe_sanitizer_replays.controls.session import ControlSession
from alphamoe_sanitizer_replays.replays.job import ReplayInputs, prepare_inputs, run_replay
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, SanitizeReport, overall
from alphamoe_sanitizer_replays.reports.scope import scope_sentence
from alphamoe_sanitizer_replays.results import ControlReport, OutputCheck, Tool, ToolRun
from alphamoe_sanitizer_replays.session.entries import entry_of, open_entry
from alphamoe_sanitizer_replays.session.plan import Plan, PlannedCapture, SessionOptions
from alphamoe_sanitizer_replays.tool import process_group
from alphamoe_sanitizer_replays.tool.sanitizer import ToolPath, find_tool
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowEntry, AllowList, load_allow_list
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError

Told = Callable[[str, int, int], None]
"""Called with what was done last, how much is done, and how much there is."""
_POLL_S = 0.2
_TIMED_LAUNCHES = 20


@dataclass(frozen=True)
class _Made:
    """One replay process, before it is judged: that needs the controls."""

    capture: PlannedCapture
    variant: str | None
    tool: Tool | None
    run: ToolRun
    output: OutputCheck
    compile_s: float


def run_session(options: SessionOptions, plan: Plan, folder: Path, told: Told = lambda *_: None) -> SanitizeReport:
    """Run a session into a folder that exists and is its own.

    Args:
        options: what was asked.
        plan: the captures.
        folder: for logs, XML and results; paths in the report are relative to it.
        told: progress.

    Returns:
        The report. It is complete in the sense that every replay that was asked for has an entry.

    Raises:
        UsageError: the named tool is not there, or the allow-list is malformed or out of date.
        OSError: the folder cannot be written.
    """
    began_s = time.monotonic()
    allow, today = load_allow_list(options.allow_list), datetime.date.today()
    device, device_name, trouble = choose_device(options.device, bool(options.tools))
    tool_path: ToolPath | None = None
    if options.tools:
        try:
            tool_path = find_tool(options.sanitizer)
        except EvidenceError as error:
            trouble = f"{error}: {error.hint}"
    session = _Session(options, plan, folder, device, tool_path, told)
    if not trouble:
        session.run()
    judged = [session.judge(made, allow, today) for made in session.made]
    entries = (*(entry for entry, _ in judged), *session.failed)
    used = [item for _, allowed in judged for item in allowed]
    reason = trouble or ("interrupted before every replay was made" if session.interrupted else "")
    missing = [
        open_entry(capture.facts, variant, tool, reason or "it was not run")
        for capture, variant, tool in session.wanted
        if not any((e.capture, e.variant, e.tool) == (capture.facts.path, variant, tool or "none") for e in entries)
    ]
    entries = tuple(sorted((*entries, *missing), key=session.place))
    damaged = f"{len(plan.damaged)} captures cannot be opened: {plan.damaged[0]}" if plan.damaged else ""
    verdict, why = overall(entries, len(session.wanted), trouble or damaged or reason)
    return SanitizeReport(
        verdict=verdict,
        reason=why,
        scope=_scope(plan, entries, session.controls),
        run_id=plan.run_id,
        targets=tuple(str(path) for path in options.paths),
        device=device_name,
        tool_path=str(tool_path.path) if tool_path is not None else None,
        tool_version=tool_path.version if tool_path is not None else None,
        tools=options.tools or ("none",),
        controls=session.controls,
        captures=tuple(own.facts for own in plan.captures),
        entries=entries,
        allow_list=str(options.allow_list) if options.allow_list is not None else None,
        notes=(*plan.damaged, *session.notes, *allow.notes(used, today)),
        interrupted=session.interrupted,
        controls_wall_s=session.controls_wall_s,
        wall_s=time.monotonic() - began_s,
        created=utc_now(),
    )


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
        return "cpu", None, f"{why}, and the tools watch kernels on a GPU alone" if with_tools else ""
    if not survey.gpus:
        return "cuda", None, f"no GPU here ({survey.reason or 'none is visible'})"
    return "cuda", name, ""


class _Session:
    """What is on the way: controls, inputs, replay processes."""

    def __init__(
        self, options: SessionOptions, plan: Plan, folder: Path, device: str, tool_path: ToolPath | None, told: Told
    ) -> None:
        self._options, self._folder, self._device, self._tool_path = options, folder, device, tool_path
        self._told, self._done = told, 0
        tools: tuple[Tool | None, ...] = options.tools or (None,)
        self.wanted = [(own, variant, tool) for own in plan.captures for variant in own.variants for tool in tools]
        self._captures, self._targets = plan.captures, plan.targets
        self.made: list[_Made] = []
        self.failed: list[ReplayEntry] = []
        self.controls: tuple[ControlReport, ...] = ()
        self.notes: list[str] = []
        self.controls_wall_s = 0.0
        self.interrupted = False

    def run(self) -> None:
        """Run controls and replays, as many at a time as was asked for."""
        process_group.INTERRUPTED.clear()
        inputs = self._folder / "inputs"
        controls: ControlSession | None = None
        replays: dict[Future[_Made], tuple[PlannedCapture, str | None, Tool | None]] = {}
        pool = ThreadPoolExecutor(max_workers=self._options.jobs, thread_name_prefix="sanitize")
        try:
            if self._tool_path is not None:
                controls = ControlSession(
                    pool,
                    self._options.tools,
                    self._targets,
                    self._tool_path,
                    self._folder,
                    self._options.timeout_s,
                )
                for number, _ in enumerate(_as_completed(controls.futures), start=1):
                    self._told("positive controls", number, len(controls.futures))
                self.controls = controls.reports()
            for own in self._captures:
                self._submit(pool, own, inputs, replays)
                # Inputs are large: those of the next capture wait until a worker will be free for it.
                self._collect(replays, at_most=self._options.jobs - 1)
            self._collect(replays, at_most=0)
        except KeyboardInterrupt:
            self.interrupted = True
            process_group.INTERRUPTED.set()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            process_group.INTERRUPTED.clear()
            for future in [future for future in replays if future.done() and not future.cancelled()]:
                self._take(future, replays.pop(future))
            if controls is not None:
                self.controls = self.controls or controls.reports()
                self.controls_wall_s = controls.wall_s
            if not self._options.keep_inputs:
                shutil.rmtree(inputs, ignore_errors=True)

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        own: PlannedCapture,
        inputs_folder: Path,
        replays: dict[Future[_Made], tuple[PlannedCapture, str | None, Tool | None]],
    ) -> None:
        jobs = [(variant, tool) for capture, variant, tool in self.wanted if capture is own]
        try:
            inputs = prepare_inputs(own.stored, inputs_folder)
        except (AlphaMoEError, OSError) as error:
            hint = error.hint if isinstance(error, AlphaMoEError) else ""
            self.failed += [open_entry(own.facts, variant, tool, str(error), hint) for variant, tool in jobs]
            self._done += len(jobs)
            return
        compiled: dict[str | None, float] = {}
        for variant, tool in jobs:
            try:
                if variant not in compiled and self._device == "cuda":
                    compiled[variant] = inputs.compile_ahead(variant, self._options.source)
            except AlphaMoEError as error:
                self.failed.append(open_entry(own.facts, variant, tool, str(error), error.hint))
                self._done += 1
                continue
            made = pool.submit(self._replay, own, inputs, variant, tool, compiled.get(variant, 0.0))
            replays[made] = (own, variant, tool)

    def _replay(
        self, own: PlannedCapture, inputs: ReplayInputs, variant: str | None, tool: Tool | None, compile_s: float
    ) -> _Made:
        folder = self._folder / "replays" / _folder_name(self._captures, own) / (variant or "only") / (tool or "none")
        run, output = run_replay(
            inputs,
            folder,
            tool=tool,
            tool_path=self._tool_path,
            device=self._device,
            variant=variant,
            source=self._options.source,
            repeats=_TIMED_LAUNCHES,
            timeout_s=self._options.timeout_s,
            relative_to=self._folder,
        )
        if not self._options.keep_inputs and run.result is not None and run.result.outputs is not None:
            (folder / Path(run.result.outputs).name).unlink(missing_ok=True)
        return _Made(own, variant, tool, run, output, compile_s)

    def _collect(
        self, replays: dict[Future[_Made], tuple[PlannedCapture, str | None, Tool | None]], at_most: int
    ) -> None:
        while len(replays) > at_most:
            done, _ = wait(list(replays), timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future, replays.pop(future))

    def _take(self, future: Future[_Made], job: tuple[PlannedCapture, str | None, Tool | None]) -> None:
        own, variant, tool = job
        failure = future.exception()
        if failure is None:
            self.made.append(future.result())
        elif isinstance(failure, AlphaMoEError):
            self.failed.append(open_entry(own.facts, variant, tool, str(failure), failure.hint))
        elif isinstance(failure, OSError):
            self.failed.append(open_entry(own.facts, variant, tool, f"it could not be run: {failure}"))
        elif not isinstance(failure, KeyboardInterrupt):
            raise failure
        self._done += 1
        if not self.interrupted:
            self._told(f"{tool or 'no tool'}, {own.facts.label}", self._done, len(self.wanted))

    def judge(self, made: _Made, allow: AllowList, today: datetime.date) -> tuple[ReplayEntry, tuple[AllowEntry, ...]]:
        """Judge one replay, now that the controls of its tool are known; gives the allow-list's entries it used too."""
        controls = next((own for own in self.controls if own.tool == made.tool), None)
        return entry_of(made.capture, made.variant, made.run, made.output, controls, allow, made.compile_s, today)

    def place(self, entry: ReplayEntry) -> int:
        """Give an entry's place in the order that was asked for."""
        for index, (own, variant, tool) in enumerate(self.wanted):
            if (own.facts.path, variant, tool or "none") == (entry.capture, entry.variant, entry.tool):
                return index
        return len(self.wanted)


def _as_completed(futures: Iterable[Future[ControlRun]]) -> Iterable[Future[ControlRun]]:
    """Yield futures as they end, in short waits, so that Ctrl-C is heard."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        yield from done


def _folder_name(captures: tuple[PlannedCapture, ...], own: PlannedCapture) -> str:
    label = own.facts.label.replace(" ", "-")
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in label)
    return f"{captures.index(own):03d}-{safe}"


def _scope(plan: Plan, entries: tuple[ReplayEntry, ...], controls: tuple[ControlReport, ...]) -> tuple[str, ...]:
    layers = [own.facts.layer for own in plan.captures]
    sentences = []
    for own in plan.captures:
        for variant in own.variants:
            mine = [e for e in entries if e.capture == own.facts.path and e.variant == variant]
            sentences.append(scope_sentence(own.facts, variant, mine, controls, layers))
    return tuple(sentences)


def write_reports(report: SanitizeReport, folder: Path) -> None:
    """Write ``report.json``, ``junit.xml`` and ``report.md``, each whole or not at all."""
    from alphamoe_profiler.bundle_files import encode_json, replacing
    from alphamoe_sanitizer_replays.reports.junit import junit_xml
    from alphamoe_sanitizer_replays.reports.markdown import markdown
    from alphamoe_sanitizer_replays.reports.records import report_document

    for name, content in (
        ("report.json", encode_json(report_document(report), "the report", indent=2)),
        ("junit.xml", junit_xml(report).encode("utf-8", errors="backslashreplace")),
        ("report.md", markdown(report).encode("utf-8", errors="backslashreplace")),
    ):
        with replacing(folder / name) as stream:
            stream.write(content)


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
