"""Which sizes are captured, and which graph a forward replays."""

from __future__ import annotations

import itertools

import pytest

from alphamoe_backend.capture_sizes import (
    DEFAULT_DECODE_SIZES,
    DEFAULT_PREFILL_SIZES,
    CaptureSizes,
    bucket_for,
)
from alphamoe_tracers.errors import UsageError


def test_default_lists_are_those_of_the_serving_integration() -> None:
    """Facts 3.4 give the steps; the counts and neighbours here were worked out from them by hand."""
    assert DEFAULT_DECODE_SIZES[:8] == (1, 2, 4, 8, 12, 16, 24, 32)
    assert len(DEFAULT_DECODE_SIZES) == 6 + 30 + 16
    assert (256, 272) in itertools.pairwise(DEFAULT_DECODE_SIZES)
    assert DEFAULT_DECODE_SIZES[-1] == 512
    assert len(DEFAULT_PREFILL_SIZES) == 8 + 14 + 8 + 8 + 4
    assert DEFAULT_PREFILL_SIZES[-5:] == (1024, 1280, 1536, 1792, 2048)
    assert sorted(set(DEFAULT_PREFILL_SIZES)) == list(DEFAULT_PREFILL_SIZES)


@pytest.mark.parametrize(("n", "bucket"), [(1, 4), (4, 4), (5, 8), (904, 960), (960, 960), (2048, 2048), (2049, None)])
def test_a_forward_replays_the_smallest_size_that_holds_it(n: int, bucket: int | None) -> None:
    """The size itself fits, one more takes the next, and beyond the largest there is none."""
    assert bucket_for(n, DEFAULT_PREFILL_SIZES) == bucket


def test_only_needed_sizes_are_captured_and_too_large_ones_are_told() -> None:
    """Two prompts of one bucket need one graph; a prompt beyond all graphs is noted with its size."""
    sizes = CaptureSizes.of(None, (64, 16))
    assert sizes.needed("prefill", [3, 9, 16, 17, 65]) == (16, 64)
    assert sizes.needed("decode", [3, 3]) == (4,)
    assert sizes.too_large("prefill", [65, 3, 65]) == [
        "a prefill of 65 tokens is larger than the largest captured size (64) and runs eagerly"
    ]


@pytest.mark.parametrize("sizes", [(), (0, 4), (-1,)])
def test_sizes_that_hold_nothing_are_refused_by_option(sizes: tuple[int, ...]) -> None:
    """The message names the option that was wrong."""
    with pytest.raises(UsageError, match="--cuda-graph-bs-prefill"):
        CaptureSizes.of(None, sizes)
