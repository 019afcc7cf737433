"""What a sanitize session came to: the records that every report of it is written from. ``report.json`` is these."""

from __future__ import annotations

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

    @classmethod
    def of(cls, path: str, capture: Capture) -> CaptureFacts:
        """Take what a report repeats of a capture."""
        shared = {name: getattr(capture, name) for name in CapturedCall.__struct_fields__}
        return cls(path=path, capture_s=capture.wall_s, **shared)


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
    notes: tuple[str, ...] = ()
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
    log_file: str | None = None
    """Relative to the report."""
    xml_file: str | None = None


class SanitizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one session found."""

    schema: str = REPORT_SCHEMA
    verdict: Verdict
    reason: str
    """One line. Never empty."""
    scope: tuple[str, ...]
    """Sentences that a pull request can quote: one for each capture and variant."""
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
        first = failed[0]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return Verdict.FAIL, f"{told(first)}: {first.reasons[0] if first.reasons else 'a fault was found'}{more}"
    if trouble:
        return Verdict.INCONCLUSIVE, trouble
    if not entries and not expected:
        return Verdict.CONFIG_ERROR, "nothing was replayed"
    verdict = worst(entry.verdict for entry in entries) if entries else Verdict.INCONCLUSIVE
    open_entries = [entry for entry in entries if entry.verdict is not Verdict.PASS]
    if open_entries:
        first = next(entry for entry in open_entries if entry.verdict is verdict)
        more = f", and {len(open_entries) - 1} more" if len(open_entries) > 1 else ""
        return verdict, f"{told(first)}: {first.reasons[0] if first.reasons else 'nothing was proven'}{more}"
    if len(entries) < expected:
        return Verdict.INCONCLUSIVE, f"{expected - len(entries)} of {expected} replays were not made"
    tools = {entry.tool for entry in entries}
    if tools == {"none"}:
        # No tool looked, so nothing is known of races and memory.
        return Verdict.PASS, f"{len(entries)} replays without a tool gave the captured output; nothing else was asked"
    unclean = sum(entry.whole is not Verdict.PASS for entry in entries)
    other = f"; {unclean} of them not clean outside the kernel under test" if unclean else ""
    return Verdict.PASS, f"{len(entries)} replays clean, with the basic controls of every tool caught{other}"


def told(entry: ReplayEntry) -> str:
    """Name one entry: ``racecheck, rank 0 layer 0 M 1, t8_c8``."""
    return ", ".join(part for part in (entry.tool, entry.label, entry.variant) if part)


def report_document(report: SanitizeReport) -> dict[str, object]:
    """Return the report as plain data: enums by value, with the exit code beside the verdict."""
    plain: dict[str, object] = msgspec.to_builtins(report)
    return {**plain, "exit_code": report.exit_code}
