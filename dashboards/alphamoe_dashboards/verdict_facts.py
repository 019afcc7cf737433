"""Verdicts for a page: the witness summary, and every report that a gate or a sanitizer replay left in the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from alphamoe_profiler.bundle import RunBundle
from alphamoe_tracers.errors import AlphaMoEError

if TYPE_CHECKING:
    from alphamoe_profiler.witness import WitnessSummary

NARROW_FROM = 600_000
MAX_REPORT_BYTES = 16 << 20
MAX_CELLS = 5_000
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "CONFIG_ERROR")


def witness_facts(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Judge a run as ``alphamoe-trace show`` does.

    Returns:
        (the judgement as plain data, everything that is wrong with the bundle).

    Raises:
        UsageError: files of the bundle contradict each other.
    """
    from alphamoe_profiler.witness import summarise

    bundle = _cheap(RunBundle.open(path))
    return _plain(summarise(bundle)), bundle.check()


def _cheap(bundle: RunBundle) -> RunBundle:
    """Return the bundle, of large runs only with the kernels that the summary asks about."""
    from alphamoe_backend.experts.registry import forbidden_symbols, required_symbols
    from alphamoe_profiler.evidence import MOE_CLASSES
    from alphamoe_profiler.gate_bundle import NarrowBundle
    from alphamoe_profiler.windows import SENTINEL_PREFIX

    sizes = 0
    for part in bundle.path.glob("kernels/rank=*/part-*.parquet"):
        sizes += part.stat().st_size
    if bundle.run.kind != "recorded" or sizes < NARROW_FROM * 4:
        return bundle
    try:
        backend = bundle.run.moe_runner_backend or ""
        names = {*required_symbols(backend), *forbidden_symbols(backend)}
    except AlphaMoEError:  # summarise tells it
        return bundle
    lists = {id(r.kernels): r.kernels for rank in bundle.ranks for r in bundle.receipts(rank).receipts}
    names |= {item.symbol for kernels in lists.values() for item in kernels}

    def wanted(row: dict[str, Any]) -> bool:
        base = row["base"] or ""
        return base in names or base.startswith(SENTINEL_PREFIX) or (row["class"] or "").startswith(MOE_CLASSES)

    return NarrowBundle.narrow(bundle, wanted)


def _plain(summary: WitnessSummary) -> dict[str, Any]:
    return {
        "name": "witness summary",
        "kind": "witness",
        "verdict": summary.verdict.value,
        "reason": summary.reason,
        "file": None,
        "cells": [
            {
                "rank": cell.rank,
                "execution": cell.execution,
                "what": f"{'required' if cell.required else 'forbidden'} {cell.symbol}",
                "verdict": cell.finding.verdict.value,
                "reason": cell.finding.reason,
                "kernels": cell.kernels,
                "submissions": cell.submissions,
            }
            for cell in summary.cells[:MAX_CELLS]
        ],
        "checks": [
            {"name": check.name, "verdict": check.verdict.value, "reason": check.reason, "compared": check.compared}
            for check in summary.checks
        ],
        "required": sorted({cell.symbol for cell in summary.cells if cell.required}),
        "forbidden": sorted({cell.symbol for cell in summary.cells if not cell.required}),
        "identities": [identity.told() for identity in summary.identities],
        "notes": list(summary.notes),
    }


def report_facts(
    folder: Path, run_id: str | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Read ``reports/*.json`` and ``reports/sanitizer/*.json``: derived files, shown and never judged again.

    Args:
        folder: ``RUN/reports``.
        run_id: of the bundle; a report that names another run is stale and left out.

    Returns:
        (gate reports, sanitizer reports, one sentence for each file that could not be read).
    """
    gates: list[dict[str, Any]] = []
    sanitizers: list[dict[str, Any]] = []
    problems: list[str] = []
    if not folder.is_dir():
        return [], [], []
    for path in sorted([*folder.glob("*.json"), *folder.glob("sanitizer/**/*.json")]):
        shown = path.relative_to(folder.parent).as_posix()
        try:
            if path.is_symlink() or path.stat().st_size > MAX_REPORT_BYTES:
                problems.append(f"{shown}: not read (a link, or larger than a report)")
                continue
            document = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            problems.append(f"{shown}: not readable ({error})")
            continue
        if not isinstance(document, dict) or document.get("verdict") not in VERDICTS:
            continue
        if document.get("schema") == "alphamoe-trace-report-v1":
            continue  # `show --json`: the witness summary is computed afresh
        told = document.get("run_id")
        if run_id is not None and isinstance(told, str) and told != run_id:
            problems.append(f"{shown}: not shown, it is about run {told[:40]}")
            continue
        inner = "sanitizer" in path.relative_to(folder).parts or "sanitize" in str(document.get("schema", ""))
        (sanitizers if inner else gates).append(_report(document, path.stem, shown))
    return gates, sanitizers, problems


def _report(document: dict[str, Any], name: str, shown: str) -> dict[str, Any]:
    # A gate's report has its cells under its rules; other tools may list them flat.
    rules = [item for item in _list(document, "rules") if isinstance(item, dict)]
    asked = [(_text(rule.get("title")), cell) for rule in rules for cell in _list(rule, "cells")]
    asked += [(_text(cell.get("rule")), cell) for cell in _list(document, "cells") if isinstance(cell, dict)]
    cells = [_cell(title, cell) for title, cell in asked[:MAX_CELLS] if isinstance(cell, dict)]
    findings = [_flat(item) for key in ("findings", "results", "captures") for item in _list(document, key)]
    return {
        "name": _text(document.get("name")) or ", ".join(map(str, _list(document, "policies")[:3])) or name,
        "kind": "gate",
        "verdict": document["verdict"],
        "reason": _text(document.get("reason")) or "",
        "scope": _text(document.get("scope")),
        "tool": _text(document.get("tool")),
        "file": shown,
        "cells": cells,
        "checks": [],
        "identities": [],
        "findings": findings[:500],
        "notes": [str(note) for note in (*_list(document, "notes"), *_list(document, "warnings"))][:100],
    }


def _cell(title: str | None, cell: dict[str, Any]) -> dict[str, Any]:
    rank = cell.get("rank")
    verdict = cell.get("verdict")
    reasons = [_text(cell.get("reason")), _text(cell.get("settled_by"))]
    return {
        "rank": rank if isinstance(rank, int) else None,
        "execution": _text(cell.get("execution")),
        "what": " ".join(part for part in (title, _text(cell.get("symbol"))) if part),
        "verdict": verdict if verdict in VERDICTS else "INCONCLUSIVE",
        "reason": "; to settle it: ".join(part for part in reasons if part),
    }


def _list(document: dict[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _flat(item: object) -> dict[str, str]:
    """Return one finding as short texts by name."""
    if not isinstance(item, dict):
        return {"finding": str(item)[:500]}
    return {str(key): _short(value) for key, value in item.items() if value not in (None, "", [], {})}


def _short(value: object) -> str:
    return value[:500] if isinstance(value, str) else msgspec.json.encode(value).decode()[:500]
