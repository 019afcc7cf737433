"""Verdicts for a page: the witness summary, and every report that a gate or a sanitizer replay left in the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_tracers.errors import AlphaMoEError

if TYPE_CHECKING:
    from alphamoe_profiler.witness_records import WitnessSummary

NARROW_FROM = 600_000
MAX_REPORT_BYTES = 16 << 20
MAX_CELLS = 5_000
# Written by alphamoe_sanitizer_replays, a sibling that is not imported here.
SANITIZE_SCHEMA = "alphamoe-trace-sanitize-v1"
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "CONFIG_ERROR")


def witness_facts(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Judge a run as ``alphamoe-trace show`` does.

    Returns:
        (the judgement as plain data, everything that is wrong with the bundle).

    Raises:
        UsageError: files of the bundle contradict each other.
    """
    from alphamoe_profiler.bundle_check import check
    from alphamoe_profiler.witness import summarise

    bundle = _cheap(RunBundle.open(path))
    return _plain(summarise(bundle)), check(bundle)


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
    """Read ``reports/*.json`` and ``reports/sanitizer/*.json``: derived files, which are shown.

    The verdict of sanitizer replays is shown only where it follows from the replays and controls beside it, that of a
    gate only where it is the worst of its cells; a report of another sanitizer schema is no PASS.

    Args:
        folder: ``RUN/reports``.
        run_id: of the bundle; a report that names another run is stale and left out, and so is one of sanitizer
            replays that names none and whose captures do not.

    Returns:
        (gate reports, sanitizer reports, one sentence for each file that could not be read or contradicts itself).
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
        if document.get("schema") == SANITIZE_SCHEMA:
            if run_id is not None and _runs(document) != {run_id}:
                problems.append(f"{shown}: not shown, neither it nor its captures say that it is about this run")
                continue
            contradiction = _contradiction(document)
            problems += [f"{shown}: {contradiction}"] if contradiction else []
            sanitizers.append(_sanitize_report(document, shown, contradiction))
            continue
        inner = "sanitizer" in path.relative_to(folder).parts or "sanitize" in str(document.get("schema", ""))
        own = _report(document, path.stem, shown)
        if why := _unknown_pass(document) if inner else _gate_contradiction(document):
            problems.append(f"{shown}: {why}")
            own |= {"verdict": "FAIL" if "FAIL" in _judged(document) else "INCONCLUSIVE", "reason": why}
        (sanitizers if inner else gates).append(own)
    return gates, sanitizers, problems


def _runs(document: dict[str, Any]) -> set[str]:
    """Give the ids of the runs that a report of sanitizer replays and its captures name."""
    return {
        own["run_id"]
        for own in (document, *_list(document, "captures"))
        if isinstance(own, dict) and isinstance(own.get("run_id"), str)
    }


def _unknown_pass(document: dict[str, Any]) -> str:
    schema = _short(document.get("schema"))
    return f"PASS of schema {schema} cannot be checked here" if document["verdict"] == "PASS" else ""


def _gate_contradiction(document: dict[str, Any]) -> str:
    """Say why the verdict of a gate's report is not the worst of its cells, known gaps aside; empty where it is.

    Without cells nothing was judged, and the verdict says why.
    """
    verdict, judged = Verdict(document["verdict"]), [Verdict(own) for own in _judged(document)]
    why = _own_words(document)
    if (judged or verdict is Verdict.PASS) and verdict is not worst(judged):
        why = f"the worst of its cells is {worst(judged).value}" if judged else "no cell is in it"
    return _contradicts(document, why)


def _judged(document: dict[str, Any]) -> list[str]:
    rules = [own for own in _list(document, "rules") if isinstance(own, dict)]
    cells = [cell for own in (*rules, document) for cell in _list(own, "cells") if isinstance(cell, dict)]
    return [_cell(None, cell)["verdict"] for cell in cells if cell.get("known_gap") is None]


def _own_words(document: dict[str, Any]) -> str:
    """Say which of a report's own words, exit code and statement, are of another verdict."""
    verdict = Verdict(document["verdict"])
    if document.get("exit_code", verdict.exit_code) != verdict.exit_code:
        return f"its exit code is {_short(document['exit_code'])}"
    statement = _text(document.get("statement"))
    return "its statement is of another verdict" if statement and not statement.startswith(f"{verdict.value}:") else ""


def _contradicts(document: dict[str, Any], why: str) -> str:
    return f"the report contradicts itself: it says {document['verdict']}, and {why}" if why else ""


def _contradiction(document: dict[str, Any]) -> str:
    """Say why the verdict of a report of sanitizer replays does not follow from what is in it; empty where it does.

    A session is FAIL where a replay is, and only there. It is PASS only where every replay is, and where each tool
    caught its basic planted faults and found nothing in the sound ones, on the replays' device.
    """
    verdict = document["verdict"]
    entries = [own for own in _list(document, "entries") if isinstance(own, dict)]
    rows = [_replay_row(own) for own in entries]
    of_replays = {row["verdict"] for row in rows}
    controls = [own for own in _list(document, "controls") if isinstance(own, dict)]
    proven = {own.get("tool") for own in controls if isinstance(own.get("tool"), str) and _basic_caught(own)}
    unproven = sorted({row["tool"] for row in rows} - proven - {"none"})
    unused = sorted({own for own in _list(document, "tools") if isinstance(own, str)} - {row["tool"] for row in rows})
    devices = {own["device"] for own in (*controls, *entries) if isinstance(own.get("device"), str)}
    why = ""
    if (verdict == "FAIL") != ("FAIL" in of_replays):
        why = "a replay in it is FAIL" if "FAIL" in of_replays else "no replay in it is"
    elif verdict == "PASS" and of_replays != {"PASS"}:
        why = "not every replay in it does" if rows else "no replay is in it"
    elif wrong := next(filter(None, map(_entry_contradiction, entries)), None):
        why = f"a PASS in it {wrong}"
    elif verdict == "PASS" and unused:
        why = f"no replay in it is under {unused[0]}"
    elif verdict == "PASS" and unproven:
        why = f"no basic planted fault of {unproven[0]} was caught"
    elif verdict == "PASS" and document.get("interrupted"):
        why = "that it was interrupted"
    elif verdict == "PASS" and controls and len(devices) > 1:
        why = "its planted faults and replays ran on different devices"
    return _contradicts(document, why or _own_words(document))


def _entry_contradiction(entry: dict[str, Any]) -> str:
    """Say why a replay that says PASS is none; empty where it is, or says something else."""
    if entry.get("verdict") != "PASS":
        return ""
    if _replay_row(entry)["output"] != "PASS":
        return "has an output that is not"
    return "has findings that nothing allows" if _list(entry, "findings") and not _list(entry, "allowed") else ""


def _basic_caught(controls: dict[str, Any]) -> bool:
    outcomes = [own if isinstance(own, dict) else {} for own in _list(controls, "outcomes")]
    basic = [own.get("caught") is True for own in outcomes if own.get("basic") is True]
    return (
        bool(basic)
        and all(basic)
        and all(own.get("sound_clean") is True for own in outcomes)
        and not _list(controls, "problems")
    )


def _sanitize_report(document: dict[str, Any], shown: str, contradiction: str) -> dict[str, Any]:
    """Return a report of ``alphamoe-trace sanitize``: a row a replay, a row a finding, a row a control.

    Nothing is left to quote of one that contradicts itself, and its verdict is that of its replays at best.
    """
    entries = [own for own in _list(document, "entries") if isinstance(own, dict)][:MAX_CELLS]
    controls = [own for own in _list(document, "controls") if isinstance(own, dict)]
    version, device = _text(document.get("tool_version")), _text(document.get("device"))
    tool = f"compute-sanitizer {version}" if version else None
    verdict = document["verdict"]
    if contradiction:
        verdict = "FAIL" if any(entry.get("verdict") == "FAIL" for entry in entries) else "INCONCLUSIVE"
    return {
        "name": ", ".join(part for part in ("sanitizer replays", tool, device) if part),
        "kind": "sanitize",
        "verdict": verdict,
        "reason": contradiction or _text(document.get("reason")) or "",
        "statement": [] if contradiction else (_text(document.get("statement")) or "").split("\n"),
        "scopes": [] if contradiction else [text for text in _list(document, "scope") if isinstance(text, str)][:500],
        "file": shown,
        "replays": [_replay_row(entry) for entry in entries],
        "findings": [
            _finding_row(entry, finding, where)
            for entry in entries
            for key, where in (("findings", "kernel under test"), ("other_findings", "elsewhere"))
            for finding in _list(entry, key)
            if isinstance(finding, dict)
        ][:500],
        "allowed": [str(text)[:500] for entry in entries for text in _list(entry, "allowed")][:100],
        "controls": [
            {
                key: outcome.get(key)
                for key in ("tool", "control", "mechanism", "basic", "caught", "sound_clean", "reason")
            }
            for own in controls
            for outcome in _list(own, "outcomes")
            if isinstance(outcome, dict)
        ][:500],
        "notes": [
            *(f"{own.get('tool')}: {text}" for own in controls for text in _list(own, "problems")),
            *(str(note) for note in _list(document, "notes")),
        ][:100],
    }


def _replay_row(entry: dict[str, Any]) -> dict[str, Any]:
    output = entry.get("output")
    wall = entry.get("wall_s")
    reasons = [text for text in _list(entry, "reasons") if isinstance(text, str)]
    if allowed := len(_list(entry, "allowed")):
        reasons.append(f"not clean: {allowed} finding{'' if allowed == 1 else 's'} allowed")
    return {
        "capture": _text(entry.get("label")) or "",
        "variant": _text(entry.get("variant")),
        "tool": _text(entry.get("tool")) or "",
        "verdict": entry["verdict"] if entry.get("verdict") in VERDICTS else "INCONCLUSIVE",
        "whole": entry["whole"] if entry.get("whole") in VERDICTS else "INCONCLUSIVE",
        "errors": _count(entry.get("errors")),
        "warnings": _count(entry.get("warnings")),
        "hazards": _count(entry.get("hazards")),
        "output": _text(output.get("verdict")) if isinstance(output, dict) else None,
        "wall_s": float(wall) if isinstance(wall, int | float) else None,
        "reason": "; ".join(reasons)[:500],
    }


def _finding_row(entry: dict[str, Any], finding: dict[str, Any], where: str) -> dict[str, str]:
    places = [own for own in (finding.get("where"), finding.get("other")) if isinstance(own, dict)]
    source = [f"{own.get('file')}:{own.get('line')}" for own in places if own.get("file")]
    told = {
        "tool": entry.get("tool"),
        "capture": entry.get("label"),
        "severity": finding.get("severity"),
        "finding": finding.get("text"),
        "hazard": finding.get("hazard"),
        "where": where,
        "kernel": finding.get("kernel"),
        "function": " / ".join(str(own.get("function")) for own in places),
        "source": " / ".join(source),
        "count": finding.get("count"),
    }
    return _flat(told)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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
