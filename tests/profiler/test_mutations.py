"""Mutants of golden bundles: each is judged or refused in one line, and none that lost its support is a PASS.

``RESEALED`` mutants are consistent again after the change (hashes, row counts), as if a recording had written them so.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.inspection import RunReport, inspect_run
from alphamoe_profiler.reports.json_report import to_json
from alphamoe_profiler.reports.terminal import print_report
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import TABLES
from alphamoe_tracers.symbols import base_name

RANKS = 2
HOSTILE = "\x1b[31m\x1b]0;owned\x07\u202e[bold]\x9b2J<script>"
Mutation = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.build(tmp_path_factory.mktemp("sound") / "run", world_size=RANKS)


def judged(path: Path) -> str:
    """Return the verdict, printed and encoded on the way, or ``exit 2`` and ``exit 3`` for a bundle that is refused."""
    try:
        report = inspect_run(RunBundle.open(path))
    except AlphaMoEError as error:
        return f"exit {error.exit_code}"
    rendered(report)
    return report.verdict.value


def rendered(report: RunReport) -> str:
    document = json.loads(to_json(report), parse_constant=lambda token: pytest.fail(token))
    assert document["verdict"] == report.verdict.value
    out = io.StringIO()
    print_report(report, out, width=100)
    steering = {letter for letter in out.getvalue() if unicodedata.category(letter) in ("Cc", "Cf")} - {"\n"}
    assert not steering, f"the terminal gets {steering!r}"
    return out.getvalue()


def read(path: Path, name: str, rank: int) -> pa.Table:
    return pq.ParquetFile(path / f"{name}/rank={rank}/part-00000.parquet").read()


def write(path: Path, name: str, rank: int, table: pa.Table) -> None:
    pq.write_table(table, path / f"{name}/rank={rank}/part-00000.parquet")


def filled(table: pa.Table, name: str, value: Any) -> pa.Table:
    at = table.column_names.index(name)
    kind = table.schema.field(at).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return table.set_column(at, table.schema.field(at), pa.array([value] * table.num_rows, plain).cast(kind))


def edit(path: Path, relative: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / relative).read_text())
    change(document)
    (path / relative).write_text(json.dumps(document))


def edit_lines(path: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / f"receipts/rank={rank}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reseal(path: Path) -> None:
    """Make hashes and row counts agree with the files again."""
    for rank in range(RANKS):
        record = json.loads((path / f"ranks/{rank}.json").read_text())
        record["sha256"] = {
            name: hashlib.sha256((path / name).read_bytes()).hexdigest()
            for name in record["sha256"]
            if (path / name).is_file()
        }
        record["collector"]["rows"] = {
            name: read(path, name, rank).num_rows if (path / f"{name}/rank={rank}").is_dir() else 0 for name in TABLES
        }
        (path / f"ranks/{rank}.json").write_text(json.dumps(record))


def column(name: str, field: str, value: Any) -> Mutation:
    return lambda path: write(path, name, 0, filled(read(path, name, 0), field, value))


def emptied(name: str) -> Mutation:
    return lambda path: write(path, name, 0, read(path, name, 0).slice(0, 0))


def renamed(new: str) -> Mutation:
    def change(path: Path) -> None:
        symbols = read(path, "symbols", 0).to_pydict()
        for form, name in (("mangled", new), ("full", new), ("base", base_name(new))):
            symbols[form] = [name if own == ALPHAMOE_W8A8_SYMBOL else own for own in symbols[form]]
        write(path, "symbols", 0, pa.table(symbols, TABLES["symbols"]))

    return change


def without(symbol: str, first: int = 0, count: int | None = None) -> Mutation:
    """Remove kernels of one symbol."""

    def change(path: Path) -> None:
        symbols = read(path, "symbols", 0).to_pydict()
        number = symbols["symbol_id"][symbols["base"].index(symbol)]
        table = read(path, "kernels", 0)
        rows = [row for row, own in enumerate(table.column("symbol_id").to_pylist()) if own == number]
        gone = set(rows[first : None if count is None else first + count])
        write(path, "kernels", 0, table.filter(pa.array([row not in gone for row in range(table.num_rows)])))

    return change


def clone(path: Path) -> None:
    """Pass rank 0 off as rank 1: every identity edited, every table written anew."""
    for name in TABLES:
        pq.write_table(read(path, name, 0), path / f"{name}/rank=1/part-00000.parquet", compression="gzip")
    for name in ("modules", "receipts"):
        shutil.copy(path / f"{name}/rank=0.jsonl", path / f"{name}/rank=1.jsonl")
    edit_lines(path, 1, lambda line: line.update(rank=1) if line["type"] == "receipt" else None)


def swap_tables(path: Path) -> None:
    for name in TABLES:
        first, second = path / f"{name}/rank=0", path / f"{name}/rank=1"
        first.rename(path / "aside")
        second.rename(first)
        (path / "aside").rename(second)


def receipts(**fields: Any) -> Mutation:
    """Change the third witness step of rank 0."""

    def change(path: Path) -> None:
        seen = []

        def third(line: dict[str, Any]) -> None:
            if line["type"] == "receipt" and line["purpose"] == "witness":
                seen.append(line)
                line.update(fields if len(seen) == 3 else {})

        edit_lines(path, 0, third)

    return change


def submissions(**fields: Any) -> Mutation:
    def change(line: dict[str, Any]) -> None:
        for item in line.get("kernels", ()):
            item.update(fields)

    return lambda path: edit_lines(path, 0, change)


def collector(**fields: Any) -> Mutation:
    return lambda path: edit(path, "ranks/0.json", lambda record: record["collector"].update(fields))


def run(**fields: Any) -> Mutation:
    return lambda path: edit(path, "run.json", lambda record: record.update(fields))


def rank(**fields: Any) -> Mutation:
    return lambda path: edit(path, "ranks/0.json", lambda record: record.update(fields))


def outcome(**fields: Any) -> Mutation:
    return lambda path: edit(path, "outcome.json", lambda record: record.update(fields))


def twice(relative: str, key: str, value: str) -> Mutation:
    def change(path: Path) -> None:
        text = (path / relative).read_text()
        (path / relative).write_text(text.replace("{", f'{{"{key}": {value}, ', 1))

    return change


def added_part(path: Path) -> None:
    shutil.copy(path / "kernels/rank=0/part-00000.parquet", path / "kernels/rank=0/part-00001.parquet")


OPEN = "INCONCLUSIVE"
SENTINEL = "alphamoe_trace_sentinel_"
RESEALED: dict[str, tuple[Mutation, str]] = {
    "nothing": (lambda path: None, "PASS"),
    "no kernel": (emptied("kernels"), OPEN),
    "no symbol": (emptied("symbols"), OPEN),
    "no launch": (emptied("launches"), OPEN),
    "no range": (emptied("ranges"), OPEN),
    "no graph node": (emptied("graph_nodes"), OPEN),
    "no open sentinel": (without(f"{SENTINEL}open"), OPEN),
    "no graph sentinel": (without(f"{SENTINEL}graph_close"), OPEN),
    "one kernel less": (without(ALPHAMOE_W8A8_SYMBOL, 5, 1), "FAIL"),
    "the kernel under another name": (renamed(f"{ALPHAMOE_W8A8_SYMBOL}_v2"), "FAIL"),
    "the kernel under a forbidden name": (renamed("fused_moe_kernel"), "FAIL"),
    "the kernel under a hostile name": (renamed(HOSTILE), "FAIL"),
    "the kernel under an endless name": (renamed("k" * 5000), "FAIL"),
    "another grid": (column("kernels", "grid_x", -1), "FAIL"),
    "another process": (column("kernels", "process", 12345), OPEN),
    "a clone": (clone, "exit 2"),
    "swapped tables": (swap_tables, "exit 2"),
    "ranks disagree on M": (receipts(M=7), "FAIL"),
    "more real tokens than M": (receipts(real_tokens=99), "FAIL"),
    "a step below 0": (receipts(step=-1), OPEN),
    "a step beyond 64 bits": (receipts(step=10**30), OPEN),
    "M of 0": (receipts(M=0), OPEN),
    "M as text": (receipts(M="1"), OPEN),
    "M as truth": (receipts(M=True), OPEN),
    "an unknown list": (receipts(kernels_id=99), OPEN),
    "another request": (receipts(request_ids=[HOSTILE]), OPEN),
    "kernel M of 0": (submissions(M=0), OPEN),
    "kernel M below 0": (submissions(M=-5), OPEN),
    "kernel M above dispatch M": (submissions(M=2**40), "FAIL"),
    "kernel M beyond 64 bits": (submissions(M=2**70), OPEN),
    "no expert": (submissions(E=0), OPEN),
    "a geometry that cannot be": (submissions(H=100), "FAIL"),
    "a layer below 0": (submissions(layer=-1), OPEN),
    "a layer far away": (submissions(layer=2**62), "FAIL"),
    "a receipt key twice": (twice("receipts/rank=0.jsonl", "type", '"kernels"'), OPEN),
}
UNSEALED: dict[str, tuple[Mutation, str]] = {
    "one record dropped": (collector(dropped=1), OPEN),
    "dropped below 0": (collector(dropped=-1), OPEN),
    "dropped beyond 64 bits": (collector(dropped=10**30), OPEN),
    "no sentinel launched": (collector(sentinels=[]), OPEN),
    "no bounds": (collector(window_open_ns=None, window_close_ns=None), OPEN),
    "a window after everything": (collector(window_open_ns=2**60, window_close_ns=2**61), OPEN),
    "a window inside out": (collector(window_open_ns=2**60, window_close_ns=5), OPEN),
    "no row counts": (collector(rows={}), OPEN),
    "no hashes": (rank(sha256={}), OPEN),
    "a hash of a file outside": (rank(sha256={"../../etc/passwd": "00"}), OPEN),
    "no multiprocessors": (rank(sm_count=0), OPEN),
    "another run's rank file": (rank(run_id="older"), "exit 2"),
    "a newer rank file": (rank(schema_version=2, from_the_future=1), "exit 2"),
    "a rank file key twice": (twice("ranks/0.json", "rank", "1"), OPEN),
    "a hostile device": (rank(gpu_name=HOSTILE, device=HOSTILE, host=HOSTILE), "PASS"),
    "a newer run": (run(schema_version=2), "exit 2"),
    "no rank": (run(world_size=0), "exit 3"),
    "fewer ranks than none": (run(world_size=-1), "exit 3"),
    "a billion ranks": (run(world_size=10**9), "exit 3"),
    "one rank more": (run(world_size=RANKS + 1), "exit 2"),
    "ranks beyond 64 bits": (run(world_size=10**30), "exit 3"),
    "a run key twice": (twice("run.json", "world_size", "1"), "exit 3"),
    "no execution": (run(executions=[]), "CONFIG_ERROR"),
    "hostile words": (run(model=HOSTILE, argv=["alphamoe-trace", HOSTILE], inject_fault=HOSTILE), "PASS"),
    "a run that was cut short": (outcome(complete=False), OPEN),
    "an outcome without ranks": (outcome(ranks=[]), OPEN),
    "an outcome of another run": (outcome(run_id="older"), "exit 2"),
    "requests cut": (lambda path: os.truncate(path / "requests.jsonl", 40), OPEN),
    "modules cut": (lambda path: os.truncate(path / "modules/rank=0.jsonl", 40), OPEN),
    "an added part": (added_part, OPEN),
}


@pytest.mark.parametrize("name", RESEALED)
def test_a_consistent_mutant_has_its_verdict(sound: Path, tmp_path: Path, name: str) -> None:
    mutate, verdict = RESEALED[name]
    path = Path(shutil.copytree(sound, tmp_path / "run"))
    mutate(path)
    reseal(path)
    assert judged(path) == verdict


@pytest.mark.parametrize("name", UNSEALED)
def test_a_mutant_of_the_small_records_has_its_verdict(sound: Path, tmp_path: Path, name: str) -> None:
    mutate, verdict = UNSEALED[name]
    path = Path(shutil.copytree(sound, tmp_path / "run"))
    mutate(path)
    assert judged(path) == verdict


def test_a_link_or_a_pipe_in_place_of_a_part_is_never_opened(sound: Path, tmp_path: Path) -> None:
    for number, make in enumerate((lambda part: part.symlink_to(sound / "run.json"), os.mkfifo, Path.mkdir)):
        path = Path(shutil.copytree(sound, tmp_path / f"run{number}"))
        part = path / "kernels/rank=0/part-00000.parquet"
        part.unlink()
        make(part)
        report = inspect_run(RunBundle.open(path))
        assert report.verdict.value == OPEN
        assert any("not a file of its own" in problem for problem in report.problems)


def test_random_damage_to_any_file_is_judged_or_refused_and_never_a_pass(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(20260131)
    evidence = sorted(
        p.relative_to(sound) for p in sound.rglob("*") if p.is_file() and p.suffix in (".parquet", ".jsonl")
    )
    for number in range(16):
        path = Path(shutil.copytree(sound, tmp_path / f"run{number}"))
        target = path / rng.choice(evidence)
        if target.name == "requests.jsonl":
            continue  # no hash vouches for it: the launcher writes it
        content = bytearray(target.read_bytes())
        kind = rng.choice(("flip", "cut", "insert", "double", "remove"))
        at = rng.randrange(len(content))
        if kind == "flip":
            content[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == "double":
            content *= 2
        target.unlink()
        if kind != "remove":
            target.write_bytes(content)
        verdict = judged(path)
        assert verdict != "PASS", f"{kind} of {target.relative_to(path)} at {at}"
        shutil.rmtree(path)
