"""Step annotations of SGLang, vLLM and ATOM: real and padded sizes are kept apart, unknown stays null."""

from __future__ import annotations

import pytest

from alphamoe_tracers.steps import StepAnnotation, parse_step


def read(name: str) -> StepAnnotation:
    found = parse_step(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "mode", "tokens", "requests"),
    [
        ("step[EXTEND bs=2 toks=14721 c_sq=14721 c_sk=20000]", "EXTEND", 14721, 2),
        ("step[EXTEND bs=4 toks=2013]", "EXTEND", 2013, 4),
        ("step[DECODE bs=64]", "DECODE", 64, 64),
        ("step[DECODE bs=64 g_sq=192 g_sk=9000]", "DECODE", 192, 64),
        ("step[MIXED bs=2 c_sq=100 g_sq=1]", "MIXED", 101, 2),
        ("step[MIXED bs=2]", "MIXED", None, 2),
        ("step[VERIFY bs=3]", None, None, 3),
        ("execute_context_2(6144)_generation_3(3)", "MIXED", 6147, 5),
        ("execute_context_1(888_788544)_generation_0(0)", "EXTEND", 888, 1),
        ("execute_context_0(0)_generation_8(8)", "DECODE", 8, 8),
        ("execute_6147_context_2(sq6144sk7144sqsq1)_generation_3(sq3sk90)", "MIXED", 6147, 5),
        ("prefill[bs=2 tok=14721 ctx=[7000, 7721]]", "EXTEND", 14721, 2),
        ("decode[bs=117/128 tok=117 d=117]", "DECODE", 117, 117),
    ],
)
def test_mode_tokens_and_requests(name: str, mode: str | None, tokens: int | None, requests: int) -> None:
    """Each engine's annotation gives forward mode, real tokens and requests."""
    found = read(name)
    assert (found.forward_mode, found.real_tokens, found.batch_size) == (mode, tokens, requests)
    assert not found.capture


def test_real_and_padded_sizes_are_both_kept() -> None:
    """117 requests that ran in a 128-row graph are 117 real tokens and 128 padded rows."""
    found = read("decode[bs=117/128 tok=117 d=117]")
    assert (found.real_tokens, found.padded, found.padded_batch_size) == (117, 128, 128)
    assert read("prefill[bs=2 tok=14721 ctx=[1]]").padded is None
    assert read("step[EXTEND bs=1 toks=888]").padded is None


def test_real_above_padded_contradicts_itself() -> None:
    """More real tokens than rows cannot be."""
    (problem,) = read("decode[bs=113/112 tok=113 d=113]").problems()
    assert "113" in problem
    assert "112" in problem


@pytest.mark.parametrize(
    ("name", "size", "mode"),
    [("capture_128_decode", 128, "DECODE"), ("capture_32_FULL", 32, None), ("capture_8192_PIECEWISE", 8192, None)],
)
def test_capture_names_are_shapes_and_never_executions(name: str, size: int, mode: str | None) -> None:
    """Their size is the graph's, with no real tokens."""
    found = read(name)
    assert found.capture
    assert (found.padded, found.real_tokens, found.forward_mode) == (size, None, mode)


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "step[",
        "step[]",
        "aten::mm",
        "execute_context_x(1)_generation_0(0)",
        "capture_x_decode",
        "",
        "decode_128",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    """Nothing is guessed from a name that only resembles an annotation."""
    assert parse_step(name) is None
