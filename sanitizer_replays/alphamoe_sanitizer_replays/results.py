"""What a replay and a tool found: plain records, written as JSON, judged by what lies in ``verdicts``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from alphamoe_tracers.errors import EvidenceError

Tool = Literal["memcheck", "racecheck", "synccheck", "initcheck"]
TOOLS: tuple[Tool, ...] = ("synccheck", "racecheck", "memcheck", "initcheck")

Severity = Literal["error", "warning", "info"]
FindingKind = Literal["hazard", "memory", "uninitialized", "synchronization", "api", "leak", "internal", "other"]
Position = tuple[int, int, int]


class Access(msgspec.Struct, frozen=True):
    """One place in the code that a finding names."""

    function: str
    """As the tool printed it; with line information this is the inlined device function, not the kernel."""
    file: str | None = None
    line: int | None = None
    offset: str | None = None
    """Of the instruction, ``+0xa0``."""
    access: str | None = None
    """``Read`` or ``Write``, where the tool says so."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding, or many that differ in nothing but thread, block and address."""

    tool: Tool
    severity: Severity
    kind: FindingKind
    """``api``: a host call failed; not a fault of a kernel. ``internal``: the tool itself failed."""
    text: str
    """The tool's own first line without severity and prefix."""
    hazard: str | None = None
    """``RAW``, ``WAR``, ``WAW`` where it can be told; ``RAW/WAR`` for a write and a read in unknown order."""
    kernel: str | None = None
    """Base name of the kernel (outermost device frame), null where the tool names only inlined functions."""
    kernel_truncated: bool = False
    """The tool cut the name (``...``)."""
    where: Access | None = None
    other: Access | None = None
    """The second access of a hazard."""
    thread: Position | None = None
    other_thread: Position | None = None
    """The thread of the second access, where the tool names it (racecheck's report of single hazards)."""
    block: Position | None = None
    cluster_rank: int | None = None
    """``block rank`` of the tool: a CTA of a cluster, never a tensor-parallel rank."""
    address: str | None = None
    api: str | None = None
    shown: int = 1
    """Blocks of the log that were folded into this one."""
    count: int = 1
    """Occurrences that the tool counted in them (racecheck: ``[1024 hazards]``)."""
    in_target: bool | None = None
    """Whether it is of the kernel under test; null where neither name nor filter tells."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One summary line of the tool; one is due for each process."""

    errors: int
    warnings: int = 0
    infos: int = 0
    hazards: int | None = None
    """racecheck's own number, in its own unit."""


class ToolLog(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one log says."""

    tool: Tool
    banner: bool
    """The tool's first line was there."""
    summaries: tuple[Summary, ...]
    findings: tuple[Finding, ...]
    not_printed: int = 0
    """Findings that the tool counted but did not print, by its own word."""
    notices: tuple[str, ...] = ()
    """Lines of the tool that are no finding: the target failed, ended before the first call, the tool failed, ..."""
    cut: bool = False
    """The log ends inside a block or was truncated."""

    @property
    def found_errors(self) -> int:
        """Errors by the summaries."""
        return sum(summary.errors for summary in self.summaries)

    @property
    def found_warnings(self) -> int:
        """Warnings by the summaries."""
        return sum(summary.warnings for summary in self.summaries)

    @property
    def found_infos(self) -> int:
        """Infos by the summaries."""
        return sum(summary.infos for summary in self.summaries)

    @property
    def shown(self) -> int:
        """Blocks that were printed, API errors included."""
        return sum(finding.shown for finding in self.findings)


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the replay process itself says, written when it ends. Absent when it died."""

    status: Literal["launched", "failed"]
    error: str | None = None
    """One line, with the way out where there is one. For ``failed``."""
    symbols: tuple[str, ...] = ()
    """Kernels that the plug-in launched."""
    launches: int | None = 0
    """Of those kernels; null where the plug-in cannot know."""
    variant: str | None = None
    """The variant that was launched, where the kernel has several."""
    source_sha256: str | None = None
    cubin_sha256: str | None = None
    device: str | None = None
    caching_allocator: bool
    """Whether torch's caching allocator was on: it hides out-of-bounds accesses from memcheck."""
    collector: Literal["off", "torch.profiler"] = "off"
    """The tool is itself a CUPTI subscriber; only a witness run, which has no tool around it, starts another."""
    witnessed: dict[str, int] | None = None
    """Kernels that one launch started, full names with their counts. Null where this was no witness run."""
    seen: dict[str, int] | None = None
    """Kernels that the process itself saw itself launch, with their counts, by a hook that is no collector: Triton's
    own. Null where nothing looked; others than Triton's kernels are never in it."""
    timings_s: dict[str, float] = {}
    """``process_start`` (spawn to first line of Python), ``imports``, ``compile``, ``upload``, ``launch``,
    ``download``."""
    kernel_us: tuple[float, ...] = ()
    """Device times of repeated launches without a tool, microseconds."""
    cpu_us: tuple[float, ...] = ()
    """Wall times of repeated calls where the replay ran on a CPU, microseconds. No kernel's."""
    outputs: str | None = None
    """safetensors file of the outputs, relative to the result."""


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """What one launch of a call started in a run without a tool, for calls whose plug-in cannot tell."""

    kernels: dict[str, int] = {}
    """Full names with their counts."""
    seen: dict[str, int] = {}
    """Those that Triton's launch hook told as well, as it can under a tool."""
    problem: str = ""
    """Why nothing was seen. One line."""


class OutputCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a replay's output is that of the capture, within the kernel's own tolerance."""

    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    reason: str = ""
    max_abs_error: float | None = None
    relative_error: float | None = None
    tolerance: str = ""
    """One phrase: what was compared with what."""


class ToolRun(msgspec.Struct, frozen=True, kw_only=True):
    """One process under one tool, from its command line to its logs."""

    tool: Tool | Literal["none"]
    tool_path: str | None
    tool_version: str | None
    argv: tuple[str, ...]
    error_exitcode: int | None
    exit_code: int | None
    """Null when it was killed."""
    signal: str | None = None
    """What ended it, where that was not our own doing."""
    timed_out: bool = False
    timeout_s: float
    wall_s: float
    log_file: str | None
    """Relative to the report; what the tool printed, also when it was killed."""
    xml_file: str | None = None
    log: ToolLog | None
    """Null for ``none`` and where nothing could be started."""
    xml_records: int | None = None
    """Records in the XML file; must agree with what the log shows."""
    xml_findings: tuple[Finding, ...] = ()
    """What the XML file holds, kept only where the number of its records is not that of the log."""
    symbols: tuple[str, ...] = ()
    """The filter: the tool watched only kernels whose names hold one of these. Empty: it watched every kernel."""
    variant: str | None = None
    """That the replay was asked to launch; null for the plug-in's own choice, and where the kernel has none."""
    result: ReplayResult | None = None
    witness: Witness | None = None
    """Of the same call, seen without the tool; null where the replay itself says what it launched."""
    problems: tuple[str, ...] = ()
    """Why this run can prove nothing, one sentence each: unknown option, tool missing, log unreadable."""


class ControlOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one tool made of one planted fault and of its sound twin."""

    control: str
    """Name of the planted fault: ``block_barrier``, ``global_write``, ..."""
    mechanism: str
    """The synchronisation mechanism or kind of access that the fault breaks: ``block barrier``, ``global bounds``."""
    tool: Tool
    meant_for: bool
    """The tool claims to find faults of this kind, so a miss is a gap in its coverage."""
    basic: bool
    """The tool must catch it before anything that it calls clean counts."""
    caught: bool
    """The planted fault was reported, and in the control's own kernel."""
    sound_clean: bool
    """The sound twin ran to its end with a summary of nothing."""
    reason: str = ""
    """Why it was not caught or the twin not clean. One line."""


class ControlReport(msgspec.Struct, frozen=True, kw_only=True):
    """All controls of one tool in one session."""

    tool: Tool
    outcomes: tuple[ControlOutcome, ...]
    device: str | None = None
    """The GPU by the control processes' own word; null where none says it."""
    problems: tuple[str, ...] = ()
    """Why the controls as a whole prove nothing, one sentence each: nothing was compiled, the tool did not start."""

    @property
    def basic_caught(self) -> bool:
        """Whether there are basic controls, each was caught, no sound twin was flagged, and nothing else went wrong."""
        basic = [outcome for outcome in self.outcomes if outcome.basic]
        return (
            bool(basic)
            and not self.problems
            and all(outcome.caught for outcome in basic)
            and all(outcome.sound_clean for outcome in self.outcomes)
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Mechanisms with a control that this tool was meant to catch and did not, in the order of the controls."""
        missed = (outcome.mechanism for outcome in self.outcomes if outcome.meant_for and not outcome.caught)
        return tuple(dict.fromkeys(missed))


def read_result(path: Path) -> ReplayResult | None:
    """Read what a replay process said when it ended; null where it died before that.

    Raises:
        EvidenceError: the file is there and cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise EvidenceError(f"{path}: the replay's result cannot be read: {error}") from error
