"""The run bundle: what is written can be read again, damage is reported, and hostile content is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import golden
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphamoe_profiler.bundle import BundleWriter, RunBundle
from alphamoe_profiler.bundle_check import check, contradictions
from alphamoe_profiler.bundle_files import inside, rank_of_name, read_json, replacing
from alphamoe_profiler.run_records import RankEnd, RunInfo
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError
from alphamoe_tracers.records import TABLES, check_table


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return golden.build(tmp_path / "run")


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_sound_bundle_has_no_problem_and_reads_back_what_was_written(sound: Path) -> None:
    bundle = RunBundle.open(sound)
    assert check(bundle) == []
    assert bundle.world_size == 4
    assert [request.request_id for request in bundle.requests()] == ["gsm8k-17"]
    for name in TABLES:
        assert check_table(name, bundle.table(name, 0)) == []
    assert bundle.table("kernels", 3).num_rows == 52
    assert len(bundle.receipts(3).receipts) == len(golden.STEPS)
    assert {module.sha256 for module in bundle.modules(0)} == {golden.CUBIN, golden.STOCK_CUBIN}
    record = bundle.rank_file(2)
    assert record is not None
    assert "kernels/rank=2/part-00000.parquet" in record.sha256


def test_the_world_size_comes_from_run_json_and_not_from_counting_files(tmp_path: Path) -> None:
    def damage(content: golden.RankContent) -> None:
        content.rank_file = None if content.rank in (2, 3) else {}

    bundle = RunBundle.open(golden.build(tmp_path / "run", damage))
    assert bundle.world_size == 4
    assert check(bundle) == [f"rank {rank}: no ranks/{rank}.json, it was cut short" for rank in (2, 3)]


def test_rank_is_no_column_of_any_file(sound: Path) -> None:
    assert "rank" not in RunBundle.open(sound).table("kernels", 1).column_names
    assert "rank" not in pq.ParquetFile(sound / "kernels/rank=1/part-00000.parquet").schema_arrow.names


def test_an_unreadable_part_is_reported_and_the_other_parts_are_still_read(sound: Path) -> None:
    (sound / "kernels/rank=1/part-00001.parquet").write_bytes(b"PAR1 cut")
    bundle = RunBundle.open(sound)
    assert bundle.table("kernels", 1).num_rows == 52
    problem, unlisted = check(bundle)
    assert problem.startswith("rank 1: kernels/rank=1/part-00001.parquet: not readable")
    assert unlisted == "rank 1: kernels/rank=1/part-00001.parquet is not among the files that ranks/1.json lists"


def test_temporary_files_of_a_killed_writer_are_ignored(sound: Path) -> None:
    (sound / "kernels/rank=1/.part-00001.parquet.x1.tmp").write_bytes(b"half")
    (sound / "ranks/.0.json.x1.tmp").write_bytes(b"{")
    assert check(RunBundle.open(sound)) == []


def test_exact_duplicates_are_dropped_and_counted_but_kernels_of_one_graph_launch_are_not(sound: Path) -> None:
    part = sound / "kernels/rank=0/part-00000.parquet"
    rows = pq.ParquetFile(part).read()
    shutil.copy(part, part.with_name("part-00001.parquet"))
    read = RunBundle.open(sound).read_table("kernels", 0)
    assert (read.table.num_rows, read.duplicates, read.parts) == (rows.num_rows, rows.num_rows, 2)


def test_records_that_differ_in_stream_or_by_one_in_a_large_node_id_are_not_duplicates(tmp_path: Path) -> None:
    def damage(content: golden.RankContent) -> None:
        if content.rank == 0:
            first = content.kernels[0]
            content.kernels += [first | {"stream": 9}]
            # Beyond 2**53 a float cannot tell these two apart.
            content.kernels += [first | {"graph_node_id": 2**60}, first | {"graph_node_id": 2**60 + 1}]

    read = RunBundle.open(golden.build(tmp_path / "run", damage)).read_table("kernels", 0)
    assert (read.table.num_rows, read.duplicates) == (55, 0)


def test_rows_with_a_null_where_none_may_be_are_left_out_and_told(sound: Path) -> None:
    part = sound / "kernels/rank=0/part-00000.parquet"
    table = pq.ParquetFile(part).read()
    column = pa.array([None, *table.column("start_ns").to_pylist()[1:]], pa.int64())
    position = table.column_names.index("start_ns")
    broken = table.set_column(position, pa.field("start_ns", pa.int64()), column)
    pq.write_table(broken, part)
    read = RunBundle.open(sound).read_table("kernels", 0)
    assert read.table.num_rows == table.num_rows - 1
    assert read.problems == ("kernels/rank=0/part-00000.parquet: kernels: column start_ns has 1 nulls",)


@pytest.mark.parametrize("change", ["missing", "text"])
def test_a_part_of_another_schema_is_reported_and_not_guessed_at(sound: Path, change: str) -> None:
    part = sound / "kernels/rank=0/part-00000.parquet"
    table = pq.ParquetFile(part).read()
    if change == "missing":
        table = table.drop_columns(["symbol_id"])
    else:
        position = table.column_names.index("symbol_id")
        table = table.set_column(position, "symbol_id", pa.array(["x"] * table.num_rows))
    pq.write_table(table, part)
    read = RunBundle.open(sound).read_table("kernels", 0)
    assert read.table.num_rows == 0
    assert "symbol_id" in read.problems[0]


def test_a_file_that_was_changed_after_the_run_is_found_by_its_hash(sound: Path) -> None:
    path = sound / "modules/rank=1.jsonl"
    path.write_bytes(path.read_bytes().replace(b"4096", b"4097"))
    (problem,) = check(RunBundle.open(sound))
    assert problem.startswith("rank 1: modules/rank=1.jsonl was changed after it was written")


def test_a_file_that_vanished_is_named(sound: Path) -> None:
    (sound / "modules/rank=1.jsonl").unlink()
    assert check(RunBundle.open(sound)) == ["rank 1: modules/rank=1.jsonl cannot be read: No such file or directory"]


def test_a_rank_killed_by_a_signal_is_a_problem_even_if_its_files_parse(tmp_path: Path) -> None:
    ends = {1: RankEnd(rank=1, exit_code=-11, signal="SIGSEGV")}
    bundle = RunBundle.open(golden.build(tmp_path / "run", ends=ends))
    assert check(bundle) == ["rank 1: its process ended with SIGSEGV"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rank": 0}, "ranks/1.json: the file says rank 1, its content says rank 0"),
        ({"run_id": "older"}, "ranks/1.json: of run older, not of this run golden-0001"),
        ({"world_size": 2}, "ranks/1.json: world size 2, but run.json says 4"),
    ],
)
def test_a_rank_file_whose_content_is_of_another_rank_or_run_contradicts(
    sound: Path, fields: dict[str, object], told: str
) -> None:
    edit_json(sound / "ranks/1.json", **fields)
    assert any(told in problem for problem in contradictions(RunBundle.open(sound)))


def test_two_files_for_one_rank_contradict_whatever_the_spelling(sound: Path) -> None:
    shutil.copy(sound / "ranks/1.json", sound / "ranks/01.json")
    assert contradictions(RunBundle.open(sound)) == [
        "ranks/01.json: not a name of one rank's files; one rank has one spelling (rank=0, 0.json)"
    ]


def test_a_rank_that_the_run_does_not_have_contradicts(sound: Path) -> None:
    shutil.copytree(sound / "kernels/rank=1", sound / "kernels/rank=7")
    assert "kernels/rank=7: the run has ranks 0 to 3" in contradictions(RunBundle.open(sound))


def test_one_file_under_two_ranks_names_contradicts(sound: Path) -> None:
    shutil.copy(sound / "kernels/rank=0/part-00000.parquet", sound / "kernels/rank=1/part-00000.parquet")
    (problem,) = contradictions(RunBundle.open(sound))
    assert problem == "kernels/rank=0 and kernels/rank=1 hold the same records: one rank under two names"


def test_receipts_of_an_older_run_contradict(sound: Path) -> None:
    path = sound / "receipts/rank=2.jsonl"
    path.write_bytes(path.read_bytes().replace(b"golden-0001", b"golden-0000"))
    (problem,) = contradictions(RunBundle.open(sound))
    assert problem.startswith("receipts/rank=2.jsonl: of run golden-0000")


def test_a_newer_schema_is_refused_before_anything_else_is_read(sound: Path) -> None:
    edit_json(sound / "run.json", schema_version=2, a_field_of_the_future=True)
    with pytest.raises(UsageError, match=r"schema version 2 is newer than 1"):
        RunBundle.open(sound)


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": true}', '{"schema_version": 1}', "[]"])
def test_a_damaged_run_json_is_one_clear_error(sound: Path, text: str) -> None:
    (sound / "run.json").write_text(text)
    with pytest.raises(EvidenceError, match=r"run\.json"):
        RunBundle.open(sound)


def test_a_number_as_text_is_not_coerced(sound: Path) -> None:
    edit_json(sound / "run.json", world_size="4")
    with pytest.raises(EvidenceError, match="world_size"):
        RunBundle.open(sound)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_refused_when_read(sound: Path, token: str) -> None:
    path = sound / "ranks/0.json"
    path.write_text(path.read_text().replace('"start_up": 4.0', f'"start_up": {token}'))
    assert token in path.read_text()
    (problem,) = check(RunBundle.open(sound))
    assert problem.startswith("rank 0: ")
    assert "ranks/0.json" in problem


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_refused_when_written_and_leaves_no_file(tmp_path: Path, value: float) -> None:
    def damage(content: golden.RankContent) -> None:
        content.rank_file = {"wall_s": {"decode": value}}

    with pytest.raises(EvidenceError, match="decode"):
        golden.build(tmp_path / "run", damage, world_size=1)
    assert not (tmp_path / "run/ranks").exists() or not list((tmp_path / "run/ranks").iterdir())


@pytest.mark.parametrize("name", ["../run.json", "/etc/hostname", "a/../../b", "a\\b", "", "a\0b"])
def test_a_name_that_leads_out_of_the_bundle_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="out of the bundle"):
        inside(tmp_path, name)


def test_a_link_out_of_the_bundle_is_refused(sound: Path, tmp_path: Path) -> None:
    shutil.move(sound / "kernels/rank=0", tmp_path / "elsewhere")
    (sound / "kernels/rank=0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="link out of the bundle"):
        RunBundle.open(sound).table("kernels", 0)


def test_a_hash_list_that_names_a_file_outside_is_a_problem_and_opens_nothing(sound: Path) -> None:
    edit_json(sound / "ranks/0.json", sha256={"../../secret": "00"})
    problem, *unlisted = check(RunBundle.open(sound))
    assert "leads out of the bundle" in problem
    assert all("is not among the files that ranks/0.json lists" in text for text in unlisted)


def test_a_last_line_without_its_end_is_left_out_of_the_requests(sound: Path) -> None:
    with (sound / "requests.jsonl").open("ab") as stream:
        stream.write(b'{"request_id": "cu')
    assert len(RunBundle.open(sound).requests()) == 1


def test_a_damaged_line_inside_the_requests_is_named_with_its_number(sound: Path) -> None:
    path = sound / "requests.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(EvidenceError, match=r"requests\.jsonl:1: "):
        RunBundle.open(sound).requests()


def test_an_existing_bundle_is_not_overwritten_without_force(sound: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        BundleWriter(sound)
    BundleWriter(sound, force=True)
    assert list(sound.iterdir()) == []


def test_force_never_removes_what_is_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="not a run bundle"):
        BundleWriter(tmp_path, force=True)
    golden.build(tmp_path / "run")
    (tmp_path / "run/thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"it holds thesis\.tex"):
        BundleWriter(tmp_path / "run", force=True)
    assert (tmp_path / "run/run.json").exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "ranks/0.json"
    with replacing(path) as stream:
        stream.write(b"old")

    def fail() -> None:
        with replacing(path) as stream:
            stream.write(b"new, half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["0.json"]


def test_a_table_that_breaks_its_schema_is_not_written(tmp_path: Path) -> None:
    writer = BundleWriter(tmp_path / "run")
    with pytest.raises(EvidenceError, match="column process is missing"):
        writer.write_table("kernels", 0, pa.table({"start_ns": [1]}))
    assert not (tmp_path / "run/kernels").exists()


def test_a_rank_can_only_join_a_bundle_that_the_launcher_created(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.json"):
        BundleWriter.join(tmp_path)


def test_a_directory_without_run_json_is_not_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run bundle"):
        RunBundle.open(tmp_path)


def test_a_rank_outside_the_run_is_a_usage_error(sound: Path) -> None:
    with pytest.raises(UsageError, match="ranks 0 to 3"):
        RunBundle.open(sound).table("kernels", 4)


def test_one_rank_has_exactly_one_spelling() -> None:
    names = ["rank=0", "rank=12.jsonl", "3.json", "rank=01", "rank=-1", "rank=1 ", "03.json", "rank=x", "run.json"]
    assert [rank_of_name(name) for name in names] == [0, 12, 3, None, None, None, None, None, None]


def test_run_json_is_the_same_bytes_for_the_same_run(tmp_path: Path) -> None:
    first, second = golden.build(tmp_path / "a", world_size=1), golden.build(tmp_path / "b", world_size=1)
    assert (first / "run.json").read_bytes() == (second / "run.json").read_bytes()
    run = read_json(first / "run.json", RunInfo)
    assert msgspec.structs.replace(run, seed=1).seed == 1


def test_force_removes_nothing_that_no_run_writes(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    (path / "kernels").mkdir(parents=True)
    (path / "kernels/notes.txt").write_text("precious")
    (path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"not a run bundle \(its run\.json is not one of a run\)"):
        BundleWriter(path, force=True)
    (path / "run.json").write_text('{"schema_version": 1, "run_id": "a", "world_size": 1}')
    with pytest.raises(UsageError, match=r"it holds kernels/notes\.txt"):
        BundleWriter(path, force=True)
    (path / "kernels/rank=0").mkdir()
    (path / "kernels/notes.txt").rename(path / "kernels/rank=0/notes.txt")
    with pytest.raises(UsageError, match=r"it holds kernels/rank=0/notes\.txt"):
        BundleWriter(path, force=True)
    assert (path / "kernels/rank=0/notes.txt").read_text() == "precious"


def test_of_two_launchers_in_one_empty_directory_one_is_told_so(tmp_path: Path) -> None:
    run = RunBundle.open(golden.build(tmp_path / "model", world_size=1)).run
    (tmp_path / "empty").mkdir()
    first, second = BundleWriter(tmp_path / "empty"), BundleWriter(tmp_path / "empty")
    first.write_run(run)
    with pytest.raises(UsageError, match="another run has just begun there"):
        second.write_run(run)
    assert RunBundle.open(tmp_path / "empty").run == run


def test_a_name_that_no_file_system_takes_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(AlphaMoEError, match="File name too long"):
        BundleWriter(tmp_path / ("a" * 300))
