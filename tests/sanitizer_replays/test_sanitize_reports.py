"""What the reports of a sanitize session say: to a reviewer who reads one sentence, and to one who reads all of it."""

from __future__ import annotations

import datetime
import io
import tomllib
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.captures.records import GeometryRecord
from alphamoe_sanitizer_replays.reports.findings import allow_block, finding_line
from alphamoe_sanitizer_replays.reports.junit import junit_xml
from alphamoe_sanitizer_replays.reports.lines import control_lines
from alphamoe_sanitizer_replays.reports.markdown import markdown
from alphamoe_sanitizer_replays.reports.records import CaptureFacts, ReplayEntry, SanitizeReport, overall
from alphamoe_sanitizer_replays.reports.scope import with_scope
from alphamoe_sanitizer_replays.reports.terminal import print_report
from alphamoe_sanitizer_replays.results import TOOLS, Access, ControlOutcome, ControlReport, Finding, OutputCheck
from alphamoe_sanitizer_replays.verdicts.allow_list import parse_allow_list

SYMBOL = "kernel_alpha_moe_w8a8_up_down"
TODAY = datetime.date(2026, 11, 30)
STEERING = "\x1b[31m\x07\u202e\n::error::x http://example.invalid <b>"
RACE = Finding(
    tool="racecheck",
    severity="error",
    kind="hazard",
    text="Race reported between Write access at void block_barrier<(bool)1>(float *)+0xa0 in planted_faults.cu:20",
    where=Access("void block_barrier<(bool)1>(float *)", "planted_faults.cu", 20, "+0xa0", "Write"),
    other=Access("void block_barrier<(bool)1>(float *)", "planted_faults.cu", 22, "+0xb0", "Read"),
    count=1024,
    in_target=True,
)
RACE_LINE = "Write block_barrier planted_faults.cu:20 races with Read planted_faults.cu:22 (1,024 times)"


def controls(tool: str, **change: Any) -> ControlReport:
    """Two controls of a tool, the basic one first; ``change`` is of the second."""
    outcome = ControlOutcome(
        control="first",
        mechanism="block barrier",
        tool=tool,  # type: ignore[arg-type]
        meant_for=True,
        basic=True,
        caught=True,
        sound_clean=True,
    )
    second = msgspec.structs.replace(outcome, control="second", mechanism="warp sync", basic=False, **change)
    return ControlReport(tool=outcome.tool, outcomes=(outcome, second))


def facts(rank: int, layer: int, M: int, **change: Any) -> CaptureFacts:
    """A capture of our kernel on four ranks and two layers."""
    own = CaptureFacts(
        path=f"captures/rank={rank}/layer={layer}-M={M}",
        plugin="alphamoe_w8a8",
        symbols=(SYMBOL,),
        rank=rank,
        world_size=4,
        layer=layer,
        M=M,
        geometry=GeometryRecord(512, 2048, 128, 10, 8),
        variants=("t8_c8", "t64_w"),
        model_layers=2,
        run_id="run-a",
    )
    return msgspec.structs.replace(own, **change)


def entry(own: CaptureFacts, tool: str, **change: Any) -> ReplayEntry:
    """A clean replay."""
    made = ReplayEntry(
        capture=own.path,
        label=own.label,
        variant="t8_c8",
        tool=tool,
        verdict=Verdict.PASS,
        whole=Verdict.PASS,
        errors=0,
        warnings=0,
        hazards=0 if tool == "racecheck" else None,
        output=OutputCheck(verdict="PASS", max_abs_error=0.0),
        wall_s=9.0,
        timings_s={"imports": 1.25},
        source_sha256="ab12cd34ef567890",
        log_file="replays/tool.log",
    )
    return msgspec.structs.replace(made, **change)


def session(captures: list[CaptureFacts], *, change: Any = None, tools: tuple[str, ...] = TOOLS) -> SanitizeReport:
    """A session over captures; ``change`` makes of an entry another one."""
    entries = tuple(entry(own, tool) for own in captures for tool in tools)
    entries = tuple(change(own) for own in entries) if change else entries
    verdict, reason = overall(entries, len(entries))
    return with_scope(
        SanitizeReport(
            verdict=verdict,
            reason=reason,
            targets=("RUN",),
            device="NVIDIA H200",
            tool_version="2025.3.1.0",
            tools=tools,
            controls=tuple(controls(tool) for tool in tools if tool != "none"),
            captures=tuple(captures),
            entries=entries,
            created="2026-11-30T12:00:00Z",
            wall_s=60.0,
        )
    )


def of_racecheck(**change: Any) -> Any:
    """Change what racecheck came to."""
    return lambda own: msgspec.structs.replace(own, **change) if own.tool == "racecheck" else own


def replaced(own: ReplayEntry) -> ReplayEntry:
    """Make a replay one of another source."""
    return msgspec.structs.replace(own, source_differs=True)


FAILED = of_racecheck(
    verdict=Verdict.FAIL,
    whole=Verdict.FAIL,
    reasons=(RACE_LINE,),
    findings=(RACE,),
    hazards=1,
    errors=1,
    command="repeat me",
)
ALLOWED = of_racecheck(
    findings=(RACE,), hazards=1, errors=1, allowed=(f"{RACE_LINE}: allowed",), allowed_until="2027-01-31"
)
EVERY = [facts(rank, layer, M) for rank in range(4) for layer in range(2) for M in (1, 906)]


def terminal(report: SanitizeReport, width: int = 80) -> str:
    """Print a report as a terminal of that width would show it."""
    stream = io.StringIO()
    print_report(report, stream, width)
    return stream.getvalue()


def test_the_statement_of_a_whole_session_can_be_pasted() -> None:
    """Verdict, kernel, source, GPU, tool, dispatches, controls, and of what was not looked at only what there is."""
    assert session(EVERY).statement == (
        f"PASS: {SYMBOL} (source ab12cd34ef56), NVIDIA H200, compute-sanitizer 2025.3.1.0, "
        "16 captured eager dispatches (all 4 ranks, all 2 layers, M 1 and 906, variant t8_c8): "
        "synccheck, racecheck, memcheck and initcheck clean, outputs right; 8 of 8 planted faults caught; "
        "not covered: other M and inputs, variant t64_w, CUDA graph replays, host API errors"
    )


def test_a_variant_that_a_cpu_did_not_launch_is_not_covered() -> None:
    """The reference ran, whatever was asked for."""
    report = session(
        [facts(0, 0, 1)],
        tools=("none",),
        change=lambda own: msgspec.structs.replace(
            own, device="cpu", verdict=Verdict.INCONCLUSIVE, reasons=("no GPU",)
        ),
    )
    (sentence,) = report.scope
    for told in (report.statement, sentence):
        assert "not covered: other M and inputs, variants t8_c8 and t64_w, CUDA graph replays" in told
        assert "variant t8_c8" not in told
    assert "rank 0, layer 0, reference; " in sentence


def test_what_is_open_of_one_kernel_is_not_told_of_another() -> None:
    """Each sentence is pasted alone, and none of them as PASS."""
    mine, other, sound = (
        facts(0, 0, 1, path=f"captures/{name}", symbols=(name,)) for name in ("mine", "other", "sound")
    )
    report = session(
        [mine, other, sound],
        tools=("racecheck",),
        change=lambda own: (
            msgspec.structs.replace(own, verdict=Verdict.INCONCLUSIVE, reasons=(f"{own.capture} timed out",))
            if own.capture != sound.path
            else own
        ),
    )
    told_of_mine, told_of_other, told_of_sound = report.statement.split("\n")
    assert "captures/mine timed out" in told_of_mine
    assert "captures/other timed out" in told_of_other
    assert "captures/mine" not in told_of_other
    assert told_of_sound.startswith("INCONCLUSIVE for the session as a whole: sound")
    assert f"open: {report.reason}" in told_of_sound or "open" not in told_of_sound


def test_a_call_that_names_no_kernel_is_named_once() -> None:
    own = facts(0, None, 1, symbols=(), callable="mymoe:forward", geometry=None, variants=())
    (sentence,) = session(
        [own], tools=("racecheck",), change=lambda own: msgspec.structs.replace(own, variant=None)
    ).scope
    assert sentence.startswith("M1, rank 0, mymoe:forward; racecheck 0 hazards")


def test_what_a_session_left_out_is_told_on_one_basis() -> None:
    """Ranks and layers that no capture of the session is of, in the statement and in each sentence alike."""
    report = session([facts(0, 0, 1), facts(3, 0, 906)], tools=("racecheck",))
    gaps = "not covered: other M and inputs, variant t64_w, CUDA graph replays, ranks 1 and 2, layer 1, "
    gaps += "2 other combinations of rank, layer, M and variant, "
    gaps += "what synccheck, memcheck and initcheck would find (not run), host API errors"
    assert report.statement.endswith(gaps)
    assert (
        "(ranks 0 and 3 of 4, layer 0 of 2, M 1 and 906, variant t8_c8, 2 of 4 combinations of these)"
        in report.statement
    )
    assert report.scope[0] == (
        "M1, H2048, I128, E512, k10, BM8, rank 0, layer 0, t8_c8; racecheck 0 hazards; output PASS; " + gaps
    )
    assert all(sentence.endswith(gaps) for sentence in report.scope)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"run_id": "run-b"}, ("of run run-a (", "of run run-b (")),
        ({"gpu_name": "H20"}, ("captured on unknown (", "captured on H20 (")),
        ({"model": "tiny"}, ("of the model unknown (", "of the model tiny (")),
    ],
)
def test_a_sentence_is_of_one_run_one_model_and_one_gpu(change: dict[str, Any], told: tuple[str, str]) -> None:
    """Ranks of different runs together are not all ranks of either."""
    captures = [facts(0, 0, 1), facts(1, 0, 1), *(facts(rank, 0, 1, **change) for rank in (2, 3))]
    report = session(captures)
    sentences = report.statement.split("\n")
    assert len(sentences) == 2
    assert [own.removesuffix(" (") in report.scope[2 * number] for number, own in enumerate(told)] == [True, True]
    for sentence, own, there, left in zip(sentences, told, ("0 and 1", "2 and 3"), ("2 and 3", "0 and 1"), strict=True):
        assert f"2 captured eager dispatches {own}ranks {there} of 4, " in sentence
        assert f"CUDA graph replays, ranks {left}, layer 1" in sentence


def test_captures_of_no_run_are_of_how_many_nobody_knows() -> None:
    """One capture alone knows its own world; several need not be of one."""
    several = session([facts(rank, 0, 1, run_id=None) for rank in range(4)]).statement
    assert "(ranks 0, 1, 2 and 3, layer 0, M 1, " in several
    assert "CUDA graph replays, other ranks, other layers, " in several
    assert "(rank 0 of 4, layer 0 of 2, " in session([facts(0, 0, 1, run_id=None)]).statement


def test_another_source_is_told_by_every_sentence() -> None:
    """Whether or not the capture knows its own."""
    report = msgspec.structs.replace(session([facts(0, 0, 1)]), source="mine.cu")
    for own, told in (
        (report, "source given with --source"),
        (session([facts(0, 0, 1)], change=replaced), "not the captured source"),
    ):
        made = with_scope(own)
        assert told in made.statement
        assert all(told in sentence for sentence in made.scope)


def test_a_call_is_named_with_the_kernel_that_was_watched() -> None:
    """A plug-in of one's own names it where the capture does not."""
    own = msgspec.structs.replace(facts(0, 0, 1), layer=None)
    own = msgspec.structs.replace(own, symbols=(), callable="gm:inplace", variants=(), geometry=None)
    report = session([own], change=lambda entry: msgspec.structs.replace(entry, variant=None, symbols=("my_kernel",)))
    assert report.statement.startswith("PASS: gm:inplace (my_kernel) ")
    assert "gm:inplace (my_kernel); " in report.scope[0]


def test_a_rank_whose_replay_was_not_made_is_not_covered() -> None:
    """A capture alone covers nothing."""

    def never_ran(own: ReplayEntry) -> ReplayEntry:
        open_ = {"verdict": Verdict.INCONCLUSIVE, "whole": Verdict.INCONCLUSIVE, "reasons": ("no room",)}
        return msgspec.structs.replace(own, wall_s=0.0, log_file=None, **open_) if "rank=3" in own.capture else own

    statement = session([facts(rank, 0, 1) for rank in range(4)], change=never_ran).statement
    assert "ranks 0, 1 and 2 of 4" in statement
    assert "CUDA graph replays, rank 3, layer 1" in statement
    assert statement.startswith("INCONCLUSIVE: ")
    assert "synccheck: INCONCLUSIVE in 1 of 4 replays" in statement


def test_a_sentence_of_one_of_two_kernels_begins_with_pass_only_where_the_session_does() -> None:
    """Pasted alone it must not hide what another kernel, or the session, came to."""
    other = facts(1, 0, 1, symbols=("fused_moe_kernel",), plugin="triton_stock", variants=())
    captures = [facts(0, 0, 1), other]
    assert [text.split(":")[0] for text in session(captures).statement.split("\n")] == ["PASS", "PASS"]

    def wrong(own: ReplayEntry) -> ReplayEntry:
        failed = {"verdict": Verdict.FAIL, "whole": Verdict.FAIL, "reasons": ("x",), "findings": (RACE,)}
        return msgspec.structs.replace(own, **failed) if "rank=1" in own.capture else own

    first, second = session(captures, change=wrong).statement.split("\n")
    assert first.startswith(f"FAIL for the session as a whole: {SYMBOL}")
    assert session(captures, change=wrong).scope[0].startswith("FAIL for the session as a whole: M1, ")
    assert "initcheck clean" in first
    assert second.startswith("FAIL: fused_moe_kernel")
    assert "1 finding" not in first


def test_an_allowed_finding_is_never_called_clean() -> None:
    """Headline, statement, row and sentence say that a finding was allowed, and until when."""
    report = session([facts(0, 0, 1)], change=ALLOWED)
    assert report.verdict is Verdict.PASS
    assert report.reason.startswith("3 replays clean, 1 replay not clean, with 1 finding allowed until 2027-01-31")
    assert "synccheck, memcheck and initcheck clean, racecheck: 1 finding allowed until 2027-01-31" in report.statement
    assert "racecheck 1 hazard (1 finding allowed until 2027-01-31)" in report.scope[0]
    for text in (terminal(report), markdown(report)):
        assert "1 allowed" in text
    alone = session([facts(0, 0, 1)], change=ALLOWED, tools=("racecheck",))
    assert " clean" not in alone.reason.replace("not clean", "")


def test_a_fault_comes_first_and_each_finding_once() -> None:
    """The sentence begins with FAIL; the finding is readable; how to repeat it stands beside it."""
    report = session([facts(0, 0, 1)], change=FAILED)
    assert report.statement.startswith(f"FAIL: {SYMBOL}")
    assert "racecheck: 1 finding in 1 of 1 replay" in report.statement
    assert report.scope[0].startswith("FAIL: M1, ")
    unproven = with_scope(
        msgspec.structs.replace(session(EVERY), verdict=Verdict.INCONCLUSIVE, reason="of another run")
    )
    assert unproven.statement.startswith("INCONCLUSIVE for the session as a whole: ")
    assert "open: of another run" in unproven.statement
    text = terminal(report, 200)
    body = text[text.index("To quote") :]
    assert body.count("races with") == 1
    assert "repeat: repeat me" in body


def test_the_same_finding_in_many_replays_is_told_once() -> None:
    """With the first replay's log, and how many more there are; allowed ones too."""
    text = terminal(session(EVERY, change=FAILED), 200)
    assert text[text.index("To quote") :].count("races with") == 1
    assert "racecheck, rank 0 layer 0 M 1, t8_c8, and 15 replays more alike" in text
    allowed = markdown(session(EVERY, change=ALLOWED))
    assert allowed.count("races with") == 1
    assert "and 15 replays more" in allowed


def test_findings_of_every_kind_are_one_readable_line() -> None:
    """A race names both accesses and what they share once; memory names place and an example."""
    assert finding_line(RACE) == RACE_LINE
    memory = Finding(
        tool="memcheck",
        severity="error",
        kind="memory",
        text="Invalid __global__ write of size 4 bytes",
        kernel="planted",
        where=Access("void ns::store(float *)", "a.cuh", 7, "+0x10"),
        thread=(255, 0, 0),
        block=(0, 0, 0),
        address="0x7f",
        shown=3,
        count=3,
    )
    assert finding_line(memory) == (
        "Invalid __global__ write of size 4 bytes at store a.cuh:7 in planted, "
        "first thread (255, 0, 0), block (0, 0, 0), address 0x7f (3 times)"
    )
    both = msgspec.structs.replace(RACE, thread=(1, 0, 0), other_thread=(2, 0, 0))
    assert "thread (1, 0, 0) and thread (2, 0, 0)" in finding_line(both)
    assert finding_line(msgspec.structs.replace(RACE, severity="warning")).endswith("[warning]")


@pytest.mark.parametrize("kernel", [None, SYMBOL])
def test_the_proposed_entry_allows_its_finding_once_it_has_a_reason(kernel: str | None) -> None:
    """The TOML of the report is refused as it is, and covers exactly that finding with a reason filled in."""
    finding = msgspec.structs.replace(RACE, kernel=kernel)
    block = allow_block(finding, "2025.3.1.0", TODAY)
    assert tomllib.loads(block)["allow"][0]["reason"] == ""
    filled = parse_allow_list(block.replace('reason = ""', 'reason = "looked at"'), "list", TODAY)
    assert filled.match(finding, "2025.3.1.0", TODAY)[0] == "allowed"
    moved = msgspec.structs.replace(finding, where=Access("other", "else.cu", 1), other=Access("other", "else.cu", 2))
    assert filled.match(moved, "2025.3.1.0", TODAY)[0] == "open"
    assert block.split("\n")[1] in markdown(
        session(
            [facts(0, 0, 1)],
            change=of_racecheck(verdict=Verdict.FAIL, whole=Verdict.FAIL, findings=(finding,), reasons=("x",)),
        )
    )


def test_no_entry_is_proposed_that_could_not_cover_its_finding() -> None:
    """A race between two functions has no symbol that an entry could name."""
    apart = msgspec.structs.replace(RACE, other=Access("void other()", "o.cu", 3, "+0x1", "Read"))
    failed = of_racecheck(verdict=Verdict.FAIL, whole=Verdict.FAIL, reasons=("x",), findings=(apart,))
    assert "[[allow]]" not in markdown(session([facts(0, 0, 1)], change=failed))
    assert finding_line(apart) == "Write block_barrier planted_faults.cu:20 races with Read other o.cu:3 (1,024 times)"


def test_eighty_columns_hold_a_row_for_each_capture() -> None:
    """No cell wraps: one line a capture and variant, tools as columns."""
    report = session([facts(3, 47, 8192, model_layers=48), facts(0, 0, 1)], change=FAILED)
    lines = terminal(report).split("\n")
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("rank 3 layer 47 M 8192"))
    assert row.split()[6:] == ["t8_c8", "PASS", "FAIL", "1", "PASS", "PASS", "PASS"]
    header = next(line for line in lines if line.startswith("capture"))
    assert header.split() == ["capture", "variant", *TOOLS, "output"]


def test_a_large_session_is_short() -> None:
    """64 replays: a page on the terminal and in markdown; numbers of single replays are in the JSON alone."""
    report = session(EVERY)
    text = terminal(report)
    assert text.count("\n") < 50
    assert "imports" not in text + markdown(report)
    assert "slowest replay 9.0 s" in text
    visible = markdown(report).split("<details>")[0]
    assert visible.count("\n") < 15
    large = [facts(rank, layer, M) for rank in range(4) for layer in range(2) for M in range(1, 9)]
    assert "64 more captures, PASS under every tool" in terminal(session(large))


def test_a_session_that_ran_nothing_is_its_reason() -> None:
    """A terminal is told why once, a pull request what was not replayed and a sentence to quote, a case its own why."""
    reason = "no GPU here"
    nothing = {"verdict": Verdict.INCONCLUSIVE, "whole": Verdict.INCONCLUSIVE, "wall_s": 0.0, "log_file": None}
    report = session(EVERY, change=lambda own: msgspec.structs.replace(own, reasons=(reason,), output=None, **nothing))
    report = with_scope(msgspec.structs.replace(report, reason=reason, controls=()))
    assert report.scope == ()
    told = markdown(report)
    assert (terminal(report).count(reason), told.count(reason)) == (1, 1)
    assert terminal(report).count("\n") < 12
    assert f"> INCONCLUSIVE: nothing was replayed: {reason}\n" in told
    assert told.count("\n| rank ") == len(EVERY)
    assert f'message="not run: {reason}"' in junit_xml(report)


def test_nothing_in_a_report_steers_a_terminal_or_the_reader_of_a_log() -> None:
    """Control characters, text that runs backwards, line breaks and addresses are shown as text."""
    own = msgspec.structs.replace(facts(0, 0, 1), layer=None, callable=f"m:{STEERING}", symbols=())
    report = session(
        [own],
        change=of_racecheck(
            verdict=Verdict.FAIL,
            whole=Verdict.FAIL,
            reasons=(STEERING,),
            hint=STEERING,
            notes=(STEERING,),
            command=STEERING,
            findings=(
                msgspec.structs.replace(RACE, text=STEERING, where=Access(STEERING, STEERING, 1), kernel=STEERING),
            ),
        ),
    )
    report = msgspec.structs.replace(report, notes=(STEERING,), device=STEERING, targets=(STEERING,))
    for text in (markdown(report), junit_xml(report), terminal(report, 2000)):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert not any(line.strip().startswith("::error::") for line in text.split("\n"))
    fenced = markdown(report).partition("```toml")
    assert "http://" not in fenced[0] + fenced[2].partition("```")[2]
    assert "<b>" not in fenced[0]
    ElementTree.fromstring(junit_xml(report))  # noqa: S314 -- our own text


def test_junit_names_the_machine_and_holds_no_empty_case() -> None:
    """GPU and tool are properties; a case that passed says something; times are those of replays."""
    root = ElementTree.fromstring(junit_xml(session([facts(0, 0, 1)])))  # noqa: S314 -- our own text
    values = {own.get("name"): own.get("value") for own in root.iter("property")}
    assert (values["gpu"], values["compute-sanitizer"]) == ("NVIDIA H200", "2025.3.1.0")
    assert all(own.text for own in root.iter("system-out"))
    (suite,) = (own for own in root if own.get("name") == "rank 0")
    assert suite.get("time") == "36.000"
    assert all(
        own.get("time") is None for own in root.iter("testcase") if str(own.get("classname")).startswith("controls")
    )


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (controls("racecheck"), "racecheck: 2 of 2 planted faults caught, 2 of 2 sound twins clean"),
        (
            msgspec.structs.replace(controls("racecheck"), problems=("the filter for k let it through",)),
            "FILTER FAILED",
        ),
        (controls("racecheck", sound_clean=False), "SOUND TWIN NOT CLEAN"),
        (ControlReport(tool="racecheck", outcomes=(), problems=("it did not start",)), "CONTROLS FAILED"),
    ],
)
def test_controls_say_what_failed(report: ControlReport, said: str) -> None:
    """A filter that leaks is no planted fault that was missed."""
    assert said in control_lines(report)[0]


def test_one_of_a_thing_is_singular() -> None:
    """``1 replay clean``, not ``1 replays clean``; a session without a tool says that nobody looked."""
    own = facts(0, 0, 1)
    assert overall((entry(own, "racecheck"),), 1)[1].startswith("1 replay clean")
    plain = session([own], tools=("none",))
    assert plain.reason.startswith("1 replay without a tool")
    assert "no tool was run" in plain.statement
    assert "planted" not in plain.statement
