"""The page claims no more than the run knows: imports, silent ranks, executions without evidence, the other run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden
import pages
import pytest

from alphamoe_dashboards.build import build
from alphamoe_dashboards.digest import digest_run
from alphamoe_profiler.cli import main


def test_a_file_that_cannot_be_written_is_one_clear_line(
    golden_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["dashboard", str(golden_run), "-o", str(tmp_path / "file" / "page.html")]) == 2
    told = capsys.readouterr().err
    assert "there is no folder" in told
    assert told.count("\n") == 1


def test_an_import_claims_neither_versions_nor_executions_nor_a_time_of_recording(tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run", world_size=1, run={"kind": "imported"})
    asked = dict(digest_run(run).facts["asked"])
    assert asked["Executions"] == "not known (imported)"
    assert "Imported" in asked
    assert not {"Recorded", "Versions", "Source"} & set(asked)


def test_a_run_with_a_planted_fault_is_not_told_to_plant_it_again(tmp_path: Path) -> None:
    argv = ("alphamoe-trace", "--ranks", "1", "--inject-fault", "kill:rank=0", "--prompt", "gsm8k:17")
    run = golden.build(tmp_path / "run", pages.nothing, world_size=1, run={"argv": argv})
    commands = {command for _, _, command in digest_run(run).facts["missing"]}
    assert "alphamoe-trace --ranks 1 --prompt gsm8k:17" in commands
    assert not any("inject-fault" in command for command in commands)


def test_an_execution_without_any_evidence_is_named_beside_the_matrix(open_page: Any, tmp_path: Path) -> None:
    steps = tuple(step for step in golden.STEPS if step.execution == "eager")
    run = golden.build(tmp_path / "run", world_size=2, steps=steps)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"))
    told = tab.locator("#unseen").inner_text()
    assert "prefill_graph_replay, decode_graph_replay" in told
    assert "eager" not in told


def test_a_rank_without_kernels_is_unknown_and_not_a_rank_where_symbols_did_not_run(
    open_page: Any, tmp_path: Path
) -> None:
    def silent(content: Any) -> None:
        if content.rank == 1:
            pages.nothing(content)

    run = golden.build(tmp_path / "run", silent, world_size=4)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"), "#view=ranks")
    told = tab.locator("main").inner_text()
    assert "ran equally often on ranks 0, 2, 3" in told
    assert "Rank 1: no kernel was recorded, so nothing is known of it." in told
    assert tab.locator("#uneven-table").count() == 0


def test_one_rank_is_not_called_equal_to_others(open_page: Any, tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run", world_size=1)
    told = open_page(pages.page_of(run, tmp_path / "page.html"), "#view=ranks").locator("main").inner_text()
    assert told.count("there is nothing to compare") == 2
    assert "equally often on ranks" not in told


def test_the_comparison_shows_the_verdict_of_both_runs(open_page: Any, golden_run: Path, tmp_path: Path) -> None:
    empty = golden.build(tmp_path / "empty", pages.nothing)
    page = build([golden_run, empty], tmp_path / "two.html")[0]
    tab = open_page(page, "#view=compare")
    assert tab.locator("main dl .badge").all_inner_texts() == ["✓ PASS", "? INCONCLUSIVE"]


def test_a_shared_gpu_of_the_candidate_alone_is_said_beside_the_ratios(
    open_page: Any, golden_run: Path, tmp_path: Path
) -> None:
    def shared(content: Any) -> None:
        content.rank_file = {"shared_gpu": True}

    candidate = golden.build(tmp_path / "candidate", shared)
    build([golden_run, candidate], tmp_path / "page.html")
    tab = open_page(tmp_path / "page.html", "#view=compare")
    told = "shared GPU: times are inflated"
    assert told in tab.locator("#chart-compare").inner_text()
    assert told in tab.locator("section:has(#compare-table) h3").inner_text()


def test_durations_far_apart_get_a_log_axis_unless_one_of_them_is_zero(open_page: Any, tmp_path: Path) -> None:
    def apart(content: Any) -> None:
        for number, row in enumerate(content.of(golden.NORM)):
            row["end_ns"] = row["start_ns"] + (20_000 if number % 2 else 100)

    def axis(name: str, damage: Any) -> str:
        run = golden.build(tmp_path / name, damage, world_size=1)
        tab = open_page(pages.page_of(run, tmp_path / f"{name}.html"), "#view=buckets")
        tab.locator("#subject").select_option(golden.NORM)
        found: str = tab.evaluate("document.getElementById('chart-duration').layout.yaxis.type")
        return found

    assert axis("apart", apart) == "log"
    assert axis("zero", lambda content: (apart(content), pages.odd_times(content))) != "log"
