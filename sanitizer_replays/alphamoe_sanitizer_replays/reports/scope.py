"""What a session covered and what it did not, in sentences that a pull request can quote.

One sentence tells the whole session, verdict first. Each capture and variant has one of its own besides. What is not
covered is the same in all of them: what the session as a whole did not look at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from alphamoe_profiler.printable import printable_line
from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_sanitizer_replays.reports.lines import counts_told
from alphamoe_sanitizer_replays.reports.records import (
    CaptureFacts,
    ReplayEntry,
    SanitizeReport,
    allowed_told,
    many,
    overall,
)
from alphamoe_sanitizer_replays.results import TOOLS, ControlReport

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
_MOST_NAMED = 8
_HASH_LETTERS = 12


def mechanisms_used(plugin: str, variant: str | None) -> frozenset[str] | None:
    """Name the mechanisms that a kernel uses; null where its plug-in is not ours, and it may use any."""
    return _USED.get((plugin, variant or ""))


def not_covered(uses: Sequence[frozenset[str] | None], controls: Iterable[ControlReport]) -> tuple[str, ...]:
    """Say which mechanisms of several kernels a tool was meant to check and did not: ``warp sync by synccheck``."""
    gaps: dict[str, list[str]] = {}
    for report in controls:
        for mechanism in report.not_covered:
            if any(used is None or mechanism in used for used in uses):
                gaps.setdefault(mechanism, []).append(report.tool)
    return tuple(f"{mechanism} by {' and '.join(tools)}" for mechanism, tools in gaps.items())


def with_scope(report: SanitizeReport) -> SanitizeReport:
    """Return a report with its statement and its scope, made from everything else in it."""
    together: dict[tuple[object, ...], list[CaptureFacts]] = {}
    for facts in report.captures:
        together.setdefault((_kernel(facts, report.entries), *facts.origin), []).append(facts)
    kernels = [_Kernel(report, str(name), own) for (name, *_), own in together.items()]
    if not any(entry.ran for entry in report.entries):
        return msgspec.structs.replace(
            report, statement=f"{report.verdict.value}: nothing was replayed: {report.reason}", scope=()
        )
    return msgspec.structs.replace(
        report,
        statement="\n".join(printable_line(kernel.statement()) for kernel in kernels),
        scope=tuple(printable_line(sentence) for kernel in kernels for sentence in kernel.sentences()),
    )


def _kernel(facts: CaptureFacts, entries: Iterable[ReplayEntry]) -> str:
    """Name what is under test: the capture's symbols, else what was called, with those that its plug-in names."""
    if facts.symbols:
        return ", ".join(facts.symbols)
    own = dict.fromkeys(symbol for entry in entries if entry.capture == facts.path for symbol in entry.symbols)
    return (facts.callable or facts.plugin) + (f" ({', '.join(own)})" if own else "")


class _Kernel:
    """What a session did with one kernel, in captures of one run."""

    def __init__(self, report: SanitizeReport, name: str, captures: Sequence[CaptureFacts]) -> None:
        self._report, self._name = report, name
        facts = {own.path: own for own in captures}
        self._entries = tuple(entry for entry in report.entries if entry.capture in facts)
        self._replays = {(entry.capture, entry.variant): facts[entry.capture] for entry in self._entries if entry.ran}
        self._on_cpu = {(own.capture, own.variant) for own in self._entries if own.device == "cpu"}
        self._captures = tuple({id(own): own for own in self._replays.values()}.values())
        self._not_covered = ", ".join(self._gaps())

    def statement(self) -> str:
        """Say what the session proved of this kernel."""
        report = self._report
        verdict, head = self._verdict(self._entries)
        tool = f"compute-sanitizer {report.tool_version or 'of unknown version'}" if report.controls else "no tool"
        kernel = f"{self._name}{self._source()}, {self._device()}, {tool}"
        parts = [", ".join((*self._found(), self._outputs()))]
        outcomes = [outcome for own in report.controls for outcome in own.outcomes]
        if outcomes:
            caught = sum(outcome.caught for outcome in outcomes)
            parts.append(f"{caught} of {many(len(outcomes), 'planted fault')} caught")
        if verdict in (Verdict.INCONCLUSIVE, Verdict.CONFIG_ERROR):
            parts.append(f"open: {self._reason()}")
        parts.append(f"not covered: {self._not_covered}")
        return f"{head}: {kernel}, {self._where()}: {'; '.join(parts)}"

    def sentences(self) -> list[str]:
        """Say the same of each capture and variant that was replayed."""
        told = []
        for (path, variant), facts in self._replays.items():
            entries = [entry for entry in self._entries if (entry.capture, entry.variant) == (path, variant)]
            verdict, told_verdict = self._verdict(entries)
            head = "" if verdict is Verdict.PASS else f"{told_verdict}: "
            outputs = worst(
                Verdict(entry.output.verdict) if entry.output is not None else Verdict.INCONCLUSIVE for entry in entries
            )
            results = "; ".join((*map(_result, entries), f"output {outputs.value}"))
            launched = "reference" if variant is not None and (path, variant) in self._on_cpu else variant
            call = f"{_call(facts, launched, self._name)}{self._origin()}{self._replaced(entries)}"
            told.append(f"{head}{call}; {results}; not covered: {self._not_covered}")
        return told

    def _verdict(self, entries: Sequence[ReplayEntry]) -> tuple[Verdict, str]:
        """Give the verdict that a sentence about these entries begins with.

        Pasted alone it must not begin with PASS where its session did not come to PASS.
        """
        own = worst(entry.verdict for entry in entries)
        if own is not Verdict.PASS or self._report.verdict is Verdict.PASS:
            return own, own.value
        return self._report.verdict, f"{self._report.verdict.value} for the session as a whole"

    def _reason(self) -> str:
        """Say what is open of this kernel, and only where that is nothing, what is open of the session."""
        verdict, reason = overall(self._entries, len(self._entries))
        return self._report.reason if verdict is Verdict.PASS else reason

    def _source(self) -> str:
        hashes = sorted({entry.source_sha256 for entry in self._entries if entry.source_sha256 is not None})
        other = self._replaced(self._entries)
        if not hashes:
            return other
        shown = " and ".join(own[:_HASH_LETTERS] for own in hashes)
        return f" (source{'s' if len(hashes) > 1 else ''} {shown}{other})"

    def _replaced(self, entries: Sequence[ReplayEntry]) -> str:
        """Say that another source than the captured one was replayed, or may have been."""
        if any(entry.source_differs for entry in entries):
            return ", not the captured source"
        return ", source given with --source" if self._report.source else ""

    def _device(self) -> str:
        """Name the GPU by the replays' own word."""
        told = sorted({entry.device for entry in self._entries if entry.device is not None})
        named = ["CPU" if name == "cpu" else name for name in told]
        return " and ".join(named) or self._report.device or "no GPU"

    def _origin(self) -> str:
        """Say of which run, model and GPU the captures are, where the session has captures of several."""
        words = (
            ("of run", [own.run_id for own in self._report.captures], self._captures[0].run_id),
            ("of the model", [own.model for own in self._report.captures], self._captures[0].model),
            ("captured on", [own.gpu_name for own in self._report.captures], self._captures[0].gpu_name),
        )
        return "".join(f" {word} {own or 'unknown'}" for word, every, own in words if len(set(every)) > 1)

    def _totals(self) -> tuple[set[int | None], set[int | None]]:
        """Give how many ranks and layers there are; unknown for several captures that no run holds together."""
        if len(self._captures) > 1 and self._captures[0].run_id is None:
            return set(), set()
        return {own.world_size for own in self._captures}, {own.model_layers for own in self._captures}

    def _combinations(self) -> tuple[int, int]:
        """Give how many combinations of rank, layer, M and variant were replayed, and how many there are."""
        seen = {(own.rank, own.layer, own.M, variant) for (_, variant), own in self._replays.items()}
        return len(seen), math.prod(len(set(values)) for values in zip(*seen, strict=True)) if seen else 0

    def _where(self) -> str:
        """Say which dispatches: ``16 captured eager dispatches (all 4 ranks, layer 0 of 2, M 1 and 906, ...)``."""
        captures, variants = self._captures, self._variants()
        if not captures:
            return "no dispatch replayed"
        ranks, layers = _distinct(own.rank for own in captures), _distinct(own.layer for own in captures)
        worlds, depths = self._totals()
        Ms = _distinct(own.M for own in captures)
        parts = [_of_all("rank", ranks, worlds)]
        if layers:
            parts.append(_of_all("layer", layers, depths))
        parts.append(f"M {_listed(Ms)}")
        if variants:
            parts.append(f"variant{'s' if len(variants) > 1 else ''} {_listed(variants)}")
        made, possible = self._combinations()
        if made < possible:
            parts.append(f"{made} of {possible} combinations of these")
        noun = "dispatch" if len(captures) == 1 else "dispatches"
        return f"{len(captures):,} captured eager {noun}{self._origin()} ({', '.join(parts)})"

    def _variants(self) -> tuple[str, ...]:
        """Give the variants of the kernel that were launched: on a CPU none was, whichever was asked for."""
        launched = (own for own in self._replays if own not in self._on_cpu)
        return tuple(dict.fromkeys(variant for _, variant in launched if variant is not None))

    def _found(self) -> list[str]:
        """Say what each tool found; those that are clean together."""
        clean, told = [], []
        for tool in self._report.tools:
            entries = [entry for entry in self._entries if entry.tool == tool]
            if tool == "none" or not entries:
                continue
            own = [self._of_tool(entries, verdict) for verdict in Verdict]
            accepted = [entry for entry in entries if entry.allowed]
            own += [allowed_told(accepted)] if accepted else []
            said = [text for text in own if text]
            if said:
                told.append(f"{tool}: {' and '.join(said)}")
            else:
                clean.append(tool)
        return [f"{_listed(clean)} clean", *told] if clean else told

    @staticmethod
    def _of_tool(entries: list[ReplayEntry], verdict: Verdict) -> str:
        mine = [entry for entry in entries if entry.verdict is verdict]
        if not mine:
            return ""
        where = f"in {len(mine)} of {many(len(entries), 'replay')}"
        if verdict is Verdict.PASS:
            elsewhere = sum(entry.whole is not Verdict.PASS for entry in mine)
            return f"findings in another kernel in {many(elsewhere, 'replay')}" if elsewhere else ""
        if verdict is Verdict.FAIL:
            found = sum(len(entry.findings) for entry in mine)
            return f"{many(found, 'finding')} {where}" if found else f"FAIL {where}"
        return f"{verdict.value} {where}"

    def _outputs(self) -> str:
        checks = [entry.output.verdict if entry.output is not None else "INCONCLUSIVE" for entry in self._entries]
        if "FAIL" in checks:
            return f"output wrong in {checks.count('FAIL')} of {many(len(checks), 'replay')}"
        return "outputs not all compared" if "INCONCLUSIVE" in checks else "outputs right"

    def _gaps(self) -> list[str]:
        """Say what the session did not look at."""
        report, captures = self._report, self._captures
        gaps = ["other M and inputs"]
        known = dict.fromkeys(name for own in captures for name in own.variants)
        left = [name for name in known if name not in self._variants()]
        if left:
            gaps.append(f"variant{'s' if len(left) > 1 else ''} {_listed(left)}")
        gaps.append("CUDA graph replays")
        worlds, depths = self._totals()
        gaps += _left("rank", (own.rank for own in captures), worlds)
        layers = _distinct(own.layer for own in captures)
        gaps += _left("layer", layers, depths) if layers else ["other calls"]
        made, possible = self._combinations()
        if made < possible:
            gaps.append(f"{many(possible - made, 'other combination')} of rank, layer, M and variant")
        idle = [tool for tool in TOOLS if tool not in report.tools]
        if idle:
            gaps.append(f"what {_listed(idle)} would find ({'no tool was' if len(idle) == len(TOOLS) else 'not'} run)")
        used = [mechanisms_used(own.plugin, variant) for (_, variant), own in self._replays.items()]
        gaps += not_covered(used, report.controls)
        return [*gaps, "host API errors"]


def _call(facts: CaptureFacts, variant: str | None, kernel: str) -> str:
    """Name one dispatch: ``M1, H2048, I128, E512, k10, BM8, rank 0, layer 0, t8_c8``."""
    own = facts.geometry
    shape = f", H{own.H}, I{own.I_local}, E{own.E}, k{own.top_k}, BM{own.block_m}" if own is not None else ""
    where = f"layer {facts.layer}" if facts.layer is not None else (facts.callable or facts.plugin)
    launched = variant or kernel
    return f"M{facts.M}{shape}, rank {facts.rank}, {where}" + (f", {launched}" if launched != where else "")


def _result(entry: ReplayEntry) -> str:
    if not entry.ran:
        return f"{entry.tool} not run"
    if entry.tool == "none":
        return "no tool"
    notes = [allowed_told([entry])] if entry.allowed else []
    if entry.verdict is Verdict.INCONCLUSIVE:
        notes.append("INCONCLUSIVE" if entry.errors or entry.hazards else "INCONCLUSIVE, proves nothing")
    elif entry.verdict is Verdict.CONFIG_ERROR:
        notes.append("its allow-list entry expired")
    return f"{entry.tool} {counts_told(entry)}" + (f" ({', '.join(notes)})" if notes else "")


def _of_all(noun: str, seen: Sequence[int], totals: set[int | None]) -> str:
    """Say which of how many: ``all 4 ranks``, ``layers 0 and 1 of 48``, ``rank 0``."""
    named = f"{noun}{'s' if len(seen) > 1 else ''} {_listed(seen)}"
    total = _total(totals)
    if total is None:
        return named
    return f"all {total} {noun}s" if 1 < total == len(seen) else f"{named} of {total}"


def _left(noun: str, seen: Iterable[int], totals: set[int | None]) -> list[str]:
    """Say which ranks or layers were not replayed; nothing where all of them were."""
    total = _total(totals)
    if total is None:
        return [f"other {noun}s"]
    there = set(seen)
    left = [number for number in range(min(total, 10_000)) if number not in there]
    if not left:
        return []
    return [
        f"{noun}{'s' if len(left) > 1 else ''} {_listed(left)}"
        if len(left) <= _MOST_NAMED
        else f"{len(left)} other {noun}s"
    ]


def _total(totals: set[int | None]) -> int | None:
    """Give the one number that all captures agree on; null where they do not, or do not know."""
    return next(iter(totals)) if len(totals) == 1 else None


def _distinct(values: Iterable[int | None]) -> list[int]:
    return sorted({value for value in values if value is not None})


def _listed(values: Sequence[object]) -> str:
    """Name values: ``0, 1 and 3``; of many the first, the last and how many there are."""
    words = [str(value) for value in values]
    if len(words) > _MOST_NAMED:
        return f"{words[0]} to {words[-1]} ({len(words)} of them)"
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)
