"""Receipts on disk: what is written is read, and nothing is coerced or guessed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.receipts import ReceiptWriter, read_receipts
from alphamoe_tracers.records import Receipt, Submission

SUBMISSION = Submission(
    layer=0,
    kernel="alphamoe_fp8_block_scale_aligned_moe",
    symbol="kernel_alpha_moe_w8a8_up_down",
    M=8,
    E=512,
    H=2048,
    I_local=128,
    top_k=10,
    block_m=8,
    captured=False,
    device=0,
)


def receipt(step: int, kernels: tuple[Submission, ...] = (SUBMISSION,)) -> Receipt:
    return Receipt(
        run_id="r",
        rank=0,
        purpose="witness",
        request_ids=("q",),
        step=step,
        forward_mode="DECODE",
        execution="eager",
        M=8,
        real_tokens=5,
        batch_size=5,
        attribution="direct_submissions",
        graph_key=None,
        kernels=kernels,
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "rank=0.jsonl"
    writer = ReceiptWriter(path)
    other = (msgspec.structs.replace(SUBMISSION, layer=1),)
    for item in (receipt(0), receipt(1), receipt(2, other), receipt(3)):
        writer.write(item)
    writer.close()
    return path


def test_round_trip_stores_each_kernel_list_once(written: Path) -> None:
    """Receipts come back equal and in order; a list that repeats is one line of its own."""
    found = read_receipts(written)
    assert [item.step for item in found.receipts] == [0, 1, 2, 3]
    assert found.receipts[0] == receipt(0)
    assert (found.duplicates, found.cut, found.problems) == (0, False, ())
    assert written.read_text().count('"type":"kernels"') == 2


def test_every_line_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    """A rank killed with -9 keeps its receipts."""
    writer = ReceiptWriter(tmp_path / "r.jsonl")
    writer.write(receipt(7))
    assert [item.step for item in read_receipts(tmp_path / "r.jsonl").receipts] == [7]
    writer.close()


def test_cut_last_line_is_tolerated_and_flagged(written: Path) -> None:
    """What was finished still counts."""
    written.write_bytes(written.read_bytes()[:-20])
    found = read_receipts(written)
    assert ([item.step for item in found.receipts], found.cut) == ([0, 1, 2], True)


def test_exact_duplicates_count_once(written: Path) -> None:
    """Two identical lines are one step, and the repetition is noted."""
    data = written.read_bytes()
    written.write_bytes(data + data)
    found = read_receipts(written)
    assert (len(found.receipts), found.duplicates) == (4, 4)


@pytest.mark.parametrize(("value", "what"), [('"8"', "str"), ("true", "bool"), ("8.5", "float"), ("NaN", "")])
def test_wrong_types_are_refused_with_their_line(written: Path, value: str, what: str) -> None:
    """M as a string, a boolean or a fraction is not coerced; the other receipts are still read."""
    lines = written.read_text().splitlines()
    lines[1] = lines[1].replace('"M":8', f'"M":{value}')
    written.write_text("\n".join(lines) + "\n")
    found = read_receipts(written)
    assert [item.step for item in found.receipts] == [1, 2, 3]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("line 2: ")
    assert what in found.problems[0]


def test_unknown_list_schema_and_field_are_problems(written: Path) -> None:
    """A reference to nothing, another schema and an unknown field are each named with their line."""
    lines = written.read_text().splitlines()
    lines[1] = lines[1].replace('"kernels_id":0', '"kernels_id":9')
    lines[2] = lines[2].replace("receipt-v1", "receipt-v9")
    lines[5] = lines[5].replace('"rank":0', '"rank":0,"surprise":1')
    written.write_text("\n".join(lines) + "\n")
    found = read_receipts(written)
    assert [item.step for item in found.receipts] == [2]
    assert [problem.split(":")[0] for problem in found.problems] == ["line 2", "line 3", "line 6"]


def test_redefined_kernel_list_is_a_contradiction(written: Path) -> None:
    """One id cannot stand for two lists; the first definition stays in force."""
    lines = written.read_text().splitlines()
    lines.append(lines[0].replace('"M":8', '"M":16'))
    written.write_text("\n".join(lines) + "\n")
    assert "defined twice" in read_receipts(written).problems[0]


def test_two_writers_cannot_share_a_file(written: Path) -> None:
    """The second writer fails instead of interleaving."""
    with pytest.raises(FileExistsError):
        ReceiptWriter(written)


def test_missing_file_is_an_evidence_error(tmp_path: Path) -> None:
    """A file that is not there is named in one line."""
    with pytest.raises(EvidenceError, match=r"nothing\.jsonl"):
        read_receipts(tmp_path / "nothing.jsonl")
