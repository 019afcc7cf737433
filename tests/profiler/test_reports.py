"""The reports show what was computed: complete, plain without a terminal, and one strict JSON document."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest
from golden import RankContent
from judging import fall_back, no_cuda, only

from alphamoe_profiler.bundle import MemorySnapshot, RunBundle
from alphamoe_profiler.inspection import RunReport, inspect_run
from alphamoe_profiler.reports.json_report import to_json
from alphamoe_profiler.reports.terminal import print_report
from alphamoe_profiler.verdicts import Verdict


def inspected(path: Path, damage: golden.Damage | None = None, **settings: Any) -> RunReport:
    return inspect_run(RunBundle.open(golden.build(path / "run", damage, **{"world_size": 2, **settings})))


def printed(report: RunReport, width: int = 160) -> str:
    stream = io.StringIO()
    print_report(report, file=stream, width=width)
    return stream.getvalue()


def test_the_terminal_report_prints_everything_that_a_run_is_asked_for(tmp_path: Path) -> None:
    text = printed(inspected(tmp_path, world_size=4))
    for wanted in (
        str(tmp_path / "run"),
        "gsm8k:17, 13 tokens, sha256 abababababab, row 17 of gsm8k",
        "NVIDIA H200",
        "kernel_alpha_moe_w8a8_up_down",
        "fused_moe_kernel (forbidden)",
        "(2; 1, 13)",
        "(1; 16, 16)",
        "144 of 208 kernels attributed",
        "48 of 48 MoE kernels of witness steps attributed",
        "40 not attributed: sentinel (ranks 0-3)",
        "after_run",
        "start_up",
        "next: alphamoe-trace show ",
    ):
        assert wanted in text
    assert "PASS kernel_alpha_moe_w8a8_up_down witnessed 48 times on all 4 ranks" in text


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_control_code_leaves_a_pipe(tmp_path: Path, width: int) -> None:
    text = printed(inspected(tmp_path, only(2, fall_back), world_size=4), width)
    copied = ("run ", "next: ")
    assert max(len(line) for line in text.splitlines() if not line.startswith(copied)) <= width
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_what_a_reader_copies_is_never_broken_over_lines(tmp_path: Path) -> None:
    report = inspected(tmp_path / "a folder with a long name" / "and another one inside it")
    lines = printed(report, 60).splitlines()
    assert lines[0] == f"run      {report.path}"
    assert lines[-1] == f"next: alphamoe-trace show '{report.path}' --json"


def test_the_next_command_names_the_program_as_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = inspected(tmp_path)
    monkeypatch.setattr("sys.argv", [".venv/bin/alphamoe-trace", "show"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert printed(report).splitlines()[-1].startswith("next: .venv/bin/alphamoe-trace show ")
    assert report.next_command.startswith("alphamoe-trace show ")


def test_narrow_terminals_break_no_word_of_the_rank_table(tmp_path: Path) -> None:
    text = printed(inspected(tmp_path), 60)
    assert "kernels dropped receipts ended    collector" in text
    assert "prefill_graph_replay" in text


@pytest.mark.parametrize("width", range(40, 140, 5))
def test_headings_break_between_words_only_at_any_width(tmp_path: Path, width: int) -> None:
    """A table that is too wide for its words goes on below itself, with the columns that name its rows."""
    phases = ("start_up", "load", "warm_up", "capture", "prefill", "decode", "collection", "dispatch_captures")

    def damage(content: RankContent) -> None:
        content.rank_file = {"wall_s": dict.fromkeys(phases, 12.345)}

    text = printed(inspected(tmp_path, damage), width)
    times = text[text.index("Wall times") : text.index("launcher:")]
    words = {
        word for phase in phases for word in (phase, *(f"{part}_" for part in phase.split("_")), phase.split("_")[-1])
    }
    headings = [line for line in times.splitlines()[1:] if line.strip() and "12.345" not in line]
    told = " ".join(headings).replace("kept apart", "").split()
    assert set(told) <= words | {"rank"}
    assert times.count("12.345") == 2 * len(phases)
    assert all("rank" in line or line.startswith(" ") for line in headings)


def test_a_run_without_wall_times_of_ranks_draws_no_table_of_one_column(tmp_path: Path) -> None:
    """All ranks were cut short: the launcher's own times are what is left."""

    def damage(content: RankContent) -> None:
        content.rank_file = None

    text = printed(inspected(tmp_path, damage))
    assert "Wall times in seconds, kept apart\nlauncher: " in text


CAPTURES = [
    {"path": "captures/rank=0/a", "rank": 0, "layer": 0, "M": 1, "variant": "t8_c8", "bytes": 12_000},
    {"path": "captures/rank=1/b", "error": "its hash is another"},
]


def test_captures_stand_before_the_verdict_and_all_next_steps_after_it(tmp_path: Path) -> None:
    """One block of next steps ends the report."""
    report = inspected(tmp_path)
    stream = io.StringIO()
    print_report(report, stream, 200, CAPTURES)
    lines = stream.getvalue().splitlines()
    assert [line.split()[:2] for line in lines[-3:]] == [
        ["PASS", "kernel_alpha_moe_w8a8_up_down"],
        ["next:", "alphamoe-trace"],
        ["next:", "alphamoe-trace"],
    ]
    assert lines[-1].startswith("next: alphamoe-trace sanitize ")
    at = lines.index("Captures: 2")
    assert lines[at + 2].split() == ["0", "0", "1", "t8_c8", "12,000", "captures/rank=0/a"]
    assert lines[at + 3] == "captures/rank=1/b: its hash is another"


@pytest.mark.parametrize("run", [{"device_kind": "cpu"}, {}])
def test_sanitize_is_the_next_step_only_where_it_could_pass(tmp_path: Path, run: dict[str, str]) -> None:
    """Captures of a CPU, or ones that cannot be opened, prove nothing under a tool."""
    stream = io.StringIO()
    print_report(inspected(tmp_path, run=run), stream, 200, CAPTURES if run else CAPTURES[1:])
    text = stream.getvalue()
    assert "alphamoe-trace sanitize" not in text
    assert ("under a tool of sanitize they can only be INCONCLUSIVE" in text) is bool(run)


def test_a_long_prompt_is_shortened_to_one_line(tmp_path: Path) -> None:
    report = inspected(tmp_path)
    prompt = msgspec.structs.replace(report.run.prompts[0], spec="text:one\ntwo " + "word " * 500)
    report = dataclasses.replace(report, run=msgspec.structs.replace(report.run, prompts=[prompt]))
    line = next(line for line in printed(report).splitlines() if line.startswith("prompt"))
    assert line.startswith("prompt   text:one two word word")
    assert "…, 13 tokens" in line


def test_no_color_is_respected_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    report = inspected(tmp_path)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured, plain = Terminal(), Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_report(report, file=coloured, width=100)
    monkeypatch.setenv("NO_COLOR", "1")
    print_report(report, file=plain, width=100)
    assert "\x1b[1;32m" in coloured.getvalue()
    assert "32m" not in plain.getvalue()


def test_a_failed_run_names_rank_symbol_and_count_at_the_end(tmp_path: Path) -> None:
    *_, verdict, following = printed(inspected(tmp_path, only(1, fall_back)), 1000).rstrip().splitlines()
    assert verdict.startswith("FAIL rank 1 eager: forbidden fused_moe_kernel ran 6 times")
    assert following.startswith("next: ")


def test_times_of_ranks_that_share_a_gpu_are_marked(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.rank_file = {"shared_gpu": True}

    lines = printed(inspected(tmp_path, damage), 200).splitlines()
    assert lines.count("Wall times in seconds, kept apart (shared GPU, ranks 0, 1: comparable with nothing)") == 1
    assert sum("NVIDIA H200 (shared)" in line for line in lines) == 2
    assert "shared" not in printed(inspected(tmp_path / "alone"), 200)


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 4)[0]["_base"] = "moe_align_block_size_kernel[red]x[/red]"
        content.rank_file = {"gpu_name": "[bold]GPU[/bold] :smile:"}

    text = printed(inspected(tmp_path, damage), 200)
    assert "[bold]GPU[/bold] :smile:" in text


def test_other_moe_kernels_that_ran_are_listed(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 4)[0]["_base"] = "moe_align_block_size_kernel"

    assert "moe_align_block_size_kernel" in printed(inspected(tmp_path, only(0, damage)))


def test_a_run_without_cuda_says_so_and_points_at_the_doctor(tmp_path: Path) -> None:
    eager = tuple(step for step in golden.STEPS if step.execution == "eager")
    text = printed(inspected(tmp_path, no_cuda, steps=eager, executions=("eager",)), 200)
    assert "INCONCLUSIVE ranks 0, 1: no CUDA device\nnext: alphamoe-trace doctor" in text
    assert "no kernel was recorded" in text
    assert "none witnessed" in text


def test_a_rank_that_was_cut_short_is_shown_with_what_it_left(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.rank_file = None

    report = inspected(tmp_path, only(3, damage), world_size=4)
    text = printed(report, 200)
    assert "cut short" in text
    assert "rank 3: no ranks/3.json, it was cut short" in text
    assert report.next_command == "alphamoe-trace --ranks 4 --prompt gsm8k:17"
    assert report.ranks[3].kernels == 52


def test_an_execution_that_was_not_exercised_gets_a_command_that_would(tmp_path: Path) -> None:
    steps = tuple(step for step in golden.STEPS if step.execution != "decode_graph_replay")
    command = inspected(tmp_path, steps=steps).next_command
    assert command == (
        "alphamoe-trace --ranks 2 --prompt gsm8k:17 "
        "--executions eager,prefill_graph_replay,decode_graph_replay --max-new-tokens 8"
    )


def test_the_next_command_records_again_what_was_left_out_and_writes_over_nothing(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.receipts = []

    kept, left_out = ["--ranks", "2", "--prompt", "gsm8k:17"], ["--no-receipts", "--json", "r.json", "--no-nvtx"]
    argv = ("alphamoe-trace", *left_out, "--out", "runs/a", *kept, "--force", "--seed", "3")
    report = inspected(tmp_path, damage, run={"argv": argv})
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "record the run without --no-receipts" in report.witness.reason
    assert report.next_command == "alphamoe-trace --ranks 2 --prompt gsm8k:17 --seed 3"


def test_a_run_whose_collector_was_switched_off_is_to_be_recorded_again_with_it(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        no_cuda(content)
        content.collector |= {"reason": "switched off with --no-collector"}

    argv = ("alphamoe-trace", "--prompt", "gsm8k:17", "--no-collector")
    assert inspected(tmp_path, damage, run={"argv": argv}).next_command == "alphamoe-trace --prompt gsm8k:17"


def test_a_dispatch_of_a_forbidden_kernel_is_noted_where_nothing_can_be_witnessed(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        fall_back(content)
        no_cuda(content)

    eager = tuple(step for step in golden.STEPS if step.execution == "eager")
    report = inspected(tmp_path, only(1, damage), steps=eager, executions=("eager",))
    assert "rank 1: its receipts say that forbidden fused_moe_kernel was dispatched 6 times" in report.witness.notes


def test_the_json_report_is_one_strict_document_with_the_documented_keys(tmp_path: Path) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(token)

    text = to_json(inspected(tmp_path, only(1, fall_back)))
    document = json.loads(text, parse_constant=refuse)
    described = (Path(__file__).parents[2] / "docs/run-bundle.md").read_text()
    assert all(f"`{key}`" in described for key in document)
    assert all(f"`{key}`" in described for key in document["ranks"][0])
    assert all(f"`{key}`" in described for key in document["cells"][0])
    assert all(f"`{key}`" in described for key in document["m_buckets"][0])
    assert (document["verdict"], document["exit_code"]) == ("FAIL", 1)
    assert document["m_buckets"][0]["dispatch_M"] == {"n": 2, "min": 1, "max": 13, "values": [1, 13], "folded": "1, 13"}
    assert document["ranks"][0]["unattributed"] == {"sentinel": 10, "before window": 6}
    assert sum(row["kernels"] for row in document["moe_kernels"] if row["rank"] == 1) == 12


def test_the_json_report_of_the_same_bundle_is_the_same_bytes(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=1)
    assert to_json(inspect_run(RunBundle.open(path))) == to_json(inspect_run(RunBundle.open(path)))


def test_inspecting_writes_nothing(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=1)
    before = {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")}
    inspect_run(RunBundle.open(path))
    assert {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")} == before


def test_unknown_memory_is_a_dash_and_not_a_zero(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.rank_file = {"memory": (MemorySnapshot(label="after_start_up"),)}

    assert "- (-)" in printed(inspected(tmp_path, damage))
