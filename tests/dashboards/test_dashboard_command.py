"""The command: files it writes and refuses, reports it shows, imported runs, large runs, figures as PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pandas as pd
import pytest

from alphamoe_dashboards import png, tables
from alphamoe_dashboards.digest import digest_run
from alphamoe_dashboards.page_data import read_page
from alphamoe_dashboards.sampling import MAX_KERNELS
from alphamoe_profiler.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "h200-tp4"


def test_the_page_goes_into_the_runs_reports_and_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = golden.build(tmp_path / "run", world_size=1)
    page = run / "reports" / "dashboard.html"
    assert main(["dashboard", str(run)]) == 0
    assert capsys.readouterr().out == f"Wrote {page}\n"
    before = page.read_bytes()
    assert main(["dashboard", str(run)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["dashboard", str(run), "--force"]) == 0
    assert page.read_bytes() == before


def test_no_bundle_and_one_run_twice_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = golden.build(tmp_path / "run", world_size=1)
    assert main(["dashboard", str(tmp_path)]) == 2
    assert "no run.json" in capsys.readouterr().err
    assert main(["dashboard", str(run), str(run)]) == 2
    assert "given twice" in capsys.readouterr().err


def test_contradictory_files_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run", world_size=2)
    (run / "ranks" / "1.json").write_text((run / "ranks" / "0.json").read_text())
    assert main(["dashboard", str(run), "-o", str(tmp_path / "page.html")]) == 2
    assert not (tmp_path / "page.html").exists()


def test_png_without_a_browser_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = golden.build(tmp_path / "run", world_size=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(png.BROWSER_VARIABLE, raising=False)
    assert main(["dashboard", str(run), "--png", str(tmp_path / "png")]) == 2
    told = capsys.readouterr().err
    assert "needs a browser" in told
    assert told.count("\n") == 1
    assert not (run / "reports").exists()


def test_main_figures_are_drawn_as_png(browser: Any, golden_run: Path, tmp_path: Path) -> None:
    digested = digest_run(golden_run)
    figures = png.main_figures(digested)
    assert set(figures) == set(png.NAMES)
    kept = {name: figures[name] for name in ("matrix",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(png, "main_figures", lambda run: kept)
        written = png.write_pngs([digested], tmp_path / "png")
    assert [path.name for path in written] == ["matrix.png"]
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_reports_of_gates_and_sanitizers_are_shown_and_damaged_ones_named(open_page: Any, tmp_path: Path) -> None:
    run = golden.build(tmp_path / "run", world_size=1)
    reports = run / "reports"
    (reports / "sanitizer").mkdir(parents=True)
    gate = ["gate", str(run), "--require-backend", "flashinfer_alphamoe", "--json", str(reports / "gate.json")]
    assert main(gate) in (0, 3)
    judged = json.loads((reports / "gate.json").read_text())
    (reports / "stale.json").write_text(json.dumps(judged | {"run_id": "another run"}))
    finding = {"kernel": "k<b>", "hazard": "RAW", "severity": "error"}
    scope = {"verdict": "FAIL", "tool": "racecheck", "reason": "1 hazard", "scope": "M1, rank 0", "findings": [finding]}
    (reports / "sanitizer" / "racecheck.json").write_text(json.dumps(scope))
    (reports / "broken.json").write_text("{")
    assert main(["dashboard", str(run)]) == 0
    tab = open_page(reports / "dashboard.html")
    first = tab.locator("#verdicts").inner_text()
    assert judged["reason"] in first
    own = read_page((reports / "dashboard.html").read_text(encoding="utf-8"))["runs"][0]["facts"]["verdicts"][0]
    assert own["verdict"] == judged["verdict"]
    assert len(own["cells"]) == sum(len(rule["cells"]) for rule in judged["rules"])
    assert "stale.json: not shown, it is about run another run" in tab.locator("main").inner_text()
    assert "witness summary" in first
    assert "reports/broken.json: not readable" in tab.locator("main").inner_text()
    tab.evaluate("AMT.set({view: 'sanitizer'})")
    text = tab.locator("main").inner_text()
    assert "Scope: M1, rank 0" in text
    assert "k<b>" in text


def test_an_imported_run_shows_symbols_of_some_ranks_only(open_page: Any, shared: Path, tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    assert main(["import", str(shared / "traces/dlrm-8xv100"), "--ranks", "8", "--out", str(run)]) == 0
    assert main(["dashboard", str(run), "-o", str(page)]) == 0
    tab = open_page(page, "#view=ranks")
    own = tab.locator("#uneven-table tbody tr", has_text="0-2, 5-7")
    assert own.count() == 3
    assert all("DeviceRadixSort" in text for text in own.all_inner_texts())
    facts = read_page(page.read_text(encoding="utf-8"))["runs"][0]["facts"]
    assert [rank["kernels"] for rank in facts["ranks"]] == [245, 310, 246, 315, 251, 245, 246, 246]
    tab.evaluate("AMT.set({view: 'overview'})")
    assert "Imported traces hold no receipts" in tab.locator("main").inner_text()


def test_buckets_of_an_imported_sweep_come_from_file_names(shared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    source = str(shared / "traces/batch-sweep-a100")
    assert main(["import", source, "--ranks", "1", "--bucket", r"batch_size_(\d+)", "--out", str(run)]) == 0
    buckets = tables.bucket_table(digest_run(run))
    assert buckets["M"].tolist() == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert buckets["calls"].between(544, 558).all()


def test_a_large_run_holds_whole_sampled_steps_and_sums_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golden.build(tmp_path / "run", world_size=2)
    whole = digest_run(run)
    assert whole.facts["sample"]["everything"]
    monkeypatch.setattr("alphamoe_dashboards.sampling.MAX_KERNELS", 40)
    small = digest_run(run)
    sample = small.facts["sample"]
    assert (sample["everything"], sample["of"]) == (False, whole.facts["sample"]["of"])
    assert 0 < sample["kernels"] < sample["of"]
    pd.testing.assert_frame_equal(tables.named(small, "cube"), tables.named(whole, "cube"))
    for step in np.unique(small.tables["slices"]["step"]).tolist():
        left, right = tables.step_table(small, step), tables.step_table(whole, step)
        pd.testing.assert_frame_equal(left, right)
    assert MAX_KERNELS == 160_000


def test_ranks_digested_in_processes_of_their_own_give_the_same_page(
    golden_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alphamoe_dashboards.page import render

    alone = render([digest_run(golden_run)])
    monkeypatch.setattr("alphamoe_dashboards.digest.PARALLEL_FROM", 0)
    assert render([digest_run(golden_run)]) == alone


def test_the_example_run_is_witnessed_in_every_cell(open_page: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["dashboard", str(EXAMPLE), "-o", str(page)]) == 0
    tab = open_page(page)
    states = tab.evaluate("[...document.querySelectorAll('#matrix td[data-state]')].map(c => c.dataset.state)")
    assert states == ["equal"] * 16
    assert "shared GPU" in tab.locator("header").inner_text()
