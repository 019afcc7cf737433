"""The work of a session: controls first, then every (capture, variant, tool) in a process of its own."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from alphamoe_sanitizer_replays.controls.judge import ControlRun
from alphamoe_sanitizer_replays.controls.session import ControlSession
from alphamoe_sanitizer_replays.plugins.protocol import CompiledAhead
from alphamoe_sanitizer_replays.replays.job import RESULT_FILE, ReplayInputs, prepare_inputs, run_replay, stumble
from alphamoe_sanitizer_replays.replays.spec import outputs_file
from alphamoe_sanitizer_replays.replays.witness import Witnesses
from alphamoe_sanitizer_replays.reports.records import ReplayEntry, many, replay_named
from alphamoe_sanitizer_replays.results import ControlReport, OutputCheck, Tool, ToolRun
from alphamoe_sanitizer_replays.session.entries import open_entry
from alphamoe_sanitizer_replays.session.plan import Plan, PlannedCapture, SessionOptions
from alphamoe_sanitizer_replays.session.progress import Told
from alphamoe_sanitizer_replays.tool import process_group
from alphamoe_sanitizer_replays.tool.interrupts import Interrupts
from alphamoe_sanitizer_replays.tool.sanitizer import ToolPath
from alphamoe_tracers.errors import AlphaMoEError

_POLL_S = 0.2
_TIMED_LAUNCHES = 20


class Wanted(NamedTuple):
    """One replay that was asked for."""

    capture: PlannedCapture
    variant: str | None
    tool: Tool | None

    @property
    def key(self) -> tuple[str, str | None, str]:
        """That of its entry: (path, variant, tool)."""
        return self.capture.facts.path, self.variant, self.tool or "none"


@dataclass(frozen=True)
class Made:
    """One replay process, before it is judged: that needs the controls."""

    wanted: Wanted
    run: ToolRun
    output: OutputCheck
    ahead: CompiledAhead
    inputs: frozenset[Path]
    """Files outside the capture that it read."""

    def with_problem(self, problem: str) -> Made:
        """Give the same process with one more reason why it proves nothing."""
        return replace(self, run=msgspec.structs.replace(self.run, problems=(*self.run.problems, problem)))


class SessionWork:
    """What is on the way: controls, inputs, replay processes."""

    def __init__(
        self, options: SessionOptions, plan: Plan, folder: Path, device: str, tool_path: ToolPath | None, told: Told
    ) -> None:
        """Lay out the work; see :func:`session.run.run_session` for the arguments."""
        self._options, self._folder, self._device, self._tool_path = options, folder, device, tool_path
        self._told, self._done = told, 0
        tools: tuple[Tool | None, ...] = options.tools or (None,)
        self._captures, self._targets = plan.captures, plan.targets
        self._possible = [Wanted(own, v, tool) for own in plan.captures for v in own.variants for tool in tools]
        refused = [(Wanted(own, r.variant, tool), r) for own in plan.captures for r in own.refused for tool in tools]
        self.wanted = [*self._possible, *(wanted for wanted, _ in refused)]
        self._witnesses = Witnesses()
        self.made: list[Made] = []
        self.failed: list[ReplayEntry] = [open_entry(*wanted, r.reason, r.hint) for wanted, r in refused]
        self.controls: tuple[ControlReport, ...] = ()
        self.controls_wall_s = 0.0
        self.interrupted = False

    def run(self, interrupts: Interrupts) -> None:
        """Run controls and replays, as many at a time as was asked for, until all is done or it is interrupted."""
        process_group.INTERRUPTED.clear()
        controls: ControlSession | None = None
        replays: dict[Future[Made], Wanted] = {}
        pool = ThreadPoolExecutor(max_workers=self._options.jobs, thread_name_prefix="sanitize")
        try:
            try:
                if self._tool_path is not None and self._possible:
                    controls = ControlSession(
                        pool,
                        self._options.tools,
                        self._targets,
                        self._tool_path,
                        self._folder,
                        self._options.timeout_s,
                    )
                self._told(self._to_come(controls), 0, len(self._possible))
                self._replay_all(pool, controls, replays)
            finally:
                interrupts.hold()
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

    def _to_come(self, controls: ControlSession | None) -> str:
        tools = max(len(self._options.tools), 1)
        replays = many(len(self._possible) // tools, "replay")
        under = f"{replays} x {many(tools, 'tool')}" if self._options.tools else f"{replays} without a tool"
        planted = f", {len(controls.futures)} control processes" if controls is not None else ""
        return f"{under}{planted}, {self._options.jobs} at a time"

    def _replay_all(
        self, pool: ThreadPoolExecutor, controls: ControlSession | None, replays: dict[Future[Made], Wanted]
    ) -> None:
        if controls is not None:
            for number, _ in enumerate(_as_completed(controls.futures), start=1):
                self._told("positive controls", number, len(controls.futures))
            self.controls = controls.reports()
        for own in self._captures:
            self._submit(pool, own, replays)
            # Inputs are large: those of the next capture wait until a worker will be free for it.
            self._collect(replays, at_most=self._options.jobs - 1)
        self._collect(replays, at_most=0)

    def _submit(self, pool: ThreadPoolExecutor, own: PlannedCapture, replays: dict[Future[Made], Wanted]) -> None:
        jobs = [wanted for wanted in self._possible if wanted.capture is own]
        if not jobs:
            return
        try:
            inputs = prepare_inputs(own.stored, self._folder / "inputs")
        except Exception as error:  # one capture must not cost the others theirs
            self._fail(jobs, error)
            return
        compiled: dict[str | None, CompiledAhead | Exception] = {}
        for wanted in jobs:
            if wanted.variant not in compiled:
                compiled[wanted.variant] = self._compiled(inputs, wanted.variant)
            ahead = compiled[wanted.variant]
            if isinstance(ahead, Exception):
                self._fail([wanted], ahead)
            else:
                replays[pool.submit(self._replay, wanted, inputs, ahead)] = wanted

    def _compiled(self, inputs: ReplayInputs, variant: str | None) -> CompiledAhead | Exception:
        """Compile what replays of a variant will load; gives what went wrong for each of its entries."""
        if self._device != "cuda":
            return CompiledAhead()
        try:
            return inputs.compile_ahead(variant, self._options.source)
        except Exception as error:  # a plug-in's, too
            return error

    def _replay(self, wanted: Wanted, inputs: ReplayInputs, ahead: CompiledAhead) -> Made:
        own, variant, tool = wanted
        folder = self._folder / "replays" / _folder_name(self._captures, own) / (variant or "only") / (tool or "none")
        run, output = run_replay(
            inputs,
            folder,
            tool=tool,
            tool_path=self._tool_path,
            device=self._device,
            variant=variant,
            source=self._options.source,
            repeats=_TIMED_LAUNCHES if self._device == "cuda" else 0,
            timeout_s=self._options.timeout_s,
            relative_to=self._folder,
        )
        if tool is not None and run.result is not None and run.result.launches is None:
            witness = self._witnesses.of(
                inputs,
                folder.parent,
                device=self._device,
                variant=variant,
                source=self._options.source,
                timeout_s=self._options.timeout_s,
            )
            run = msgspec.structs.replace(run, witness=witness)
        if not self._options.keep_inputs:
            with contextlib.suppress(OSError):
                outputs_file(folder / RESULT_FILE).unlink()
        files = {Path(place.file) for place in inputs.places}
        return Made(wanted, run, output, ahead, frozenset(files))

    def _collect(self, replays: dict[Future[Made], Wanted], at_most: int) -> None:
        while len(replays) > at_most:
            done, _ = wait(list(replays), timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future, replays.pop(future))

    def _take(self, future: Future[Made], wanted: Wanted) -> None:
        failure = future.exception()
        if failure is None:
            self.made.append(future.result())
            self._done += 1
        elif isinstance(failure, Exception):
            self._fail([wanted], failure)
        if not self.interrupted:
            named = replay_named(wanted.tool or "none", wanted.capture.facts.label, wanted.variant)
            self._told(named, self._done, len(self._possible))

    def _fail(self, jobs: Sequence[Wanted], error: Exception) -> None:
        self._done += len(jobs)
        if isinstance(error, AlphaMoEError):
            reason, hint = str(error), error.hint
        else:
            reason, hint = f"it could not be run: {error if isinstance(error, OSError) else stumble(error)}", ""
        self.failed += [open_entry(*wanted, reason, hint) for wanted in jobs]

    def remove_inputs(self, entries: Iterable[ReplayEntry]) -> None:
        """Remove what replays read, unless it was asked for or the command of a replay with findings needs it."""
        if self._options.keep_inputs:
            return
        found = {(entry.capture, entry.variant, entry.tool) for entry in entries if entry.findings}
        kept = {path for made in self.made if made.wanted.key in found for path in made.inputs}
        inputs = self._folder / "inputs"
        for path in inputs.iterdir() if inputs.is_dir() else ():
            if path.absolute() not in kept:
                path.unlink()
        if inputs.is_dir() and not any(inputs.iterdir()):
            shutil.rmtree(inputs, ignore_errors=True)


def of_one_build(made: Sequence[Made]) -> list[Made]:
    """Give each run a problem where the replays of its capture and variant did not run one build of the kernel."""
    builds: dict[tuple[str, str | None], set[tuple[str | None, str | None]]] = {}
    for own in made:
        result = own.run.result
        if result is not None and result.status == "launched":
            known = builds.setdefault(own.wanted.key[:2], set())
            known.add((result.source_sha256, result.cubin_sha256))
            if own.ahead.cubin_sha256 is not None and result.cubin_sha256 is not None:
                known.add((own.ahead.source_sha256, own.ahead.cubin_sha256))
    return [
        own if len(builds.get(own.wanted.key[:2], ())) <= 1 else _mixed(own, builds[own.wanted.key[:2]]) for own in made
    ]


def _mixed(own: Made, builds: set[tuple[str | None, str | None]]) -> Made:
    named = ", ".join(sorted((cubin or "unknown")[:12] for _, cubin in builds))
    problem = f"the replays of this capture and variant ran {len(builds)} builds of the kernel (cubins {named})"
    hint = "was the source saved again during the session?"
    return own.with_problem(f"{problem}: {hint}")


def _as_completed(futures: Iterable[Future[ControlRun]]) -> Iterable[Future[ControlRun]]:
    """Yield futures as they end, in short waits, so that Ctrl-C is heard."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        yield from done


def _folder_name(captures: tuple[PlannedCapture, ...], own: PlannedCapture) -> str:
    label = own.facts.label.replace(" ", "-")
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in label)
    return f"{captures.index(own):03d}-{safe[:80]}"
