"""What one rank of a golden run leaves behind, in plain rows that a test may change before they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_KERNEL, ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL
from alphamoe_backend.geometry import PRESETS
from alphamoe_backend.kernels.launch import launch_shape
from alphamoe_tracers.records import TABLES, ModuleRecord, Receipt, Submission

RUN_ID = "golden-0001"
CUBIN = "c0" * 32
SOURCE = "50" * 32
STOCK_CUBIN = "7e" * 32
SM_COUNT = 132
MAIN_THREAD = 700
LAYERS = 2
NORM, ALL_REDUCE = "rms_norm_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
FULL_NAMES = {
    NORM: "void ns::rms_norm_kernel<__nv_bfloat16>(__nv_bfloat16*, float)",
    ALL_REDUCE: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One forward of the golden run."""

    step: int
    execution: str
    forward_mode: str
    M: int
    real_tokens: int
    purpose: str = "witness"


STEPS = (
    Step(1, "eager", "EXTEND", 13, 13, "warmup"),
    Step(4, "eager", "EXTEND", 13, 13),
    Step(5, "eager", "DECODE", 1, 1),
    Step(6, "eager", "DECODE", 1, 1),
    Step(7, "prefill_graph_replay", "EXTEND", 16, 13),
    Step(8, "decode_graph_replay", "DECODE", 2, 1),
    Step(9, "decode_graph_replay", "DECODE", 2, 1),
)
"""Steps 2 and 3 are the captures: they have ranges and make graph nodes, but no receipts."""


@dataclass
class RankContent:
    """Everything that one rank leaves behind, in plain rows that a test may change before they are written."""

    rank: int
    world_size: int
    symbols: dict[str, int] = field(default_factory=dict)
    symbol_modules: dict[str, str | None] = field(default_factory=dict)
    kernels: list[Row] = field(default_factory=list)
    launches: list[Row] = field(default_factory=list)
    ranges: list[Row] = field(default_factory=list)
    graph_nodes: list[Row] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    sentinels: dict[str, int] = field(default_factory=dict)
    """Launched, by kind."""
    window: tuple[int | None, int | None] = (None, None)
    collector: dict[str, Any] = field(default_factory=dict)
    """Fields of the collector's summary that differ from a sound one."""
    rank_file: dict[str, Any] | None = field(default_factory=dict)
    """Fields of ranks/N.json that differ from a sound one; None leaves the file out."""
    now_ns: int = 0
    correlation: int = 0

    def of(self, symbol: str, step: int | None = None) -> list[Row]:
        """Return the kernel rows of one symbol, and of one step where that is given."""
        return [k for k in self.kernels if k["_base"] == symbol and step in (None, k["_step"])]

    def drop(self, rows: list[Row]) -> None:
        """Remove kernel rows."""
        gone = {id(row) for row in rows}
        self.kernels = [row for row in self.kernels if id(row) not in gone]


def rank_content(rank: int, world_size: int, steps: tuple[Step, ...], backend: str) -> RankContent:
    """Return what one sound rank leaves behind."""
    symbol = STOCK_SYMBOL if backend == "triton" else ALPHAMOE_W8A8_SYMBOL
    content = RankContent(rank, world_size, now_ns=1_000_000_000 + 17 * rank)
    content.symbol_modules = {ALPHAMOE_W8A8_SYMBOL: CUBIN, STOCK_SYMBOL: STOCK_CUBIN}
    content.modules = [
        ModuleRecord(CUBIN, 4096, 900, (ALPHAMOE_W8A8_SYMBOL,), SOURCE),
        ModuleRecord(STOCK_CUBIN, 2048, 901, (STOCK_SYMBOL,), None),
    ]
    for step in steps:
        if step.purpose == "warmup":
            _eager_step(content, step, symbol)
    nodes = {
        execution: _capture(content, number, step.M, symbol)
        for number, execution in ((2, "prefill_graph_replay"), (3, "decode_graph_replay"))
        for step in [next((s for s in steps if s.execution == execution), None)]
        if step is not None
    }
    opened = content.now_ns
    for kind in ("open", "graph_open"):
        _sentinel(content, kind)
    for step in steps:
        if step.purpose == "warmup":
            continue
        if step.execution == "eager":
            _eager_step(content, step, symbol)
        else:
            _replay_step(content, step, symbol, nodes[step.execution])
        _sentinel(content, "step")
    for kind in ("graph_close", "close"):
        _sentinel(content, kind)
    content.window = (opened, content.now_ns)
    return content


def submissions(content: RankContent, step: Step, symbol: str) -> tuple[Submission, ...]:
    """Return the submissions of one forward: one a layer, two for the stock path's two GEMMs."""
    local = PRESETS["qwen3-next-80b"].moe.local(content.world_size)
    count = 2 if symbol == STOCK_SYMBOL else 1
    kernel = "fused_experts" if symbol == STOCK_SYMBOL else ALPHAMOE_W8A8_KERNEL
    return tuple(
        Submission(
            layer=layer,
            kernel=kernel,
            symbol=symbol,
            M=step.M,
            E=local.E,
            H=local.H,
            I_local=local.I_local,
            top_k=local.top_k,
            block_m=local.block_m,
            captured=step.execution != "eager",
            device=0,
        )
        for layer in range(LAYERS)
        for _ in range(count)
    )


def receipt(content: RankContent, step: Step, symbol: str) -> Receipt:
    """Return the receipt of one forward."""
    eager = step.execution == "eager"
    return Receipt(
        run_id=RUN_ID,
        rank=content.rank,
        purpose=step.purpose,  # type: ignore[arg-type]
        request_ids=("gsm8k-17",),
        step=step.step,
        forward_mode=step.forward_mode,  # type: ignore[arg-type]
        execution=step.execution,  # type: ignore[arg-type]
        M=step.M,
        real_tokens=step.real_tokens,
        batch_size=1,
        attribution="direct_submissions" if eager else "capture_registration",
        graph_key=None if eager else f"{step.execution}|M={step.M}",
        kernels=submissions(content, step, symbol),
    )


def _eager_step(content: RankContent, step: Step, symbol: str) -> None:
    with_range = _open(content, "step", step.step, 0)
    for layer in range(LAYERS):
        in_layer = _open(content, "layer", layer, 1)
        for base in _layer_kernels(symbol):
            inside = _open(content, "experts" if base == symbol else "quant", None, 2)
            correlation = _launch(content, "cuLaunchKernelEx")
            _kernel(content, base, step, correlation)
            _close(content, inside)
        _close(content, in_layer)
    _close(content, with_range)
    content.receipts.append(receipt(content, step, symbol))


def _layer_kernels(symbol: str) -> tuple[str, ...]:
    return (NORM, *((symbol, symbol) if symbol == STOCK_SYMBOL else (symbol,)), ALL_REDUCE)


def _capture(content: RankContent, step: int, M: int, symbol: str) -> list[tuple[str, int]]:
    """Make the nodes of one graph: captured under ranges, then cloned by instantiation. Returns (symbol, clone id)."""
    nodes = []
    with_range = _open(content, "step", step, 0)
    for layer in range(LAYERS):
        in_layer = _open(content, "layer", layer, 1)
        for base in _layer_kernels(symbol):
            original = len(content.graph_nodes) + (step << 32) + 1
            content.graph_nodes.append(_node(content, original, None))
            nodes.append((base, original))
        _close(content, in_layer)
    _close(content, with_range)
    clones = []
    for base, original in nodes:
        clone = original + (1 << 48)
        content.graph_nodes.append(_node(content, clone, original))
        clones.append((base, clone))
    return clones


def _replay_step(content: RankContent, step: Step, symbol: str, nodes: list[tuple[str, int]]) -> None:
    with_range = _open(content, "step", step.step, 0)
    # A prefill graph is cut at the collectives (one launch a layer), a decode graph is one launch.
    per_launch = len(nodes) // LAYERS if step.execution == "prefill_graph_replay" else len(nodes)
    for first in range(0, len(nodes), per_launch):
        correlation = _launch(content, "cudaGraphLaunch")
        for base, node in nodes[first : first + per_launch]:
            _kernel(content, base, step, correlation, node)
    _close(content, with_range)
    content.receipts.append(receipt(content, step, symbol))


def _tick(content: RankContent, ns: int = 1000) -> int:
    content.now_ns += ns
    return content.now_ns


def _open(content: RankContent, name: str, payload: int | None, depth: int) -> Row:
    row: Row = {
        "process": 100 + content.rank,
        "thread": MAIN_THREAD,
        "start_ns": _tick(content),
        "end_ns": None,
        "domain": "alphamoe",
        "name": name,
        "payload": payload,
        "depth": depth,
        "kind": "push_pop",
    }
    content.ranges.append(row)
    return row


def _close(content: RankContent, row: Row) -> None:
    row["end_ns"] = _tick(content)


def _launch(content: RankContent, api: str) -> int:
    content.correlation += 1
    start = _tick(content)
    content.launches.append(
        {
            "process": 100 + content.rank,
            "thread": MAIN_THREAD,
            "start_ns": start,
            "end_ns": _tick(content, 100),
            "correlation_id": content.correlation,
            "api": api,
        }
    )
    return content.correlation


def _node(content: RankContent, node: int, original: int | None) -> Row:
    return {
        "graph_node_id": node,
        "original_node_id": original,
        "process": 100 + content.rank,
        "thread": MAIN_THREAD,
        "created_ns": _tick(content),
    }


def _sentinel(content: RankContent, kind: str) -> None:
    content.sentinels[kind] = content.sentinels.get(kind, 0) + 1
    correlation = _launch(content, "cudaGraphLaunch" if kind.startswith("graph") else "cuLaunchKernel")
    node = 9_000_000 + content.correlation if kind.startswith("graph") else None
    _kernel(content, f"alphamoe_trace_sentinel_{kind}", None, correlation, node)


def _kernel(content: RankContent, base: str, step: Step | None, correlation: int, node: int | None = None) -> None:
    grid, block, cluster, dynamic = (8, 1, 1), (128, 1, 1), (1, 1, 1), 0
    if base == ALPHAMOE_W8A8_SYMBOL and step is not None:
        shape = launch_shape(PRESETS["qwen3-next-80b"].moe.local(content.world_size), step.M, SM_COUNT)
        grid, block, cluster, dynamic = shape.grid, shape.block, shape.cluster, shape.dynamic_smem_bytes
    start = _tick(content)
    row: Row = {
        "process": 100 + content.rank,
        "start_ns": start,
        "end_ns": _tick(content, 500),
        "device": 0,
        "context": 1,
        "stream": 7,
        "correlation_id": correlation,
        "graph_id": None if node is None else 5,
        "graph_node_id": node,
        "symbol_id": content.symbols.setdefault(base, len(content.symbols)),
        "static_smem_bytes": 0,
        "dynamic_smem_bytes": dynamic,
        "registers": 64,
        "_base": base,
        "_step": step.step if step else None,
    }
    for name, values in (("grid", grid), ("block", block), ("cluster", cluster)):
        row |= {f"{name}_{axis}": value for axis, value in zip("xyz", values, strict=True)}
    content.kernels.append(row)


def table(name: str, rows: list[Row]) -> pa.Table:
    """Return rows as an Arrow table with the schema of a bulk table; keys that begin with ``_`` are left out."""
    schema = TABLES[name]
    return pa.table(
        {entry.name: pa.array([row[entry.name] for row in rows], _plain(entry.type)) for entry in schema}
    ).cast(schema)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
