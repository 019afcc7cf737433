"""The text log, in the shapes that the real tool was recorded with and that others reported."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fake_sanitizer import BANNER

from alphamoe_sanitizer_replays.results import TOOLS, Tool, ToolLog
from alphamoe_sanitizer_replays.tool.blocks import in_target, names_target, read_location
from alphamoe_sanitizer_replays.tool.log import MAX_DISTINCT, MAX_LINE, parse_log

DATA = Path(__file__).parents[1] / "data" / "sanitizer"


def recorded(name: str, target: str = "planted_x", *, filtered: bool = False) -> ToolLog:
    tool: Tool = name.split(".")[0]  # type: ignore[assignment]
    return parse_log(DATA / name, tool, (target,), filtered)


@pytest.mark.parametrize("tool", ["racecheck", "synccheck", "initcheck"])
def test_a_recorded_clean_run_has_a_banner_one_summary_and_nothing_else(tool: str) -> None:
    log = recorded(f"{tool}.sound.log")
    assert log.banner
    assert len(log.summaries) == 1
    assert (log.found_errors, log.found_warnings, log.shown, log.not_printed) == (0, 0, 0, 0)
    assert (log.notices, log.cut) == ((), False)


def test_every_recorded_log_shows_as_many_findings_as_its_summary_counts() -> None:
    names = sorted(path.name for path in DATA.glob("*.log") if path.name != "initcheck.killed.log")
    assert len(names) >= 14
    for name in names:
        log = recorded(name)
        assert log.found_errors + log.found_warnings == log.shown + log.not_printed, name
        assert not log.cut, name


def test_a_recorded_race_names_both_accesses_and_no_kernel() -> None:
    (finding,) = recorded("racecheck.planted_block_barrier.log").findings
    assert (finding.severity, finding.kind, finding.count, finding.shown) == ("error", "hazard", 1024, 1)
    assert finding.kernel is None
    assert finding.where is not None
    assert finding.other is not None
    assert (finding.where.access, finding.where.file, finding.where.line, finding.where.offset) == (
        *("Write", "planted_faults.cu", 18),
        "+0xa0",
    )
    assert (finding.other.access, finding.other.line) == ("Read", 20)
    assert finding.where.function == "void block_barrier<(bool)1>(float *)"


def test_a_race_is_of_the_target_only_where_the_filter_says_so() -> None:
    assert recorded("racecheck.planted_block_barrier.log").findings[0].in_target is None
    assert recorded("racecheck.planted_block_barrier.log", filtered=True).findings[0].in_target is True


def test_a_recorded_warning_is_a_warning() -> None:
    log = recorded("racecheck.warp_sync.log")
    assert (log.found_errors, log.found_warnings, log.findings[0].severity) == (0, 1, "warning")


def test_the_tools_own_failure_is_counted_as_it_counts_it_and_is_of_no_kernel() -> None:
    log = recorded("racecheck.all.log", filtered=True)
    (internal,) = [finding for finding in log.findings if finding.kind == "internal"]
    assert internal.in_target is None
    assert (log.found_errors, log.found_warnings, log.shown) == (6, 1, 7)
    assert log.notices == ("Target application returned an error",)


def test_the_kernel_is_the_outermost_device_frame_not_the_inlined_function() -> None:
    (finding,) = recorded("initcheck.global_copy.log", "planted_global_copy").findings
    assert (finding.kernel, finding.in_target, finding.kind) == ("planted_global_copy", True, "uninitialized")
    assert (finding.thread, finding.block) == ((255, 0, 0), (0, 0, 0))
    assert finding.address == "0x7fb9baa04000"


def test_equal_findings_are_folded_and_what_was_not_printed_is_no_summary() -> None:
    log = recorded("synccheck.divergent_barrier.log", "planted_divergent_barrier")
    (finding,) = log.findings
    assert (finding.shown, finding.in_target, log.not_printed, log.found_errors) == (20, True, 108, 128)
    assert len(log.summaries) == 1


def test_failed_host_calls_are_api_findings_apart_from_the_kernels() -> None:
    api, memory = recorded("memcheck.all.log", "planted_shared_write").findings
    assert (api.kind, api.api, api.shown, api.in_target) == ("api", "cuGetProcAddress_v2", 34, False)
    assert (memory.kind, memory.kernel, memory.in_target, memory.address) == (
        "memory",
        "planted_shared_write",
        True,
        "0x800",
    )


def test_a_killed_run_leaves_findings_and_no_summary() -> None:
    log = recorded("initcheck.killed.log", "kernel_alpha_moe_w8a8_up_down")
    assert log.summaries == ()
    assert [finding.in_target for finding in log.findings] == [False, True]
    assert [finding.shown for finding in log.findings] == [2, 2]
    assert log.findings[0].api == "cudaMemcpy"


@pytest.mark.parametrize(
    ("line", "tool", "errors", "warnings"),
    [
        ("ERROR SUMMARY: 1 error", "memcheck", 1, 0),
        ("ERROR SUMMARY: 2 errors", "synccheck", 2, 0),
        ("ERROR SUMMARY: 1,024 errors", "initcheck", 1024, 0),
        ("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", "racecheck", 1, 0),
        ("RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)", "racecheck", 0, 3),
        ("RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", "racecheck", 0, 1),
    ],
)
def test_summaries_are_read_in_singular_and_plural(line: str, tool: Tool, errors: int, warnings: int) -> None:
    log = parse_log(f"{BANNER}========= {line}\n", tool, ("k",), True)
    assert (log.found_errors, log.found_warnings, len(log.summaries)) == (errors, warnings, 1)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR SUMMARY: no errors",
        "ERROR SUMMARY: 0 errors in the first process",
        "ERROR SUMMARY: 0",
        "SUMMARY: 0 errors",
        "LEAK SUMMARY: 0 bytes leaked in 0 allocations",
        "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
        "    ERROR SUMMARY: 0 errors",
    ],
)
def test_what_only_resembles_memchecks_summary_is_none(line: str) -> None:
    log = parse_log(f"{BANNER}========= {line}\n", "memcheck", ("k",), True)
    assert log.summaries == ()
    assert len(log.notices) == 1


def test_the_word_error_in_a_kernels_name_makes_no_error_and_no_summary() -> None:
    text = (
        f"{BANNER}========= Invalid __global__ write of size 4 bytes\n"
        "=========     at void error_summary<ERROR SUMMARY: 0 errors>(float *)+0x10 in error.cu:3\n"
        "========= \n========= ERROR SUMMARY: 1 error\n"
    )
    log = parse_log(text, "memcheck", ("other",), False)
    assert (log.shown, log.found_errors, log.findings[0].kernel) == (1, 1, "error_summary")


@pytest.mark.parametrize(
    "end", ["========= ERROR SUMMARY: 0 error", "========= Invalid __global__ read of size 4 bytes\n"]
)
def test_a_log_that_ends_inside_a_line_or_block_is_cut(end: str) -> None:
    assert parse_log(BANNER + end, "memcheck", ("k",), True).cut


def test_a_second_first_line_and_a_line_that_nobody_knows_are_notices() -> None:
    text = BANNER + BANNER + "========= Something new happened\n========= ERROR SUMMARY: 0 errors\n"
    assert len(parse_log(text, "memcheck", ("k",), True).notices) == 2


def test_a_finding_of_a_shape_that_nobody_knows_is_still_a_finding() -> None:
    text = f"{BANNER}========= Brand new fault of 2027\n=========     at moe_gemm+0x10\n========= \n"
    (finding,) = parse_log(text, "memcheck", ("moe_gemm",), True).findings
    assert (finding.kind, finding.in_target, finding.text) == ("other", True, "Brand new fault of 2027")


def test_windows_line_ends_and_blank_lines_are_passed_over() -> None:
    text = f"{BANNER}\n  \n========= ERROR SUMMARY: 3 errors\n".replace("\n", "\r\n")
    log = parse_log(text, "memcheck", ("k",), True)
    assert (log.banner, log.found_errors, log.notices) == (True, 3, ())


def test_infos_are_read_from_a_summary() -> None:
    text = f"{BANNER}========= RACECHECK SUMMARY: 9 hazards displayed (0 errors, 2 warnings, 7 infos)\n"
    log = parse_log(text, "racecheck", ("k",), True)
    assert (log.found_errors, log.found_warnings, log.found_infos, log.summaries[0].hazards) == (0, 2, 7, 9)


@pytest.mark.parametrize(
    ("first", "others", "hazard"),
    [
        ("Write", ["Write"], "WAW"),
        ("Write", ["Read"], "RAW/WAR"),
        ("Read", ["Write", "Write"], "RAW/WAR"),
        ("Write", ["Read", "Write"], None),
        ("Atomic", ["Read"], None),
        ("Write", [], None),
    ],
)
def test_a_race_is_named_by_its_two_accesses_which_have_no_order(
    first: str, others: list[str], hazard: str | None
) -> None:
    text = f"{BANNER}========= Error: Race reported between {first} access at f(int)+0x10 in a.cu:7\n"
    text += "".join(f"=========     and {other} access at f(int)+0x20 in a.cu:9 [8 hazards]\n" for other in others)
    (finding,) = parse_log(text + "========= \n", "racecheck", ("f",), True).findings
    assert finding.hazard == hazard


def test_names_that_steer_a_terminal_are_shown_as_escapes() -> None:
    text = f"{BANNER}========= Invalid \x1b[2J write\n=========     at k+0x1\n========= \n"
    assert "\x1b" not in parse_log(text, "memcheck", ("k",), True).findings[0].text


def test_the_older_words_for_a_race_are_read() -> None:
    text = (
        f"{BANNER}========= Warning: Race reported between Read access at 0x570 in void ns::reduce<int>(T1)\n"
        "=========     and Write access at 0x600 in void ns::reduce<int>(T1) [16 hazards]\n"
        "=========     and Write access at 0x610 in void ns::reduce<int>(T1) [4 hazards]\n=========\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
    )
    (finding,) = parse_log(text, "racecheck", ("reduce",), False).findings
    assert (finding.count, finding.in_target, finding.kernel) == (20, True, "reduce")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("void ns::moe_gemm<(int)8>(float *)", True),
        ("moe_gemm", True),
        ("moe_gemm_0d1d2de3", True),
        ("_Z8moe_gemmPf", True),
        ("_ZN2ns8moe_gemmILi8EEEvPf", True),
        ("_Z8moe_gemmPf.constprop.0", True),
        ("moe_gemm.constprop.0", True),
        ("moe_gemm_$_isra", True),
        ("moe_gemm_gptq", None),
        ("__nv_static_12__x_cu__Z8moe_gemmPf", None),
        ("_Z8moe_gemmPf_x", None),
        ("_Z8moe_g...", None),
        ("_Z5otherPf", False),
        ("void moe_gemm<Tile<1, ... 4>>(P)", True),
        ("void ns::moe_g...", None),
        ("void ns::other_...", False),
    ],
)
def test_a_name_is_the_targets_by_its_base_in_any_form_and_one_that_only_holds_it_tells_nothing(
    name: str, same: bool | None
) -> None:
    assert names_target(name, ("moe_gemm",)) is same


def test_a_kernel_that_the_filter_cannot_have_let_through_is_not_placed() -> None:
    assert in_target("memory", "ncclDevKernel", (), ("moe_gemm",), True) is None
    assert in_target("memory", "ncclDevKernel", (), ("moe_gemm",), False) is False


@pytest.mark.parametrize("name", ["__nv_static_12__moe_gemm", "_Z8moe_gemmPf_x", "moe_g...", None])
def test_under_a_filter_a_finding_whose_name_is_not_understood_is_the_targets(name: str | None) -> None:
    assert in_target("memory", name, (), ("moe_gemm",), True) is True
    assert in_target("memory", name, (), ("moe_gemm",), False) is None


@pytest.mark.parametrize("tool", TOOLS)
def test_where_no_kernel_is_known_to_be_under_test_no_finding_is_another_ones(tool: Tool) -> None:
    block = "========= Invalid __global__ write of size 4 bytes\n=========     at moe_gemm+0x10\n"
    if tool == "racecheck":
        block = "========= Error: Race reported between Write access at f(int)+0x1\n"
        block += "=========     and Read access at g(int)+0x2\n"
    (finding,) = parse_log(BANNER + block + "========= \n", tool, (), False).findings
    assert finding.in_target is None


UNKNOWN = [
    "Invalid __global__ write of size 4 bytes",
    " ========= Invalid __global__ write of size 4 bytes",
    "\x1b[31m========= Invalid __global__ write of size 4 bytes\x1b[0m",
    "======== Invalid __global__ write of size 4 bytes",
    "========== Invalid __global__ write of size 4 bytes",
    "Internal Sanitizer Error: the tool failed",
    "Segmentation fault (core dumped)",
    "========= " + " " * MAX_LINE + "Invalid __global__ write of size 4 bytes",
    BANNER.rstrip(),
]


@pytest.mark.parametrize("line", UNKNOWN)
@pytest.mark.parametrize("behind", [False, True])
def test_every_line_that_is_not_understood_is_a_notice(line: str, behind: bool) -> None:
    summary = "========= ERROR SUMMARY: 0 errors\n"
    text = BANNER + (f"{summary}{line}\n" if behind else f"{line}\n{summary}")
    log = parse_log(text, "memcheck", ("k",), True)
    assert (log.banner, len(log.notices), log.findings) == (True, 1, ())


@pytest.mark.parametrize("before", ["\n", "hello\n", "========= ERROR SUMMARY: 0 errors\n", "========= \n", "\ufeff"])
def test_a_first_line_that_is_not_the_first_is_none(before: str) -> None:
    log = parse_log(f"{before}{BANNER}========= ERROR SUMMARY: 0 errors\n", "memcheck", ("k",), True)
    assert not log.banner
    assert log.notices


def test_a_location_is_read_without_its_folder() -> None:
    access = read_location("T::operator+(int)+0xffffffffffffff10 in /secret/place/a.cuh:7")
    assert (access.function, access.offset, access.file, access.line) == (
        *("T::operator+(int)", "+0xffffffffffffff10"),
        *("a.cuh", 7),
    )


def test_ten_megabytes_of_findings_are_read_as_a_stream_and_folded(tmp_path: Path) -> None:
    block = (
        "========= Invalid __global__ write of size 4 bytes\n=========     at moe_gemm+0x{0:x}\n"
        "=========     by thread ({0},0,0) in block (0,0,0)\n"
        "=========     Address 0x{0:x} is out of bounds\n========= \n"
    )
    blocks = 55_000
    path = tmp_path / "tool.log"
    with path.open("w") as stream:
        stream.write(BANNER)
        stream.writelines(block.format(number) for number in range(blocks))
        stream.write(f"========= ERROR SUMMARY: {blocks} errors\n")
    assert path.stat().st_size > 10_000_000
    log = parse_log(path, "memcheck", ("moe_gemm",), True)
    assert (log.shown, log.found_errors, log.cut) == (blocks, blocks, False)
    assert len(log.findings) == MAX_DISTINCT + 1
    assert all(finding.in_target for finding in log.findings)


def test_a_line_without_end_costs_no_time_and_hides_nothing_behind_it() -> None:
    text = f"{BANNER}========= Invalid {'+0x1 in a:1 ' * 100_000}\n========= \n========= ERROR SUMMARY: 1 error\n"
    begun = time.monotonic()
    log = parse_log(text, "memcheck", ("k",), True)
    assert time.monotonic() - begun < 2
    assert (log.shown, log.found_errors, log.cut) == (1, 1, False)
    assert len(log.findings[0].text) < MAX_LINE


@pytest.mark.parametrize(
    "line",
    [
        f"x{' ' * 16_000}x",
        "[1" * 8_000,
        f"and Write access at k_0{'1' * 8_000}x",
        f"at k+0x{':1' * 8_000}",
        f"thread ({'1' * 8_000}",
    ],
)
def test_no_line_costs_more_time_than_its_length(line: str) -> None:
    text = f"{BANNER}========= Invalid write {line}\n=========     {line}\n========= \n" * 20
    begun = time.monotonic()
    parse_log(text, "racecheck", ("k",), True)
    assert time.monotonic() - begun < 2


def test_what_lies_behind_the_bound_of_a_log_makes_it_cut(tmp_path: Path) -> None:
    path = tmp_path / "tool.log"
    path.write_text(f"{BANNER}========= ERROR SUMMARY: 0 errors\n" + "x\n" * 100)
    assert parse_log(path, "memcheck", ("k",), True, limit_bytes=100).cut
