"""Ranks beside each other: how far apart they were, who was last, and when nothing can be said."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import golden
import pytest
from golden import RankContent

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.inspection import RunReport, inspect_run
from alphamoe_profiler.rank_skew import RankSkew, skew_document
from alphamoe_profiler.reports.terminal import print_report

OFFSET_NS = 17
"""Golden ranks do the same, each this much later than the one before."""


def inspected(path: Path, damage: golden.Damage | None = None, **settings: Any) -> RunReport:
    return inspect_run(RunBundle.open(golden.build(path / "run", damage, **{"world_size": 4, **settings})))


def skew_of(path: Path, damage: golden.Damage | None = None, **settings: Any) -> RankSkew:
    skew = inspected(path, damage, **settings).skew
    assert skew is not None
    return skew


def printed(report: RunReport) -> str:
    stream = io.StringIO()
    print_report(report, file=stream, width=200)
    return stream.getvalue()


def test_equal_ranks_are_apart_by_their_offset_and_the_last_is_last(tmp_path: Path) -> None:
    """Three moments of three executions; 2 steps of eager decode and 1 of prefill, 2 layers each."""
    skew = skew_of(tmp_path)
    assert {(row.execution, row.moment): row.compared for row in skew.spreads} == {
        (execution, moment): steps * (1 if moment == "step start" else 2)
        for execution, steps in (("eager", 3), ("prefill_graph_replay", 1), ("decode_graph_replay", 2))
        for moment in ("step start", "all-reduce start", "all-reduce end")
    }
    apart = 3 * OFFSET_NS
    assert {(row.median_ns, row.worst_ns, row.worst_rank) for row in skew.spreads} == {(apart, apart, 3)}
    assert all(row.last == {3: row.compared} for row in skew.spreads)
    assert (skew.clock_error_ns, skew.shared_gpu, skew.notes) == (0, False, ())


def test_the_rank_that_begins_one_step_late_is_named_with_the_step(tmp_path: Path) -> None:
    """Only the first kernel of step 8 is late, so one of two decode replays is, and no all-reduce."""

    def damage(content: RankContent) -> None:
        if content.rank == 1:
            for row in content.of(golden.NORM, 8)[:1]:
                row["start_ns"] += 400
                row["end_ns"] += 400

    rows = {(row.execution, row.moment): row for row in skew_of(tmp_path, damage).spreads}
    late = rows["decode_graph_replay", "step start"]
    assert (late.worst_ns, late.worst_step, late.worst_rank) == (400 + OFFSET_NS, 8, 1)
    assert late.median_ns == (400 + OFFSET_NS + 3 * OFFSET_NS) // 2
    assert late.last == {1: 1, 3: 1}
    assert rows["decode_graph_replay", "all-reduce start"].worst_ns == 3 * OFFSET_NS


def test_all_reduces_are_counted_and_timed_by_rank_and_symbol(tmp_path: Path) -> None:
    """Six witness steps of two layers; each kernel lasts 500 ns, one lasts 10 us longer."""

    def damage(content: RankContent) -> None:
        if content.rank == 2:
            content.of(golden.ALL_REDUCE, 5)[0]["end_ns"] += 10_000

    rows = {row.rank: row for row in skew_of(tmp_path, damage).all_reduces}
    every = {(rank, golden.ALL_REDUCE, 12) for rank in range(4)}
    assert {(row.rank, row.symbol, row.kernels) for row in rows.values()} == every
    assert [(rows[rank].total_ns, rows[rank].median_ns) for rank in (0, 2)] == [(6_000, 500), (16_000, 500)]


def test_an_all_reduce_that_ends_before_it_began_elsewhere_tells_the_clocks_error(tmp_path: Path) -> None:
    """A rank that lies 5 us behind: its all-reduces begin 4.5 us after those of rank 0 ended."""

    def damage(content: RankContent) -> None:
        if content.rank == 3:
            for row in content.of(golden.ALL_REDUCE):
                row["start_ns"] += 5_000
                row["end_ns"] += 5_000

    report = inspected(tmp_path, damage)
    assert report.skew is not None
    assert report.skew.clock_error_ns == 5_000 + 3 * OFFSET_NS - 500
    assert "by that the clocks are off by 4.55 us at least" in printed(report)


def test_steps_with_unlike_all_reduces_are_left_out_and_told(tmp_path: Path) -> None:
    """Rank 0 lacks one of step 9: nothing of that step is paired with another."""

    def damage(content: RankContent) -> None:
        if content.rank == 0:
            content.drop(content.of(golden.ALL_REDUCE, 9)[:1])

    skew = skew_of(tmp_path, damage)
    rows = {(row.execution, row.moment): row.compared for row in skew.spreads}
    assert (rows["decode_graph_replay", "step start"], rows["decode_graph_replay", "all-reduce start"]) == (2, 2)
    assert skew.notes == ("left out 1 of 6 steps, in which the ranks did not run equally many all-reduces",)


def test_gloo_on_a_shared_gpu_says_both(tmp_path: Path) -> None:
    """Times are shown with the mark, all-reduces are not there, and why."""

    def damage(content: RankContent) -> None:
        content.rank_file = {"shared_gpu": True, "communication": "gloo"}
        content.drop(content.of(golden.ALL_REDUCE))

    report = inspected(tmp_path, damage)
    assert report.skew is not None
    assert {row.moment for row in report.skew.spreads} == {"step start"}
    assert report.skew.clock_error_ns is None
    text = printed(report)
    assert "at the same moment (shared GPU: comparable with nothing)" in text
    assert "ranks beside each other: no all-reduce kernel was recorded: gloo sums on the host" in text


def test_ranks_of_several_hosts_are_not_laid_on_one_time_line(tmp_path: Path) -> None:
    """Their all-reduces are still shown."""

    def damage(content: RankContent) -> None:
        content.rank_file = {"host": f"node{content.rank // 2}"}

    skew = skew_of(tmp_path, damage)
    assert (skew.spreads, len(skew.all_reduces)) == ((), 4)
    assert skew.notes == ("the ranks ran on several hosts: their clocks are not compared",)


def test_a_rank_without_kernels_is_left_out_and_named(tmp_path: Path) -> None:
    """The others are compared."""

    def damage(content: RankContent) -> None:
        if content.rank == 3:
            content.drop(list(content.kernels))

    skew = skew_of(tmp_path, damage)
    assert {row.worst_ns for row in skew.spreads} == {2 * OFFSET_NS}
    assert skew.notes == ("no timed kernel in a witness step on rank 3: left out",)


@pytest.mark.parametrize("what", ["untimed", "warm-up"])
def test_what_has_no_time_or_is_no_request_is_not_compared(tmp_path: Path, what: str) -> None:
    """An untimed first kernel and a late warm-up change nothing but the untimed step's first kernel."""

    def damage(content: RankContent) -> None:
        if content.rank == 1:
            row = content.of(golden.NORM, 5 if what == "untimed" else 1)[0]
            row["start_ns"], row["end_ns"] = (0, 0) if what == "untimed" else (row["start_ns"] + 9, row["end_ns"] + 9)

    worst = {row.worst_ns for row in skew_of(tmp_path, damage).spreads if row.moment == "step start"}
    assert max(worst) < 1_000_000  # never the 0 of an untimed kernel
    assert (worst == {3 * OFFSET_NS}) == (what == "warm-up")


def test_one_rank_has_no_skew(tmp_path: Path) -> None:
    """Neither the report nor its JSON speak of it."""
    report = inspected(tmp_path, world_size=1)
    assert skew_document(report.skew) is None
    assert "Skew" not in printed(report)


def test_ranks_without_any_kernel_have_no_skew(tmp_path: Path) -> None:
    """That nothing was recorded is told already."""
    assert inspected(tmp_path, lambda content: content.drop(list(content.kernels))).skew is None


def test_the_report_prints_medians_and_symbols(tmp_path: Path) -> None:
    """Microseconds and milliseconds, as the columns say."""
    lines = printed(inspected(tmp_path)).splitlines()
    row = next(line.split() for line in lines if line.startswith("decode_graph_replay") and "step start" in line)
    assert row[3:] == ["2", "0.05", "0.05", "8", "3", "3", "(2)"]
    assert sum(golden.ALL_REDUCE in line and line.split()[-3:] == ["12", "0.006", "0.50"] for line in lines) == 4
