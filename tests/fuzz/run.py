"""Fuzz import and gate: ``python tests/fuzz/run.py --mutants 20000 [--seed N] [--jobs N]``.

Every mutant is made from (seed, number) alone, so ``--only NUMBER --keep DIR`` makes one again. Exit 1: one was wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import bundle_mutants
import kineto_mutants
import nsys_mutants
import policy_mutants
from judge import Mutant, Outcome, emptied, judged, peak_bytes

SHARE = (
    *(kineto_mutants,) * 8,
    *(nsys_mutants,) * 4,
    *(policy_mutants,) * 6,
    *(bundle_mutants,) * 2,
)
"""One of every twenty mutants comes from each of these."""
STUCK_S = 40.0
"""A process that says nothing for so long hangs where no alarm reaches it."""
ADDRESS_SPACE = 12 << 30


class Told(NamedTuple):
    """What a worker says of one mutant."""

    number: int
    kind: str
    removed: bool
    outcome: Outcome


def mutant_of(seed: int, number: int, folder: Path) -> Mutant:
    """Make one mutant again."""
    rng = random.Random(f"{seed}:{number}")
    return SHARE[number % len(SHARE)].make(rng, emptied(folder))


def fuzz(seed: int, numbers: Iterable[int], folder: Path) -> Iterable[Told]:
    """Judge mutants one after the other."""
    for number in numbers:
        mutant = mutant_of(seed, number, folder)
        yield Told(number, mutant.kind, mutant.removed, judged(mutant))


def sound_seeds(folder: Path) -> list[str]:
    """Say which seeds are no PASS: nothing could be removed from those."""
    own = (kineto_mutants, nsys_mutants, policy_mutants, bundle_mutants)
    outcomes = [(seed.__name__, judged(seed.untouched(emptied(folder)))) for seed in own]
    return [f"{name}: {outcome}" for name, outcome in outcomes if outcome.verdict != "PASS" or outcome.fault]


def _work(connection: Connection, seed: int, numbers: list[int]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory(prefix="alphamoe-fuzz-", dir=_memory_disk()) as folder:
        tempfile.tempdir = folder
        peak = 0
        for told in fuzz(seed, numbers, Path(folder) / "mutant"):
            peak = max(peak, peak_bytes())
            connection.send(told)
        connection.send(peak)


def _memory_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 -- a private folder is made inside


def main() -> int:
    """Run the fuzz and print counts by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="make and judge this mutant only")
    parser.add_argument("--keep", type=Path, help="where --only leaves its files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="alphamoe-fuzz-", dir=_memory_disk()) as folder:
        unsound = sound_seeds(Path(folder) / "sound")
    if unsound:
        print("a seed is no PASS:", *unsound, sep="\n")
        return 1
    if args.only is not None:
        folder = args.keep or Path(tempfile.mkdtemp(prefix="alphamoe-fuzz-"))
        mutant = mutant_of(args.seed, args.only, folder)
        print(mutant.kind, *mutant.words)
        print(judged(mutant))
        return 0
    return _report(args, *_run(args))


def _run(args: argparse.Namespace) -> tuple[list[Told], int, float]:
    """Judge all mutants in processes of their own; one that dies or hangs is a fault of its mutant."""
    context = multiprocessing.get_context("spawn")
    waiting = [list(range(first, args.mutants, args.jobs)) for first in range(args.jobs)]
    at_work: dict[Connection, tuple[multiprocessing.process.BaseProcess, list[int], float]] = {}
    found: list[Told] = []
    peak, begun = 0, time.monotonic()

    def start(numbers: list[int]) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, args.seed, numbers))
        process.start()
        theirs.close()
        at_work[ours] = (process, numbers, time.monotonic() + 60)

    for numbers in waiting:
        start(numbers)
    while at_work:
        for ready in wait(list(at_work), timeout=1):
            connection: Connection = ready  # type: ignore[assignment]
            process, numbers, _ = at_work[connection]
            try:
                told = connection.recv()
            except EOFError:
                told = None
            if isinstance(told, Told):
                found.append(told)
                if told.outcome.fault:
                    print(f"  {told.number} {told.kind}: {told.outcome.fault}", flush=True)
                at_work[connection] = (process, numbers[1:], time.monotonic())
                if len(found) % 1000 == 0:
                    print(f"{len(found):,} in {time.monotonic() - begun:.0f} s", flush=True)
                continue
            process.join()
            del at_work[connection]
            if isinstance(told, int):
                peak = max(peak, told)
            else:
                _replace(found, numbers, f"the process ended with {process.exitcode}", start)
        for connection, (process, numbers, since) in list(at_work.items()):
            if time.monotonic() - since > STUCK_S:
                process.kill()
                process.join()
                del at_work[connection]
                _replace(found, numbers, f"hangs for {STUCK_S:.0f} s", start)
    return found, peak, time.monotonic() - begun


def _replace(found: list[Told], numbers: list[int], why: str, start: object) -> None:
    found.append(Told(numbers[0], "killed", False, Outcome("none", why, STUCK_S)))
    if numbers[1:]:
        start(numbers[1:])  # type: ignore[operator]


def _report(args: argparse.Namespace, found: list[Told], peak: int, seconds: float) -> int:
    kinds = Counter((told.kind, told.outcome.verdict) for told in found)
    names = sorted({kind for kind, _ in kinds})
    verdicts = ("PASS", "FAIL", "INCONCLUSIVE", "refused", "read")
    width = max(len(name) for name in names)
    print(f"\n{'kind':{width}} {'all':>6} " + " ".join(f"{verdict:>12}" for verdict in verdicts) + f" {'removed':>8}")
    for name in names:
        total = sum(count for (kind, _), count in kinds.items() if kind == name)
        removed = sum(told.removed for told in found if told.kind == name)
        print(f"{name:{width}} {total:>6} " + " ".join(f"{kinds[name, v]:>12}" for v in verdicts) + f" {removed:>8}")
    faults = [told for told in found if told.outcome.fault]
    slowest = max(found, key=lambda told: told.outcome.seconds)
    print(
        f"\n{len(found):,} mutants, {sum(told.removed for told in found):,} of them with evidence removed, "
        f"in {seconds:.0f} s; seed {args.seed}; slowest {slowest.outcome.seconds:.2f} s ({slowest.kind}); "
        f"peak {peak >> 20} MiB a process"
    )
    print(f"{len(faults)} faults")
    for told in faults[:60]:
        print(f"  {told.number} {told.kind}: {told.outcome.fault}")
    return 1 if faults or len(found) != args.mutants else 0


if __name__ == "__main__":
    code = main()
    for left in (nsys_mutants, policy_mutants, bundle_mutants):
        own = getattr(left, "_seeds", None) or getattr(left, "_run", None) or left._sound
        made = own()
        shutil.rmtree((made[0] if isinstance(made, tuple) else made).parent, ignore_errors=True)
    sys.exit(code)
