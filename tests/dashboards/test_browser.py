"""The page in a real browser: it opens, filters show the right numbers, nothing is markup, nothing asks the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import golden
import msgspec
import pages
import pandas as pd
import pytest
from test_page_numbers import frames

from alphamoe_dashboards.page import render
from alphamoe_profiler.m_buckets import witness_mask

SYMBOL = "kernel_alpha_moe_w8a8_up_down"
VIEWS = ("overview", "buckets", "ranks", "timeline", "symbols", "requests", "run", "sanitizer")


def rows(tab: Any, table: str) -> list[list[str]]:
    found: list[list[str]] = tab.evaluate(
        "id => [...document.querySelectorAll(`#${id} tbody tr`)].map(r => [...r.cells].map(c => c.textContent))", table
    )
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_every_view_opens_without_an_error_or_a_request(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page, "#view=run", fresh=True)
    assert tab.locator("#tab-run").get_attribute("aria-selected") == "true"
    for view in VIEWS:
        tab.locator(f"#tab-{view}").click()
        assert tab.locator("main > *").count() > 0
        assert f"view={view}" in tab.url or view == "overview"
    tab.go_back()
    assert tab.evaluate("AMT.state.view") == VIEWS[-2]


def test_the_first_screen_shows_verdict_question_and_matrix(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page)
    assert "PASS" in tab.locator("#verdicts").inner_text()
    asked = tab.locator("#asked").inner_text()
    for text in ("flashinfer_alphamoe", "qwen3-next-80b", "4 ranks", "gsm8k:17"):
        assert text in asked
    matrix = rows(tab, "matrix")
    assert [row[:3] for row in matrix] == [
        ["eager", "1", "2"], ["eager", "13", "1"],
        ["prefill_graph_replay", "16", "1"], ["decode_graph_replay", "2", "2"],
    ]  # fmt: skip
    assert matrix[3][3:] == ["4 = 4"] * 4
    assert set(tab.evaluate("[...document.querySelectorAll('#matrix td[data-state]')].map(c => c.dataset.state)")) == {
        "equal"
    }
    assert tab.locator("#matrix").bounding_box()["y"] < 500


def test_filters_change_the_buckets_to_what_pandas_counts(open_page: Any, golden_page: Path, golden_run: Path) -> None:
    frame = frames(golden_run)
    real = frame[witness_mask(frame) & (frame["base"] == SYMBOL)]
    tab = open_page(golden_page, "#view=buckets")
    for changes, chosen in (
        ("{ranks: [1, 3]}", real["rank"].isin([1, 3])),
        ("{ranks: [2], layers: [1]}", (real["rank"] == 2) & (real["layer"] == 1)),
        ("{ranks: null, layers: null, executions: ['eager']}", real["execution"] == "eager"),
        ("{executions: null, ms: [2, 16]}", real["kernel_M"].isin([2, 16])),
    ):
        tab.evaluate(f"AMT.set({changes})")
        wanted = real[chosen].groupby(["execution", "kernel_M"])["duration_ns"].agg(["size", "sum"])
        shown = {(row[0], int(row[1])): number(row[3]) for row in rows(tab, "bucket-table")}
        assert shown == {key: int(value) for key, value in wanted["size"].items()}
        sums = tab.evaluate("AMT.bucketRows(AMT.run()).map(r => [r.execution, r.M, r.sum])")
        assert {(e, m): s for e, m, s in sums} == {key: int(value) for key, value in wanted["sum"].items()}


def test_a_filter_is_chosen_with_the_mouse_and_kept_in_the_link(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page)
    tab.locator("[data-filter=ranks] summary").click()
    tab.locator("[data-filter=ranks] input[data-value='0']").uncheck()
    assert "rank=1%2C2%2C3" in tab.url
    assert len(rows(tab, "matrix")[0]) == 3 + 3
    again = open_page(golden_page, tab.url[tab.url.index("#") :], fresh=True)
    assert again.locator("[data-filter=ranks] summary").inner_text() == "Ranks: 1-3"
    again.locator("#reset").click()
    assert "rank" not in again.url


def test_the_page_is_usable_from_the_keyboard(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page)
    tab.locator("#tab-overview").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("AMT.state.view") == "buckets"
    assert tab.evaluate("document.activeElement.id") == "tab-buckets"
    tab.locator("[data-filter=executions] summary").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_function("document.querySelector('[data-filter=executions]').open")
    for _ in range(3):
        tab.keyboard.press("Tab")
    tab.keyboard.press("Space")
    assert tab.evaluate("AMT.state.executions") == ["prefill_graph_replay", "decode_graph_replay", "unknown"]
    assert tab.evaluate("document.activeElement.dataset.value") == "eager"
    tab.keyboard.press("Escape")
    assert not tab.evaluate("document.querySelector('[data-filter=executions]').open")


def test_a_bucket_opens_its_steps_and_a_step_its_kernels(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page, "#view=buckets")
    tab.locator("#bucket-table tbody tr", has_text="decode_graph_replay").click()
    assert [row[0] for row in rows(tab, "step-table")] == ["8", "9"]
    tab.locator("#step-table tbody tr").nth(1).click()
    assert "step=9" in tab.url
    kernels = rows(tab, "kernel-table")
    assert sum(SYMBOL in row[-1] for row in kernels) == 8
    assert {row[4] for row in kernels if SYMBOL in row[-1]} == {"2"}


def test_the_timeline_draws_slots_when_zoomed_out_and_every_kernel_when_zoomed_in(
    open_page: Any, golden_page: Path
) -> None:
    tab = open_page(golden_page, "#view=timeline&step=4")
    chart = tab.locator("#chart-timeline")
    assert chart.get_attribute("data-exact") == "true"
    exact = int(chart.get_attribute("data-marks"))
    tab.evaluate("AMT.MAX_MARKS = 12; AMT.render()")
    assert chart.get_attribute("data-exact") == "false"
    assert int(chart.get_attribute("data-marks")) <= 8 * 4 < exact + 9
    middle, at = tab.evaluate("""() => {
        const chart = document.getElementById('chart-timeline'), box = chart.getBoundingClientRect();
        const axis = chart._fullLayout.xaxis, run = AMT.run(), first = AMT.lanes(run, 4)[0].rows[0];
        return [box.top + box.height / 3, box.left + axis._offset + axis.d2p(run.kernels.start[first] / 1e3)];
    }""")
    tab.mouse.move(at - 25, middle)
    tab.mouse.down()
    tab.mouse.move(at + 5, middle, steps=4)
    tab.mouse.up()
    tab.wait_for_function("document.getElementById('chart-timeline').dataset.exact === 'true'")
    assert 1 <= int(chart.get_attribute("data-marks")) <= 12 < exact
    tab.evaluate("Plotly.relayout('chart-timeline', {'xaxis.autorange': true})")
    tab.wait_for_function("document.getElementById('chart-timeline').dataset.exact === 'false'")


def test_aggregated_slots_and_exact_kernels_cover_the_same_span(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page, "#view=timeline&step=4")
    spans = tab.evaluate("""() => {
        const run = AMT.run(), lanes = AMT.lanes(run, 4), whole = AMT.extent(run, lanes);
        const exact = AMT.marks(run, lanes, 0, whole);
        AMT.MAX_MARKS = 40;
        const slots = AMT.marks(run, lanes, 0, whole);
        const span = (marks) => [Math.min(...marks.map(m => m.start)), Math.max(...marks.map(m => m.end))];
        const counted = slots.marks.reduce((sum, m) => sum + m.rows, 0);
        return [span(exact.marks), span(slots.marks), exact.marks.length, counted, whole];
    }""")
    slot = spans[4] / 10
    assert spans[3] <= spans[2]
    assert abs(spans[0][0] - spans[1][0]) <= slot
    assert abs(spans[0][1] - spans[1][1]) <= slot


def test_the_symbol_table_is_searched_sorted_and_copied(open_page: Any, golden_page: Path, golden_run: Path) -> None:
    frame = frames(golden_run)
    real = frame[witness_mask(frame)]
    tab = open_page(golden_page, "#view=symbols")
    table = {row[2].removesuffix("Copy"): row for row in rows(tab, "symbol-table")}
    wanted = real.groupby("full").size()
    assert {name: number(row[3]) for name, row in table.items()} == {str(k): int(v) for k, v in wanted.items()}
    tab.locator("#symbol-table thead button", has_text="calls").first.click()
    calls = [number(row[3]) for row in rows(tab, "symbol-table")]
    assert calls == sorted(calls, reverse=True)
    tab.locator("#search").fill("allreduce nccl")
    assert [row[2].startswith(golden.ALL_REDUCE) for row in rows(tab, "symbol-table")] == [True]
    assert "q=allreduce" in tab.url
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_label("Copy the full name").click()
    tab.wait_for_function("document.getElementById('said').textContent === 'Copied'")


def test_dark_mode_follows_the_system_and_the_button(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page, "#view=buckets", scheme="dark")
    paper = "document.getElementById('chart-launches').layout.paper_bgcolor"
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    dark = tab.evaluate(paper)
    tab.locator("#theme").click()
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.evaluate(paper) != dark


def test_names_are_never_markup(open_page: Any, tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run</script><b>", pages.hostile, world_size=1)
    page = pages.page_of(run, tmp_path / "page.html")
    tab = open_page(page, "#view=symbols&traffic=*")
    shown = {row[2].removesuffix("Copy") for row in rows(tab, "symbol-table")}
    assert set(pages.HOSTILE) <= shown
    assert tab.locator("main b, main img, main script").count() == 0
    for view in VIEWS:
        tab.evaluate(f"AMT.set({{view: '{view}', traffic: null, subject: 'all'}})")
        assert tab.locator("main img, main script").count() == 0
    tab.evaluate("AMT.set({view: 'buckets', subject: 'full:k<b>bold</b>'})")
    assert "k<b>bold</b>" in tab.locator("#subject").inner_text()
    assert page.read_text(encoding="utf-8").count("</script>") == 3


def test_kernels_of_no_width_and_without_times_stay_out_of_every_duration(open_page: Any, tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run", pages.odd_times, world_size=1)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"))
    ranks = rows(tab, "ranks-table")
    assert [ranks[0][5], ranks[0][6]] == ["1", "1"]
    for view in VIEWS:
        tab.evaluate(f"AMT.set({{view: '{view}', subject: 'base:{golden.NORM}'}})")
        assert not re.search(r"\bNaN\b|Infinity|undefined", tab.locator("main").inner_text())
    low = tab.evaluate("Math.min(...AMT.bucketRows(AMT.run()).map(r => r.min))")
    assert low == 0


def test_an_empty_run_says_what_is_missing_and_which_command_records_it(open_page: Any, tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run", pages.nothing, world_size=2)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"))
    for view in VIEWS:
        tab.evaluate(f"AMT.set({{view: '{view}'}})")
        assert tab.locator("main > *").count() > 0
    tab.evaluate("AMT.set({view: 'overview'})")
    text = tab.locator("main").inner_text()
    assert "No receipts were written" in text
    assert "alphamoe-trace --ranks 2 --prompt gsm8k:17" in text
    tab.evaluate("AMT.set({view: 'buckets'})")
    assert "No kernel was recorded on any rank" in tab.locator("main").inner_text()


def test_a_rank_that_was_cut_short_is_shown_and_the_others_stay(open_page: Any, tmp_path: Path) -> None:
    def cut(content: Any) -> None:
        if content.rank == 1:
            content.rank_file = None
            content.drop(content.of(SYMBOL, 9))

    run = golden.build(tmp_path / "run", cut, world_size=2)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"))
    assert "cut short" in rows(tab, "ranks-table")[1][1]
    decode = next(row for row in rows(tab, "matrix") if row[0] == "decode_graph_replay")
    assert decode[3:] == ["4 = 4", "2 < 4"]


def test_missing_kernels_are_none_only_where_the_window_is_proven_complete(open_page: Any, tmp_path: Path) -> None:
    def lost(content: Any) -> None:
        content.drop(content.of(SYMBOL, 7))
        if content.rank == 1:
            content.collector = {"dropped": 3}

    run = golden.build(tmp_path / "run", lost, world_size=2)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"))
    prefill = next(row for row in rows(tab, "matrix") if row[0] == "prefill_graph_replay")
    assert prefill[3:] == ["0 ∅ 2", "0 ? 2"]


def test_a_rank_that_fell_back_is_no_green_cell(open_page: Any, tmp_path: Path) -> None:
    def fall_back(content: Any) -> None:
        if content.rank != 1:
            return
        for row in content.of(SYMBOL):
            row["_base"] = "fused_moe_kernel"
        renamed = [msgspec.structs.replace(own, kernels=tuple(
            msgspec.structs.replace(item, symbol="fused_moe_kernel") for item in own.kernels
        )) for own in content.receipts]  # fmt: skip
        content.receipts[:] = renamed

    run = golden.build(tmp_path / "run", fall_back, world_size=2)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"))
    decode = [row for row in rows(tab, "matrix") if row[0] == "decode_graph_replay"]
    assert [row[4:] for row in decode] == [["4 = 4", "0 ∅ 0"], ["\u2013", "✗ 4 = 4"]]
    wrong = tab.evaluate("[...document.querySelectorAll('#matrix tr td:last-child')].map(c => c.className)")
    assert set(wrong) == {"none"}
    assert "FAIL" in tab.locator("#title-badge").inner_text()


@pytest.mark.parametrize("axis", ["cat", "log"])
def test_m_from_1_to_16384_with_a_zero_is_shown_on_both_axes(open_page: Any, tmp_path: Path, axis: str) -> None:
    run = golden.build(tmp_path / "run", world_size=1, steps=pages.many_m())
    page = pages.page_of(run, tmp_path / "page.html", pages.zero_m)
    tab = open_page(page, f"#view=buckets&axis={axis}")
    wanted = [0, *(m for m in pages.MS if m != 3)]
    assert [int(row[1]) for row in rows(tab, "bucket-table") if row[0] == "eager"] == wanted
    x = tab.evaluate("document.getElementById('chart-launches').data[0].x")
    if axis == "cat":
        assert x == [str(m) for m in wanted]
        assert tab.locator("#zeros").count() == 0
    else:
        assert x == [m for m in wanted if m > 0]
        assert "eager 2 launches" in tab.locator("#zeros").inner_text()


@pytest.mark.parametrize("count", [1, 64])
def test_one_rank_and_64_ranks_are_shown(open_page: Any, golden_run: Path, tmp_path: Path, count: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(render([pages.many_ranks(golden_run, count)]), encoding="utf-8")
    tab = open_page(page)
    assert all(len(row) == 3 + count for row in rows(tab, "matrix"))
    for view in VIEWS:
        tab.evaluate(f"AMT.set({{view: '{view}', step: 8}})")
    assert tab.evaluate("AMT.lanes(AMT.run(), 8).length") == count
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [1280, 1920])
def test_no_view_is_wider_than_the_screen(open_page: Any, golden_page: Path, width: int) -> None:
    tab = open_page(golden_page, width=width)
    for view in VIEWS:
        tab.evaluate(f"AMT.set({{view: '{view}'}})")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_two_runs_are_compared_with_intervals_and_differences(open_page: Any, golden_run: Path, tmp_path: Path) -> None:
    from alphamoe_dashboards.build import build

    def slower(content: Any) -> None:
        for row in content.of(SYMBOL):
            row["end_ns"] += row["end_ns"] - row["start_ns"]
        for row in content.of(golden.NORM):
            row["_base"] = "another_norm"

    other = golden.build(tmp_path / "slower", slower, run={"model": "other-model"})
    page, _ = build([golden_run, other], tmp_path / "page.html")
    tab = open_page(page, "#view=compare")
    own = [row for row in rows(tab, "compare-table") if row[2] == SYMBOL]
    assert {row[7] for row in own} == {"2.000"}
    assert {row[9] for row in own if row[0] == "decode_graph_replay"} == {"slower"}
    assert {row[9] for row in own if row[0] == "prefill_graph_replay"} == {"one step"}
    text = tab.locator("main").inner_text()
    assert "another_norm" in text
    assert ["Model", "qwen3-next-80b", "other-model"] in rows(tab, "differs-table")


def test_printing_shows_the_view_in_light_colours(open_page: Any, golden_page: Path) -> None:
    tab = open_page(golden_page, scheme="dark")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.getElementById('theme')).display") == "none"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_ranks_that_share_a_gpu_have_it_said_beside_their_times(open_page: Any, tmp_path: Path) -> None:
    def share(content: Any) -> None:
        content.rank_file = {"shared_gpu": True}

    run = golden.build(tmp_path / "run", share, world_size=2)
    tab = open_page(pages.page_of(run, tmp_path / "page.html"), "#view=buckets")
    assert "shared GPU" in tab.locator("header").inner_text()
    for name in ("gpu_time", "duration", "roofline"):
        assert "shared GPU" in tab.evaluate(f"document.getElementById('chart-{name}').layout.title.text")


def test_the_ranks_view_shows_who_was_last_and_the_all_reduce_kernels(open_page: Any, golden_page: Path) -> None:
    """Golden ranks lie 17 ns apart, and each runs two all-reduces in each of six steps."""
    tab = open_page(golden_page, "#view=ranks")
    moments = rows(tab, "moments-table")
    assert [row[1] for row in moments] == ["step start", "all-reduce start", "all-reduce end"] * 3
    assert moments[0][2:] == ["3", "51 ns", "51 ns", moments[0][5], "3", "3 (3 of 3)"]
    reduces = rows(tab, "all-reduce-table")
    assert [row[0] for row in reduces] == ["0", "1", "2", "3"]
    assert all(golden.ALL_REDUCE in row[1] and row[2:] == ["12", "6.00 µs", "500 ns"] for row in reduces)


def test_pandas_frames_have_the_kernels_that_these_tests_ask_for(golden_run: Path) -> None:
    assert isinstance(frames(golden_run), pd.DataFrame)
    assert (frames(golden_run)["base"] == SYMBOL).any()
