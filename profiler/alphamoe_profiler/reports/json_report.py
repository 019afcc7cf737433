"""The report of a run as one JSON document. Its keys are documented in docs/run-bundle.md."""

from __future__ import annotations

from typing import Any

import msgspec
import pandas as pd

from alphamoe_profiler.bundle_files import encode_json
from alphamoe_profiler.inspection import RankReport, RunReport
from alphamoe_profiler.m_buckets import DiscreteSet, MBuckets
from alphamoe_profiler.rank_skew import skew_document

REPORT_SCHEMA = "alphamoe-trace-report-v1"


def json_document(report: RunReport) -> dict[str, Any]:
    """Return the report as plain data: no NaN, null where something is unknown."""
    witness = report.witness
    return {
        "schema": REPORT_SCHEMA,
        "run_directory": str(report.path),
        "run": msgspec.to_builtins(report.run),
        "verdict": witness.verdict.value,
        "exit_code": witness.verdict.exit_code,
        "reason": witness.reason,
        "next_command": report.next_command,
        "shared_gpu": report.shares_gpu,
        "cells": [
            {
                "rank": cell.rank,
                "execution": cell.execution,
                "symbol": cell.symbol,
                "rule": "required" if cell.required else "forbidden",
                "kernels": cell.kernels,
                "submissions": cell.submissions,
                "verdict": cell.finding.verdict.value,
                "reason": cell.finding.reason or None,
            }
            for cell in witness.cells
        ],
        "checks": [
            {
                "name": check.name,
                "verdict": check.verdict.value,
                "reason": check.reason or None,
                "compared": check.compared,
            }
            for check in witness.checks
        ],
        "identities": [
            {
                "symbol": identity.symbol,
                "modules": list(identity.modules),
                "source_sha256": identity.source_sha256,
                "ranks": list(identity.ranks),
                "kernels": identity.kernels,
            }
            for identity in witness.identities
        ],
        "notes": list(witness.notes),
        "problems": list(report.problems),
        "ranks": [_rank(rank) for rank in report.ranks],
        "moe_kernels": [
            {"rank": rank, "execution": _text(execution), "symbol": symbol, "class": _text(kind), "kernels": kernels}
            for rank, execution, symbol, kind, kernels in zip(
                *(report.moe[name].tolist() for name in ("rank", "execution", "symbol", "class", "kernels")),
                strict=True,
            )
        ],
        "m_buckets": [_buckets(row) for row in report.m_buckets],
        "skew": skew_document(report.skew),
        "requests": [
            {
                "request_id": request.request_id,
                "purpose": request.purpose,
                "status": request.status,
                "executions": list(request.executions),
                "prompt_sha256": request.prompt_sha256,
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": request.completion_tokens,
                "finish_reason": request.finish_reason,
                "timings_s": request.timings_s,
            }
            for request in report.requests
        ],
        "launcher_wall_s": report.launcher_wall_s,
        "ran": _records(report.ran),
        "by_bucket": _by_bucket(report.by_bucket),
    }


def to_json(report: RunReport) -> str:
    """Return the report as one indented JSON document with sorted keys, ending in a line break.

    Raises:
        EvidenceError: a number in it is NaN or infinite.
    """
    return encode_json(json_document(report), "report", indent=2).decode()


def _rank(rank: RankReport) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "device": rank.device,
        "gpu_name": rank.gpu_name,
        "shared_gpu": rank.shared_gpu,
        "ended": rank.ended,
        "error": rank.error,
        "collector": rank.collector,
        "communication": rank.communication,
        "window_failures": list(rank.window),
        "kernels": rank.kernels,
        "dropped": rank.dropped,
        "duplicates": rank.duplicates,
        "receipts": rank.receipts,
        "attributed": rank.attributed,
        "unattributed": dict(rank.reasons),
        "moe_kernels": rank.moe_kernels,
        "moe_attributed": rank.moe_attributed,
        "kernel_time_ns": rank.busy_ns,
        "memory": [msgspec.to_builtins(snapshot) for snapshot in rank.memory],
        "wall_s": rank.wall_s,
    }


def _buckets(row: MBuckets) -> dict[str, Any]:
    return {
        "execution": row.execution,
        "rank": row.rank,
        "steps": row.steps,
        "real_tokens": _set(row.real_tokens),
        "dispatch_M": _set(row.dispatch_M),
        "kernel_M": _set(row.kernel_M),
        "witnessed_M": _set(row.witnessed_M),
    }


def _set(values: DiscreteSet) -> dict[str, Any]:
    own = values.values
    return {
        "n": len(own),
        "min": own[0] if own else None,
        "max": own[-1] if own else None,
        "values": list(own),
        "folded": values.folded,
    }


def _records(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    if table is None:
        return []
    names = [str(name) for name in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*(table[name].tolist() for name in names), strict=True)]


def _by_bucket(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    if table is None:
        return []
    return [
        {"symbol": str(name), "kernels": {str(bucket): int(count) for bucket, count in row.items()}}
        for name, row in table.iterrows()
    ]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
