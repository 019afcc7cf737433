"""``--capture``: what it names, what it refuses, and the size that is stated before a run."""

from __future__ import annotations

from typing import Any

import pytest

from alphamoe_profiler.run_records import GeometryInfo, PromptInfo, RunInfo, SourceRevision
from alphamoe_sanitizer_replays.captures.request import CaptureRequest, estimate, parse_capture
from alphamoe_tracers.errors import UsageError


def run_info(**changes: Any) -> RunInfo:
    """Give run.json of four ranks, four layers, and prompts of 24 and 906 tokens."""
    prompts = tuple(
        PromptInfo(
            spec="text:x",
            request_id=f"request-{index}",
            sha256="0" * 64,
            token_count=count,
            dataset=None,
            row=None,
            dataset_sha256=None,
            dataset_source=None,
        )
        for index, count in enumerate((24, 906))
    )
    fields: dict[str, Any] = {
        "schema_version": 1,
        "run_id": "r",
        "created": "2026-01-31T00:00:00Z",
        "argv": (),
        "world_size": 4,
        "prompts": prompts,
        "model": "qwen3-next-80b",
        "geometry": GeometryInfo(E=512, H=2048, I=512, top_k=10, block_m=8, quantization="fp8_w8a8", layers=4),
        "moe_runner_backend": "flashinfer_alphamoe",
        "executions": ("eager", "decode_graph_replay"),
        "device_kind": "cuda",
        "seed": 0,
        "max_new_tokens": 32,
        "source": SourceRevision(commit=None, dirty=None, tree_sha256=None),
    }
    return RunInfo(**(fields | changes))


def test_a_request_says_which_dispatches_it_wants() -> None:
    """Every key, with its defaults where it is absent."""
    assert parse_capture("layer=0,M=1") == CaptureRequest("layer=0,M=1", layers=(0,), M=1)
    text = "rank=0+last,layer=last,M=prefill,execution=eager,every=bucket,purpose=warmup"
    assert parse_capture(text) == CaptureRequest(
        text, layers=("last",), M="prefill", ranks=(0, "last"), every="bucket", purpose="warmup"
    )
    assert parse_capture("rank=all,execution=eager,every=bucket").M == "all"


@pytest.mark.parametrize(
    ("text", "layer", "M", "mode", "purpose", "wanted"),
    [
        ("layer=0,M=1", 0, 1, "DECODE", "witness", True),
        ("layer=0,M=1", 1, 1, "DECODE", "witness", False),
        ("layer=0,M=1", 0, 2, "DECODE", "witness", False),
        ("layer=0,M=1", 0, 1, "DECODE", "warmup", False),
        ("layer=last,M=prefill", 3, 906, "EXTEND", "witness", True),
        ("layer=last,M=prefill", 3, 2, "DECODE", "witness", False),
        ("layer=last,M=decode", 3, 2, "DECODE", "witness", True),
        ("layer=0+last", 2, 2, "DECODE", "witness", False),
        ("purpose=warmup", 2, 8, "EXTEND", "warmup", True),
    ],
)
def test_a_dispatch_matches_by_layer_rows_mode_and_purpose(
    text: str, layer: int, M: int, mode: Any, purpose: Any, wanted: bool
) -> None:
    """Of four layers, ``last`` is 3; warm-up traffic is captured only where it is asked for."""
    assert parse_capture(text).matches(layer, 4, M, mode, purpose) is wanted


def test_ranks_are_chosen_by_number_and_last() -> None:
    """``last`` follows the number of ranks."""
    request = parse_capture("rank=1+last")
    assert [request.of_rank(rank, 4) for rank in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers=0", "did you mean layer="),
        ("layer", "the keys are layer, M, rank"),
        ("", "the keys are"),
        ("layer=0,layer=1", "gives layer twice"),
        ("layer=-1", "layer is a number"),
        ("rank=0+", "rank is a number"),
        ("M=0", "M is a number of rows"),
        ("M=1.5", "M is a number of rows"),
        ("every=step", "every is bucket"),
        ("purpose=fun", "no purpose 'fun'"),
        ("execution=decode_graph_replay", "they live in the graph's own buffers"),
        ("execution=lazy", "no execution 'lazy'"),
    ],
)
def test_a_request_that_cannot_be_is_a_usage_error_with_the_way_out(text: str, says: str) -> None:
    """Unknown keys, doubled keys, impossible values, and graph replays, whose inputs nobody can capture."""
    with pytest.raises(UsageError) as raised:
        parse_capture(text)
    assert says in f"{raised.value} {raised.value.hint}"


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("rank=4", {}, "the run has ranks 0 to 3"),
        ("layer=4", {}, "the run has layers 0 to 3"),
        ("M=7", {}, "24 (prefill), 906 (prefill), 2 (decode)"),
        ("M=2", {"max_new_tokens": 1}, "24 (prefill), 906 (prefill)"),
        ("M=decode", {"max_new_tokens": 1}, "never decodes"),
        ("M=2", {"executions": ("decode_graph_replay",)}, "add eager to --executions"),
        ("M=2", {"geometry": None}, "recorded here"),
    ],
)
def test_what_the_run_will_not_have_is_refused_before_it_starts(text: str, changes: dict[str, Any], says: str) -> None:
    """A rank, a layer, an M or an execution that no forward of the run has."""
    with pytest.raises(UsageError) as raised:
        estimate((parse_capture(text),), run_info(**changes), weights=False)
    assert says in f"{raised.value} {raised.value.hint}"


def test_the_estimate_counts_captures_and_weights_once_for_each_rank_and_layer() -> None:
    """One capture for each rank, layer and (with ``every=bucket``) M; weights of a rank and layer are stored once."""
    one = estimate((parse_capture("layer=0,M=2,rank=0"),), run_info(), weights=False)
    assert one.captures == 1
    all_of_it = estimate((parse_capture("every=bucket"),), run_info(), weights=False)
    assert all_of_it.captures == 4 * 4 * 3
    twice = (parse_capture("layer=0,M=2,rank=0"), parse_capture("layer=0,M=prefill,rank=0"))
    bare, full = (estimate(twice, run_info(), weights=weights) for weights in (False, True))
    assert bare.captures == 2
    expert_bytes = 3 * 128 * 2048 + 3 * 16 * 4
    assert full.bytes - bare.bytes == 512 * expert_bytes
