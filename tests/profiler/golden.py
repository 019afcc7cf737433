"""Hand-made golden run bundles: small, complete, and damaged in exactly one way at a time.

They freeze the format before anything is built on it: every pass and report is tested on these, and a real recording
must pass the same ``check()``. ``build`` makes a sound run of four ranks and three executions; a test hands it a
``damage`` that changes one rank's content before it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from golden_rank import (
    ALL_REDUCE,
    CUBIN,
    FULL_NAMES,
    LAYERS,
    NORM,
    RUN_ID,
    SM_COUNT,
    SOURCE,
    STEPS,
    STOCK_CUBIN,
    RankContent,
    Row,
    Step,
    rank_content,
    receipt,
    submissions,
    table,
)

from alphamoe_backend.geometry import PRESETS
from alphamoe_profiler.bundle import (
    BundleWriter,
    GeometryInfo,
    GpuInfo,
    MemorySnapshot,
    PromptInfo,
    RankEnd,
    RankFile,
    RequestRecord,
    RunInfo,
    RunOutcome,
)
from alphamoe_tracers.receipts import ReceiptWriter
from alphamoe_tracers.records import EXECUTIONS, CollectorSummary, ModuleRecord, SentinelCount
from alphamoe_tracers.symbols import symbol_class

__all__ = [
    "ALL_REDUCE", "CUBIN", "NORM", "SM_COUNT", "SOURCE", "STEPS", "STOCK_CUBIN", "Damage", "ModuleRecord",
    "RankContent", "Row", "Step", "build", "rank_content", "receipt", "submissions", "table",
]  # fmt: skip

Damage = Callable[[RankContent], None]


def build(
    path: Path,
    damage: Damage | None = None,
    *,
    world_size: int = 4,
    steps: tuple[Step, ...] = STEPS,
    executions: tuple[str, ...] = EXECUTIONS,
    backend: str = "flashinfer_alphamoe",
    run: dict[str, Any] | None = None,
    ends: dict[int, RankEnd] | None = None,
) -> Path:
    """Write one golden bundle and return its path.

    Args:
        path: a new directory.
        damage: changes the content of each rank before it is written.
        world_size: ranks; preset ``qwen3-next-80b`` is cut over them.
        steps: forwards of every rank.
        executions: what run.json asks for.
        backend: the MoE runner backend that was asked for and that runs.
        run: fields of run.json that differ from a sound one.
        ends: how the launcher saw ranks end, where it was not exit code 0.
    """
    with mock.patch("os.fsync"):  # a test's disk need not survive a power cut
        return _build(path, damage, world_size, steps, executions, backend, run or {}, ends or {})


def _build(
    path: Path,
    damage: Damage | None,
    world_size: int,
    steps: tuple[Step, ...],
    executions: tuple[str, ...],
    backend: str,
    run: dict[str, Any],
    ends: dict[int, RankEnd],
) -> Path:
    writer = BundleWriter(path)
    writer.write_run(msgspec.structs.replace(_run(world_size, executions, backend), **run))
    for record in _requests():
        writer.append_request(record)
    for rank in range(world_size):
        content = rank_content(rank, world_size, steps, backend)
        if damage is not None:
            damage(content)
        _write(writer, content)
    ordinary = {rank: RankEnd(rank=rank, exit_code=0) for rank in range(world_size)}
    ranks = tuple((ordinary | ends).values())
    complete = all(end.exit_code == 0 for end in ranks)
    writer.write_outcome(RunOutcome(run_id=RUN_ID, complete=complete, ranks=ranks, wall_s={"total": 12.5}))
    return path


def _write(writer: BundleWriter, content: RankContent) -> None:
    rank = content.rank
    # A damage may rename kernels: a symbol that only a damage uses gets its row here.
    for row in content.kernels:
        row["symbol_id"] = content.symbols.setdefault(row["_base"], len(content.symbols))
    symbols = [
        {
            "symbol_id": number,
            "mangled": base,
            "full": FULL_NAMES.get(base, base),
            "base": base,
            "class": symbol_class(base, FULL_NAMES.get(base, base)),
            "module_sha256": content.symbol_modules.get(base),
        }
        for base, number in content.symbols.items()
    ]
    rows = {
        "symbols": symbols,
        "kernels": content.kernels,
        "launches": content.launches,
        "ranges": content.ranges,
        "graph_nodes": content.graph_nodes,
        "transfers": [],
    }
    for name, entries in rows.items():
        writer.write_table(name, rank, table(name, entries))
    writer.write_modules(rank, content.modules)
    receipts = ReceiptWriter(writer.receipts_path(rank))
    for entry in content.receipts:
        receipts.write(entry)
    receipts.close()
    if content.rank_file is None:
        return
    seen = {kind: len(content.of(f"alphamoe_trace_sentinel_{kind}")) for kind in content.sentinels}
    summary = CollectorSummary(
        state="on",
        reason=None,
        cupti_library="libcupti.so.13",
        cupti_version=130001,
        cupti_python_version="13.0.1",
        kernel_record="ActivityKernel10",
        window_open_ns=content.window[0],
        window_close_ns=content.window[1],
        rows={name: len(entries) for name, entries in rows.items()},
        dropped=0,
        duplicates=0,
        invalid_times=0,
        untimed=0,
        unresolved_names=0,
        sentinels=tuple(SentinelCount(kind, count, seen[kind]) for kind, count in content.sentinels.items()),  # type: ignore[arg-type]
        skipped_api_ids=(),
        range_problems=(),
    )
    record = RankFile(
        run_id=RUN_ID,
        rank=rank,
        world_size=content.world_size,
        host="golden",
        pid=100 + rank,
        device="cuda:0",
        gpu_name="NVIDIA H200",
        gpu_uuid=f"GPU-{rank}",
        sm_count=SM_COUNT,
        shared_gpu=False,
        collector=msgspec.structs.replace(summary, **content.collector),
        receipts=len(content.receipts),
        sha256={},
        memory=(MemorySnapshot(label="after_run", device_used_bytes=2 << 30, device_total_bytes=141 << 30),),
        wall_s={"start_up": 4.0, "capture": 1.0, "prefill": 0.5, "decode": 0.25, "collection": 0.125},
        ended="complete",
        error=None,
        clock="cuptiGetTimestamp",
        compute_capability="9.0",
    )
    writer.write_rank(msgspec.structs.replace(record, **content.rank_file))


def _run(world_size: int, executions: tuple[str, ...], backend: str) -> RunInfo:
    moe = PRESETS["qwen3-next-80b"].moe
    return RunInfo(
        schema_version=1,
        run_id=RUN_ID,
        created="2026-01-02T03:04:05Z",
        argv=("alphamoe-trace", "--ranks", str(world_size), "--prompt", "gsm8k:17"),
        world_size=world_size,
        prompts=(
            PromptInfo(
                spec="gsm8k:17",
                request_id="gsm8k-17",
                sha256="ab" * 32,
                token_count=13,
                dataset="gsm8k",
                row=17,
                dataset_sha256="37" * 32,
            ),
        ),
        model="qwen3-next-80b",
        geometry=GeometryInfo(
            E=moe.E,
            H=moe.H,
            I=moe.I,
            top_k=moe.top_k,
            block_m=moe.block_m,
            quantization=moe.quantization,
            layers=LAYERS,
        ),
        moe_runner_backend=backend,
        executions=executions,  # type: ignore[arg-type]
        device_kind="cuda",
        seed=0,
        max_new_tokens=3,
        gpus=(GpuInfo(index=0, name="NVIDIA H200", uuid="GPU-0"),),
        driver="580.65",
    )


def _requests() -> list[RequestRecord]:
    return [
        RequestRecord(
            request_id="gsm8k-17",
            purpose="witness",
            prompt="Question: how many?\nAnswer:",
            prompt_sha256="ab" * 32,
            status="finished",
            prompt_tokens=13,
            executions=("eager",),
            response="57500",
            response_sha256="cd" * 32,
            completion_tokens=3,
            finish_reason="length",
        )
    ]
