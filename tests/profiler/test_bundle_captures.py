"""Captures inside a run bundle: hashed, vouched for, and of the rank and run whose folder they lie in."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest

from alphamoe_profiler.bundle import BundleWriter, RunBundle
from alphamoe_profiler.bundle_check import check, contradictions

NAME = "captures/rank=1/layer=0-M=1-step=4"


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A golden run whose rank 1 holds one capture, vouched for by its rank file."""
    run = golden.build(tmp_path / "run")
    folder = run / NAME
    folder.mkdir(parents=True)
    (folder / "capture.json").write_text(json.dumps({"rank": 1, "run_id": RunBundle.open(run).run.run_id, "M": 1}))
    (folder / "tensors.safetensors").write_bytes(b"tensors")
    half = run / "captures/rank=1/.layer=1-M=1-step=4.x.tmp"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    record = RunBundle.open(run).rank_file(1)
    assert record is not None
    BundleWriter.join(run).write_rank(record)
    return run


def test_a_rank_file_vouches_for_captures_and_not_for_half_written_ones(captured: Path) -> None:
    """Temporary directories of a killed writer are neither hashed nor told."""
    bundle = RunBundle.open(captured)
    assert check(bundle) == []
    record = bundle.rank_file(1)
    assert record is not None
    assert [name for name in record.sha256 if name.startswith("captures/")] == [
        f"{NAME}/capture.json",
        f"{NAME}/tensors.safetensors",
    ]


def test_a_changed_and_an_added_file_of_a_capture_are_told(captured: Path) -> None:
    """A tensor file that was changed, and a file that nobody vouches for."""
    (captured / NAME / "tensors.safetensors").write_bytes(b"others")
    (captured / NAME / "added").write_bytes(b"")
    problems = check(RunBundle.open(captured))
    assert len(problems) == 2
    assert f"{NAME}/tensors.safetensors was changed" in problems[0]
    assert f"{NAME}/added is not among the files" in problems[1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"rank": 2}, "the folder says rank 1, its content says rank 2"),
        ({"run_id": "older"}, "of run older, not of this run"),
    ],
)
def test_a_capture_of_another_rank_or_run_contradicts(captured: Path, content: dict[str, object], says: str) -> None:
    """A capture that was copied from elsewhere proves nothing about this run."""
    path = captured / NAME / "capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    found = contradictions(RunBundle.open(captured))
    assert len(found) == 1
    assert found[0].startswith(f"{NAME}/capture.json: ")
    assert says in found[0]
