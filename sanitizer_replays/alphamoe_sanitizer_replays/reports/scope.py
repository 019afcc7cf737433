"""The scope of a clean result as a sentence that a pull request can quote: what was looked at, and what was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alphamoe_sanitizer_replays.controls.table import CONTROLS
from alphamoe_sanitizer_replays.reports.records import CaptureFacts, ReplayEntry
from alphamoe_sanitizer_replays.results import ControlReport

_ALWAYS = frozenset(
    {
        "block barrier",
        "warp sync",
        "cp.async group",
        "ldmatrix/stmatrix",
        "stmatrix in a warp",
        "global race between blocks",
        "global bounds",
        "shared bounds",
        "uninitialised global",
        "uninitialised shared",
    }
)
_CLUSTER = frozenset({"distributed shared memory", "cluster barrier", "CTA exit in a cluster"})
_WGMMA = frozenset({"wgmma (async proxy)"})
# What the variants of the fused kernel use; another kernel may use anything.
_USED: Mapping[tuple[str, str], frozenset[str]] = {
    ("alphamoe_w8a8", "t8_c8"): _ALWAYS | _CLUSTER,
    ("alphamoe_w8a8", "t16_c4"): _ALWAYS | _CLUSTER,
    ("alphamoe_w8a8", "t32_c2"): _ALWAYS | _CLUSTER,
    ("alphamoe_w8a8", "t64_w"): _ALWAYS | _WGMMA,
}


def mechanisms_used(plugin: str, variant: str | None) -> frozenset[str]:
    """Name the mechanisms that a kernel uses: all of them where its plug-in is not ours."""
    return _USED.get((plugin, variant or ""), frozenset(control.mechanism for control in CONTROLS))


def not_covered(facts: CaptureFacts, variant: str | None, controls: Iterable[ControlReport]) -> tuple[str, ...]:
    """Say which mechanisms of a kernel a tool was meant to check and did not: ``warp sync by synccheck``."""
    used = mechanisms_used(facts.plugin, variant)
    gaps: dict[str, list[str]] = {}
    for report in controls:
        for mechanism in report.not_covered:
            if mechanism in used:
                gaps.setdefault(mechanism, []).append(report.tool)
    return tuple(f"{mechanism} by {' and '.join(tools)}" for mechanism, tools in gaps.items())


def scope_sentence(
    facts: CaptureFacts,
    variant: str | None,
    entries: Iterable[ReplayEntry],
    controls: Iterable[ControlReport],
    layers: Iterable[int | None] = (),
) -> str:
    """Say what the entries of one capture and variant cover.

    Args:
        facts: the capture.
        variant: of the kernel that was launched.
        entries: one for each tool.
        controls: the session's; they tell what each tool does not see.
        layers: every layer that the session has captures of, so that "other layers" says which were looked at.
    """
    geometry = facts.geometry
    shape = (
        f", H{geometry.H}, I{geometry.I_local}, E{geometry.E}, k{geometry.top_k}, BM{geometry.block_m}"
        if geometry is not None
        else ""
    )
    where = f"layer {facts.layer}" if facts.layer is not None else (facts.callable or facts.plugin)
    head = f"M{facts.M}{shape}, rank {facts.rank}, {where}, {variant or ', '.join(facts.symbols) or 'symbol unknown'}"
    entries = tuple(entries)
    results = [_result(entry) for entry in entries] or ["nothing was replayed"]
    covered = ", ".join(str(layer) for layer in sorted({own for own in layers if own is not None}))
    gaps = ["graph replays", _other_ranks(facts), f"layers other than {covered}" if covered else "other calls"]
    gaps += not_covered(facts, variant, controls)
    gaps.append("host API errors")
    if all(entry.tool == "none" for entry in entries):
        gaps.append("races and memory errors (no tool ran)")
    return f"{head}; {'; '.join(results)}; not covered: {', '.join(gaps)}"


def _result(entry: ReplayEntry) -> str:
    allowed = f" ({len(entry.allowed)} allowed)" if entry.allowed else ""
    open_told = "" if entry.verdict.value in ("PASS", "FAIL") else f" ({entry.verdict.value}, proves nothing)"
    if entry.tool == "none":
        verdict = entry.output.verdict if entry.output is not None else "not checked"
        return f"no tool, output {verdict}"
    errors, warnings = entry.errors, entry.warnings or 0
    if errors is None:
        found = "no count"
    elif entry.tool == "racecheck":
        hazards = entry.hazards if entry.hazards is not None else errors + warnings
        found = f"{_many(hazards, 'hazard')}, {_many(warnings, 'warning')}"
    else:
        found = _many(errors, "error") + (f", {_many(warnings, 'warning')}" if warnings else "")
    return f"{entry.tool} {found}{allowed}{open_told}"


def _other_ranks(facts: CaptureFacts) -> str:
    world = facts.world_size
    if world is None:
        return "other ranks"
    others = [str(rank) for rank in range(min(world, 64)) if rank != facts.rank]
    return f"other ranks ({', '.join(others)})" if others else "other processes"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
