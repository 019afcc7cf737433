"""The small recording that ``alphamoe-trace selftest`` damages: two ranks, one eager and one decode-graph step.

It is written from code, row by row, so that it needs no GPU and no file of its own. The sha256 of the launch rule that
its shapes were made with is in its run.json, as in any recording.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_KERNEL, ALPHAMOE_W8A8_SYMBOL
from alphamoe_backend.geometry import PRESETS
from alphamoe_backend.kernels.launch import launch_shape
from alphamoe_profiler.bundle import BundleWriter, GeometryInfo, RankEnd, RankFile, RequestRecord, RunInfo, RunOutcome
from alphamoe_profiler.run_identity import LAUNCH_RULE, launch_rule_sha256
from alphamoe_profiler.run_records import PromptInfo, SourceRevision
from alphamoe_profiler.windows import SENTINEL_PREFIX
from alphamoe_tracers.receipts import ReceiptWriter
from alphamoe_tracers.records import SCHEMA_VERSION, TABLES, CollectorSummary, ModuleRecord, Receipt, SentinelCount
from alphamoe_tracers.records import Submission as _Submission
from alphamoe_tracers.symbols import symbol_class

RANKS, LAYERS, SM_COUNT = 2, 2, 132
RUN_ID, COMMIT = "selftest", "5e1f" * 10
CUBIN, SOURCE = "c0" * 32, "50" * 32
NORM = "rms_norm_kernel"
STEPS = ((1, "eager", 13, "warmup"), (4, "eager", 13, "witness"), (5, "decode_graph_replay", 2, "witness"))
"""Step 3 is the capture: it makes graph nodes and leaves no receipt."""
EAGER, DECODE = 4, 5
_NODE, _CLONE = 100, 1 << 40
Row = dict[str, Any]


@dataclass
class SelftestRank:
    """What one rank leaves behind; a case changes it before it is written."""

    rank: int
    run_id: str = RUN_ID
    kernels: list[Row] = field(default_factory=list)
    launches: list[Row] = field(default_factory=list)
    ranges: list[Row] = field(default_factory=list)
    nodes: list[Row] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    sentinels: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    window: tuple[int, int] = (0, 0)
    write_rank_file: bool = True
    clock_ns: int = 0
    correlation: int = 0

    def of(self, name: str, step: int | None = None) -> list[Row]:
        """Return the kernels of one name, and of one step where that is given."""
        return [row for row in self.kernels if row["_name"] == name and step in (None, row["_step"])]

    def drop(self, rows: list[Row]) -> None:
        """Remove kernels."""
        gone = {id(row) for row in rows}
        self.kernels = [row for row in self.kernels if id(row) not in gone]

    def tick(self, ns: int = 1_000) -> int:
        """Advance the rank's clock and return it."""
        self.clock_ns += ns
        return self.clock_ns


def sound_rank(rank: int) -> SelftestRank:
    """Return a rank that ran as it should: warm-up, capture, an eager step and a replay, sentinels around."""
    own = SelftestRank(rank, clock_ns=1_000_000_000 + 17 * rank)
    own.modules = [ModuleRecord(CUBIN, 4096, 900, (ALPHAMOE_W8A8_SYMBOL,), SOURCE)]
    _eager(own, *STEPS[0][:1], STEPS[0][2], "warmup")
    _capture(own)
    opened = own.clock_ns
    for kind in ("open", "graph_open"):
        _sentinel(own, kind)
    _eager(own, EAGER, STEPS[1][2], "witness")
    _replay(own)
    for kind in ("graph_close", "close"):
        _sentinel(own, kind)
    own.window = (opened, own.tick())
    return own


def write_run(path: Path, ranks: list[SelftestRank], **changes: Any) -> Path:
    """Write a bundle.

    Args:
        path: a new directory.
        ranks: what each rank leaves; one that is missing leaves nothing.
        changes: fields of run.json that differ from a sound one.
    """
    import msgspec

    moe = PRESETS["qwen3-next-80b"].moe
    run = RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=RUN_ID,
        created="2026-01-02T03:04:05Z",
        argv=("alphamoe-trace", "selftest"),
        world_size=RANKS,
        prompts=(PromptInfo(spec="text:selftest", request_id="selftest", sha256="ab" * 32, token_count=13),),
        model="qwen3-next-80b",
        geometry=GeometryInfo(moe.E, moe.H, moe.I, moe.top_k, moe.block_m, moe.quantization, LAYERS),
        moe_runner_backend="flashinfer_alphamoe",
        executions=("eager", "decode_graph_replay"),
        device_kind="cuda",
        seed=0,
        max_new_tokens=2,
        versions={"alphamoe-trace": "0.1.0", LAUNCH_RULE: launch_rule_sha256()},
        source=SourceRevision(commit=COMMIT, dirty=False, tree_sha256="7e" * 32),
    )
    writer = BundleWriter(path)
    writer.write_run(msgspec.structs.replace(run, **changes))
    writer.append_request(
        RequestRecord(
            request_id="selftest",
            purpose="witness",
            prompt="selftest",
            prompt_sha256="ab" * 32,
            status="finished",
            prompt_tokens=13,
            completion_tokens=2,
        )
    )
    for own in ranks:
        _write_rank(writer, own)
    ends = tuple(RankEnd(rank=rank, exit_code=0) for rank in range(RANKS))
    writer.write_outcome(RunOutcome(run_id=RUN_ID, complete=True, ranks=ends))
    return path


def _write_rank(writer: BundleWriter, own: SelftestRank) -> None:
    names = list(dict.fromkeys(row["_name"] for row in own.kernels))
    for row in own.kernels:
        row["symbol_id"] = names.index(row["_name"])
    symbols = [
        {
            "symbol_id": number,
            "mangled": name,
            "full": name,
            "base": name,
            "class": symbol_class(name, name),
            "module_sha256": next((m.sha256 for m in own.modules if name in m.kernels), None),
        }
        for number, name in enumerate(names)
    ]
    tables = {
        "symbols": symbols,
        "kernels": own.kernels,
        "launches": own.launches,
        "ranges": own.ranges,
        "graph_nodes": own.nodes,
        "transfers": [],
    }
    for table, rows in tables.items():
        schema = TABLES[table]
        plain = [{name: row[name] for name in schema.names} for row in rows]
        writer.write_table(table, own.rank, pa.Table.from_pylist(plain, schema=_plain(schema)).cast(schema))
    writer.write_modules(own.rank, own.modules)
    receipts = ReceiptWriter(writer.receipts_path(own.rank))
    for receipt in own.receipts:
        receipts.write(receipt)
    receipts.close()
    if not own.write_rank_file:
        return
    seen = {kind: len(own.of(f"{SENTINEL_PREFIX}{kind}")) for kind in own.sentinels}
    collector = CollectorSummary(
        state="on",
        reason=None,
        cupti_library=None,
        cupti_version=None,
        cupti_python_version=None,
        kernel_record=None,
        window_open_ns=own.window[0],
        window_close_ns=own.window[1],
        rows={table: len(rows) for table, rows in tables.items()},
        dropped=own.dropped,
        duplicates=0,
        invalid_times=0,
        untimed=0,
        unresolved_names=0,
        sentinels=tuple(SentinelCount(kind, count, seen[kind]) for kind, count in own.sentinels.items()),  # type: ignore[arg-type]
        skipped_api_ids=(),
        range_problems=(),
    )
    record = RankFile(
        run_id=own.run_id,
        rank=own.rank,
        world_size=RANKS,
        host="selftest",
        pid=100 + own.rank,
        device="cuda:0",
        gpu_name="NVIDIA H200",
        gpu_uuid=f"GPU-{own.rank}",
        sm_count=SM_COUNT,
        shared_gpu=False,
        collector=collector,
        receipts=len(own.receipts),
        sha256={},
        memory=(),
        wall_s={},
        ended="complete",
        error=None,
        clock="selftest",
        compute_capability="9.0",
    )
    writer.write_rank(record)


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            pa.field(own.name, own.type.value_type if pa.types.is_dictionary(own.type) else own.type, own.nullable)
            for own in schema
        ]
    )


def _open(own: SelftestRank, name: str, payload: int | None, depth: int) -> Row:
    row: Row = {"process": 100 + own.rank, "thread": 7, "start_ns": own.tick(), "end_ns": None, "domain": "alphamoe"}
    row |= {"name": name, "payload": payload, "depth": depth, "kind": "push_pop"}
    own.ranges.append(row)
    return row


def _launch(own: SelftestRank, api: str) -> int:
    own.correlation += 1
    start = own.tick()
    row = {"process": 100 + own.rank, "thread": 7, "start_ns": start, "end_ns": own.tick(100), "api": api}
    own.launches.append(row | {"correlation_id": own.correlation})
    return own.correlation


def _kernel(own: SelftestRank, name: str, step: int | None, M: int, correlation: int, node: int | None = None) -> None:
    grid, block, cluster, dynamic = (8, 1, 1), (128, 1, 1), (1, 1, 1), 0
    if name == ALPHAMOE_W8A8_SYMBOL:
        rule = launch_shape(PRESETS["qwen3-next-80b"].moe.local(RANKS), M, SM_COUNT)
        grid, block, cluster, dynamic = rule.grid, rule.block, rule.cluster, rule.dynamic_smem_bytes
    row: Row = {
        "process": 100 + own.rank,
        "start_ns": own.tick(),
        "end_ns": own.tick(500),
        "device": 0,
        "context": 1,
        "stream": 7,
        "correlation_id": correlation,
        "graph_id": None if node is None else 5,
        "graph_node_id": node,
        "static_smem_bytes": 0,
        "dynamic_smem_bytes": dynamic,
        "registers": 64,
        "_name": name,
        "_step": step,
    }
    for kind, values in (("grid", grid), ("block", block), ("cluster", cluster)):
        row |= {f"{kind}_{axis}": value for axis, value in zip("xyz", values, strict=True)}
    own.kernels.append(row)


def _sentinel(own: SelftestRank, kind: str) -> None:
    own.sentinels[kind] = own.sentinels.get(kind, 0) + 1
    in_graph = kind.startswith("graph")
    correlation = _launch(own, "cudaGraphLaunch" if in_graph else "cuLaunchKernel")
    _kernel(own, f"{SENTINEL_PREFIX}{kind}", None, 0, correlation, 9_000_000 + correlation if in_graph else None)


def _eager(own: SelftestRank, step: int, M: int, purpose: str) -> None:
    whole = _open(own, "step", step, 0)
    for layer in range(LAYERS):
        inside = _open(own, "layer", layer, 1)
        for name in (NORM, ALPHAMOE_W8A8_SYMBOL):
            _kernel(own, name, step, M, _launch(own, "cuLaunchKernelEx"))
        inside["end_ns"] = own.tick()
    whole["end_ns"] = own.tick()
    own.receipts.append(_receipt(own, step, "eager", M, purpose))


def _capture(own: SelftestRank) -> None:
    whole = _open(own, "step", 3, 0)
    for layer in range(LAYERS):
        inside = _open(own, "layer", layer, 1)
        for place in range(2):
            own.nodes.append(_node(own, _NODE + 2 * layer + place, None))
        inside["end_ns"] = own.tick()
    whole["end_ns"] = own.tick()
    own.nodes += [_node(own, row["graph_node_id"] + _CLONE, row["graph_node_id"]) for row in list(own.nodes)]


def _node(own: SelftestRank, node: int, original: int | None) -> Row:
    row = {"graph_node_id": node, "original_node_id": original, "process": 100 + own.rank, "thread": 7}
    return row | {"created_ns": own.tick()}


def _replay(own: SelftestRank) -> None:
    step, execution, M, purpose = STEPS[2]
    whole = _open(own, "step", step, 0)
    correlation = _launch(own, "cudaGraphLaunch")
    for layer in range(LAYERS):
        for place, name in enumerate((NORM, ALPHAMOE_W8A8_SYMBOL)):
            _kernel(own, name, step, M, correlation, _NODE + 2 * layer + place + _CLONE)
    whole["end_ns"] = own.tick()
    own.receipts.append(_receipt(own, step, execution, M, purpose))


def _receipt(own: SelftestRank, step: int, execution: str, M: int, purpose: str) -> Receipt:
    local = PRESETS["qwen3-next-80b"].moe.local(RANKS)
    eager = execution == "eager"
    kernels = tuple(
        _Submission(
            layer=layer,
            kernel=ALPHAMOE_W8A8_KERNEL,
            symbol=ALPHAMOE_W8A8_SYMBOL,
            M=M,
            E=local.E,
            H=local.H,
            I_local=local.I_local,
            top_k=local.top_k,
            block_m=local.block_m,
            captured=not eager,
            device=0,
        )
        for layer in range(LAYERS)
    )
    return Receipt(
        run_id=own.run_id,
        rank=own.rank,
        purpose=purpose,  # type: ignore[arg-type]
        request_ids=("selftest",),
        step=step,
        forward_mode="EXTEND" if eager else "DECODE",
        execution=execution,  # type: ignore[arg-type]
        M=M,
        real_tokens=13 if eager else 1,
        batch_size=1,
        attribution="direct_submissions" if eager else "capture_registration",
        graph_key=None if eager else f"decode|M={M}",
        kernels=kernels,
    )
