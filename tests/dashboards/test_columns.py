"""Typed columns, string tables, histograms, samples and labels."""

from __future__ import annotations

import numpy as np
import pytest

from alphamoe_dashboards.cards import card_of, experts_touched, moe_work
from alphamoe_dashboards.columns import Strings, narrow, pack, unpack
from alphamoe_dashboards.histograms import bins_of, dense, quantile, sparse, value_of
from alphamoe_dashboards.labels import escape_label, label
from alphamoe_dashboards.sampling import MAX_KERNELS, choose_steps, own_steps


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 255], "u8"),
        ([0, 256], "u16"),
        ([0, 65536], "u32"),
        ([-1, 127], "i8"),
        ([-1, 40000], "i32"),
        ([0, 2**40], "f64"),
    ],
)
def test_a_column_takes_the_smallest_kind_that_holds_it_exactly(values: list[int], kind: str) -> None:
    column = np.array(values, np.int64)
    assert narrow(column)[0] == kind
    assert unpack(pack({"a": column}))["a"].tolist() == values


def test_an_integer_that_javascript_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="not exact"):
        narrow(np.array([2**60], np.int64))


def test_an_empty_table_survives_packing() -> None:
    assert unpack(pack({"a": np.zeros(0, np.int64)}))["a"].tolist() == []


def test_a_string_table_keeps_each_text_once() -> None:
    strings = Strings()
    assert strings.column(["a", "b", "a", None]).tolist() == [0, 1, 0, -1]
    assert strings.values == ["a", "b"]


def test_representatives_of_bins_lie_within_one_per_cent_from_one_nanosecond_to_an_hour() -> None:
    durations = np.unique(np.geomspace(1, 3.6e12, 20_000).astype(np.int64))
    assert (np.abs(value_of(bins_of(durations)) / durations - 1) < 0.01).all()
    assert value_of(bins_of(np.array([0]))).tolist() == [0.0]


def test_histograms_of_groups_add_up_and_give_quantiles_of_the_union() -> None:
    rng = np.random.default_rng(5)
    durations = np.concatenate([rng.lognormal(9, 1, 5000), [0, 1, 10**10]]).astype(np.int64)
    group = rng.integers(0, 7, len(durations))
    by_group, entries = sparse(group, durations, 7)
    assert entries["gap"].max() <= 255
    bins, counts = dense(by_group["hist_entries"], entries["gap"], entries["count"], np.arange(7))
    assert counts.sum() == len(durations)
    for q in (0.01, 0.5, 0.999):
        assert quantile(bins, counts, q) == pytest.approx(np.quantile(durations, q, method="lower"), rel=0.01)


def test_a_group_without_timed_kernels_has_no_entry() -> None:
    by_group, _ = sparse(np.array([2]), np.array([5]), 4)
    assert by_group["hist_entries"].tolist() == [0, 0, 1, 0]


def test_a_small_run_is_held_whole_and_a_large_one_by_steps_of_every_bucket() -> None:
    steps = [(step, "eager 1" if step % 50 else "eager 906", 1) for step in range(1000)]
    assert choose_steps(steps, MAX_KERNELS, 8).everything
    sample = choose_steps(steps, MAX_KERNELS * 50, 8)
    assert 2 <= len(sample.steps) <= 20
    assert {step % 50 == 0 for step in sample.steps} == {True, False}


def test_kernels_without_steps_are_sampled_from_the_start() -> None:
    assert own_steps(np.full(10, -1), 4).tolist() == [True] * 4 + [False] * 6


def test_labels_show_markup_letter_by_letter() -> None:
    assert escape_label("k<b>bold</b> & $x$") == "k&lt;b&gt;bold&lt;/b&gt; &amp; &#36;x&#36;"
    assert label("pack<A>(x)") != label("pack<B>(x)")


def test_a_long_label_keeps_both_ends() -> None:
    assert label("a" * 60 + "<1>", 20).startswith("aaaa")
    assert label("a" * 60 + "<1>", 20).endswith("&lt;1&gt;")


def test_one_token_touches_top_k_experts_and_many_touch_all() -> None:
    assert experts_touched(1, 512, 10) == pytest.approx(10)
    assert experts_touched(16384, 512, 10) == pytest.approx(512)
    assert experts_touched(0, 512, 10) == 0


def test_work_of_one_token_is_six_products_for_each_expert_of_it() -> None:
    work = moe_work(1, 512, 2048, 128, 10)
    assert work.flop == 6 * 10 * 2048 * 128
    assert work.bytes == pytest.approx(10 * 3 * 2048 * 128, rel=0.01)


def test_cards_are_found_by_their_driver_names_and_unknown_ones_have_no_roof() -> None:
    assert card_of("NVIDIA H200").name == "H200"  # type: ignore[union-attr]
    assert card_of("NVIDIA H100 80GB HBM3").name == "H100"  # type: ignore[union-attr]
    assert card_of("NVIDIA A100-SXM4-80GB").bytes_per_s == 2.039e12  # type: ignore[union-attr]
    assert card_of("Some GPU") is None
    assert card_of(None) is None
