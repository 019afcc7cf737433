"""A few seconds of the fuzz, the same mutants every time; ``make fuzz`` runs it long."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import kineto_mutants
import nsys_mutants
import policy_mutants
import pytest
import run
from damage import json_bytes
from judge import Mutant, emptied, judged

MUTANTS = 100


def test_no_mutant_crashes_hangs_or_passes_without_its_evidence(tmp_path: Path) -> None:
    told = list(run.fuzz(7, range(MUTANTS), tmp_path / "mutant"))
    assert [own for own in told if own.outcome.fault] == []
    assert sum(own.removed for own in told) > MUTANTS // 8


def test_every_seed_is_a_pass_so_that_something_can_be_removed(tmp_path: Path) -> None:
    assert run.sound_seeds(tmp_path / "sound") == []


def test_the_fuzz_sees_a_pass_that_is_wrong_and_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that cannot fail proves nothing."""
    sound = kineto_mutants.untouched(emptied(tmp_path / "sound"))
    assert judged(Mutant(sound.kind, sound.words, removed=True)).fault == "PASS although its evidence was removed"

    def crash(*_: object) -> None:
        raise ZeroDivisionError

    assert judged(Mutant("crash", read=crash)).fault == "ZeroDivisionError: "  # type: ignore[arg-type]
    monkeypatch.setattr("alphamoe_profiler.gate.evaluate", crash)
    assert "unexpected ZeroDivisionError" in (judged(sound).fault or "")


def test_a_mutant_answers_for_the_memory_that_it_takes_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process held before, or a mutant before it took, is not its own."""
    monkeypatch.setattr("judge.LIMIT_BYTES", 64 << 20)
    others = bytes(128 << 20)
    greedy = judged(Mutant("greedy", read=lambda: bytes(range(256)) * (1 << 19)))
    assert greedy.fault in ("127 MiB of memory", "128 MiB of memory")
    assert judged(Mutant("modest", read=lambda: None)).fault is None
    assert len(others) == 128 << 20


@pytest.mark.parametrize("digits", [5000, 100_000])
def test_a_number_of_thousands_of_digits_in_a_policy_is_one_line(tmp_path: Path, digits: int) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f"world_size = {'9' * digits}\n")
    sound = policy_mutants.untouched(emptied(tmp_path / "sound"))
    outcome = judged(Mutant("digits", (*sound.words[:2], "--policy", str(path))))
    assert (outcome.verdict, outcome.fault) == ("refused", None)


def test_half_a_character_in_a_trace_ends_one_rank_at_most(tmp_path: Path) -> None:
    """JSON can escape a lone surrogate, UTF-8 cannot hold it."""
    traces = [kineto_mutants.sound(rank) for rank in range(2)]
    traces[0]["distributedInfo"]["backend"] = traces[0]["schemaVersion"] = "\ud800"
    files = {f"p-TP-{rank}.trace.json": json_bytes(trace) for rank, trace in enumerate(traces)}
    import random

    outcome = judged(kineto_mutants.whole(tmp_path, "half", files, random.Random(0), removed=False))
    assert outcome.fault is None
    assert outcome.verdict in ("PASS", "INCONCLUSIVE")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 0.5",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 'text' WHERE rowid % 3 = 0",
        "PRAGMA writable_schema = 1; UPDATE sqlite_master SET name = x'ff00' WHERE name = 'NVTX_EVENTS'",
    ],
)
def test_a_column_of_another_type_in_an_export_is_one_line(tmp_path: Path, change: str) -> None:
    import sqlite3

    mutant = nsys_mutants.untouched(emptied(tmp_path / "mutant"))
    connection = sqlite3.connect(tmp_path / "mutant/traces/own0.sqlite")
    connection.executescript(change)
    connection.commit()
    connection.close()
    outcome = judged(mutant)
    assert (outcome.verdict, outcome.fault) == ("INCONCLUSIVE", None)
