"""What a page says of a run beside its kernels: what was asked, the ranks, requests, memory, and what is missing."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from alphamoe_dashboards.cards import card_of, moe_work
from alphamoe_dashboards.columns import Columns, Strings
from alphamoe_dashboards.verdict_facts import report_facts
from alphamoe_profiler.bundle import RequestRecord, RunBundle, readable_rank_file
from alphamoe_profiler.rank_skew import compare_ranks, skew_document
from alphamoe_tracers.errors import EvidenceError

if TYPE_CHECKING:
    from alphamoe_dashboards.rank_digest import RankDigest

_NOT_AGAIN = ("--out", "--force", "--json", "--no-collector", "--no-nvtx", "--no-receipts", "--inject-fault")
PREVIEW = 600
"""Letters of a prompt or response that a page shows; the bundle holds them whole."""
_VERSIONS = (
    "torch",
    "torch-cuda",
    "cupti-python",
    "nvidia-cuda-cupti",
    "triton",
    "sglang",
    "vllm",
    "flashinfer",
    "python",
)


def read_facts(bundle: RunBundle, parts: list[RankDigest]) -> dict[str, Any]:
    """Return the facts of one run as plain data."""
    run = bundle.run
    gates, sanitizers, problems = report_facts(bundle.path / "reports", run.run_id)
    ranks = [_rank(bundle, part) for part in parts]
    names = [gpu.name for gpu in run.gpus] + [str(rank["gpu_name"]) for rank in ranks if rank["gpu_name"]]
    gpu = next((name for name in [*(str(r["gpu_name"]) for r in ranks if r["gpu_name"]), *names]), None)
    card = card_of(gpu)
    facts: dict[str, Any] = {
        "name": bundle.path.resolve().name,
        "run_id": run.run_id,
        "kind": run.kind,
        "asked": _asked(bundle, gpu),
        "world_size": bundle.world_size,
        "executions": list(run.executions),
        "shared_gpu": any(rank["shared_gpu"] for rank in ranks),
        "ranks": ranks,
        "rank_skew": skew_document(compare_ranks(bundle, [part.marks for part in parts if part.marks is not None])),
        "requests": _requests(bundle),
        "card": None if card is None else msgspec.to_builtins(card),
        "m_from": _m_from(bundle, parts),
        "problems": problems,
        "reports": gates,
        "sanitizer": sanitizers,
    }
    facts["missing"] = _missing(bundle, facts, parts)
    return facts


def _asked(bundle: RunBundle, gpu: str | None) -> list[list[str]]:
    run = bundle.run
    geometry = run.geometry
    shape = None
    if geometry is not None:
        shape = (
            f"E {geometry.E}, H {geometry.H}, I {geometry.I}, top-k {geometry.top_k}, block M {geometry.block_m}, "
            f"{geometry.quantization}, {geometry.layers} layers"
        )
    prompts = [f"{item.spec}, {item.token_count:,} tokens, sha256 {item.sha256[:12]}" for item in run.prompts[:20]] + (
        [f"and {len(run.prompts) - 20} more"] if len(run.prompts) > 20 else []
    )
    source = run.source
    revision = None
    if source.commit or source.tree_sha256:
        revision = f"commit {source.commit[:12]}" if source.commit else f"tree {(source.tree_sha256 or '')[:12]}"
        revision += " (with local changes)" if source.dirty else ""
    imported = run.kind == "imported"
    versions = ", ".join(f"{name} {run.versions[name]}" for name in _VERSIONS if name in run.versions)
    rows: list[tuple[str, str | None]] = [
        ("MoE backend", run.moe_runner_backend),
        ("Model", run.model),
        ("World size", f"{run.world_size} rank{'s' if run.world_size != 1 else ''}"),
        ("Prompt", "\n".join(prompts) or None),
        ("Executions", None if imported else ", ".join(run.executions) or None),
        ("New tokens", None if run.max_new_tokens is None else str(run.max_new_tokens)),
        ("Experts", shape),
        ("GPU", f"{gpu}, driver {run.driver}" if gpu and run.driver else gpu),
        ("Planted fault", run.inject_fault),
        # An import's own time, source and versions are those of the machine that read the trace.
        ("Imported" if imported else "Recorded", run.created),
        ("Source", None if imported else revision),
        ("Versions", None if imported else versions or None),
        ("Command", shlex.join(run.argv) if run.argv else None),
    ]
    if run.imported is not None:
        files = [item.path.rsplit("/", 1)[-1] for item in run.imported.files if item.used]
        more = f" and {len(files) - 4} more" if len(files) > 4 else ""
        rows.append(("Imported from", ", ".join(files[:4]) + more))
    unknown = "not known (imported)" if imported else "not known"
    needed = ("MoE backend", "Model", "World size", "Prompt", "Executions")
    return [[name, value or unknown] for name, value in rows if value or name in needed]


def _rank(bundle: RunBundle, part: RankDigest) -> dict[str, Any]:
    record = readable_rank_file(bundle, part.rank)
    collector = record.collector if record else None
    return {
        "rank": part.rank,
        "host": record.host if record else None,
        "gpu_name": record.gpu_name if record else None,
        "device": record.device if record else None,
        "communication": record.communication if record else None,
        "shared_gpu": bool(record and record.shared_gpu),
        "ended": record.ended if record else "cut short",
        "error": record.error if record else "no ranks file: the rank was cut short",
        "dropped": collector.dropped if collector else None,
        "collector": None if collector is None else {"state": collector.state, "reason": collector.reason},
        "receipts": len(bundle.receipts(part.rank).receipts),
        "memory": [msgspec.to_builtins(item) for item in record.memory] if record else [],
        "wall_s": dict(record.wall_s) if record else {},
        **part.facts,
    }


def _requests(bundle: RunBundle) -> list[dict[str, Any]]:
    try:
        records = bundle.requests()
    except EvidenceError:  # told by bundle_check.check()
        return []
    return [_request(item) for item in records[:2000]]


def _request(item: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": item.request_id,
        "purpose": item.purpose,
        "status": item.status,
        "executions": list(item.executions),
        "prompt": item.prompt[-PREVIEW:],
        "prompt_letters": len(item.prompt),
        "prompt_sha256": item.prompt_sha256,
        "prompt_tokens": item.prompt_tokens,
        "completion_tokens": item.completion_tokens,
        "finish_reason": item.finish_reason,
        "response": (item.response or "")[:PREVIEW],
        "error": item.error,
        "retries": item.retries,
        "timings_s": dict(item.timings_s),
    }


def _m_from(bundle: RunBundle, parts: list[RankDigest]) -> str:
    """Say where the M of the page's buckets comes from."""
    if any(bundle.receipts(part.rank).receipts for part in parts):
        return "kernel M by receipt"
    info = bundle.run.imported
    if info is not None and any(item.bucket is not None for item in info.files):
        return "bucket by file name"
    return "dispatch M by step annotation"


def work_table(bundle: RunBundle, strings: Strings) -> Columns:
    """Return operations and least bytes of one launch: base (added to ``strings``), M, flop, bytes, experts."""
    rows: dict[tuple[str, int], tuple[float, float, float]] = {}
    seen: set[int] = set()
    quantization = bundle.run.geometry.quantization if bundle.run.geometry else "fp8_w8a8"
    for rank in bundle.ranks if quantization == "fp8_w8a8" else ():
        for receipt in bundle.receipts(rank).receipts:
            if id(receipt.kernels) in seen:
                continue
            seen.add(id(receipt.kernels))
            for item in receipt.kernels:
                if (item.symbol, item.M) in rows or min(item.M, item.H, item.I_local, item.E, item.top_k) <= 0:
                    continue
                same = sum(own.symbol == item.symbol and own.layer == item.layer for own in receipt.kernels)
                work = moe_work(item.M, item.E, item.H, item.I_local, item.top_k)
                rows[item.symbol, item.M] = (work.flop / same, work.bytes / same, work.experts)
    return {
        "base": strings.column(symbol for symbol, _ in rows),
        "M": np.array([m for _, m in rows], np.int64),
        "flop": np.array([row[0] for row in rows.values()], np.float64),
        "bytes": np.array([row[1] for row in rows.values()], np.float64),
        "experts": np.array([row[2] for row in rows.values()], np.float64),
    }


def _missing(bundle: RunBundle, facts: dict[str, Any], parts: list[RankDigest]) -> list[list[str]]:
    """Say what this page cannot show and which command records it: [view, what is missing, command or ""]."""
    run = bundle.run
    here = shlex.quote(str(bundle.path))
    again = _again(run.argv) if run.argv and run.kind == "recorded" else "alphamoe-trace --ranks 4 --prompt gsm8k:17"
    rows = []
    if not any(rank["kernels"] for rank in facts["ranks"]):
        rows.append(["buckets", "No kernel was recorded on any rank.", "alphamoe-trace doctor"])
    silent = [rank["rank"] for rank in facts["ranks"] if not rank["kernels"]]
    if silent and len(silent) < bundle.world_size:
        command = again
        if run.kind == "imported":
            command = f"alphamoe-trace import TRACE_OF_EVERY_RANK... --ranks {bundle.world_size} --out RUN"
        rows.append(["ranks", f"No kernel of rank {', '.join(map(str, silent))}.", command])
    if not any(rank["receipts"] for rank in facts["ranks"]):
        why = "Imported traces hold no receipts" if run.kind == "imported" else "No receipts were written"
        rows.append(["matrix", f"{why}: witnesses cannot be compared with what was dispatched.", again])
    if not any((part.tables["steps"]["step"] >= 0).any() for part in parts):
        rows.append(["timeline", "No kernel is attributed to a step.", again])
    if not facts["requests"]:
        rows.append(["requests", "No request bodies were recorded.", again])
    if not any(rank["memory"] for rank in facts["ranks"]):
        rows.append(["memory", "No memory snapshot was recorded.", again])
    if not facts["reports"]:
        asked = f"--require-backend {run.moe_runner_backend}" if run.moe_runner_backend else "--policy POLICY.toml"
        gate = f"alphamoe-trace gate {here} {asked} --json {here}/reports/gate.json"
        rows.append(["verdicts", "No gate was run on this bundle.", gate])
    if not facts["sanitizer"]:
        captured = (bundle.path / "captures").is_dir()
        text = "No report in reports/sanitizer/: nothing is known of memory errors and races."
        if not captured:
            text += " This run holds no captures: record it again with --capture, then alphamoe-trace sanitize RUN."
        rows.append(
            ["sanitizer", text, f"alphamoe-trace sanitize {here}" if captured else f"{again} --capture layer=0"]
        )
    return rows


def _again(argv: tuple[str, ...]) -> str:
    """Return the command that recorded a run, without what would leave its evidence out or overwrite it once more."""
    kept: list[str] = []
    dropping = False
    for word in argv:
        if word.startswith("--"):
            dropping = word.split("=", 1)[0] in _NOT_AGAIN
        if not dropping:
            kept.append(word)
    return shlex.join(kept)
