"""The small records of a run bundle: run.json, requests.jsonl, ranks/N.json and outcome.json as msgspec structs.

The bundle's format, file by file, is described in docs/run-bundle.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from alphamoe_profiler.import_records import ImportInfo
from alphamoe_tracers.records import CollectorSummary, Execution, Purpose
from alphamoe_tracers.trace_files import TraceSummary


class PromptInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which prompt was asked for, and the hashes that tie it to its source."""

    spec: str
    """As it was asked for: ``gsm8k:17``, ``text:...``, ``file:PATH``."""
    request_id: str
    sha256: str
    """Hash of the UTF-8 text that was tokenised."""
    token_count: int
    dataset: str | None = None
    """Name of the data set, null for a text or a file."""
    row: int | None = None
    """0-based row of the data set."""
    dataset_sha256: str | None = None
    dataset_source: str | None = None
    """Where the rows came from: a package with its version, a file's name, a hub revision."""


class GeometryInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shapes of one MoE layer of the whole model, before tensor parallelism, and how many layers were built."""

    E: int
    H: int
    I: int  # noqa: E741 -- the field's own name for the intermediate size
    top_k: int
    block_m: int
    quantization: str
    layers: int


class GpuInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU of the machine as its driver names it."""

    index: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None


class SourceRevision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The code that ran."""

    commit: str | None = None
    dirty: bool | None = None
    tree_sha256: str | None = None
    """Hash over the files of the packages under test."""


class RunInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """run.json: what was asked, by whom of which code, on what machine. The world size comes from here only."""

    schema_version: int
    run_id: str
    created: str
    """UTC, ISO 8601."""
    argv: tuple[str, ...]
    """Secrets redacted."""
    world_size: int
    prompts: tuple[PromptInfo, ...]
    model: str | None
    """Null, as every field below that only a recording knows, in an imported run."""
    geometry: GeometryInfo | None
    moe_runner_backend: str | None
    executions: tuple[Execution, ...]
    """What the run was asked to exercise. Nothing else is judged."""
    device_kind: Literal["cpu", "cuda"]
    seed: int | None
    max_new_tokens: int | None
    environment: dict[str, str] = {}
    """The environment registry, sorted, secrets redacted."""
    versions: dict[str, str] = {}
    gpus: tuple[GpuInfo, ...] = ()
    driver: str | None = None
    source: SourceRevision = SourceRevision()
    inject_fault: str | None = None
    """The negative control that was planted, for example ``fallback:rank=2``."""
    server: dict[str, str] | None = None
    """Resolved arguments of a server that was driven, null for our own engine."""
    kind: Literal["recorded", "imported"] = "recorded"
    imported: ImportInfo | None = None
    """Of an imported run: its files, and what the user stated of them."""


class RequestRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One served request, bodies included: what cannot be read again cannot be audited."""

    request_id: str
    purpose: Purpose
    prompt: str
    prompt_sha256: str
    status: Literal["finished", "failed", "cut"]
    prompt_tokens: int
    executions: tuple[Execution, ...] = ()
    """The executions that this request was served with."""
    response: str | None = None
    response_sha256: str | None = None
    completion_tokens: int | None = None
    completion_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    retries: int = 0
    error: str | None = None
    timings_s: dict[str, float] = {}


class MemorySnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory at one moment, not a peak."""

    label: str
    """``after_start_up``, ``after_graph_capture``, ``after_run``."""
    device_used_bytes: int | None = None
    """Of the whole device: other processes are in it."""
    device_total_bytes: int | None = None
    process_bytes: int | None = None
    """Of this rank's process on the device, null where the driver does not say."""
    host_rss_bytes: int | None = None
    torch_allocated_bytes: int | None = None
    """Of this rank in torch's allocator; kernels loaded outside torch are not in it."""
    torch_reserved_bytes: int | None = None
    source: str | None = None
    """Who measured the device: ``nvml``; ``procfs`` where only the host was measured."""


class RankFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ranks/N.json: written last, by rename. A rank without one was cut short."""

    run_id: str
    rank: int
    world_size: int
    host: str | None
    pid: int | None
    device: str | None
    """The torch device of the rank, ``cpu`` or ``cuda:0``. Never the rank's number."""
    gpu_name: str | None
    gpu_uuid: str | None
    sm_count: int | None
    """Streaming multiprocessors of the device: the launch rule needs it."""
    shared_gpu: bool
    """Another rank uses the same GPU: no time of this rank is comparable with anything."""
    collector: CollectorSummary | None
    """Null for an imported rank: its traces speak in ``imported``."""
    receipts: int
    """Receipts that were written."""
    sha256: dict[str, str]
    """Hash of each file of this rank, by path relative to the bundle."""
    memory: tuple[MemorySnapshot, ...]
    wall_s: dict[str, float]
    """Wall times by phase, kept apart: start_up, warm_up, capture, prefill, decode, collection."""
    ended: Literal["complete", "exception", "interrupted", "unreadable"]
    error: str | None
    clock: str
    """The clock of every timestamp of this rank."""
    compute_capability: str | None = None
    """``9.0`` on Hopper."""
    imported: tuple[TraceSummary, ...] = ()
    """What each imported file says of this rank; a file's tables are part k of the rank's."""
    rows: dict[str, int] = {}
    """Rows written by table, of an imported rank; a recorded one has them in ``collector``."""
    communication: str | None = None
    """What made the all-reduces: ``nccl``, or ``gloo`` on the host; null for one rank alone or where nothing says."""
    schema_version: int = 1


class RankEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the launcher saw one rank's process end."""

    rank: int
    exit_code: int | None
    signal: str | None = None
    """``SIGKILL``, ``SIGSEGV``, ... where a signal ended it."""
    phase: str | None = None
    """The last phase that the rank announced."""


class RunOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """outcome.json: written by the launcher when every rank has ended."""

    run_id: str
    complete: bool
    ranks: tuple[RankEnd, ...]
    error: str | None = None
    wall_s: dict[str, float] = {}
    """Wall times of the launcher: start_up, run, total."""
