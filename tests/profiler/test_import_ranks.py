"""Which rank an imported file is: explicit map over content over name, and every disagreement names both sides."""

from __future__ import annotations

import shutil
from pathlib import Path

import foreign
import pytest

from alphamoe_profiler.run_records import RankFile


def rank_file(bundle: object, rank: int) -> RankFile:
    record = bundle.rank_file(rank)  # type: ignore[attr-defined]
    assert record is not None
    return record  # type: ignore[no-any-return]


def test_the_world_size_is_the_requests_and_missing_ranks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two good files of a world of four leave ranks 2 and 3 without a trace."""
    for rank in range(2):
        foreign.trace(tmp_path / f"in/p-TP-{rank}.trace.json", foreign.run_of(at=100 + rank))
    bundle = foreign.imported(tmp_path / "run", tmp_path / "in", "--ranks", 4, code=1)
    assert bundle.world_size == 4
    assert [bundle.rank_file(rank) is not None for rank in range(4)] == [True, True, False, False]
    assert capsys.readouterr().out.count("no trace was imported for it") == 2


def test_a_file_under_two_names_is_refused_with_both_and_both_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TP-1 is a copy of TP-0: its content says rank 0."""
    first = foreign.trace(tmp_path / "in/p-TP-0.trace.json", foreign.run_of(), 0, 2)
    shutil.copy(first, tmp_path / "in/p-TP-1.trace.json")
    foreign.refused(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    told = capsys.readouterr().err
    for text in ("p-TP-0.trace.json", "p-TP-1.trace.json", "same SHA-256", "file says TP-1", "content says rank 0"):
        assert text in told
    assert told.count("\n") == 1


def test_name_against_content_imports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A renamed file is a contradiction, not a choice."""
    foreign.trace(tmp_path / "in/p-TP-0.trace.json", foreign.run_of(), 0, 2)
    foreign.trace(tmp_path / "in/p-TP-1.trace.json", foreign.run_of("other"), 0, 2)
    foreign.refused(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    told = capsys.readouterr().err
    assert "p-TP-1.trace.json: its content (distributedInfo) says rank 0, its name" in told
    assert "says rank 1" in told


def test_map_against_content_imports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even the explicit map does not overrule what the file says of itself."""
    path = foreign.trace(tmp_path / "in/a.json", foreign.run_of(), 0, 2)
    foreign.refused(tmp_path / "run", path, "--ranks", 2, "--map", "a.json=1")
    told = capsys.readouterr().err
    assert "the map says rank 1" in told
    assert "says rank 0" in told


def test_two_files_for_one_rank_are_refused_with_both_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever way they came to it."""
    foreign.trace(tmp_path / "in/a.json", foreign.run_of("a"), 0, 2)
    foreign.trace(tmp_path / "in/b.json", foreign.run_of("b"), 0, 2)
    foreign.refused(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    told = capsys.readouterr().err
    assert "a.json and " in told
    assert "b.json both claim rank 0" in told


def test_files_without_a_rank_stay_apart_and_need_a_map(tmp_path: Path) -> None:
    """Device 0 and process 0 in both: without a map no rank has a trace, with one there are two ranks of one call."""
    one = foreign.trace(tmp_path / "in/one.json", [foreign.kernel("moe_gemm", 10, 5, 1)])
    two = foreign.trace(tmp_path / "in/two.json", [foreign.kernel("moe_gemm", 11, 5, 1)])
    bare = foreign.imported(tmp_path / "bare", one, two, "--ranks", 2, code=1)
    assert bare.rank_file(0) is None
    assert bare.rank_file(1) is None
    assert bare.run.imported is not None
    assert all("--map" in (item.reason or "") for item in bare.run.imported.files)
    words = (one, two, "--ranks", 2, "--map", "one.json=1", "--map", f"{two}=0")
    mapped = foreign.imported(tmp_path / "mapped", *words)
    assert [mapped.table("kernels", rank).num_rows for rank in range(2)] == [1, 1]


def test_one_file_of_one_rank_needs_no_map(tmp_path: Path) -> None:
    """``--ranks 1`` leaves no other rank that it could be."""
    path = foreign.trace(tmp_path / "r1t03_53384.1718.pt.trace.json", foreign.run_of())
    bundle = foreign.imported(tmp_path / "run", path, "--ranks", 1)
    assert bundle.table("kernels", 0).num_rows == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "2", "--map", "nothere.json=0"], "no such file is imported"),
        (["--ranks", "2", "--map", "a.json=2"], "ranks 0 to 1"),
        (["--ranks", "2", "--map", "a.json"], "is not FILE=RANK"),
        (["--ranks", "0"], "1 to"),
        (["--ranks", "4"], "says world size 2, --ranks says 4"),
        (["--ranks", "2", "--bucket", "("], "no regular expression"),
        (["--ranks", "2", "--bucket", "zzz"], "found in no file's name"),
        (["--ranks", "2", "--jobs", "0"], "at least one process"),
    ],
)
def test_requests_that_cannot_be_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """One line and nothing written."""
    path = foreign.trace(tmp_path / "in/a.json", foreign.run_of(), 0, 2)
    foreign.refused(tmp_path / "run", path, *words)
    assert told in capsys.readouterr().err


def test_a_rank_outside_the_world_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that says rank 5 in a world of two."""
    foreign.refused(
        tmp_path / "run", foreign.trace(tmp_path / "in/trace_node02_5.json", foreign.run_of()), "--ranks", 2
    )
    assert "says rank 5" in capsys.readouterr().err


def test_a_merged_file_is_checked_for_every_label(tmp_path: Path) -> None:
    """A file merged before all ranks had written holds TP00 and TP02 of three."""
    events = []
    for rank in (0, 2):
        pid = f"[TP{rank:02d}] 900"
        call, record = foreign.launch(100 + rank, 41 + rank), foreign.kernel("moe_gemm", 105 + rank, 3, 41 + rank)
        events += [call | {"pid": pid}, record | {"pid": f"[TP{rank:02d}] 0"}]
    path = foreign.trace(tmp_path / "in/merged-17.5.trace.json", events)
    bundle = foreign.imported(tmp_path / "run", path, "--ranks", 3, code=1)
    assert [bundle.rank_file(rank) is not None for rank in range(3)] == [True, False, True]


def test_stages_of_one_profile_are_one_rank(tmp_path: Path) -> None:
    """EXTEND and DECODE files of TP-0 share ids, and are kept apart all the same."""
    foreign.trace(tmp_path / "in/17.5-TP-0-EXTEND.trace.json", foreign.run_of("prefill_gemm"))
    foreign.trace(tmp_path / "in/17.5-TP-0-DECODE.trace.json", foreign.run_of("decode_gemm", 500))
    bundle = foreign.imported(tmp_path / "run", tmp_path / "in", "--ranks", 1)
    processes = bundle.table("kernels", 0).column("process").to_pylist()
    assert len(set(processes)) == 2
    assert len(rank_file(bundle, 0).imported) == 2


def test_files_of_two_profiles_are_not_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of an older profile in the folder is stale evidence, named beside the newer one."""
    foreign.trace(tmp_path / "in/1700000000.1-TP-1.trace.json", foreign.run_of("old"))
    foreign.trace(tmp_path / "in/1700009999.2-TP-0.trace.json", foreign.run_of("new"))
    foreign.refused(tmp_path / "run", tmp_path / "in", "--ranks", 2)
    told = capsys.readouterr().err
    assert "two profiles" in told
    assert "1700000000.1" in told


def test_capture_traces_are_no_execution(tmp_path: Path) -> None:
    """A folder of capture traces gives shapes; the rank has no trace."""
    path = foreign.trace(tmp_path / "in/capture_traces/bs_8_rank0.json", foreign.run_of())
    bundle = foreign.imported(tmp_path / "run", path.parent, "--ranks", 1, code=1)
    assert bundle.rank_file(0) is None
    assert bundle.run.imported is not None
    assert "capture" in (bundle.run.imported.files[0].reason or "")


def test_processes_of_one_export_need_a_map_and_the_order_is_none(tmp_path: Path, shared: Path) -> None:
    """Without a map neither process is a rank; FILE=RANK for a file of two is refused; FILE:PID=RANK settles it."""
    path = shared / "traces/nsys/mfu_2gpu_before.sqlite"
    bare = foreign.imported(tmp_path / "bare", path, "--ranks", 2, code=1)
    assert bare.rank_file(0) is None
    foreign.refused(tmp_path / "run", path, "--ranks", 2, "--map", f"{path.name}=0")
    foreign.refused(tmp_path / "run", path, "--ranks", 2, "--map", f"{path.name}:146=0")
    words = ("--map", f"{path.name}:144=1", "--map", f"{path.name}:145=0")
    bundle = foreign.imported(tmp_path / "run", path, "--ranks", 2, *words)
    assert [bundle.table("kernels", rank).num_rows for rank in range(2)] == [2017, 1993]
