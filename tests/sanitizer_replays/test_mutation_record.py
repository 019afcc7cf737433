"""What is kept of a sweep over mutants, and what of it counts again in the next one."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import mutation_sweep
from kernel_mutations import all_mutants, changed_lines, mutant
from mutation_inputs import make_ragged
from mutation_record import KEPT, document, markdown, not_known
from mutation_resume import Identities, kernel_sha256, read_lines, take_up
from mutation_schedule import Schedule
from mutation_sweep import cases, chosen_runs
from mutation_table import CATCHES, DEADLOCK, KERNEL, NO_ANSWER, SURVIVORS, Case, Outcome, tabulate

from alphamoe_sanitizer_replays.captures.store import open_capture
from alphamoe_sanitizer_replays.controls.table import CONTROLS
from alphamoe_tracers.errors import EvidenceError

MUTANTS = all_mutants()
BY_NAME = {made.name: made for made in MUTANTS}
KEPT_NOW = json.loads(KEPT.read_text())
GONE = ("kernel", "        copies_wait<0>();\n", "\n")
ONE = mutant("one", "block barrier", "t8_c8@ragged3", GONE)


def test_the_kept_result_knows_every_mutant_and_no_other() -> None:
    """Each mutant that something must catch has a row, or its run is named as one that is to come."""
    named = {row["mutant"] for row in KEPT_NOW["rows"]}
    assert named <= set(BY_NAME)
    wanted = {made.name for made in MUTANTS if not (made.harmless or made.same_code)}
    assert wanted <= named | set(KEPT_NOW["not_run"])
    assert KEPT_NOW["not_run"] == not_known(KEPT_NOW["rows"], MUTANTS)
    for row in KEPT_NOW["rows"]:
        made = BY_NAME[row["mutant"]]
        assert (row["variant"], row["input"]) in made.runs, made.name
        assert row["mechanism"] == made.mechanism
        assert set(row["seen"]) == set(CATCHES)
        if kernel_sha256() == KEPT_NOW["kernel_sha256"]:
            assert row["lines"] == [f"{file}:{line}" for file, line in changed_lines(made)]


def test_survivors_survived_everything_and_are_all_that_did() -> None:
    """A listed survivor was shown to every tool and caught by none; none that was caught is listed."""
    caught = {row["mutant"] for row in KEPT_NOW["rows"] if row["caught_by"]}
    quiet = {
        row["mutant"]
        for row in KEPT_NOW["rows"]
        if not row["caught_by"] and not set(row["seen"].values()) & {*NO_ANSWER}
    }
    assert set(SURVIVORS) <= quiet - caught
    harmless = {made.name for made in MUTANTS if made.harmless or made.same_code}
    assert quiet - caught - harmless - set(KEPT_NOW["not_run"]) == set(SURVIVORS)


def test_the_reason_of_a_survivor_names_a_control_of_the_tool() -> None:
    """The tool that should catch it misses a planted fault of the same kind, which the session says by name."""
    controls = {control.name: control.meant_for for control in CONTROLS}
    for name, reason in SURVIVORS.items():
        told = re.search(r"control (\w+)", reason)
        assert told, name
        assert "racecheck" in controls[told[1]], name


def test_the_markdown_counts_each_mutant_once() -> None:
    """Caught, surviving and unknown mutants make up all of them, in each mechanism and in the sum."""
    lines = [line for line in markdown(KEPT_NOW, MUTANTS).splitlines() if line.startswith("|")][2:]
    counts = {line.split("|")[1].strip(): [int(word) for word in line.split("|")[2:-1]] for line in lines}
    for numbers in counts.values():
        assert numbers[0] == numbers[1] + numbers[-2] + numbers[-1]
    total = counts.pop("**all**")
    assert total == [sum(column) for column in zip(*counts.values(), strict=True)]
    assert total[0] == len([made for made in MUTANTS if not (made.harmless or made.same_code)])


def test_only_a_plain_hang_is_one() -> None:
    """A tool that does not end leaves its cell open and lets the others run; after a plain crash tools are lost."""
    mutants = chosen_runs([ONE], every=False)

    def rows(plain: str, under: str) -> dict[str, str]:
        told = {"none": plain, "racecheck": under, "initcheck": "not run"}
        made = [
            Outcome.of(case, "clean" if case.mutant == KERNEL else told.get(case.tool, "clean"), "")
            for case in cases(mutants)
        ]
        table = tabulate(made, mutants)
        assert bool(table.incomplete) == (plain == "clean")
        return dict(table.rows[0].seen)

    assert (rows("clean", "hang")["racecheck"], rows("clean", "hang")["initcheck"]) == ("unfinished", "not run")
    assert (rows("crash", "hang")["racecheck"], rows("crash", "hang")["initcheck"]) == ("lost", "skipped")
    assert (rows("hang", "hang")["racecheck"], rows("hang", "hang")["initcheck"]) == ("hang", "skipped")


@pytest.mark.parametrize(("plain", "first"), [("clean", "racecheck"), ("crash", "memcheck"), ("wrong", "racecheck")])
def test_a_tool_that_hangs_delays_no_other(plain: str, first: str) -> None:
    """The mutant that one tool hung on goes to the others in its turn; of one that crashes memcheck alone does."""
    two = [ONE, dataclasses.replace(ONE, name="two")]
    to_do = [case for case in cases(two) if case.mutant != KERNEL]
    schedule = Schedule(to_do, two)
    with schedule.changed:
        for case in [case for case in to_do if case.tool == "none"]:
            schedule.put(Outcome.of(case, plain if case.mutant == "one" else "clean", ""))
        schedule.put(Outcome.of(Case("one", "t8_c8", "ragged3", "synccheck"), "hang", ""))
        order = [case for case in iter(schedule.take, None) if case.mutant == "one"]
        assert not any(case.tool in (DEADLOCK, "synccheck", "none") for case in order)
        assert order[0].tool == first
        assert {case.tool for case in order} == {"racecheck", "memcheck", "initcheck"}
        assert schedule.close()[0].outcome == ("skipped" if plain == "crash" and order[0].tool != first else "not run")


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    """Make those of one mutant on the ragged inputs."""
    made = make_ragged(tmp_path_factory.mktemp("ragged"), torch.device("cpu"))
    captures = {name: open_capture(path).capture for name, path in made.items()}
    return Identities([ONE], captures, "2025.3.1.0")


def test_answers_of_the_same_code_input_and_tool_count_again(identities: Identities, tmp_path: Path) -> None:
    """Changed code, edits, inputs or tools, and what was no answer, are run again; a cut last line is passed over."""
    mutants = chosen_runs([ONE], every=False)
    to_do = cases(mutants)
    unknown = {"memcheck": "not run", "racecheck": "hang", "initcheck": "unclear"}
    made = [Outcome.of(case, unknown.get(case.tool, "clean"), "", 1.0, 0.5) for case in reversed(to_do)]
    file = tmp_path / "mutations.jsonl"
    file.write_text("\n".join([*map(identities.line, made), '{"mutant": "o']))
    lines = read_lines(file)
    assert len(lines) == len(to_do)
    taken = take_up(lines, identities, to_do)
    assert {outcome.tool for outcome in taken} == {"none", "synccheck"}
    assert [outcome.tool for outcome in taken[:2]] == ["none", "none"]
    assert len(taken) == 4
    for key in ("kernel_sha256", "mutant_sha256", "input_sha256"):
        assert take_up([line | {key: "0"} for line in lines], identities, to_do) == []
    newer = [
        outcome.tool for outcome in take_up([line | {"tool_version": "2026"} for line in lines], identities, to_do)
    ]
    assert newer == []
    assert take_up([{k: v for k, v in line.items() if "sha256" not in k} for line in lines], identities, to_do) == []
    assert take_up(lines, identities, []) == []


def test_what_is_no_outcome_is_refused(tmp_path: Path) -> None:
    """A missing file and a foreign line are errors; nothing is resumed from them in silence."""
    with pytest.raises(EvidenceError):
        read_lines(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(EvidenceError, match="line 1"):
        read_lines(tmp_path / "other.jsonl")


def test_a_result_is_kept_by_what_ran() -> None:
    """Rows are of the runs that have an outcome, first or not; a name that nobody knows is refused."""
    made = BY_NAME["plan_barrier"]
    case = Case(made.name, *made.runs[1], "none")
    own = Outcome.of(dataclasses.replace(case, mutant=KERNEL), "clean", "")
    kept = document([own, Outcome.of(case, "wrong", "")], MUTANTS, "a GPU", "1")
    assert [(row["mutant"], row["input"], row["caught_by"]) for row in kept["rows"]] == [
        ("plan_barrier", made.runs[1][1], ["output"])
    ]
    assert "plan_barrier" not in kept["not_run"]
    assert kept["not_run"]["advance_wait"] == "t8_c8@ragged3"
    with pytest.raises(ValueError, match="gone"):
        document([Outcome.of(dataclasses.replace(case, mutant="gone"), "wrong", "")], MUTANTS, "a GPU", "1")


def test_a_resumed_sweep_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sweep takes up the answers of the first, fills its gap, and its own file holds both."""
    ran: list[str] = []
    gap = {"memcheck": "unclear"}

    class Fake(mutation_sweep.Sweep):
        def run(self, case: Case, source: Path | None, limit_s: float, watch_s: float, cut: bool = False) -> Outcome:
            ran.append(case.tool)
            made = Outcome.of(case, gap.get(case.tool, "found") if case.mutant == "one" else "clean", "")
            self.take(made)
            return made

    monkeypatch.setattr(mutation_sweep, "Sweep", Fake)
    monkeypatch.setattr(mutation_sweep, "compile_all", lambda wanted, folder, jobs, limit_s: [])
    monkeypatch.setenv("ALPHAMOE_COMPUTE_SANITIZER", sys.executable)
    captures = make_ragged(tmp_path / "ragged", torch.device("cpu"))
    file = tmp_path / "mutations.jsonl"

    def sweep(resume: Path | None) -> int:
        deadline = time.monotonic() + 60.0
        return mutation_sweep.sweep(captures, [ONE], tmp_path, jobs=2, deadline=deadline, resume=resume)

    assert sweep(None) == 3
    assert len(ran) == len(file.read_text().splitlines()) == 10
    ran.clear()
    gap.clear()
    assert sweep(file) == 0
    assert ran == ["memcheck"]
    assert len(file.read_text().splitlines()) == 10
