"""The answer of a gate as one JSON document. Its keys are described in docs/gate.md."""

from __future__ import annotations

from typing import Any

from alphamoe_profiler.gate_records import GateCell, GateReport

GATE_SCHEMA = "alphamoe-trace-gate-v1"


def gate_document(report: GateReport) -> dict[str, Any]:
    """Return the report as plain data: null where something is unknown."""
    return {
        "schema": GATE_SCHEMA,
        "verdict": report.verdict.value,
        "exit_code": report.exit_code,
        "reason": report.reason,
        "run_directory": report.run,
        "run_id": report.run_id,
        "world_size": report.world_size,
        "policies": list(report.policies),
        "rules": [
            {
                "title": rule.title,
                "kind": rule.kind,
                "policy_file": rule.path,
                "line": rule.line if rule.path else None,
                "cells": [_cell(cell) for cell in report.of_rule(index)],
            }
            for index, rule in enumerate(report.rules)
        ],
        "inspected": [
            {
                "rank": rank.rank,
                "kernels": rank.kernels,
                "launches": rank.launches,
                "receipts": rank.receipts,
                "files": list(rank.files),
                "window_failures": list(rank.window),
            }
            for rank in report.inspected
        ],
        "ran": [
            {
                "rank": own.rank,
                "execution": own.execution,
                "symbol": own.symbol,
                "class": own.kind,
                "kernels": own.kernels,
            }
            for own in report.ran
        ],
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }


def _cell(cell: GateCell) -> dict[str, Any]:
    first, gap = cell.first, cell.tolerated
    return {
        "rank": cell.rank,
        "execution": cell.execution,
        "verdict": cell.finding.verdict.value,
        "reason": cell.finding.reason or None,
        "kernels": cell.finding.witnesses,
        "evidence": {
            "file": cell.file,
            "first": None
            if first is None
            else {
                "start_ns": first.start_ns,
                "correlation_id": first.correlation_id,
                "graph_node_id": first.graph_node_id,
            },
        },
        "settled_by": cell.settled_by,
        "known_gap": None if gap is None else {"reason": gap.reason, "expires": gap.expires.isoformat()},
    }
