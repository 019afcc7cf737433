"""Every case of public reports has its test: a table from case to test, and the few that are tested nowhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import foreign
import pytest

from alphamoe_profiler.cli import main
from alphamoe_profiler.gate import evaluate
from alphamoe_profiler.inspection import inspect_run
from alphamoe_profiler.launch_shapes import kernels_by_launch_shape
from alphamoe_profiler.policy_source import parse_policy
from alphamoe_profiler.reports.json_report import to_json
from alphamoe_profiler.verdicts import Verdict
from alphamoe_tracers.trace_files import TraceSummary

TESTS = Path(__file__).resolve().parents[1]
CASES = {
    "T1": "tracers/test_kineto_malformed: a_name_that_was_not_escaped_is_told_with_byte_and_line; "
    "tracers/test_kineto_malformed: a_backslash_that_happens_to_be_an_escape_is_read_as_it_stands; "
    "tracers/test_kineto: escapes_in_names_are_decoded_as_json_says; profiler/test_import: one_bad_file_ends_one_rank",
    "T2": "profiler/test_import_ranks: the_world_size_is_the_requests_and_missing_ranks_are_told; "
    "profiler/test_import_ranks: a_file_under_two_names_is_refused_with_both_and_both_ranks; "
    "tracers/test_kineto_malformed: two_writers_in_one_file_are_suspected",
    "T3": "profiler/test_import_ranks: files_without_a_rank_stay_apart_and_need_a_map; "
    "profiler/test_import_ranks: map_against_content_imports_nothing; "
    "tracers/test_rank_names: a_tp_index_among_several_groups_is_no_global_rank; "
    "tracers/test_kineto_malformed: a_device_index_is_never_a_rank",
    "T4": "profiler/test_gate_traces: names_are_matched_in_one_form; "
    "profiler/test_gate_traces: a_truncated_name_cannot_prove_absence_but_others_are_seen; "
    "tracers/test_nsys: full_names_tell_kernels_of_one_short_name_apart",
    "T5": "profiler/test_gate_traces: host_launches_without_a_gpu_kernel_are_no_evidence; "
    "profiler/test_policy: an_empty_or_contradictory_question_is_named; "
    "profiler/test_gate: a_symbol_that_matches_nothing_anywhere_is_listed_with_its_nearest_names",
    "T6": "profiler/test_gate_traces: a_fallback_on_one_rank_fails_and_names_rank_and_count; "
    "profiler/test_gate: partial_fallback_fails_and_names_rank_and_count",
    "T7": "profiler/test_gate_traces: a_record_delivered_twice_counts_once; "
    "tracers/test_kineto: an_exact_repetition_counts_once_and_near_ones_count; "
    "tracers/test_nsys: a_record_delivered_twice_counts_once; "
    "profiler/test_import: importing_again_is_refused_or_replaces_the_whole",
    "T8": "profiler/test_gate_traces: times_of_zero_or_below_leave_presence_and_counts; "
    "tracers/test_kineto: untimed_and_impossible_times_stay_out_of_every_sum; "
    "profiler/test_attribution: a_kernel_just_before_its_launch_is_tolerated_and_one_long_before_is_flagged",
    "T10": "profiler/test_gate_traces: "
    "a_graph_traced_as_one_block_is_inconclusive_with_the_option_that_shows_its_nodes; "
    "tracers/test_nsys: node_level_kernels_belong_to_their_graph_launch; "
    "profiler/test_witness: eager_kernels_do_not_satisfy_a_graph_execution",
    "T12": "tracers/test_sglang_log: a_number_of_another_type_is_refused_with_its_line; "
    "tracers/test_receipts: wrong_types_are_refused_with_their_line; "
    "profiler/test_integrity: more_real_tokens_than_m_fail_integrity; "
    "profiler/test_integrity: ranks_that_disagree_on_m_fail_integrity; "
    "profiler/test_m_buckets: real_tokens_dispatch_m_and_kernel_m_stay_three_columns",
    "A1": "tracers/test_kineto_malformed: an_array_that_was_not_closed_is_read_and_proves_no_absence",
    "A2": "tracers/test_kineto: a_bare_list_is_read_and_names_no_rank; "
    "tracers/test_kineto: a_trace_of_nothing_is_a_summary_of_nothing; "
    "tracers/test_kineto_malformed: other_documents_are_refused_in_one_line",
    "A3": "tracers/test_kineto: a_trace_of_metadata_alone_and_one_of_copies_alone_hold_no_kernel",
    "A4": "tracers/test_kineto: spellings_of_one_stream_are_one_stream; "
    "tracers/test_kineto: streams_without_a_number_stay_distinct",
    "A5": "tracers/test_kineto_malformed: tokens_that_json_does_not_have_are_refused_where_they_stand; "
    "profiler/test_bundle: a_number_that_is_none_is_refused_when_read; "
    "profiler/test_trace_cases: a_share_of_nothing_is_null_and_no_report_holds_nan",
    "A6": "tracers/test_kineto_malformed: a_token_in_quotes_is_a_name; "
    "tracers/test_kineto_malformed: tokens_that_json_does_not_have_are_refused_where_they_stand",
    "A7": "tracers/test_kineto: a_name_that_is_not_utf8_is_replaced_and_told",
    "A8": "tracers/test_kineto: overlap_within_a_stream_is_measured_and_between_streams_is_not",
    "A9": "profiler/test_gate_names: of_a_graph_with_a_while_node_one_witness_is_at_least_one; "
    "profiler/test_gate: counts_in_conditional_graphs_are_lower_bounds_when_the_policy_says_so",
    "A10": "tracers/test_kineto_split: a_record_without_an_end_is_refused_before_it_fills_the_memory; "
    "tracers/test_kineto_split: any_split_of_the_bytes_gives_the_same_records",
    "A11": "profiler/test_import_attribution: a_launch_of_another_thread_is_not_given_to_the_range; "
    "profiler/test_attribution: a_launch_from_another_thread_is_not_given_to_the_nearest_range",
    "A12": "profiler/test_gate_traces: kernels_outside_the_stated_request_window_are_no_presence; "
    "profiler/test_gate_names: marks_of_lazy_loading_in_a_trace_are_told_and_are_no_kernels; "
    "profiler/test_gate_names: code_that_was_loaded_inside_the_window_is_told",
    "A13": "profiler/test_trace_cases: ranks_that_began_far_apart_are_told_with_their_spread",
    "A14": "profiler/test_import_ranks: a_merged_file_is_checked_for_every_label",
    "A15": "tracers/test_kineto: display_units_change_nothing",
    "A16": "tracers/test_sglang_log: kernel_and_m_are_no_joined_text; "
    "profiler/test_gate: two_symbols_that_differ_where_names_meet_numbers_stay_two; "
    "profiler/test_m_buckets: m_and_layer_never_run_together_in_one_key",
    "A17": "tracers/test_kineto: the_clock_is_told_from_the_size_of_the_times; "
    "profiler/test_trace_cases: clocks_without_a_common_base_are_never_compared",
    "C1": "tracers/test_collector: collector_that_cannot_start_is_off_with_a_reason",
    "C2": "tracers/test_libcupti: refused_second_collector_leaves_the_first_connected; "
    "tracers/test_libcupti: second_subscriber_disturbs_nothing",
    "C3": "tracers/test_libcupti: status_codes_come_with_a_remedy; "
    "tracers/test_collector: collector_that_cannot_start_is_off_with_a_reason",
    "C4": "tracers/test_libcupti: every_mapped_libcupti_is_listed_once; "
    "tracers/test_libcupti: two_libraries_are_refused_with_their_paths",
    "C5": "profiler/test_gate: dropped_records_make_counts_lower_bounds_and_leave_presence; "
    "profiler/test_witness: dropped_records_make_absence_inconclusive",
    "C6": "backend/test_environ: words_for_off",
    "C7": "profiler/test_bundle: a_rank_killed_by_a_signal_is_a_problem_even_if_its_files_parse; "
    "profiler/test_witness: a_rank_killed_after_its_last_file_is_inconclusive",
    "C8": "tracers/test_collector: kernels_of_an_earlier_session_are_dropped_with_a_note; "
    "profiler/test_attribution: kernels_from_before_the_session_are_kept_but_counted_outside_the_window",
    "N1": "tracers/test_ranges: imbalance_is_paired_by_stack_and_reported_with_its_thread; "
    "tracers/test_kineto: begin_and_end_events_pair_by_stack_and_imbalance_is_told",
    "N2": "tracers/test_ranges: pops_equal_pushes_whatever_the_tool_returns",
    "N3": "profiler/test_import_attribution: kernels_of_a_capture_are_no_witnesses; "
    "profiler/test_trace_cases: a_range_around_a_capture_gets_nothing_of_its_replays",
    "N4": "profiler/test_import_attribution: the_whole_path_tells_two_phases_apart; "
    "profiler/test_attribution: the_same_name_in_two_phases_stays_two_paths",
    "H1": "profiler/test_trace_cases: times_are_of_one_rank_each",
    "H2": "tracers/test_nsys: a_missing_table_is_named_with_the_tools_version; "
    "tracers/test_nsys: an_old_schema_without_graph_nodes_still_imports",
    "H3": "tracers/test_nsys: what_is_no_whole_database_is_one_line; tracers/test_nsys: a_locked_database_is_told; "
    "profiler/test_import: unreadable_databases_end_their_rank",
    "H4": "profiler/test_import_attribution: equal_ids_on_two_ranks_are_never_joined; "
    "profiler/test_witness: equal_correlation_ids_on_two_ranks_never_join_them",
    "H5": "profiler/test_bundle: receipts_of_an_older_run_contradict; "
    "profiler/test_import_ranks: files_of_two_profiles_are_not_one_run",
    "H6": "profiler/test_trace_cases: one_name_in_two_launch_shapes_stays_two_groups",
}  # fmt: skip
ASKED = (
    *(f"T{number}" for number in (*range(1, 9), 10, 12)),
    *(f"A{number}" for number in range(1, 18)),
    *(f"C{number}" for number in range(1, 9)),
    *(f"N{number}" for number in range(1, 5)),
    *(f"H{number}" for number in range(1, 7)),
)


def test_every_case_is_in_the_table() -> None:
    assert set(CASES) == set(ASKED)


@pytest.mark.parametrize("case", ASKED)
def test_every_test_of_the_table_is_there(case: str) -> None:
    for entry in CASES[case].split(";"):
        file, name = (word.strip() for word in entry.split(":"))
        text = (TESTS / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def test_{name}\(", text, re.MULTILINE), f"{file} has no test_{name}"


def test_a_share_of_nothing_is_null_and_no_report_holds_nan(tmp_path: Path) -> None:
    """A5: two kernels of no time at all."""
    events = [foreign.launch(10, 1), foreign.launch(20, 2), foreign.kernel("k", 0, 0, 1), foreign.kernel("k", 0, 0, 2)]
    bundle = one_rank(tmp_path, events)
    assert summary(bundle, 0).overlap_share is None
    assert summary(bundle, 0).untimed == 2
    assert not re.search(r"\b(NaN|Infinity)\b", to_json(inspect_run(bundle)))


def test_ranks_that_began_far_apart_are_told_with_their_spread(tmp_path: Path) -> None:
    """A13: one all-reduce that waits for the other rank to begin recording."""
    base = 1_700_000_000_000_000
    late = 31_000_000
    for rank, (ts, dur) in enumerate(((0, late + 5), (late, 5))):
        events = [foreign.launch(base + ts - 5, 1), foreign.kernel("allreduce", base + ts, dur, 1)]
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", events, rank, 2)
    bundle = foreign.imported(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    report = evaluate(bundle, [parse_policy('[[require]]\nsymbol = "allreduce"\n', "p")])
    assert any("first kernels of the ranks lie 31" in note and "rank 0 first" in note for note in report.notes)


def test_clocks_without_a_common_base_are_never_compared(tmp_path: Path) -> None:
    """A17: one rank counts since 1970, the other since it was started."""
    for rank, base in enumerate((1_700_000_000_000_000, 8_200_000_000)):
        events = [foreign.launch(base, 1), foreign.kernel("k", base + 5, 5, 1)]
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", events, rank, 2)
    bundle = foreign.imported(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    notes = evaluate(bundle, [parse_policy('[[require]]\nsymbol = "k"\n', "p")]).notes
    assert any("no stated common base" in note for note in notes)
    assert not any("apart" in note for note in notes)


def test_a_range_around_a_capture_gets_nothing_of_its_replays(tmp_path: Path) -> None:
    """N3: the range encloses a capture and no kernel; the replay's kernels hang at the replay's own launch."""
    from alphamoe_profiler.attribution import attribute

    events = [
        foreign.annotation("captured", 0, 50),
        foreign.launch(5, 1, "cudaStreamBeginCapture"),
        foreign.launch(20, 2),
        foreign.launch(40, 3, "cudaStreamEndCapture"),
        foreign.annotation("replayed", 90, 50),
        foreign.launch(100, 9, "cudaGraphLaunch"),
        *(foreign.kernel("moe_gemm", 110 + 5 * number, 3, 9) for number in range(3)),
    ]
    bundle = one_rank(tmp_path, events)
    frame = attribute(bundle, 0).frame
    assert [str(path) for path in frame["path"]] == ["replayed"] * 3
    assert (summary(bundle, 0).launches_while_capturing, summary(bundle, 0).launches_without_kernel) == (1, 0)


def test_times_are_of_one_rank_each(tmp_path: Path) -> None:
    """H1: four ranks with a kernel of 10 us each are four times 10 us, whatever device each of them names."""
    for rank in range(4):
        events = [foreign.launch(100 + rank, 1), foreign.kernel("k", 110 + rank, 10, 1, device=rank % 2)]
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", events, rank, 4)
    bundle = foreign.imported(tmp_path / "run", tmp_path / "in", "--ranks", 4)
    assert [summary(bundle, rank).summed_ns for rank in range(4)] == [10_000] * 4
    report = evaluate(bundle, [parse_policy('[[require]]\nsymbol = "k"\nexactly = 1\n', "p")])
    assert report.verdict is Verdict.PASS


def test_one_name_in_two_launch_shapes_stays_two_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H6: asked for by launch shape, one name in two grids is two rows, in the table and in the command's JSON."""
    grids = ([8, 1, 1], [64, 1, 1], [64, 1, 1])
    events = [foreign.launch(100 * number, number) for number in range(1, 4)]
    events += [
        foreign.kernel("fused_moe_kernel", 100 * number + 5, 3, number, grid=grid)
        for number, grid in enumerate(grids, start=1)
    ]
    bundle = one_rank(tmp_path, events)
    table = kernels_by_launch_shape(bundle)
    assert table[["symbol", "grid", "0"]].to_numpy().tolist() == [
        ["fused_moe_kernel", "8x1x1", 1],
        ["fused_moe_kernel", "64x1x1", 2],
    ]
    target = tmp_path / "shapes.json"
    assert main(["show", str(bundle.path), "--launch-shapes", "--json", str(target)]) == 0
    assert [row["0"] for row in json.loads(target.read_text())["launch_shapes"]] == [1, 2]
    assert main(["show", str(bundle.path), "--launch-shapes"]) == 0
    assert "64x1x1" in capsys.readouterr().out


def one_rank(tmp_path: Path, events: list[foreign.Event]) -> foreign.RunBundle:
    return foreign.imported(tmp_path / "run", foreign.trace(tmp_path / "p-TP-0.trace.json", events, 0, 1), "--ranks", 1)


def summary(bundle: foreign.RunBundle, rank: int) -> TraceSummary:
    record = bundle.rank_file(rank)
    assert record is not None
    return record.imported[0]
