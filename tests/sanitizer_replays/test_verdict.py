"""Verdicts: every condition of a clean result alone decides, and damage never hides a fault."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from fake_sanitizer import BANNER, CAPTURE, CLEAN, EQUAL, LAUNCHED, TARGET, caught

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.results import TOOLS, ControlReport, Finding, OutputCheck, Tool, ToolRun
from alphamoe_sanitizer_replays.tool.log import parse_log
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowList, parse_allow_list
from alphamoe_sanitizer_replays.verdicts.judge import ToolVerdict, judge

TODAY = datetime.date(2026, 6, 1)
FAULT = "========= Invalid __global__ write of size 4 bytes\n=========     at {}+0x10 in a.cu:7\n========= \n"
ENTRY = f"""
[[allow]]
symbol = "{TARGET}"
hazard = "memory"
tool = "memcheck"
tool_versions = "2025.1..2025.4"
reason = "understood"
expires = 2026-12-31
"""
_UNSET: Any = object()


def a_run(tool: Tool = "memcheck", text: str | None = None, *, filtered: bool = True, **changed: Any) -> ToolRun:
    log = parse_log(CLEAN[tool] if text is None else text, tool, (TARGET,), filtered)
    found = log.found_errors + log.found_warnings
    run = ToolRun(
        tool=tool,
        tool_path="/t/compute-sanitizer",
        tool_version="2025.3.1.0",
        argv=(),
        error_exitcode=86,
        exit_code=86 if found else 0,
        timeout_s=60,
        wall_s=3,
        log_file="tool.log",
        xml_file="tool.xml",
        log=log,
        xml_records=log.shown,
        symbols=(TARGET,) if filtered else (),
        result=LAUNCHED,
    )
    return msgspec.structs.replace(run, **changed)


def judged(
    run: ToolRun,
    *,
    output: OutputCheck | None = EQUAL,
    controls: ControlReport | None = _UNSET,
    allow: AllowList | None = None,
    today: datetime.date = TODAY,
    symbols: tuple[str, ...] = (TARGET,),
) -> ToolVerdict:
    known = caught(run.tool) if controls is _UNSET and run.tool != "none" else controls
    return judge(
        run,
        capture=msgspec.structs.replace(CAPTURE, symbols=symbols),
        output=output,
        controls=None if known is _UNSET else known,
        allow=allow or AllowList(),
        today=today,
    )


def with_fault(name: str = TARGET, errors: int = 1) -> str:
    return f"{BANNER}{FAULT.format(name) * errors}========= ERROR SUMMARY: {errors} error{'s' * (errors > 1)}\n"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_clean_run_with_all_conditions_passes(tool: Tool) -> None:
    verdict = judged(a_run(tool))
    assert (verdict.target, verdict.whole, verdict.reasons, verdict.settled_by) == (
        *(Verdict.PASS, Verdict.PASS, ()),
        "all conditions",
    )


DAMAGES: dict[str, dict[str, Any]] = {
    "timeout": {"timed_out": True, "exit_code": None},
    "signal": {"signal": "SIGSEGV", "exit_code": None},
    "unknown end": {"exit_code": None},
    "program's own exit code": {"exit_code": 3},
    "crash behind a clean line": {"exit_code": 139},
    "unknown option": {"exit_code": 255},
    "exit code says found": {"exit_code": 86},
    "no exit code set": {"error_exitcode": None},
    "no version": {"tool_version": None},
    "no log": {"log": None},
    "no XML": {"xml_records": None},
    "XML holds more": {"xml_records": 1},
    "no result": {"result": None},
    "problem": {"problems": ("the disk was full",)},
    "failed": {"result": msgspec.structs.replace(LAUNCHED, status="failed", error="x")},
    "not launched": {"result": msgspec.structs.replace(LAUNCHED, launches=0)},
    "launched by a plug-in that cannot know": {"result": msgspec.structs.replace(LAUNCHED, launches=None)},
    "launched less than nothing": {"result": msgspec.structs.replace(LAUNCHED, launches=-1)},
    "a collector beside the tool": {"result": msgspec.structs.replace(LAUNCHED, collector="torch.profiler")},
    "on the CPU": {"result": msgspec.structs.replace(LAUNCHED, device="cpu")},
    "no GPU told": {"result": msgspec.structs.replace(LAUNCHED, device=None)},
    "no variant told": {"variant": "t8_c8"},
    "another variant": {"variant": "t8_c8", "result": msgspec.structs.replace(LAUNCHED, variant="t64_w")},
    "another launched": {"result": msgspec.structs.replace(LAUNCHED, symbols=("other",))},
    "another watched": {"symbols": ("other",)},
    "caching allocator": {"result": msgspec.structs.replace(LAUNCHED, caching_allocator=True)},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_alone_makes_a_clean_log_inconclusive_and_says_why(name: str) -> None:
    verdict = judged(a_run(**DAMAGES[name]))
    assert (verdict.target, verdict.whole, verdict.settled_by) == (
        *(Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE),
        "evidence",
    )
    assert all(verdict.reasons)


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "no log"])
def test_no_damage_hides_a_fault_in_the_target(name: str) -> None:
    assert judged(a_run(text=with_fault(), **DAMAGES[name])).target is Verdict.FAIL


LOGS = {
    "empty": "",
    "banner only": BANNER,
    "no banner": "========= ERROR SUMMARY: 0 errors\n",
    "cut line": f"{BANNER}========= ERROR SUMMARY: 0 errors",
    "another script's zero": f"{BANNER}========= ERROR SUMMARY: \u0660 errors\n",
    "cut number": f"{BANNER}========= ERROR SUMMARY: 0 error",
    "words without the mark": f"{BANNER}Segmentation fault (core dumped)\n========= ERROR SUMMARY: 0 errors\n",
    "words behind the summary": f"{CLEAN['memcheck']}Internal Sanitizer Error: the tool failed\n",
    "banner in the second line": f"\n{CLEAN['memcheck']}",
    "two runs": CLEAN["memcheck"] * 2,
    "two summaries": CLEAN["memcheck"] + "========= ERROR SUMMARY: 0 errors\n",
    "another tool": CLEAN["racecheck"],
    "program failed": f"{BANNER}========= Target application returned an error\n========= ERROR SUMMARY: 0 errors\n",
    "before the first call": (
        f"{BANNER}========= Error: Target application terminated before first instrumented API call\n"
        "========= ERROR SUMMARY: 0 errors\n"
    ),
    "tool failed": (
        f"{BANNER}========= Internal Sanitizer Error: the tool failed\n========= \n========= ERROR SUMMARY: 0 errors\n"
    ),
    "tool failed and counted it": (
        f"{BANNER}========= Internal Sanitizer Error: the tool failed\n========= \n========= ERROR SUMMARY: 1 error\n"
    ),
    "unknown words": f"{BANNER}========= Tracking of 1 kernel was given up\n========= ERROR SUMMARY: 0 errors\n",
    "not printed without number": f"{CLEAN['memcheck']}========= ERROR SUMMARY: some errors were not printed.\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_only_looks_clean_is_inconclusive(name: str) -> None:
    verdict = judged(a_run(text=LOGS[name]))
    assert verdict.target is Verdict.INCONCLUSIVE
    assert verdict.whole is not Verdict.PASS
    assert verdict.reasons


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("memcheck", f"{BANNER}{FAULT.format(TARGET)}========= ERROR SUMMARY: 0 errors\n"),
        ("memcheck", f"{BANNER}========= ERROR SUMMARY: 0 errors\n{FAULT.format(TARGET)}"),
        ("memcheck", f"{BANNER}========= ERROR SUMMARY: 1 error\n"),
        ("memcheck", f"{CLEAN['memcheck']}========= ERROR SUMMARY: 5 errors were not printed. Use --print-limit\n"),
        ("racecheck", f"{BANNER}========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 0 warnings)\n"),
        ("racecheck", f"{BANNER}========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"),
    ],
)
def test_a_log_that_contradicts_itself_fails_by_what_it_shows_or_counts(tool: Tool, text: str) -> None:
    assert judged(a_run(tool, text, exit_code=0)).target is Verdict.FAIL


def test_a_fault_that_only_the_xml_holds_fails() -> None:
    finding = Finding(tool="memcheck", severity="error", kind="memory", text="Invalid write", in_target=True)
    verdict = judged(a_run(xml_records=1, xml_findings=(finding,)))
    assert (verdict.target, verdict.target_findings) == (Verdict.FAIL, (finding,))


def test_a_fault_that_only_the_xml_holds_fails_beside_an_allowed_one_in_the_log() -> None:
    """The entry covers the one that it names."""
    allow = parse_allow_list(ENTRY, "a.toml", TODAY)
    other = Finding(tool="memcheck", severity="error", kind="memory", text="Invalid write", in_target=True)
    verdict = judged(a_run(text=with_fault(), xml_records=2, xml_findings=(other,)), allow=allow)
    assert (verdict.target, len(verdict.allowed)) == (Verdict.FAIL, 1)
    assert other in verdict.target_findings


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (None, Verdict.INCONCLUSIVE),
        (OutputCheck(verdict="INCONCLUSIVE", reason="x"), Verdict.INCONCLUSIVE),
        (OutputCheck(verdict="FAIL", reason="error 3"), Verdict.FAIL),
    ],
)
def test_the_output_must_be_the_captured_one(output: OutputCheck | None, target: Verdict) -> None:
    assert judged(a_run(), output=output).target is target


def controls_with(**changed: Any) -> ControlReport:
    (outcome,) = caught("memcheck").outcomes
    return ControlReport(tool="memcheck", outcomes=(msgspec.structs.replace(outcome, **changed),))


@pytest.mark.parametrize(
    "controls",
    [
        None,
        caught("racecheck"),
        ControlReport(tool="memcheck", outcomes=()),
        controls_with(caught=False),
        controls_with(sound_clean=False),
        controls_with(basic=False),
        msgspec.structs.replace(caught("memcheck"), problems=("nothing was compiled",)),
        msgspec.structs.replace(caught("memcheck"), device="NVIDIA T4"),
        msgspec.structs.replace(caught("memcheck"), device=None),
    ],
)
def test_nothing_is_clean_without_the_tools_own_controls(controls: ControlReport | None) -> None:
    verdict = judged(a_run(), controls=controls)
    assert (verdict.target, verdict.settled_by) == (Verdict.INCONCLUSIVE, "controls")
    assert verdict.reasons


def test_a_fault_needs_no_controls() -> None:
    assert judged(a_run(text=with_fault()), controls=None).target is Verdict.FAIL


def test_no_symbol_anywhere_is_inconclusive() -> None:
    nameless = msgspec.structs.replace(LAUNCHED, symbols=())
    assert judged(a_run(result=nameless, filtered=False), symbols=()).target is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("name", [TARGET, f"_Z8{TARGET}Pf", f"{TARGET}.constprop.0", f"__nv_static_1__{TARGET}"])
def test_a_fault_of_the_target_in_any_form_of_its_name_fails(name: str) -> None:
    assert judged(a_run(text=with_fault(name))).target is Verdict.FAIL


def test_a_fault_of_what_may_be_the_target_is_never_clean_without_a_filter() -> None:
    assert judged(a_run(text=with_fault(f"__nv_static_1__{TARGET}"), filtered=False)).target is Verdict.INCONCLUSIVE


def test_infos_that_are_counted_and_not_shown_are_not_clean() -> None:
    text = f"{BANNER}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings, 7 infos)\n"
    verdict = judged(a_run("racecheck", text))
    assert verdict.target is Verdict.INCONCLUSIVE
    assert "7 infos" in verdict.reasons[0]


def test_a_file_that_grew_too_large_is_the_reason_and_not_our_own_signal() -> None:
    verdict = judged(a_run(exit_code=None, problems=("tool.log grew past 64 MiB; killed",)))
    assert verdict.reasons == ("tool.log grew past 64 MiB; killed",)


@pytest.mark.parametrize(
    "call",
    [
        'CUDA_ERROR_ILLEGAL_ADDRESS (error 700) due to "x" on CUDA API call to cuCtxSynchronize.',
        'cudaErrorIllegalAddress (error 700) due to "x" on CUDA API call to cudaDeviceSynchronize.',
        'cudaErrorInvalidConfiguration (error 9) due to "x" on CUDA API call to cudaLaunchKernel.',
        'CUDA_ERROR_INVALID_VALUE (error 1) due to "x" on CUDA API call to cuLaunchKernelEx.',
        'cudaErrorLaunchFailure (error 719) due to "x" on CUDA API call to cudaGetDriverEntryPoint.',
        "CUDA_ERROR_NEVER_HEARD_OF (error 12345)",
    ],
)
def test_a_failed_host_call_leaves_the_target_open_unless_it_only_looked_something_up(call: str) -> None:
    text = f"{BANNER}========= Program hit {call}\n========= \n========= ERROR SUMMARY: 1 error\n"
    verdict = judged(a_run(text=text))
    assert (verdict.target, verdict.whole, verdict.api_errors) == (Verdict.INCONCLUSIVE, Verdict.FAIL, 1)


def test_unprinted_findings_are_not_the_targets_where_the_log_shows_those_of_others() -> None:
    text = f"{BANNER}{FAULT.format('ncclDevKernel')}========= ERROR SUMMARY: 3 errors\n"
    verdict = judged(a_run(text=text))
    assert (verdict.target, verdict.whole) == (Verdict.INCONCLUSIVE, Verdict.FAIL)


def test_failed_host_calls_up_to_the_print_limit_may_hide_a_fault_of_the_target() -> None:
    call = 'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "x" on CUDA API call to cuGetProcAddress_v2.'
    text = (
        f"{BANNER}========= {call}\n========= \n========= ERROR SUMMARY: 15 errors\n"
        "========= ERROR SUMMARY: 14 errors were not printed. Use --print-limit\n"
    )
    verdict = judged(a_run(text=text))
    assert (verdict.target, verdict.whole) == (Verdict.INCONCLUSIVE, Verdict.FAIL)
    assert "14 findings were not printed" in verdict.reasons


def test_a_log_of_another_tool_proves_nothing_for_this_one() -> None:
    for text in (CLEAN["memcheck"], CLEAN["racecheck"] + "========= ERROR SUMMARY: 0 errors\n"):
        assert judged(a_run("racecheck", text)).target is Verdict.INCONCLUSIVE
    assert judged(msgspec.structs.replace(a_run("synccheck"), tool="memcheck")).target is Verdict.INCONCLUSIVE


def test_an_allowed_finding_passes_is_listed_apart_and_stays_in_the_totals() -> None:
    verdict = judged(a_run(text=with_fault(errors=2)), allow=parse_allow_list(ENTRY, "a.toml", TODAY))
    assert (verdict.target, verdict.whole, verdict.found, verdict.shown) == (Verdict.PASS, Verdict.PASS, 2, 2)
    assert len(verdict.allowed) == 1
    assert "understood" in verdict.allowed[0]
    assert verdict.target_findings[0].shown == 2


def test_an_entry_that_expired_is_a_config_error_for_what_it_would_have_covered() -> None:
    late = parse_allow_list(ENTRY.replace("2026-12-31", "2026-05-31"), "a.toml", TODAY)
    verdict = judged(a_run(text=with_fault()), allow=late)
    assert (verdict.target, verdict.settled_by, verdict.allowed) == (Verdict.CONFIG_ERROR, "allow-list", ())
    assert judged(a_run(), allow=late).target is Verdict.PASS


def test_an_allowed_finding_excuses_nothing_that_was_not_printed_and_no_other_exit_code() -> None:
    allow = parse_allow_list(ENTRY, "a.toml", TODAY)
    more = with_fault().replace("SUMMARY: 1 error", "SUMMARY: 9 errors")
    assert judged(a_run(text=more), allow=allow).target is Verdict.FAIL
    assert judged(a_run(text=with_fault(), exit_code=0), allow=allow).target is Verdict.INCONCLUSIVE
    assert judged(a_run(text=with_fault(), tool_version="2026.1"), allow=allow).target is Verdict.FAIL


def plain_run(**result: Any) -> ToolRun:
    run = a_run(log=None, exit_code=0, result=msgspec.structs.replace(LAUNCHED, **result))
    return msgspec.structs.replace(
        run, tool="none", error_exitcode=None, tool_version=None, xml_records=None, symbols=()
    )


def test_a_run_without_a_tool_says_that_the_kernel_ran_and_the_output_is_equal() -> None:
    verdict = judged(plain_run())
    assert (verdict.target, verdict.whole, verdict.reasons) == (Verdict.PASS, Verdict.PASS, ())
    assert verdict.notes == ("no tool looked: nothing is known of races and memory",)
    assert judged(plain_run(), output=None).target is Verdict.INCONCLUSIVE
    assert judged(plain_run(), output=OutputCheck(verdict="FAIL", reason="x")).target is Verdict.FAIL
    assert judged(msgspec.structs.replace(plain_run(), exit_code=1)).target is Verdict.INCONCLUSIVE


ON_CPU = "no GPU: it ran on the CPU, where no kernel is launched"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"device": "cpu"}, ON_CPU),
        ({"device": "cpu", "symbols": (), "launches": 0, "variant": "reference"}, ON_CPU),
        ({"device": None}, "the replay does not say on which GPU it ran"),
        ({"launches": 0}, "the replay says that it launched no kernels"),
        ({"launches": None}, f"nothing tells that {TARGET} was launched"),
        ({"symbols": ("other",)}, f"the replay did not launch {TARGET}"),
    ],
)
def test_without_a_tool_a_kernel_that_was_not_seen_to_run_is_no_pass(result: dict[str, Any], why: str) -> None:
    for run in (plain_run(**result), a_run(result=msgspec.structs.replace(LAUNCHED, **result))):
        verdict = judged(run)
        assert (verdict.target, verdict.reasons) == (Verdict.INCONCLUSIVE, (why,))


def test_without_a_tool_a_capture_without_a_symbol_is_no_pass_and_tritons_word_is_one() -> None:
    unnamed = judged(plain_run(symbols=(), launches=None, seen={TARGET: 1}), symbols=())
    assert unnamed.target is Verdict.INCONCLUSIVE
    assert "--symbol" in unnamed.reasons[0]
    seen = judged(plain_run(launches=None, seen={TARGET: 2}))
    assert seen.target is Verdict.PASS
    assert seen.notes[0] == f"seen by Triton's launch hook: {TARGET} (2 launched)"


def test_without_a_tool_an_output_that_is_wrong_on_a_cpu_fails() -> None:
    verdict = judged(plain_run(device="cpu"), output=OutputCheck(verdict="FAIL", reason="off"))
    assert verdict.target is Verdict.FAIL
    assert verdict.reasons == ("the output is not the captured one: off", ON_CPU)


def test_a_verdict_goes_through_json() -> None:
    verdict = judged(a_run(text=with_fault()), allow=parse_allow_list(ENTRY, "a.toml", TODAY))
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=ToolVerdict) == verdict
