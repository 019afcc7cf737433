"""Names that lie, hide or steer: what a kernel is called decides nothing that its other forms contradict."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import foreign
import golden
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gating import REQUIRE, SYMBOL, cell, gate
from golden import RankContent
from judging import FAIL, OPEN, PASS, check, judge, only
from test_mutations import RANKS, read, reseal

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.gate import evaluate
from alphamoe_profiler.inspection import inspect_run
from alphamoe_profiler.policy_source import builtin_policy, parse_policy
from alphamoe_profiler.reports.annotations import error_lines
from alphamoe_profiler.reports.gate_terminal import print_gate
from alphamoe_profiler.reports.terminal import print_report
from alphamoe_tracers.records import TABLES

STEERING = "\x1b[31m\x1b]0;owned\x07\u202e\x9b2J"
DRAWN = f"lost{STEERING}\nPASS everything ran\r\nPASS again\u2028PASS"


@pytest.mark.parametrize(
    ("forms", "verdict"),
    [
        ({"full": "fused_moe_kernel", "mangled": "fused_moe_kernel"}, FAIL),
        ({"full": "void other(int)"}, OPEN),
        ({"mangled": "_Z16fused_moe_kernelv"}, OPEN),
        ({"mangled": "another"}, OPEN),
        ({"base": "fused_moe_kernel"}, OPEN),
        ({"full": f"void {SYMBOL}<1>(P)", "mangled": f"void {SYMBOL}<1>(P)"}, PASS),
    ],
)
def test_a_name_that_its_other_forms_contradict_is_never_a_pass(
    tmp_path: Path, forms: dict[str, str], verdict: object
) -> None:
    """The base name is computed from the full one, whatever the table says."""
    path = golden.build(tmp_path / "run", world_size=RANKS)
    columns = read(path, "symbols", 0).to_pydict()
    at = columns["base"].index(SYMBOL)
    for form, name in forms.items():
        columns[form][at] = name
    pq.write_table(pa.table(columns, TABLES["symbols"]), path / "symbols/rank=0/part-00000.parquet")
    reseal(path)
    report = evaluate(RunBundle.open(path), [builtin_policy("flashinfer_alphamoe")])
    assert report.verdict is verdict


def test_a_name_steers_no_terminal_and_draws_no_line_of_its_own(tmp_path: Path) -> None:
    """Kernel names, rule titles and messages are printed on one line, escapes shown."""
    policy = (
        REQUIRE
        + f'[[forbid]]\nname = "{DRAWN.encode("unicode_escape").decode().replace(chr(92) + "x", chr(92) + "u00")}"\n'
    )
    policy += 'symbol = "lost"\nmatch = "full"\n'

    def damage(content: RankContent) -> None:
        for row in content.of(SYMBOL):
            row["_base"] = DRAWN

    report = gate(tmp_path, policy, damage)
    assert report.verdict is FAIL
    out = io.StringIO()
    print_gate(report, out, width=4000)
    lines = out.getvalue().split("\n")
    assert not any(line.strip().startswith("PASS") for line in lines)
    assert any("\\nPASS everything ran" in line for line in lines)
    for text in (out.getvalue(), *error_lines(report)):
        assert {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp")} <= {"\n"}


def test_a_name_of_thousands_of_letters_is_shown_by_both_its_ends(tmp_path: Path) -> None:
    name = "void at::native::" + "x" * 5000 + "<last>(P)"
    path = foreign.trace(tmp_path / "p-TP-0.trace.json", foreign.run_of(name), 0, 1)
    bundle = foreign.imported(tmp_path / "run", path, "--ranks", 1)
    report = evaluate(bundle, [parse_policy('[[require]]\nsymbol = "absent"\n', "p")])
    out = io.StringIO()
    print_gate(report, out, width=400)
    assert "void at::native::xxx" in out.getvalue()
    assert "xx<last>(P)" in out.getvalue()
    assert len(out.getvalue()) < 3000


@pytest.mark.parametrize("kernels", ["demangledName", "demangledName, shortName"])
def test_kernels_without_a_name_may_be_any_symbol(tmp_path: Path, kernels: str) -> None:
    """A name that StringIds lost proves neither that a symbol is missing nor that a forbidden one did not run."""
    tables = {
        "StringIds": ("id,value", [(1, "cudaLaunchKernel_v7000"), (2, "norm")]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("start,end,correlationId,nameId", [(50, 60, 8, 1), (70, 80, 9, 1)]),
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            f"start,end,correlationId,{kernels}",
            [(100, 120, 8, *[2] * len(kernels.split(","))), (130, 140, 9, *[77] * len(kernels.split(",")))],
        ),
    }
    bundle = foreign.imported(tmp_path / "run", foreign.sqlite(tmp_path / "own.sqlite", tables), "--ranks", 1)
    for rule in ("require", "forbid"):
        report = evaluate(bundle, [parse_policy(f'[[{rule}]]\nsymbol = "moe_gemm"\n', "p")])
        assert report.verdict is OPEN
        assert "no known name" in report.reason


def test_a_count_that_a_kernel_without_a_name_may_complete_is_open(tmp_path: Path) -> None:
    names = [(1, "cudaLaunchKernel_v7000"), (2, "moe_gemm")]
    tables = {
        "StringIds": ("id,value", names),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("start,end,correlationId,nameId", [(50, 60, 8, 1), (70, 80, 9, 1)]),
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "start,end,correlationId,demangledName",
            [(100, 120, 8, 2), (130, 140, 9, None)],
        ),
    }
    bundle = foreign.imported(tmp_path / "run", foreign.sqlite(tmp_path / "own.sqlite", tables), "--ranks", 1)
    for count in ("at_least = 2", "exactly = 2"):
        report = evaluate(bundle, [parse_policy(f'[[require]]\nsymbol = "moe_gemm"\n{count}\n', "p")])
        assert report.verdict is OPEN
        assert "no known name" in report.reason


def drop_layer(content: RankContent) -> None:
    """Step 5 loses layer 1 in its kernels and in its receipt alike."""
    content.drop(content.of(SYMBOL, 5)[1:])
    content.receipts = [
        msgspec.structs.replace(own, kernels=own.kernels[:1]) if own.step == 5 else own for own in content.receipts
    ]


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_layer_that_left_neither_a_submission_nor_a_kernel_in_one_step_fails(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    """The other steps say which layers there are, so that a step without one of them contradicts them."""

    def damage(content: RankContent) -> None:
        if content.rank in ranks:
            drop_layer(content)

    summary = judge(tmp_path, damage)
    assert summary.verdict is FAIL
    told = check(summary, "every layer in every step")
    assert told.verdict is FAIL
    assert "rank 0 step 5: nothing was submitted in layer 1" in told.reason


def test_a_step_that_one_rank_did_not_run_fails(tmp_path: Path) -> None:
    """Every rank takes part in every forward: a receipt that only one of them lacks is a contradiction."""

    def damage(content: RankContent) -> None:
        rows = [row for row in content.kernels if row["_step"] == 6]
        content.drop(rows)
        content.receipts = [own for own in content.receipts if own.step != 6]

    summary = judge(tmp_path, only(1, damage))
    assert summary.verdict is FAIL
    assert "rank 1: no receipt of step 6, which other ranks ran" in check(summary, "ranks agree on M").reason


def test_code_that_was_loaded_inside_the_window_is_told(tmp_path: Path) -> None:
    """A first use or a compilation inside the request window explains slow first kernels."""

    def damage(content: RankContent) -> None:
        late = msgspec.structs.replace(content.modules[0], loaded_ns=(content.window[0] or 0) + 5)
        content.modules = [late, *content.modules[1:]]

    report = gate(tmp_path, REQUIRE, only(1, damage))
    assert report.verdict is PASS
    assert [note for note in report.notes if "loaded" in note] == [
        "rank 1: 1 code modules were loaded inside the window (a first use, or compiled there)"
    ]


def test_marks_of_lazy_loading_in_a_trace_are_told_and_are_no_kernels(tmp_path: Path) -> None:
    events = foreign.run_of()
    mark = {"ph": "X", "cat": "overhead", "name": "Lazy Function Loading", "pid": -1, "tid": 0, "ts": 99, "dur": 40}
    path = foreign.trace(tmp_path / "p-TP-0.trace.json", [mark, mark | {"ts": 150}, *events], 0, 1)
    bundle = foreign.imported(tmp_path / "run", path, "--ranks", 1)
    record = bundle.rank_file(0)
    assert record is not None
    assert record.imported[0].kernels == 1
    assert "2 marks of code that was loaded or compiled while recording" in record.imported[0].notes


def test_of_a_graph_with_a_while_node_one_witness_is_at_least_one(tmp_path: Path) -> None:
    """Tools record the first iteration only: one kernel for four steps is no contradiction, and no exact count."""
    launch = foreign.launch(100, 41, "cudaGraphLaunch")
    node = foreign.kernel("moe_gemm", 105, 3, 41, **{"graph node id": 11, "graph id": 3})
    path = foreign.trace(tmp_path / "p-TP-0.trace.json", [launch, node], 0, 1)
    bundle = foreign.imported(tmp_path / "run", path, "--ranks", 1)
    asked = '[[require]]\nsymbol = "moe_gemm"\nexecutions = ["decode_graph_replay"]\n'
    report = evaluate(bundle, [parse_policy(f"conditional_graphs = true\n{asked}exactly = 4\n", "p")])
    own = cell(report, "moe_gemm", 0, "decode_graph_replay").finding
    assert (own.verdict, own.witnesses) == (OPEN, 1)
    assert own.reason.startswith("seen at least 1 times, not exactly 4")
    assert evaluate(bundle, [parse_policy(f"conditional_graphs = true\n{asked}", "p")]).verdict is PASS


def test_a_line_break_in_a_name_draws_no_line_of_a_run_report(tmp_path: Path) -> None:
    path = foreign.trace(tmp_path / "p-TP-0.trace.json", foreign.run_of("bmm_\nPASS everything\r\nran"), 0, 1)
    report = inspect_run(foreign.imported(tmp_path / "run", path, "--ranks", 1))
    out = io.StringIO()
    print_report(report, out, width=200)
    assert not any(line.strip().startswith("PASS") for line in out.getvalue().split("\n"))
    assert r"bmm_\nPASS everything\r\nran" in out.getvalue()
