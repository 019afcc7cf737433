"""Numbers inside a page equal what pandas counts on the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from alphamoe_dashboards.columns import MISSING
from alphamoe_dashboards.histograms import dense, quantile
from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.inspection import inspect_run
from alphamoe_profiler.m_buckets import witness_mask
from alphamoe_profiler.rank_skew import skew_document


def named_cube(data: dict[str, Any]) -> pd.DataFrame:
    run, strings = data["runs"][0], [*data["strings"], None]
    cube = pd.DataFrame(run["tables"]["cube"])
    for name in ("traffic", "execution"):
        cube[name] = [strings[code] for code in cube[name].tolist()]
    full = run["tables"]["symbols"]["full"]
    cube["full"] = [strings[full[code]] for code in cube["symbol"].tolist()]
    return cube


def frames(path: Path) -> pd.DataFrame:
    bundle = RunBundle.open(path)
    parts = [attribute(bundle, rank).frame.assign(rank=rank) for rank in bundle.ranks]
    whole = pd.concat([part.astype({"full": object, "execution": object, "purpose": object}) for part in parts])
    return whole[whole["reason"] != "sentinel"]


def test_counts_and_sums_by_rank_execution_layer_and_symbol_equal_pandas(golden_run: Path, golden_data: Any) -> None:
    frame = frames(golden_run)
    real = frame[witness_mask(frame)]
    keys = ["rank", "execution", "layer", "full"]
    wanted = real.groupby(keys)["duration_ns"].agg(["size", "sum", "min", "max"]).astype("int64")
    cube = named_cube(golden_data)
    own = cube[cube["traffic"] == "witness"].groupby(keys).agg(
        size=("calls", "sum"), sum=("sum_ns", "sum"), min=("min_ns", "min"), max=("max_ns", "max")
    )  # fmt: skip
    pd.testing.assert_frame_equal(own.sort_index(), wanted.sort_index(), check_dtype=False, check_index_type=False)


def test_every_kernel_of_the_run_is_counted_once_whatever_its_traffic(golden_run: Path, golden_data: Any) -> None:
    bundle = RunBundle.open(golden_run)
    cube = named_cube(golden_data)
    for rank in bundle.ranks:
        assert int(cube[cube["rank"] == rank]["calls"].sum()) == bundle.table("kernels", rank).num_rows


def test_kernel_m_of_moe_kernels_equals_pandas_and_other_kernels_take_that_of_their_step(
    golden_run: Path, golden_data: Any
) -> None:
    frame = frames(golden_run)
    real = frame[witness_mask(frame)]
    by_step = real.groupby(["rank", "step"])["kernel_M"].max()
    bucket = pd.Series(by_step.reindex(pd.MultiIndex.from_frame(real[["rank", "step"]])).to_numpy(), index=real.index)
    wanted = real.assign(M=bucket).groupby(["rank", "execution", "M", "full"]).size()
    cube = named_cube(golden_data)
    own = cube[cube["traffic"] == "witness"].groupby(["rank", "execution", "M", "full"])["calls"].sum()
    assert own.to_dict() == {key: int(value) for key, value in wanted.items()}


def test_quantiles_of_any_filter_lie_within_one_per_cent(golden_run: Path, golden_data: Any) -> None:
    frame = frames(golden_run)
    real = frame[witness_mask(frame)]
    tables = golden_data["runs"][0]["tables"]
    cube = named_cube(golden_data)
    for execution, exact in real.groupby("execution")["duration_ns"]:
        rows = np.flatnonzero((cube["traffic"] == "witness") & (cube["execution"] == execution))
        bins, counts = dense(tables["cube"]["hist_entries"], tables["hist"]["gap"], tables["hist"]["count"], rows)
        assert counts.sum() == len(exact)
        for q in (0.02, 0.25, 0.5, 0.9, 0.99):
            truth = np.quantile(exact.astype("int64").to_numpy(), q, method="lower")
            assert quantile(bins, counts, q) == pytest.approx(truth, rel=0.01)


def test_kernels_of_a_step_have_their_exact_durations_and_relative_starts(golden_run: Path, golden_data: Any) -> None:
    frame = frames(golden_run)
    tables = golden_data["runs"][0]["tables"]
    slices = pd.DataFrame(tables["slices"])
    for rank, step in ((0, 4), (3, 8)):
        row = slices[(slices["rank"] == rank) & (slices["step"] == step)].iloc[0]
        own = slice(int(row["first"]), int(row["first"] + row["count"]))
        wanted = frame[(frame["rank"] == rank) & (frame["step"] == step)].sort_values("start_ns")
        assert tables["kernels"]["duration"][own].tolist() == wanted["duration_ns"].astype("int64").tolist()
        gaps = np.diff(tables["kernels"]["start"][own].astype(np.int64)).tolist()
        assert gaps == np.diff(wanted["start_ns"].to_numpy()).tolist()
        assert tables["kernels"]["start"][own].min() >= 0


def test_forwards_count_every_receipt_and_keep_real_tokens_dispatch_and_kernel_m_apart(golden_data: Any) -> None:
    strings = [*golden_data["strings"], None]
    forwards = pd.DataFrame(golden_data["runs"][0]["tables"]["forwards"])
    own = forwards[(forwards["rank"] == 2) & (forwards["traffic"] == strings.index("witness"))]
    told = {
        (strings[row["execution"]], row["M"], row["dispatch_M"], row["real_tokens"]): row["steps"]
        for row in own.to_dict("records")
    }
    assert told == {
        ("eager", 13, 13, 13): 1, ("eager", 1, 1, 1): 2, ("prefill_graph_replay", 16, 16, 13): 1,
        ("decode_graph_replay", 2, 2, 1): 2,
    }  # fmt: skip


def test_cells_of_the_matrix_hold_what_receipts_submitted_and_what_was_witnessed(golden_data: Any) -> None:
    strings = golden_data["strings"]
    cells = pd.DataFrame(golden_data["runs"][0]["tables"]["cells"])
    assert (cells["submissions"] == cells["witnesses"]).all()
    assert cells["shape_bad"].sum() == 0
    assert cells["proven"].all()
    totals = cells.groupby([[strings[code] for code in cells["execution"]], "M", "rank"])["witnesses"].sum()
    assert totals[("decode_graph_replay", 2, 3)] == 4


def test_a_page_of_equal_runs_is_equal_byte_for_byte(golden_run: Path, golden_page: Path, tmp_path: Path) -> None:
    from alphamoe_dashboards.build import build

    again, _ = build([golden_run], tmp_path / "again.html")
    assert again.read_bytes() == golden_page.read_bytes()


def test_a_page_holds_one_plotly_and_names_no_server(golden_page: Path) -> None:
    text = golden_page.read_text(encoding="utf-8")
    assert text.count("<script>") == 2
    assert "<script src" not in text
    assert "<link" not in text
    assert text.count("plotly.js v") <= 2


def test_unknown_numbers_are_missing_and_never_zero(golden_data: Any) -> None:
    cube = named_cube(golden_data)
    norm = cube[cube["full"].str.contains("rms_norm")]
    assert (norm["layer"] >= 0).any()
    assert (cube[cube["traffic"] == "sentinel"]["M"] == MISSING).all()


def test_the_page_holds_the_skew_and_the_all_reduces_of_the_report(
    golden_run: Path, golden_data: dict[str, Any]
) -> None:
    """Computed in parts, rank by rank, it is what `show --json` says."""
    report = inspect_run(RunBundle.open(golden_run))
    assert golden_data["runs"][0]["facts"]["rank_skew"] == skew_document(report.skew)
    assert len(golden_data["runs"][0]["facts"]["rank_skew"]["spreads"]) == 9
