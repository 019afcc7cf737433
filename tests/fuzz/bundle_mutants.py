"""Mutants of a golden run bundle: files damaged without a plan, and evidence that was removed without a trace."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from damage import damaged_bytes, damaged_json, json_bytes
from judge import Mutant

sys.path.append(str(Path(__file__).resolve().parents[1] / "profiler"))
import golden

from alphamoe_tracers.records import TABLES

RANKS = 2
SYMBOL = "kernel_alpha_moe_w8a8_up_down"
SENTINEL = "alphamoe_trace_sentinel_"
POLICY = f"""
backend = "flashinfer_alphamoe"
[[require]]
symbol = "{SYMBOL}"
equals_receipts = true
per_layer = 1
equal_across_ranks = true
source_sha256 = ["{golden.SOURCE}"]
"""
Row = dict[str, Any]


def make(rng: random.Random, folder: Path) -> Mutant:
    """Write one mutant into an empty folder."""
    path = Path(shutil.copytree(_sound(), folder / "run"))
    if rng.random() < 0.5:
        kind = rng.choice(list(REMOVALS))
        REMOVALS[kind](rng, path, rng.randrange(RANKS))
        if rng.random() < 0.8:
            reseal(path)
        # Either policy must notice; the built-in one asks less.
        return _gated(folder, f"bundle: {kind}", True, built_in=rng.random() < 0.5 and kind not in ASKED_ONLY)
    files = sorted(own for own in path.rglob("*") if own.is_file())
    vouched = [own for own in files if own.suffix == ".parquet" or own.parent.name in ("receipts", "modules")]
    if rng.random() < 0.4:
        target = rng.choice(vouched)
        before = target.read_bytes()
        target.write_bytes(damaged_bytes(rng, before))
        return _gated(folder, "bundle: vouched bytes", target.read_bytes() != before)
    target = rng.choice([own for own in files if own not in vouched])
    if target.suffix == ".json" and rng.random() < 0.6:
        target.write_bytes(json_bytes(damaged_json(rng, json.loads(target.read_bytes()))))
        return _gated(folder, f"bundle: values of {'ranks/N' if target.parent.name == 'ranks' else target.stem}", False)
    target.write_bytes(damaged_bytes(rng, target.read_bytes()))
    return _gated(folder, "bundle: bytes of documents", False)


def untouched(folder: Path) -> Mutant:
    """The sound seed, which must be a PASS."""
    shutil.copytree(_sound(), folder / "run")
    return _gated(folder, "bundle: sound", False)


@lru_cache(maxsize=1)
def _sound() -> Path:
    return golden.build(Path(mkdtemp(prefix="alphamoe-fuzz-bundle-")) / "run", world_size=RANKS)


def _gated(folder: Path, kind: str, removed: bool, built_in: bool = False) -> Mutant:
    (folder / "policy.toml").write_text(POLICY)
    asked = () if built_in else ("--policy", str(folder / "policy.toml"))
    return Mutant(kind, ("gate", str(folder / "run"), *asked), removed=removed)


def read(path: Path, name: str, rank: int) -> list[Row]:
    """Read one table as rows."""
    rows: list[Row] = pq.ParquetFile(path / f"{name}/rank={rank}/part-00000.parquet").read().to_pylist()
    return rows


def write(path: Path, name: str, rank: int, rows: list[Row]) -> None:
    """Write one table from rows."""
    schema = TABLES[name]
    plain = {own.name: pa.array([row[own.name] for row in rows], _plain(own.type)) for own in schema}
    pq.write_table(pa.table(plain).cast(schema), path / f"{name}/rank={rank}/part-00000.parquet")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def reseal(path: Path) -> None:
    """Make hashes, rows, receipts and sentinels agree with the files again, as if a recording had written them so."""
    for rank in range(RANKS):
        document = path / f"ranks/{rank}.json"
        if not document.is_file():
            continue
        record = json.loads(document.read_text())
        record["sha256"] = {
            name: hashlib.sha256((path / name).read_bytes()).hexdigest()
            for name in record["sha256"]
            if (path / name).is_file()
        }
        record["collector"]["rows"] = {
            name: len(read(path, name, rank)) if (path / f"{name}/rank={rank}/part-00000.parquet").is_file() else 0
            for name in TABLES
        }
        receipts = path / f"receipts/rank={rank}.jsonl"
        lines = receipts.read_text().splitlines() if receipts.is_file() else []
        record["receipts"] = sum('"type":"receipt"' in line.replace(" ", "") for line in lines)
        document.write_text(json.dumps(record))


def _numbers(path: Path, rank: int, *names: str) -> list[int]:
    return [row["symbol_id"] for row in read(path, "symbols", rank) if row["base"] in names]


def _witness_steps(path: Path, rank: int) -> set[int]:
    return {line["step"] for line in _receipts(path, rank) if line.get("purpose") == "witness"}


def _receipts(path: Path, rank: int) -> list[Row]:
    return [json.loads(line) for line in (path / f"receipts/rank={rank}.jsonl").read_text().splitlines()]


def _write_receipts(path: Path, rank: int, lines: list[Row]) -> None:
    (path / f"receipts/rank={rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _in_window(path: Path, rank: int) -> tuple[int, int]:
    collector = json.loads((path / f"ranks/{rank}.json").read_text())["collector"]
    return collector["window_open_ns"], collector["window_close_ns"]


def _required(path: Path, rank: int) -> list[int]:
    """Return rows of the kernels table that are witnesses: of the required symbol, inside the window."""
    opened, _ = _in_window(path, rank)
    numbers = _numbers(path, rank, SYMBOL)
    rows = read(path, "kernels", rank)
    return [n for n, row in enumerate(rows) if row["symbol_id"] in numbers and row["start_ns"] > opened]


def _without(path: Path, name: str, rank: int, gone: set[int]) -> None:
    write(path, name, rank, [row for number, row in enumerate(read(path, name, rank)) if number not in gone])


def _kernels(rng: random.Random, path: Path, rank: int) -> None:
    rows = _required(path, rank)
    _without(path, "kernels", rank, set(rng.sample(rows, rng.choice((1, 1, 2, len(rows))))))


def _before_open(rng: random.Random, path: Path, rank: int) -> None:
    """Move witnesses to before the window: they become warm-up."""
    rows, opened = read(path, "kernels", rank), _in_window(path, rank)[0]
    gone = {rows[number]["correlation_id"] for number in rng.sample(_required(path, rank), 2)}
    launches = read(path, "launches", rank)
    for row in (*rows, *launches):
        if row["correlation_id"] in gone:
            row["start_ns"], row["end_ns"] = opened - 9000, opened - 8000
    write(path, "kernels", rank, rows)
    write(path, "launches", rank, launches)


def _fields(name: str, **values: Any) -> Removal:
    def change(rng: random.Random, path: Path, rank: int) -> None:
        rows, chosen = read(path, name, rank), _required(path, rank)
        for number in rng.sample(chosen, rng.choice((1, len(chosen)))):
            rows[number].update(values)
        write(path, name, rank, rows)

    return change


def _symbols(rng: random.Random, path: Path, rank: int) -> None:
    rows = read(path, "symbols", rank)
    if rng.random() < 0.4:
        write(path, "symbols", rank, [row for row in rows if row["base"] != SYMBOL])
        return
    new = rng.choice((f"{SYMBOL}_v2", "fused_moe_kernel", "x", "", "ns::" + SYMBOL, SYMBOL.upper()))
    lying = rng.random() < 0.3 and new not in ("", "ns::" + SYMBOL)
    for row in rows:
        if row["base"] == SYMBOL:
            forms = ("mangled", "full") if lying else ("mangled", "full", "base")
            row.update(dict.fromkeys(forms, new))
    write(path, "symbols", rank, rows)


def _sentinel(rng: random.Random, path: Path, rank: int) -> None:
    kind = rng.choice(("open", "close", "graph_open", "graph_close", "step"))
    numbers = _numbers(path, rank, SENTINEL + kind)
    rows = read(path, "kernels", rank)
    write(path, "kernels", rank, [row for row in rows if row["symbol_id"] not in numbers])


def _launches(rng: random.Random, path: Path, rank: int) -> None:
    kernels = read(path, "kernels", rank)
    chosen = _required(path, rank)
    gone = {kernels[number]["correlation_id"] for number in rng.sample(chosen, rng.choice((1, len(chosen))))}
    write(path, "launches", rank, [row for row in read(path, "launches", rank) if row["correlation_id"] not in gone])


def _ranges(rng: random.Random, path: Path, rank: int) -> None:
    name, opened = rng.choice(("step", "layer")), _in_window(path, rank)[0]
    rows = read(path, "ranges", rank)
    chosen = [number for number, row in enumerate(rows) if row["name"] == name and row["start_ns"] > opened]
    _without(path, "ranges", rank, set(rng.sample(chosen, rng.choice((1, len(chosen))))))


def _nodes(rng: random.Random, path: Path, rank: int) -> None:
    used = {row["graph_node_id"] for row in (read(path, "kernels", rank)[n] for n in _required(path, rank))} - {None}
    gone = set(rng.sample(sorted(used), rng.choice((1, len(used)))))
    write(path, "graph_nodes", rank, [r for r in read(path, "graph_nodes", rank) if r["graph_node_id"] not in gone])


def _receipts_gone(rng: random.Random, path: Path, rank: int) -> None:
    lines = _receipts(path, rank)
    own = [number for number, line in enumerate(lines) if line.get("purpose") == "witness"]
    gone = set(rng.sample(own, rng.choice((1, 2, len(own)))))
    _write_receipts(path, rank, [line for number, line in enumerate(lines) if number not in gone])


def _other_purpose(rng: random.Random, path: Path, rank: int) -> None:
    purpose, execution = rng.choice(("warmup", "capture", "performance")), rng.choice(golden.EXECUTIONS)
    for own in range(RANKS):
        lines = _receipts(path, own)
        for line in lines:
            if line.get("execution") == execution:
                line["purpose"] = purpose
        _write_receipts(path, own, lines)


def _drop_steps(path: Path, rank: int, steps: set[int]) -> None:
    """Remove steps as if they had never been: ranges, launches, kernels and receipts."""
    ranges = read(path, "ranges", rank)
    spans = [(r["start_ns"], r["end_ns"]) for r in ranges if r["name"] == "step" and r["payload"] in steps]

    def inside(row: Row) -> bool:
        return any(first <= row["start_ns"] <= last for first, last in spans)

    for name in ("kernels", "launches", "ranges"):
        write(path, name, rank, [row for row in read(path, name, rank) if not inside(row)])
    _write_receipts(path, rank, [line for line in _receipts(path, rank) if line.get("step") not in steps])


def _step(rng: random.Random, path: Path, rank: int) -> None:
    _drop_steps(path, rank, {rng.choice(sorted(_witness_steps(path, rank)))})


def _execution(rng: random.Random, path: Path, rank: int) -> None:
    execution = rng.choice(golden.EXECUTIONS)
    for own in range(RANKS):
        lines = [line for line in _receipts(path, own) if line.get("purpose") == "witness"]
        _drop_steps(path, own, {line["step"] for line in lines if line["execution"] == execution})


def _layer(rng: random.Random, path: Path, rank: int) -> None:
    """Remove one layer of one step from the kernels and from the receipts alike, on one rank or on all."""
    step = rng.choice(sorted(_witness_steps(path, rank)))
    layer = rng.randrange(golden_layers())
    for own in range(RANKS) if rng.random() < 0.5 else (rank,):
        lines = _receipts(path, own)
        lists = {line["id"]: line for line in lines if line["type"] == "kernels"}
        forward = next(line for line in lines if line.get("step") == step)
        kept = [item for item in lists[forward["kernels_id"]]["kernels"] if item["layer"] != layer]
        number = max(lists) + 1
        forward["kernels_id"] = number
        _write_receipts(path, own, [{"type": "kernels", "id": number, "kernels": kept}, *lines])
        ranges = read(path, "ranges", own)
        span = next((r["start_ns"], r["end_ns"]) for r in ranges if r["name"] == "step" and r["payload"] == step)
        numbers = _numbers(path, own, SYMBOL)
        kernels = read(path, "kernels", own)
        rows = [n for n, k in enumerate(kernels) if k["symbol_id"] in numbers and span[0] < k["start_ns"] < span[1]]
        _without(path, "kernels", own, {rows[layer]})


def golden_layers() -> int:
    """Return how many layers the golden run has."""
    return 2


def _modules(rng: random.Random, path: Path, rank: int) -> None:
    (path / f"modules/rank={rank}.jsonl").write_text("")
    rows = [row | {"module_sha256": None} for row in read(path, "symbols", rank)]
    write(path, "symbols", rank, rows)


def _files(*patterns: str) -> Removal:
    def change(rng: random.Random, path: Path, rank: int) -> None:
        target = path / rng.choice(patterns).format(rank=rank)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()

    return change


def _collector(**fields: Any) -> Removal:
    def change(rng: random.Random, path: Path, rank: int) -> None:
        document = path / f"ranks/{rank}.json"
        record = json.loads(document.read_text())
        record["collector"].update(fields)
        document.write_text(json.dumps(record))

    return change


def _unserved(rng: random.Random, path: Path, rank: int) -> None:
    line = json.loads((path / "requests.jsonl").read_text())
    line["status"] = rng.choice(("failed", "cut"))
    (path / "requests.jsonl").write_text(rng.choice((json.dumps(line) + "\n", "")))


Removal = Callable[[random.Random, Path, int], None]
REMOVALS: dict[str, Removal] = {
    "witnesses gone": _kernels,
    "witnesses moved before the window": _before_open,
    "witnesses without correlation": _fields("kernels", correlation_id=None),
    "witnesses of another launch shape": _fields("kernels", grid_x=3, dynamic_smem_bytes=17),
    "required symbol gone or renamed": _symbols,
    "sentinels gone": _sentinel,
    "launches gone": _launches,
    "ranges gone": _ranges,
    "graph nodes gone": _nodes,
    "receipts gone": _receipts_gone,
    "traffic of another purpose": _other_purpose,
    "a step of one rank gone": _step,
    "an execution gone": _execution,
    "a layer of a step gone": _layer,
    "modules gone": _modules,
    "files gone": _files(
        "ranks/{rank}.json", "kernels/rank={rank}", "launches/rank={rank}", "symbols/rank={rank}", "ranges/rank={rank}",
        "graph_nodes/rank={rank}", "receipts/rank={rank}.jsonl", "outcome.json", "run.json", "requests.jsonl",
    ),
    "records dropped": _collector(dropped=1),
    "no window": _collector(window_open_ns=None, window_close_ns=None),
    "no sentinel launched": _collector(sentinels=[]),
    "requests unserved": _unserved,
}  # fmt: skip
ASKED_ONLY = ("modules gone",)
"""What only a policy that pins the code notices."""
