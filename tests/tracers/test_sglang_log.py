"""SGLang's AlphaMoE log lines: both field sets, strict types, ranks from the prefix, sets and never counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.sglang_log import RUNTIME_SCHEMA, SHAPE_SCHEMA, SglangLog, read_sglang_log

KERNEL = {
    "kernel": "alphamoe_fp8_block_scale_aligned_moe",
    "M": 112,
    "E": 512,
    "H": 2048,
    "I_local": 128,
    "top_k": 10,
    "block_m": 8,
    "captured": True,
    "device": 0,
}


def execution(**changes: Any) -> dict[str, Any]:
    record = {
        "schema": RUNTIME_SCHEMA,
        "execution": "decode_graph_replay",
        "forward_mode": "DECODE",
        "M": 112,
        "real_tokens": 100,
        "batch_size": 100,
        "attribution": "capture_registration",
        "graph_backend": "full",
        "graph_key": "112",
        "kernels": [KERNEL],
    }
    return record | changes


def line(record: dict[str, Any], prefix: str = "[2026-01-31 12:00:00 TP0] ") -> str:
    return f"{prefix}ALPHAMOE_RUNTIME_EXECUTION {json.dumps(record, sort_keys=True)}\n"


def read(tmp_path: Path, text: str) -> SglangLog:
    path = tmp_path / "server.log"
    path.write_text(text)
    return read_sglang_log(path)


def test_both_field_sets_of_version_two_are_read(tmp_path: Path) -> None:
    """The older one has no attribution and no graph fields: they stay null."""
    old = execution()
    for name in ("attribution", "graph_backend", "graph_key"):
        del old[name]
    found = read(tmp_path, "starting\n" + line(execution()) + line(old))
    assert not found.problems
    first, second = (item.execution for item in found.records)
    assert first is not None
    assert second is not None
    assert (first.attribution, first.M, first.real_tokens, first.kernels[0].M) == (
        "capture_registration",
        112,
        100,
        112,
    )
    assert (second.attribution, second.graph_key) == (None, None)


def test_the_rank_is_the_prefixs_tp_and_nothing_else(tmp_path: Path) -> None:
    """Colours do not hide it; several DP or PP groups make it unknown, and that is told."""
    prefixes = ["[2026-01-31 12:00:00 TP3] ", "\x1b[33m[2026 TP1 EP1]\x1b[0m WARNING: ", "[2026 DP1 TP0] ", "[2026] "]
    found = read(tmp_path, "".join(line(execution(), prefix) for prefix in prefixes))
    assert [item.rank for item in found.records] == [3, 1, None]
    assert found.duplicates == 1
    (problem,) = found.problems
    assert "line 3" in problem


def test_equal_lines_of_one_rank_are_one_record(tmp_path: Path) -> None:
    """The same execution on two ranks stays two."""
    found = read(tmp_path, line(execution()) * 2 + line(execution(), "[x TP1] "))
    assert [item.rank for item in found.records] == [0, 1]
    assert found.duplicates == 1


@pytest.mark.parametrize("value", ["100", True, 1.5, -1])
def test_a_number_of_another_type_is_refused_with_its_line(tmp_path: Path, value: object) -> None:
    """Nothing is coerced: "100" and true are no token counts."""
    found = read(tmp_path, "noise\n" + line(execution(real_tokens=value)) + line(execution()))
    assert len(found.records) == 1
    (problem,) = found.problems
    assert problem.startswith("line 2:")


def test_an_eager_record_may_leave_unknown_numbers_null(tmp_path: Path) -> None:
    """Unknown is null and no problem."""
    record = execution(execution="eager", attribution="direct_submissions", M=None, graph_key=None, graph_backend=None)
    found = read(tmp_path, line(record))
    assert not found.problems
    assert found.records[0].execution is not None
    assert found.records[0].execution.M is None


def test_more_real_tokens_than_rows_is_told(tmp_path: Path) -> None:
    """113 real tokens in 112 rows contradict each other; the record is kept for the judge."""
    found = read(tmp_path, line(execution(real_tokens=113)))
    assert len(found.records) == 1
    assert "113 real tokens exceed M 112" in found.problems[0]


def test_kernel_and_m_are_no_joined_text(tmp_path: Path) -> None:
    """gemm1 at M 23 and gemm12 at M 3 are two records."""
    one, two = KERNEL | {"kernel": "gemm1", "M": 23}, KERNEL | {"kernel": "gemm12", "M": 3}
    found = read(tmp_path, line(execution(kernels=[one])) + line(execution(kernels=[two])))
    assert len(found.records) == 2
    assert found.duplicates == 0


def test_nvfp4_shapes_and_foreign_schemas(tmp_path: Path) -> None:
    """A shape line is read too; a line of another schema is refused by name."""
    shape = {name: value for name, value in KERNEL.items() if name != "captured"}
    shape |= {"schema": SHAPE_SCHEMA, "kernel": "flashinfer::alphamoe_nvfp4_aligned_moe", "tp": 4, "ep": 1}
    text = f"[x TP2] ALPHAMOE_NVFP4_RUNTIME_SHAPE {json.dumps(shape)}\n" + line(execution(schema="v9"))
    found = read(tmp_path, text)
    assert found.records[0].shape is not None
    assert found.records[0].rank == 2
    assert "'v9'" in found.problems[0]


def test_a_cut_last_line_is_told(tmp_path: Path) -> None:
    """A server that was killed inside a line leaves the others whole."""
    found = read(tmp_path, line(execution()) + line(execution(M=128))[:90])
    assert found.cut
    assert len(found.records) == 1


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    """One line, with the path."""
    with pytest.raises(EvidenceError, match=r"nowhere\.log"):
        read_sglang_log(tmp_path / "nowhere.log")
