"""Which process of a sweep is next, how long it may take, and what becomes of those that the time does not reach.

In this order: the kernel's own baselines; every mutant without a tool; every mutant under the two tools that tell most
about its mechanism; the other tools, first for mutants that nothing caught; and last, while time is left, tools for
mutants that hang or crash without one, whose kernels may not end under a tool either. Only memcheck keeps its place
with those that crash: it stops the access that is at fault, while the other tools are lost with the kernel. A process
is ready as soon as what it depends on is known, so no slot waits for a phase to end.
Kernels that hang, or may, get a few slots only: each takes its share of the GPU's time slices from all the others.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kernel_mutations import Mutant
from mutation_table import DEADLOCK, ENDS_ITSELF, KERNEL, Case, Outcome

HANGS_AT_ONCE, SUSPECTS_AT_ONCE = 3, 5
"""On each GPU."""
PLAIN_LIMITS_S, TOOL_LIMITS_S, HUNG_LIMIT_S = (15.0, 30.0), (20.0, 60.0), 30.0
"""Least and most seconds of a process, between which 2.5 times the slowest baseline decides; of one that hangs."""
PLAIN_WATCH_S, TOOL_WATCH_S = 6.0, (8.0, 30.0)
"""Seconds from the launch until a kernel counts as hanging; under a tool 4 times the slowest baseline, within these."""
BASELINE_WATCH_S = 45.0
HARD_STOP_S = 7.0
"""Before the end of the time, processes are killed: two seconds for SIGTERM, then for their threads, then the table."""
PROGRESS_S = 20.0
MAY_HANG = frozenset({"block barrier", "cluster barrier", "warp sync"})
_RACES, _BARRIERS = ("racecheck", "synccheck", "memcheck", "initcheck"), ("synccheck", "racecheck", "memcheck")
_BOUNDS = ("memcheck", "initcheck", "racecheck", "synccheck")
_PARTIAL = ("half_warp", "absent", "mask", "open_arrive", "open_wait", "pushed_arrive", "pushed_wait")
"""In names of mutants that leave some threads out of a barrier, instead of leaving out the barrier."""


def telling_tools(mutant: Mutant) -> tuple[str, ...]:
    """Order the tools by what they may tell about a mutant."""
    if any(part in mutant.name for part in _PARTIAL):
        return (*_BARRIERS, "initcheck")
    bounds = mutant.mechanism.startswith("bounds") or mutant.mechanism == "rows of a run"
    return _BOUNDS if bounds else _RACES


class Schedule:
    """The processes of a sweep and what is known of them. Every method is for any thread.

    Args:
        cases: all of them; those of hanging mutants under racecheck get a baseline of their own when they come up.
        mutants: what they are of, in any order.
        clock: monotonic seconds.
        gpus: that the processes are dealt out to.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        mutants: Iterable[Mutant],
        *,
        clock: Callable[[], float] = time.monotonic,
        gpus: int = 1,
    ) -> None:
        self._mutants: Mapping[str, Mutant] = {mutant.name: mutant for mutant in mutants}
        self._pending = {case: number for number, case in enumerate(cases)}
        self._running: dict[Case, float] = {}
        self._clock = clock
        self._gpus = gpus
        self._plainly: dict[tuple[str, str, str], str] = {}
        self._caught: set[str] = set()
        self.made: dict[Case, Outcome] = {}
        self.changed = threading.Condition()

    def _ended(self, case: Case) -> str:
        """Say whether a mutant hung or crashed without a tool; that it hangs under one may be the tool's doing."""
        return self._plainly.get((case.mutant, case.variant, case.input), "")

    def _late(self, case: Case) -> bool:
        """Say whether a process may wait, because its kernel may not end and a catch is known already."""
        return self._ended(case) == "hang" or (self._ended(case) == "crash" and case.tool != "memcheck")

    def _may_hang(self, case: Case) -> bool:
        mutant = self._mutants.get(case.mutant)
        return mutant is not None and mutant.mechanism in MAY_HANG

    def _priority(self, case: Case, baselines: bool) -> tuple[int, ...] | None:
        """Give a small tuple for what is to be run soon, and null for what must wait."""
        number = self._pending[case]
        if case.mutant == KERNEL:
            return ((0,) if case.tool == "none" else (7,) if case.tool == DEADLOCK else (1,)) + (number,)
        if case.tool == "none":
            if baselines or (self._may_hang(case) and self._count(suspects=True) >= SUSPECTS_AT_ONCE * self._gpus):
                return None
            return (2, not self._may_hang(case), number)
        plain = dataclasses.replace(case, tool="none")
        if plain in self._pending or plain in self._running:
            return None
        order = telling_tools(self._mutants[case.mutant]).index(case.tool)
        if self._late(case):
            return None if self._count(suspects=False) >= HANGS_AT_ONCE * self._gpus else (8, order, number)
        if order < 2:
            return (3, order, number)
        return (5 if case.mutant in self._caught else 4, order, number)

    def _count(self, *, suspects: bool) -> int:
        """Count running processes that may hang without a tool, or that may under one."""
        if suspects:
            return sum(case.tool == "none" and self._may_hang(case) for case in self._running)
        return sum(case.mutant != KERNEL and self._late(case) for case in self._running)

    def take(self) -> Case | None:
        """Take the case that is to be run now; null when none is ready. Hold :attr:`changed`."""
        known = [*self._pending, *self._running]
        baselines = any(case.mutant == KERNEL and case.tool == "none" for case in known)
        ready = [(rank, case) for case in self._pending if (rank := self._priority(case, baselines)) is not None]
        if not ready:
            return None
        case = min(ready)[1]
        del self._pending[case]
        self._running[case] = self._clock()
        return case

    def put(self, made: Outcome) -> None:
        """Take in what came of a case, now or in an earlier sweep. Hold :attr:`changed`."""
        case = made.case
        self._running.pop(case, None)
        self._pending.pop(case, None)
        self.made[case] = made
        if made.caught:
            self._caught.add(case.mutant)
        ended = made.outcome if case.tool == "none" and case.mutant != KERNEL else ""
        if ended in ENDS_ITSELF:
            self._plainly[case.mutant, case.variant, case.input] = ended
        own = Case(KERNEL, case.variant, case.input, DEADLOCK)
        if ended == "hang" and own not in self.made and own not in self._running:
            racecheck = dataclasses.replace(case, tool="racecheck")
            if racecheck in self._pending:
                self._pending.setdefault(own, len(self.made))
        self.changed.notify_all()

    def limits(self, case: Case) -> tuple[float, float]:
        """Give the seconds that a process and the kernel in it may take, by the baselines so far."""
        if case.mutant == KERNEL:
            return (PLAIN_LIMITS_S if case.tool == "none" else TOOL_LIMITS_S)[1], BASELINE_WATCH_S
        own = [made for made in self.made.values() if made.mutant == KERNEL and made.tool == case.tool]
        slowest = max((made.wall_s for made in own), default=60.0)
        least, most = PLAIN_LIMITS_S if case.tool == "none" else TOOL_LIMITS_S
        limit = min(most, max(least, 2.5 * slowest))
        if case.tool == "none":
            return limit, PLAIN_WATCH_S
        launch = max((made.launch_s for made in own if made.launch_s is not None), default=TOOL_WATCH_S[1])
        watch = min(TOOL_WATCH_S[1], max(TOOL_WATCH_S[0], 4.0 * launch))
        return min(limit, HUNG_LIMIT_S) if self._late(case) else limit, watch

    @property
    def finished(self) -> bool:
        """Whether nothing is left. Hold :attr:`changed`."""
        return not self._pending and not self._running

    @property
    def idle(self) -> bool:
        """Whether nothing runs. Hold :attr:`changed`."""
        return not self._running

    def close(self) -> list[Outcome]:
        """Give up what has not ended: ``not run``, or ``skipped`` after a plain hang or crash. Hold :attr:`changed`."""
        left = []
        for case in (*self._pending, *self._running):
            if case.tool == DEADLOCK:
                continue
            ended = self._ended(case) if case.tool != "none" else ""
            detail = "killed at the end of the time" if case in self._running else "out of time"
            left.append(Outcome.of(case, "skipped" if ended else "not run", f"plain {ended}" if ended else detail))
        self._pending.clear()
        self._running.clear()
        self.made.update({made.case: made for made in left})
        return left

    def progress(self) -> str:
        """Say in one line what was done, what runs and since when. Hold :attr:`changed`."""
        counts = Counter(made.outcome for made in self.made.values())
        oldest = max((self._clock() - since for since in self._running.values()), default=0.0)
        done = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        tools = " ".join(f"{tool} {count}" for tool, count in Counter(case.tool for case in self._running).items())
        return (
            f"{len(self.made)} done ({done}); {len(self._running)} running ({tools}), the oldest for {oldest:.0f} s; "
            f"{len(self._pending)} to come"
        )


def run_schedule(
    schedule: Schedule,
    run: Callable[[Case, float, float, bool], Outcome],
    *,
    jobs: int,
    deadline: float,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Run a schedule until everything is done, or until the time is up, and give what was made.

    Args:
        schedule: what is to be run.
        run: takes a case, its limit and its kernel's in seconds, and whether the deadline shortened the limit.
        jobs: processes at once.
        deadline: monotonic seconds when this returns at the latest, whatever still runs.
        progress: takes a line every :data:`PROGRESS_S` seconds.
    """
    from alphamoe_sanitizer_replays.tool.process_group import INTERRUPTED

    stop = deadline - HARD_STOP_S
    closed = threading.Event()

    def work() -> None:
        while not closed.is_set():
            with schedule.changed:
                if schedule.finished:
                    return
                case = schedule.take() if stop - time.monotonic() > 3.0 else None
                if case is None:
                    schedule.changed.wait(0.5)
                    continue
                limit_s, watch_s = schedule.limits(case)
            left = stop - time.monotonic()
            try:
                made = run(case, min(limit_s, left), watch_s, left < limit_s)
            except KeyboardInterrupt:  # the end of the time, see below
                made = Outcome.of(case, "not run", "killed at the end of the time")
            with schedule.changed:
                if not closed.is_set():
                    schedule.put(made)

    # Not a pool: the interpreter would wait for its threads, and one may wait for a process that the driver keeps.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    told = began = time.monotonic()
    try:
        with schedule.changed:
            while not schedule.finished and time.monotonic() < stop + 2.5:
                if schedule.idle and time.monotonic() > stop:
                    break
                schedule.changed.wait(0.2)
                if time.monotonic() - told >= PROGRESS_S:
                    told = time.monotonic()
                    progress(f"{told - began:4.0f} s: {schedule.progress()}")
    finally:  # Ctrl-C or SIGTERM, too
        INTERRUPTED.set()
        try:
            for thread in threads:
                thread.join(max(0.0, min(deadline - 2.0, time.monotonic() + 4.0) - time.monotonic()))
        finally:
            with schedule.changed:
                closed.set()
                schedule.close()
            INTERRUPTED.clear()
    return list(schedule.made.values())
