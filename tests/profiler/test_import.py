"""Importing: one bad file ends one rank, nothing appears half, nothing doubles, and show says what ran."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import foreign
import pytest

from alphamoe_profiler import importing
from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.cli import main
from alphamoe_profiler.import_plan import plan_import
from alphamoe_profiler.import_worker import FileResult, read_files
from alphamoe_profiler.verdicts import Verdict
from alphamoe_profiler.windows import prove_window
from alphamoe_profiler.witness import summarise


def two(tmp_path: Path) -> Path:
    for rank in range(2):
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", foreign.run_of(at=100 + rank), rank, 2)
    return tmp_path / "in"


@pytest.mark.parametrize(
    "content",
    [
        b'{"schemaVersion":1,"traceEvents":[{"ph":"X","na{"schemaVersion":1,"traceEvents":[]}',
        b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"D:\\moe\\ep.py(3): f","ts":1,"dur":1}]}',
        b"",
        b"not json at all",
    ],
)
def test_one_bad_file_ends_one_rank(tmp_path: Path, content: bytes) -> None:
    """The other rank is imported; the bad one is unreadable, with its reason."""
    folder = two(tmp_path)
    (folder / "p-TP-1.trace.json").write_bytes(content)
    bundle = foreign.imported(tmp_path / "run", folder, "--ranks", 2, code=1)
    assert bundle.table("kernels", 0).num_rows == 1
    record = bundle.rank_file(1)
    assert record is not None
    assert (record.ended, record.imported) == ("unreadable", ())
    assert "p-TP-1.trace.json" in (record.error or "")
    assert prove_window(bundle, 1, attribute(bundle, 1).frame).cut is not None
    assert prove_window(bundle, 0, attribute(bundle, 0).frame).complete("eager")


def test_unreadable_databases_end_their_rank(tmp_path: Path) -> None:
    """Zero bytes and text renamed."""
    (tmp_path / "a.sqlite").write_bytes(b"")
    (tmp_path / "b.sqlite").write_text("hello")
    words = (tmp_path / "a.sqlite", tmp_path / "b.sqlite", "--ranks", 2, "--map", "a.sqlite=0", "--map", "b.sqlite=1")
    bundle = foreign.imported(tmp_path / "run", *words, code=1)
    records = [bundle.rank_file(rank) for rank in range(2)]
    errors = [record.error or "" for record in records if record is not None]
    assert "empty" in errors[0]
    assert "not a SQLite database" in errors[1]


def test_importing_again_is_refused_or_replaces_the_whole(tmp_path: Path) -> None:
    """A second import doubles nothing."""
    folder = two(tmp_path)
    out = tmp_path / "run"
    first = foreign.imported(out, folder, "--ranks", 2)
    assert main(["import", str(folder), "--ranks", "2", "--out", str(out)]) == 2
    again = foreign.imported(out, folder, "--ranks", 2, "--force")
    assert again.run.run_id != first.run.run_id
    assert [again.table("kernels", rank).num_rows for rank in range(2)] == [1, 1]
    assert check(again) == []


def test_force_never_replaces_what_is_no_bundle(tmp_path: Path) -> None:
    """Somebody's folder stays as it is, and so does a folder that holds the traces."""
    folder = two(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    assert main(["import", str(folder), "--ranks", "2", "--force", "--out", str(mine)]) == 2
    assert main(["import", str(folder), "--ranks", "2", "--force", "--out", str(folder)]) == 2
    assert (mine / "thesis.txt").is_file()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_import_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Neither a bundle nor its staging folder; a bundle that was there stays whole."""
    folder = two(tmp_path)
    out = tmp_path / "out/run"
    foreign.imported(out, folder, "--ranks", 2)

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(importing, "_write_rank", broken)
    assert main(["import", str(folder), "--ranks", "2", "--force", "--out", str(out)]) in (1, 130)
    assert main(["import", str(folder), "--ranks", "2", "--out", str(tmp_path / "out/other")]) in (1, 130)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["run"]
    assert importing.BundleWriter.join(out)


def test_a_killed_reader_fails_its_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in processes of their own; one that dies is told and replaced."""
    folder = two(tmp_path)
    plan = plan_import([folder / "p-TP-0.trace.json", folder / "p-TP-1.trace.json"], 2, [], None)
    monkeypatch.setattr("alphamoe_profiler.import_worker.IN_PROCESS_BYTES", -1)
    monkeypatch.setattr("alphamoe_profiler.import_worker._work", _die_on_the_first)
    (tmp_path / "staging").mkdir()
    first, second = read_files(plan.files, tmp_path / "staging", 2)
    assert "SIGKILL" in (first.error or "")
    assert second.error is None
    assert second.keys[0].summary.kernels == 1


def _die_on_the_first(connection: object, staging: str, parent: int) -> None:
    import os
    import signal

    from alphamoe_profiler.import_worker import read_one

    while (item := connection.recv()) is not None:  # type: ignore[attr-defined]
        if item.index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        read_one(item, Path(staging) / str(item.index))
        connection.send("done")  # type: ignore[attr-defined]


def test_processes_and_one_process_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    """How many read changes nothing of what is read."""
    folder = shared / "traces/megatron-tp8-a100"
    plan = plan_import([folder], 8, [], None)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = read_files(plan.files[:3], tmp_path / "one", 1)
    monkeypatch.setattr("alphamoe_profiler.import_worker.IN_PROCESS_BYTES", -1)
    together = read_files(plan.files[:3], tmp_path / "two", 2)

    def told(results: list[FileResult]) -> list[object]:
        return [key.summary for result in results for key in result.keys]

    assert told(alone) == told(together)


def test_show_says_what_ran_instead_of_failing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was required, so nothing is judged; the names, ranks and missing receipts are told."""
    out = tmp_path / "run"
    bundle = foreign.imported(out, two(tmp_path), "--ranks", 2)
    found = summarise(bundle)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "no symbol was required" in found.reason
    capsys.readouterr()
    assert main(["show", str(out)]) == 0
    told = capsys.readouterr().out
    assert "moe_gemm" in told
    assert "2 kernels of 1 names ran on ranks 0, 1" in " ".join(told.split())
    assert main(["show", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ran"] == [{"symbol": "moe_gemm", "class": None, "0": 1, "1": 1}]
    assert document["run"]["kind"] == "imported"


def test_the_import_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document on stdout."""
    folder = two(tmp_path)
    assert main(["import", str(folder), "--ranks", "3", "--out", str(tmp_path / "run"), "--json"]) == 2
    capsys.readouterr()
    shutil.rmtree(folder)
    for rank in range(2):
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", foreign.run_of(at=100 + rank))
    assert main(["import", str(folder), "--ranks", "3", "--out", str(tmp_path / "run"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [rank["problem"] is None for rank in document["ranks"]] == [True, True, False]


def test_traces_without_a_gpu_kernel_are_told_with_what_to_record_and_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them whole is no success of anything; a rank that has kernels is no such rank."""
    monkeypatch.setattr("sys.argv", ["alphamoe-trace"])
    silent = foreign.trace(tmp_path / "p-TP-0.trace.json", [foreign.launch(100, 41)], 0, 2)
    other = foreign.trace(tmp_path / "p-TP-1.trace.json", foreign.run_of(), 1, 2)
    foreign.imported(tmp_path / "some", silent, other, "--ranks", 2)
    told = " ".join(capsys.readouterr().out.split())
    assert "note: rank 0: no GPU kernel in the traces" in told
    assert "activities CPU and CUDA" in told
    assert told.endswith(f"next: alphamoe-trace gate {tmp_path / 'some'} --require-backend NAME")
    alone = foreign.trace(tmp_path / "alone" / "p-TP-0.trace.json", [foreign.launch(100, 41)], 0, 1)
    foreign.imported(tmp_path / "none", alone, "--ranks", 1)
    told = capsys.readouterr().out
    step = told.splitlines()[-1]
    assert step.startswith("next: alphamoe-trace import NEW_TRACES --ranks 1 --out ")
    assert main(["show", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == step
    foreign.imported(tmp_path / "whole", foreign.trace(alone, foreign.run_of(), 0, 1), "--ranks", 1)
    assert "no GPU kernel" not in capsys.readouterr().out


def test_a_server_log_is_dispatch_evidence_beside_the_trace(tmp_path: Path) -> None:
    """Its sets give M buckets; alone it witnesses nothing."""
    item = {"kernel": "k", "M": 112, "E": 8, "H": 8, "I_local": 8, "top_k": 2, "block_m": 8}
    record = {
        "schema": "sglang-flashinfer-alphamoe-runtime-v2",
        "execution": "decode_graph_replay",
        "forward_mode": "DECODE",
        "M": 112,
        "real_tokens": 100,
        "batch_size": 100,
        "kernels": [item],
    }
    log = tmp_path / "server.log"
    log.write_text("".join(f"[2026 TP{rank}] ALPHAMOE_RUNTIME_EXECUTION {json.dumps(record)}\n" for rank in range(2)))
    alone = foreign.imported(tmp_path / "alone", log, "--ranks", 2, code=1)
    assert len(alone.dispatch_log(1)) == 1
    assert alone.receipts(1).receipts == []
    proof = prove_window(alone, 1, attribute(alone, 1).frame)
    assert "no GPU trace" in (proof.collector_off or "")
    both = foreign.imported(tmp_path / "both", log, two(tmp_path), "--ranks", 2)
    assert both.table("kernels", 1).num_rows == 1
    assert check(both) == []


def test_a_changed_table_is_told(tmp_path: Path) -> None:
    """Imported evidence is bound by hashes as recorded evidence is."""
    bundle = foreign.imported(tmp_path / "run", two(tmp_path), "--ranks", 2)
    steps = tmp_path / "run/kernels/rank=0/part-00000.parquet"
    shutil.copy(tmp_path / "run/kernels/rank=1/part-00000.parquet", steps)
    assert check(bundle.open(tmp_path / "run"))


def test_a_folder_may_hold_other_files(tmp_path: Path) -> None:
    """server_args.json beside the traces is no trace."""
    folder = two(tmp_path)
    (folder / "server_args.json").write_text('{"tp_size": 2}')
    (folder / "notes.md").write_text("x")
    foreign.imported(tmp_path / "run", folder, "--ranks", 2)


def test_a_report_that_was_not_exported_is_told_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An .nsys-rep file is no SQLite export."""
    (tmp_path / "report1.nsys-rep").write_bytes(b"x")
    foreign.refused(tmp_path / "run", tmp_path / "report1.nsys-rep", "--ranks", 1)
    assert "nsys export --type sqlite" in capsys.readouterr().err
