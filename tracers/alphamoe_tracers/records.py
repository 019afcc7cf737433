"""Schemas of everything that is recorded: bulk tables as Arrow schemas, small records as msgspec structs.

Every timestamp of one rank comes from one clock (``cuptiGetTimestamp``: nanoseconds of the host clock that CUPTI
normalises device times to). Unknown is null, never a guess.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import pyarrow as pa

SCHEMA_VERSION = 1
RECEIPT_SCHEMA = "alphamoe-trace-receipt-v1"

Purpose = Literal["warmup", "capture", "witness", "accuracy", "performance", "other"]
ForwardMode = Literal["EXTEND", "DECODE", "MIXED"]
Execution = Literal["eager", "prefill_graph_replay", "decode_graph_replay"]
ReceiptAttribution = Literal["direct_submissions", "capture_registration"]
EXECUTIONS: tuple[Execution, ...] = ("eager", "prefill_graph_replay", "decode_graph_replay")


def _schema(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields])


# A kernel that ran on the device. correlation_id, graph_id and graph_node_id are null where CUPTI gave 0.
# start_ns and end_ns are 0 for a kernel that ran untimed.
KERNELS = _schema(
    ("process", pa.int64(), False),
    ("start_ns", pa.int64(), False),
    ("end_ns", pa.int64(), False),
    ("device", pa.int32(), False),
    ("context", pa.int32(), False),
    ("stream", pa.int32(), False),
    ("correlation_id", pa.int64(), True),
    ("graph_id", pa.int64(), True),
    ("graph_node_id", pa.int64(), True),
    ("symbol_id", pa.int32(), False),
    ("grid_x", pa.int32(), False),
    ("grid_y", pa.int32(), False),
    ("grid_z", pa.int32(), False),
    ("block_x", pa.int32(), False),
    ("block_y", pa.int32(), False),
    ("block_z", pa.int32(), False),
    ("cluster_x", pa.int32(), False),
    ("cluster_y", pa.int32(), False),
    ("cluster_z", pa.int32(), False),
    ("static_smem_bytes", pa.int32(), False),
    ("dynamic_smem_bytes", pa.int32(), False),
    ("registers", pa.int32(), False),
)

# A memcpy or memset. kind is "memcpy HtoD", "memcpy DtoD", "memset", ...
TRANSFERS = _schema(
    ("process", pa.int64(), False),
    ("kind", pa.dictionary(pa.int8(), pa.string()), False),
    ("bytes", pa.int64(), False),
    ("start_ns", pa.int64(), False),
    ("end_ns", pa.int64(), False),
    ("device", pa.int32(), False),
    ("stream", pa.int32(), False),
    ("correlation_id", pa.int64(), True),
    ("graph_node_id", pa.int64(), True),
)

# One submission through a host launch API. A runtime call and the driver call under it are one row.
LAUNCHES = _schema(
    ("process", pa.int64(), False),
    ("thread", pa.int64(), False),
    ("start_ns", pa.int64(), False),
    ("end_ns", pa.int64(), False),
    ("correlation_id", pa.int64(), True),
    ("api", pa.dictionary(pa.int16(), pa.string()), False),
)

# An NVTX range. depth counts from 0 on its thread; end_ns is null for a range that was still open at the end.
RANGES = _schema(
    ("process", pa.int64(), False),
    ("thread", pa.int64(), False),
    ("start_ns", pa.int64(), False),
    ("end_ns", pa.int64(), True),
    ("domain", pa.dictionary(pa.int16(), pa.string()), False),
    ("name", pa.dictionary(pa.int32(), pa.string()), False),
    ("payload", pa.int64(), True),
    ("depth", pa.int16(), False),
    ("kind", pa.dictionary(pa.int8(), pa.string()), False),  # push_pop | start_end
)

# A node of a CUDA graph: the thread and the time of its creation give its capture-time ranges.
# original_node_id is null for a captured node and names the node that a clone was made from.
GRAPH_NODES = _schema(
    ("graph_node_id", pa.int64(), False),
    ("original_node_id", pa.int64(), True),
    ("process", pa.int64(), False),
    ("thread", pa.int64(), False),
    ("created_ns", pa.int64(), False),
)

# A kernel's name in its three forms. module_sha256 is null when no loaded module, or more than one, holds the symbol.
SYMBOLS = _schema(
    ("symbol_id", pa.int32(), False),
    ("mangled", pa.string(), False),
    ("full", pa.string(), False),
    ("base", pa.string(), False),
    ("class", pa.string(), True),
    ("module_sha256", pa.string(), True),
)

TABLES: dict[str, pa.Schema] = {
    "kernels": KERNELS,
    "transfers": TRANSFERS,
    "launches": LAUNCHES,
    "ranges": RANGES,
    "graph_nodes": GRAPH_NODES,
    "symbols": SYMBOLS,
}


def check_table(name: str, table: pa.Table) -> list[str]:
    """Say what is wrong with one bulk table, or nothing.

    Args:
        name: a key of :data:`TABLES`.
        table: the rows of one rank.

    Returns:
        One sentence for each violation of the schema: a missing or unexpected column, another type, a null where
        the schema has none, a range or launch that ends before it starts. (A kernel that ends before it starts is
        evidence of a damaged record and is reported by the passes, not refused here.)
    """
    schema = TABLES[name]
    problems = [f"{name}: column {field.name} is missing" for field in schema if field.name not in table.column_names]
    problems += [f"{name}: unexpected column {column}" for column in table.column_names if column not in schema.names]
    for field in schema:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        wanted = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if kind != wanted:
            problems.append(f"{name}: column {field.name} has type {column.type}, not {field.type}")
        elif not field.nullable and column.null_count:
            problems.append(f"{name}: column {field.name} has {column.null_count} nulls")
    if name in ("launches", "ranges") and not problems and table.num_rows:
        frame = table.select(["start_ns", "end_ns"]).to_pandas()
        backwards = int((frame["end_ns"] < frame["start_ns"]).sum())
        if backwards:
            problems.append(f"{name}: {backwards} rows end before they start")
    return problems


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel submission that the backend made for a layer."""

    layer: int
    kernel: str
    """The operator that was dispatched, for example ``alphamoe_fp8_block_scale_aligned_moe``."""
    symbol: str
    """The base name of the kernel that this operator launches."""
    M: int
    """Kernel M: tokens, graph padding included, before top-k expansion."""
    E: int
    H: int
    I_local: int
    top_k: int
    block_m: int
    captured: bool
    """Submitted while a stream was capturing: never an execution by itself."""
    device: int


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dispatch evidence for one rank and one forward (step). See docs/run-bundle.md."""

    run_id: str
    rank: int
    purpose: Purpose
    request_ids: tuple[str, ...]
    step: int
    forward_mode: ForwardMode
    execution: Execution
    M: int | None
    """Dispatch M: tokens that the layers were called with, graph padding included."""
    real_tokens: int | None
    batch_size: int | None
    attribution: ReceiptAttribution
    graph_key: str | None
    kernels: tuple[Submission, ...]
    """In order. Eager: made in this forward. Graph replay: registered when that graph was captured."""
    schema: str = RECEIPT_SCHEMA

    def problems(self) -> list[str]:
        """Say which of the record's own numbers contradict each other."""
        found = []
        if self.real_tokens is not None and self.M is not None and self.real_tokens > self.M:
            found.append(f"step {self.step}: {self.real_tokens} real tokens exceed M {self.M}")
        if (self.attribution == "capture_registration") != (self.execution != "eager"):
            found.append(f"step {self.step}: execution {self.execution} with attribution {self.attribution}")
        return found


class ModuleRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A code module (cubin) that was loaded while the collector listened."""

    sha256: str
    size_bytes: int
    loaded_ns: int
    kernels: tuple[str, ...]
    """Mangled names of the kernels it holds; once a recording is finished, of those that ran."""
    source_sha256: str | None = None
    """Hash of the CUDA source it was compiled from, where the source is ours or known."""
    held: int | None = None
    """How many kernels it holds, run or not. A library's module can hold thousands."""


SentinelKind = Literal["open", "close", "step", "graph_open", "graph_close", "graph_step"]


class SentinelCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentinels of one kind: how many were launched, and how many of them the records show."""

    kind: SentinelKind
    launched: int
    seen: int


class CollectorSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the CUPTI collector of one rank says of itself."""

    state: Literal["on", "off"]
    reason: str | None
    """Why it is off, or what was missing while it was on. One line with the way out."""
    cupti_library: str | None
    cupti_version: int | None
    cupti_python_version: str | None
    kernel_record: str | None
    """The activity struct that kernels were decoded as, for example ``ActivityKernel10``."""
    window_open_ns: int | None
    window_close_ns: int | None
    rows: dict[str, int]
    """Rows written by table name."""
    dropped: int
    """Records that CUPTI says it dropped. Above zero every count is a lower bound."""
    duplicates: int
    """Records delivered twice and kept once."""
    invalid_times: int
    """Kernels whose end lies before their start."""
    untimed: int
    """Kernels with start and end 0: they ran, untimed."""
    unresolved_names: int
    sentinels: tuple[SentinelCount, ...]
    skipped_api_ids: tuple[str, ...]
    """Launch callback ids that this libcupti refused."""
    range_problems: tuple[str, ...]
    """Pops without a push and pushes without a pop, by thread."""
    notes: tuple[str, ...] = ()
