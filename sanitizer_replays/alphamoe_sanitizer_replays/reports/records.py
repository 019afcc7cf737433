"""What a sanitize session came to: the records that every report of it is written from. ``report.json`` is these."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_sanitizer_replays.captures.records import Capture, CapturedCall
from alphamoe_sanitizer_replays.results import ControlReport, Finding, OutputCheck

REPORT_SCHEMA = "alphamoe-trace-sanitize-v1"


class CaptureFacts(CapturedCall, frozen=True, kw_only=True):
    """One capture as the report names it."""

    path: str
    """Relative to the run where the capture lies in one."""
    capture_s: dict[str, float] = msgspec.field(default_factory=dict)
    """``copy`` and ``write``, seconds, when it was captured."""
    variants: tuple[str, ...] = ()
    """Every variant that the kernel has; empty: there is one, or the plug-in does not know."""
    model_layers: int | None = None
    """How many MoE layers the captured model has, where that is known."""
    run_id: str | None = None
    model: str | None = None
    """Where the capture says it."""
    gpu_name: str | None = None
    """On which it was captured."""
    apart: str = ""
    """What tells it from another capture of the session that would read alike: ``step 7``, ``call 1``, a run's id."""

    @classmethod
    def of(cls, path: str, capture: Capture, model_layers: int | None = None) -> CaptureFacts:
        """Take what a report repeats of a capture."""
        shared = {name: getattr(capture, name) for name in CapturedCall.__struct_fields__}
        if model_layers is None and capture.weights_from is not None:
            model_layers = capture.weights_from.layers
        return cls(
            path=path,
            capture_s=capture.wall_s,
            model_layers=model_layers,
            run_id=capture.run_id,
            model=capture.weights_from.model if capture.weights_from is not None else None,
            gpu_name=capture.gpu_name,
            **shared,
        )

    @property
    def label(self) -> str:
        """The call in a few words, no two of a session alike."""
        return f"{super().label} {self.apart}".rstrip()

    @property
    def origin(self) -> tuple[object, ...]:
        """What captures of one sentence have in common: run, GPU, model and how it was split."""
        own = self.geometry
        shape = (own.E, own.H, own.I_local, own.top_k) if own is not None else None
        return self.run_id, self.gpu_name, self.model, self.world_size, self.model_layers, shape


class ReplayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One replay of one capture: a variant under a tool, or under none."""

    capture: str
    """``CaptureFacts.path``."""
    label: str
    variant: str | None
    """Null where the kernel has one shape only."""
    tool: str
    """``none`` for a replay without a tool."""
    verdict: Verdict
    """Of the kernel under test."""
    whole: Verdict
    """Of everything that the tool saw, other kernels included."""
    reasons: tuple[str, ...] = ()
    """Why, the gravest first. Empty only where both verdicts are PASS."""
    settled_by: str = ""
    """``finding``, ``count``, ``output``, ``allow-list``, ``evidence``, ``controls`` or ``all conditions``."""
    hint: str = ""
    """What would settle what is open."""
    errors: int | None = None
    """By the tool's own summaries; null where it wrote none."""
    warnings: int | None = None
    hazards: int | None = None
    findings: tuple[Finding, ...] = ()
    """In the kernel under test, allowed ones included."""
    other_findings: tuple[Finding, ...] = ()
    """In other kernels, and those that nothing places."""
    api_errors: int = 0
    allowed: tuple[str, ...] = ()
    """Findings that an entry of the allow-list covers, with its reason. They stay in every total."""
    allowed_until: str | None = None
    """The last day, ISO 8601, on which none of those entries has expired."""
    notes: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    """The kernels under test: the capture's, else those that its plug-in names."""
    device: str | None = None
    """The GPU by the replay's own word; ``cpu`` for a reference."""
    output: OutputCheck | None = None
    kernel_us: tuple[float, ...] = ()
    """Device times of launches without a tool, microseconds."""
    timings_s: dict[str, float] = {}
    """``process_start``, ``imports``, ``compile``, ``upload``, ``launch``, ``download``, as far as they are known.
    ``compile`` is mostly ahead of the process, once for all tools of a variant, and then no part of ``wall_s``."""
    wall_s: float = 0.0
    """The whole process under the tool, from its start to its end."""
    source_sha256: str | None = None
    cubin_sha256: str | None = None
    source_differs: bool = False
    """The replayed kernel is not made from the source that was captured."""
    command: str = ""
    """What repeats this replay in a shell; the tool then reports to the terminal. Empty where nothing was run."""
    log_file: str | None = None
    """Relative to the report."""
    xml_file: str | None = None

    @property
    def ran(self) -> bool:
        """Whether there was a process: an entry of a replay that was never made holds its reason alone."""
        return self.log_file is not None or self.wall_s > 0.0


class SanitizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one session found."""

    schema: str = REPORT_SCHEMA
    verdict: Verdict
    reason: str
    """One line. Never empty."""
    statement: str = ""
    """The session in one sentence that a pull request can quote, verdict first; one more for each further kernel."""
    scope: tuple[str, ...] = ()
    """The same for each capture and variant that was replayed."""
    run_id: str | None = None
    targets: tuple[str, ...]
    """Paths that the session was asked about."""
    device: str | None = None
    tool_path: str | None = None
    tool_version: str | None = None
    tools: tuple[str, ...] = ()
    controls: tuple[ControlReport, ...] = ()
    captures: tuple[CaptureFacts, ...] = ()
    entries: tuple[ReplayEntry, ...] = ()
    source: str | None = None
    """The source that was replayed instead of the kernel's own (``--source``)."""
    allow_list: str | None = None
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    controls_wall_s: float = 0.0
    wall_s: float = 0.0
    created: str = ""
    """UTC, ISO 8601."""

    @property
    def exit_code(self) -> int:
        """As a gate's: 0 PASS, 1 FAIL, 2 CONFIG_ERROR, 3 INCONCLUSIVE."""
        return self.verdict.exit_code


def overall(entries: tuple[ReplayEntry, ...], expected: int, trouble: str = "") -> tuple[Verdict, str]:
    """Judge a session from its entries.

    Args:
        entries: what was replayed and judged.
        expected: replays that were asked for; fewer entries are no PASS.
        trouble: why the session as a whole proves nothing, or empty.

    Returns:
        (verdict, reason). A proven fault outweighs what is missing.
    """
    failed = [entry for entry in entries if entry.verdict is Verdict.FAIL]
    if failed:
        return Verdict.FAIL, _first_of(failed)
    if trouble:
        return Verdict.INCONCLUSIVE, trouble
    if not entries and not expected:
        return Verdict.CONFIG_ERROR, "nothing was replayed"
    open_entries = [entry for entry in entries if entry.verdict is not Verdict.PASS]
    if open_entries:
        verdict = worst(entry.verdict for entry in open_entries)
        worst_first = sorted(open_entries, key=lambda entry: entry.verdict is not verdict)
        return verdict, _first_of(worst_first)
    if len(entries) < expected:
        return Verdict.INCONCLUSIVE, f"{expected - len(entries)} of {many(expected, 'replay')} were not made"
    if {entry.tool for entry in entries} == {"none"}:
        # No tool looked, so nothing is known of races and memory.
        return (
            Verdict.PASS,
            f"{many(len(entries), 'replay')} without a tool gave the captured output, and no tool looked",
        )
    return Verdict.PASS, _what_passed(entries)


def _first_of(entries: list[ReplayEntry]) -> str:
    first = entries[0]
    why = first.reasons[0] if first.reasons else "it does not say why"
    more = f"; {many(len(entries) - 1, 'more replay')} not PASS" if len(entries) > 1 else ""
    return f"{told(first)}: {why}{more}"


def _what_passed(entries: tuple[ReplayEntry, ...]) -> str:
    clean = sum(not entry.allowed and entry.whole is Verdict.PASS for entry in entries)
    parts = [f"{many(clean, 'replay')} clean"] if clean else []
    accepted = [entry for entry in entries if entry.allowed]
    if accepted:
        parts.append(f"{many(len(accepted), 'replay')} not clean, with {allowed_told(accepted)}")
    unclean = sum(entry.whole is not Verdict.PASS for entry in entries)
    if unclean:
        parts.append(f"{many(unclean, 'replay')} with findings outside the kernel under test")
    return f"{', '.join(parts)}; every tool caught its basic planted fault"


def allowed_told(entries: Iterable[ReplayEntry]) -> str:
    """Say what the allow-list accepted: ``1 finding allowed until 2027-01-31``."""
    own = tuple(entries)
    until = min((entry.allowed_until for entry in own if entry.allowed_until), default=None)
    count = many(sum(len(entry.allowed) for entry in own), "finding")
    return f"{count} allowed" + (f" until {until}" if until else "")


def many(count: int, noun: str) -> str:
    """Give a count with its noun: ``1 replay``, ``2 replays``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def told(entry: ReplayEntry) -> str:
    """Name one entry: ``racecheck, rank 0 layer 0 M 1, t8_c8``."""
    return replay_named(entry.tool, entry.label, entry.variant)


def replay_named(tool: str, label: str, variant: str | None) -> str:
    """Name one replay by its tool, its capture and its variant, as far as there are any."""
    return ", ".join(part for part in ("no tool" if tool == "none" else tool, label, variant) if part)


def report_document(report: SanitizeReport) -> dict[str, object]:
    """Return the report as plain data: enums by value, with the exit code beside the verdict."""
    plain: dict[str, object] = msgspec.to_builtins(report)
    return {**plain, "exit_code": report.exit_code}
