"""T9 and S1 to S9 of the public cases: fake tools that print such output, run and judged as a replay is."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest
from fake_sanitizer import BANNER, CAPTURE, CLEAN, EQUAL, LAUNCHED, TARGET, body_of, caught, run_fake

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.results import ToolRun
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowList, parse_allow_list
from alphamoe_sanitizer_replays.verdicts.judge import ToolVerdict, judge
from alphamoe_tracers.errors import UsageError

TODAY = datetime.date(2026, 6, 1)
PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
INVALID_READ = (
    "========= Invalid __global__ read of size 4 bytes\n=========     at {}+0x10 in a.cu:7\n"
    "=========     by thread (1,0,0) in block (2,0,0)\n=========     Address 0x7f00 is out of bounds\n========= \n"
)
RACE = (
    "========= {}: Race reported between Write access at void {}<int>(int *)+0x10 in a.cu:7\n"
    "=========     and Read access at void {}<int>(int *)+0x20 in a.cu:9 [8 hazards]\n========= \n"
)


def judged(run: ToolRun, allow: AllowList | None = None) -> ToolVerdict:
    assert run.tool != "none"
    return judge(run, capture=CAPTURE, output=EQUAL, controls=caught(run.tool), allow=allow or AllowList(), today=TODAY)


def test_the_fake_tool_itself_can_pass(tmp_path: Path) -> None:
    assert judged(run_fake(tmp_path, "racecheck", body_of(CLEAN["racecheck"]))).whole is PASS


def test_t9_one_hazard_in_the_singular_with_exit_code_0_fails(tmp_path: Path) -> None:
    text = f"{BANNER}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    verdict = judged(run_fake(tmp_path, "racecheck", body_of(text)))
    assert (verdict.target, verdict.found, verdict.shown) == (FAIL, 1, 0)


def test_t9_one_error_in_the_singular_with_exit_code_0_fails(tmp_path: Path) -> None:
    text = f"{BANNER}========= ERROR SUMMARY: 1 error\n"
    assert judged(run_fake(tmp_path, "memcheck", body_of(text))).target is FAIL


@pytest.mark.parametrize("code", [0, 86])
def test_t9_a_banner_and_no_summary_is_inconclusive(tmp_path: Path, code: int) -> None:
    assert judged(run_fake(tmp_path, "memcheck", body_of(BANNER, code=code))).target is INCONCLUSIVE


@pytest.mark.parametrize("code", [139, 1, 3, 255])
def test_t9_a_clean_summary_with_another_exit_code_is_inconclusive(tmp_path: Path, code: int) -> None:
    verdict = judged(run_fake(tmp_path, "memcheck", body_of(CLEAN["memcheck"], code=code)))
    assert verdict.target is INCONCLUSIVE
    assert str(code) in verdict.reasons[0]


def test_t9_a_crash_behind_a_clean_line_is_inconclusive(tmp_path: Path) -> None:
    body = f"result(); log({CLEAN['memcheck']!r}); xml(); os.kill(os.getpid(), signal.SIGSEGV)"
    verdict = judged(run_fake(tmp_path, "memcheck", body))
    assert verdict.target is INCONCLUSIVE
    assert "SIGSEGV" in verdict.reasons[0]


def test_t9_two_summaries_are_added_and_the_second_one_counts(tmp_path: Path) -> None:
    text = f"{BANNER}========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 2 errors\n"
    verdict = judged(run_fake(tmp_path, "memcheck", body_of(text)))
    assert (verdict.target, verdict.found) == (FAIL, 2)


def test_t9_a_target_that_ended_before_the_first_call_is_inconclusive(tmp_path: Path) -> None:
    text = (
        f"{BANNER}========= Error: Target application terminated before first instrumented API call\n"
        "========= ERROR SUMMARY: 0 errors\n"
    )
    for code in (0, 255):
        assert judged(run_fake(tmp_path, "memcheck", body_of(text, code=code))).target is INCONCLUSIVE


def test_t9_the_word_error_in_a_kernels_name_is_no_error(tmp_path: Path) -> None:
    block = INVALID_READ.format("void error_summary<ERROR SUMMARY: 7 errors>(int)")
    text = f"{BANNER}{block}========= ERROR SUMMARY: 1 error\n"
    verdict = judged(run_fake(tmp_path, "memcheck", body_of(text, code=86, records=1), symbols=()))
    assert (verdict.target, verdict.whole, verdict.found) == (PASS, FAIL, 1)


def test_t9_an_unknown_option_is_inconclusive_and_named(tmp_path: Path) -> None:
    body = "print('unrecognised option --xml\\nUsage: compute-sanitizer [options]'); sys.exit(255)"
    verdict = judged(run_fake(tmp_path, "memcheck", body))
    assert verdict.target is INCONCLUSIVE
    assert any("unrecognised option --xml" in reason for reason in verdict.reasons)


def test_t9_a_target_that_was_not_seen_running_is_inconclusive(tmp_path: Path) -> None:
    idle = msgspec.structs.replace(LAUNCHED, launches=0, symbols=())
    body = body_of(CLEAN["synccheck"])
    assert judged(run_fake(tmp_path / "a", "synccheck", body, result=idle)).target is INCONCLUSIVE
    silent = body.removeprefix("result(); ")
    assert judged(run_fake(tmp_path / "b", "synccheck", silent)).target is INCONCLUSIVE


def test_t9_a_tool_of_another_version_is_read_by_its_words_alone(tmp_path: Path) -> None:
    same = run_fake(tmp_path / "a", "memcheck", body_of(CLEAN["memcheck"]), version="2031.1")
    assert (judged(same).target, same.tool_version) == (PASS, "2031.1")
    words = f"{BANNER}========= SUMMARY OF ERRORS: 0\n"
    other = run_fake(tmp_path / "b", "memcheck", body_of(words), version="2031.1")
    assert judged(other).target is INCONCLUSIVE


def test_s1_warnings_are_not_clean(tmp_path: Path) -> None:
    text = f"{BANNER}========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n"
    assert judged(run_fake(tmp_path / "a", "racecheck", body_of(text))).target is FAIL
    block = RACE.format("Warning", "store", "store")
    text = f"{BANNER}{block}========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
    verdict = judged(run_fake(tmp_path / "b", "racecheck", body_of(text, code=86, records=1)))
    assert verdict.target is FAIL
    assert "warnings are not clean" in verdict.reasons[0]


@pytest.mark.parametrize("rank", ["5", "9" * 5000])
def test_s2_a_potential_hazard_with_block_ranks_and_cut_names_is_one_hazard_and_no_rank(
    tmp_path: Path, rank: str
) -> None:
    """However long the number is that a torn line gives."""
    text = (
        f"{BANNER}========= Error: Potential RAW hazard detected (CUDA barrier operation) at __shared__ 0x9000080 "
        "in block (3,0,0) :\n"
        f"=========     Write Thread (17,0,0) (block rank {rank}) at void moe_gemm<Tile<half, ... 4>>(P1, P2)"
        "+0xfffffffffffffe20\n"
        "=========     Read Thread (2,0,0) (block rank 4) at ns::take(int, unsigned int *)+0x1a0 in take.hpp:31\n"
        "=========         Device Frame: void moe_gemm<Tile<half, ... 4>>(P1, P2)+0x9b0 in gemm.cu:12\n"
        "=========     Current Value : 0\n========= \n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    verdict = judged(run_fake(tmp_path, "racecheck", body_of(text, code=86, records=1), symbols=()))
    (finding,) = verdict.target_findings
    assert (finding.hazard, finding.kernel, finding.kernel_truncated) == ("RAW", TARGET, True)
    assert (finding.cluster_rank, finding.block, finding.thread) == (int(rank[:9]), (3, 0, 0), (17, 0, 0))
    assert finding.where is not None
    assert finding.other is not None
    assert (finding.where.offset, finding.where.access) == ("+0xfffffffffffffe20", "Write")
    assert (finding.other.line, finding.other.access) == (31, "Read")
    assert verdict.target is FAIL


def test_s3_a_barrier_finding_of_one_tool_is_not_undone_by_another_that_is_clean(tmp_path: Path) -> None:
    text = (
        f"{BANNER}========= Barrier error detected. Missing wait.\n=========     at void moe_gemm<int>(P)+0x90\n"
        "=========     by thread (0,0,0) in block (1,0,0)\n========= \n========= ERROR SUMMARY: 1 error\n"
    )
    memory = judged(run_fake(tmp_path / "a", "memcheck", body_of(CLEAN["memcheck"])))
    barrier = judged(run_fake(tmp_path / "b", "synccheck", body_of(text, code=86, records=1)))
    assert memory.target is PASS
    assert barrier.target is FAIL
    assert barrier.target_findings[0].kind == "synchronization"


def test_s4_a_hang_is_killed_keeps_its_log_and_is_inconclusive(tmp_path: Path) -> None:
    verdict = judged(run := run_fake(tmp_path, "racecheck", f"log({BANNER!r}); time.sleep(300)", timeout_s=1.0))
    assert (verdict.target, run.timed_out) == (INCONCLUSIVE, True)
    assert "timed out after 1 s" in verdict.reasons[0]
    assert (tmp_path / "run" / "tool.log").read_text() == BANNER


def test_s5_a_caching_allocator_takes_memchecks_word_and_not_racechecks(tmp_path: Path) -> None:
    cached = msgspec.structs.replace(LAUNCHED, caching_allocator=True)
    memory = judged(run_fake(tmp_path / "a", "memcheck", body_of(CLEAN["memcheck"]), result=cached))
    races = judged(run_fake(tmp_path / "b", "racecheck", body_of(CLEAN["racecheck"]), result=cached))
    assert (memory.target, races.target) == (INCONCLUSIVE, PASS)
    assert "caching allocator" in memory.reasons[0]


def test_s6_a_fault_in_a_library_kernel_leaves_the_target_clean_and_the_run_not(tmp_path: Path) -> None:
    text = f"{BANNER}{INVALID_READ.format('ncclDevKernel_X')}========= ERROR SUMMARY: 1 error\n"
    body = body_of(text, code=86, records=1)
    verdict = judged(run_fake(tmp_path / "a", "memcheck", body, symbols=()))
    assert (verdict.target, verdict.whole) == (PASS, FAIL)
    assert verdict.other_findings[0].kernel == "ncclDevKernel_X"
    # Under a filter the tool cannot have seen that kernel: name or filter is wrong, and nothing is known.
    filtered = judged(run_fake(tmp_path / "b", "memcheck", body))
    assert (filtered.target, filtered.whole) == (INCONCLUSIVE, FAIL)


def test_s7_a_failed_host_call_is_of_its_own_class_and_stays_in_the_total(tmp_path: Path) -> None:
    call = 'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "x" on CUDA API call to cuGetProcAddress_v2.'
    text = f"{BANNER}========= {call}\n========= \n========= ERROR SUMMARY: 1 error\n"
    verdict = judged(run_fake(tmp_path, "memcheck", body_of(text, code=86, records=1)))
    assert (verdict.target, verdict.whole) == (PASS, FAIL)
    assert (verdict.api_errors, verdict.found, verdict.target_findings, verdict.other_findings) == (1, 1, (), ())


def test_s8_what_was_found_and_what_was_shown_are_kept_apart(tmp_path: Path) -> None:
    text = (
        f"{BANNER}{INVALID_READ.format(TARGET) * 10}========= ERROR SUMMARY: 100 errors\n"
        "========= ERROR SUMMARY: 90 errors were not printed. Use --print-limit option\n"
    )
    verdict = judged(run_fake(tmp_path, "memcheck", body_of(text, code=86, records=10)))
    assert (verdict.target, verdict.found, verdict.shown) == (FAIL, 100, 10)
    assert verdict.notes == ("print limit reached: 100 found, 10 shown",)


def test_s9_a_library_race_needs_an_entry_with_a_reason_and_is_listed_when_it_is_used(tmp_path: Path) -> None:
    block = RACE.format("Error", "cub::X", "cub::X")
    text = f"{BANNER}{block}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    run = run_fake(tmp_path, "racecheck", body_of(text, code=86, records=1))
    entry = (
        '[[allow]]\nsymbol = "cub::X"\nhazard = "hazard"\ntool = "racecheck"\ntool_versions = "2025.1..2025.4"\n'
        "expires = 2026-12-31\n"
    )
    with pytest.raises(UsageError, match="reason") as raised:
        parse_allow_list(entry, "allow.toml", TODAY)
    assert raised.value.exit_code == Verdict.CONFIG_ERROR.exit_code
    assert judged(run).target is FAIL
    verdict = judged(run, parse_allow_list(entry + 'reason = "reported to its makers"\n', "allow.toml", TODAY))
    assert (verdict.target, verdict.found) == (PASS, 1)
    assert "reported to its makers" in verdict.allowed[0]


def test_ten_megabytes_of_findings_end_as_one_fault_in_bounded_time(tmp_path: Path) -> None:
    body = f"""
result(); log({BANNER!r})
for _ in range(50):
    log({INVALID_READ.format(TARGET)!r} * 1200)
log("========= ERROR SUMMARY: 60000 errors\\n"); xml(60000); sys.exit(86)
"""
    run = run_fake(tmp_path, "memcheck", body)
    assert (tmp_path / "run" / "tool.log").stat().st_size > 10_000_000
    verdict = judged(run)
    assert (verdict.target, verdict.found, verdict.shown) == (FAIL, 60_000, 60_000)
    assert len(verdict.target_findings) == 1
    assert len(verdict.reasons) == 1
    assert len(msgspec.json.encode(run)) < 10_000
