"""The words of compute-sanitizer: one block of its text log becomes one :class:`Finding`.

A block is a head line and the indented lines under it. The shapes below were read from recordings of version 2025.3 on
an H200 (``tests/data/sanitizer``) and from public reports of others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from alphamoe_sanitizer_replays.results import Access, Finding, FindingKind, Position, Severity, Tool
from alphamoe_tracers.symbols import base_name, demangle, triton_base

MAX_TEXT = 2_000
"""Characters of a name or line that a report keeps."""

KIND_OF_TOOL: dict[Tool, FindingKind] = {
    "memcheck": "memory",
    "racecheck": "hazard",
    "synccheck": "synchronization",
    "initcheck": "uninitialized",
}
# Order matters: the first that the head begins with wins. These are findings even where nothing follows the head.
_HEADS: tuple[tuple[str, FindingKind | None], ...] = (
    ("Program hit ", "api"),
    ("Host API memory access error", None),
    ("Race reported between ", "hazard"),
    ("Potential ", "hazard"),
    ("Barrier error detected", "synchronization"),
    ("Uninitialized ", "uninitialized"),
    ("Invalid ", "memory"),
    ("Misaligned ", "memory"),
    ("Out-of-range ", "memory"),
    ("Leaked ", "leak"),
    ("Internal Sanitizer Error", "internal"),  # the tool counts it in its summary
)
_SEVERITY = re.compile(r"(Error|Warning|Info|ERROR|WARNING|WARN|ERR|INFO)\s*:\s*")
_GROUP = re.compile(r"\([A-Za-z ]+\)\s+")  # "(Warp Level Programming) Potential RAW hazard ..."
_SEVERITIES: dict[str, Severity] = {"e": "error", "w": "warning", "i": "info"}
_API = re.compile(r"on CUDA API call to (\w+)")
_TAIL = re.compile(r"([0-9a-fA-F]+)(?: in (.+):(\d+))?")
_OFFSET_FIRST = re.compile(r"(0x[0-9a-fA-F]+) in (?:([^:\s]+):(\d+):)?(.+)")
_THREAD = re.compile(r"[Tt]hread \((\d+), ?(\d+), ?(\d+)\)")
_BLOCK = re.compile(r"in block \((\d+), ?(\d+), ?(\d+)\)")
_CLUSTER_RANK = re.compile(r"\(?block rank (\d+)\)?")
_ADDRESS = re.compile(
    r"(?:Address|Access to|access to|shared address|at __shared__|Leaked \d+ bytes at) (0x[0-9a-fA-F]+)"
)
_HAZARD_COUNT = re.compile(r"\[(\d+) hazards?\]$")
_ACCESS = re.compile(r"(Read|Write|Atomic|Read/Write) access at ")
_HAZARD_THREAD = re.compile(r"(Read|Write|Atomic) Thread \(\d+, ?\d+, ?\d+\)(?: \(block rank \d+\))? at ")
_HAZARD_TYPE = re.compile(r"\b(RAW|WAR|WAW) hazard")
_HOST_ACCESS = re.compile(r"on access by (\w+)")
_CLONE = re.compile(r"_?[.$]")
"""What a compiler puts between a function's name and its own mark: ``moe_gemm.constprop.0``, ``moe_gemm_$_isra``."""
_FRAME = "Device Frame:"


def finding_of(tool: Tool, lines: Sequence[str], target: tuple[str, ...], filtered: bool) -> Finding | None:
    """Read one block.

    Args:
        tool: whose log it is.
        lines: head line and indented lines, without prefix and without indentation.
        target: base names of the kernels under test.
        filtered: the tool was told to watch only those.

    Returns:
        The finding, or None for a head that is no known finding and has nothing under it that places it in code.
    """
    severity, head = split_severity(lines[0])
    kind = _kind(tool, head, lines[1:])
    if kind is None:
        return None
    host_access = head.startswith("Host API memory access error")
    accesses, count = _accesses(head, lines[1:])
    frames = [line.removeprefix(_FRAME).strip() for line in lines[1:] if line.startswith(_FRAME)]
    text = "\n".join(lines)
    kernel = _kernel(tool, accesses, frames, target)
    api = _API.search(head) or (_HOST_ACCESS.search(text) if host_access else None)
    rank = _CLUSTER_RANK.search(text)
    hazard = _HAZARD_TYPE.search(head)
    address = _ADDRESS.search(text)
    return Finding(
        tool=tool,
        severity=severity,
        kind=kind,
        text=head[:MAX_TEXT],
        hazard=hazard[1] if hazard else hazard_of(accesses),
        kernel=None if kernel is None else base_name(demangle(kernel)),
        kernel_truncated=any("..." in name or "…" in name for name in [*frames, *(a.function for a in accesses)]),
        where=accesses[0] if accesses else None,
        other=accesses[1] if len(accesses) > 1 else None,
        thread=_position(_THREAD, text),
        other_thread=_other_thread(text) if len(accesses) > 1 else None,
        block=_position(_BLOCK, text),
        cluster_rank=int(rank[1][:9]) if rank else None,
        address=address[1] if address else None,
        api=api[1] if api else None,
        count=count,
        in_target=False if host_access else in_target(kind, kernel, accesses, target, filtered),
    )


def split_severity(head: str) -> tuple[Severity, str]:
    """Take ``Error:`` or ``Warning:`` off a head line; a head without either is an error."""
    match = _SEVERITY.match(head)
    if match is None:
        return "error", head
    return _SEVERITIES[match[1][0].lower()], _GROUP.sub("", head[match.end() :], count=1)


def in_target(
    kind: FindingKind, kernel: str | None, accesses: Sequence[Access], target: tuple[str, ...], filtered: bool
) -> bool | None:
    """Say whether a finding is of the kernel under test; None where neither name nor filter tells.

    Another kernel's is a finding only in a run that watched every kernel, and only where it names one that holds no
    symbol of the target. Under a filter the watched kernels alone can have findings, so one whose name is missing, cut
    or not understood is the target's. Where it names a kernel that the filter cannot have let through, one of the two
    is wrong, and nothing is known. Nor is anything known where no kernel is known to be under test.
    """
    if kind in ("api", "leak"):
        return False
    if kind == "internal" or not target:
        return None
    if kernel is None:
        return True if filtered or any(names_target(access.function, target) for access in accesses) else None
    same = names_target(kernel, target)
    if filtered:
        return None if same is False else True
    return same


def names_target(name: str, target: tuple[str, ...]) -> bool | None:
    """Say whether a kernel's name in any form is one of the target's.

    None for a name that was cut too early to tell, and for one that holds a symbol inside a longer name: a namesake
    (``moe_gemm_gptq``), or the symbol in a decoration that nobody here knows (``__nv_static_12__moe_gemm``).
    """
    base = base_name(demangle(name))
    if not {base, triton_base(base), _CLONE.split(base, maxsplit=1)[0]}.isdisjoint(target):
        return True
    if any(symbol in base for symbol in target):
        return None
    for mark in ("...", "…"):
        if mark in base:  # an ellipsis inside the template arguments leaves the base name whole
            stem = base[: base.index(mark)].rstrip()
            return None if stem.startswith("_Z") or any(symbol.startswith(stem) for symbol in target) else False
    return False


def hazard_of(accesses: Sequence[Access]) -> str | None:
    """Name the hazard of the accesses that race: the first, and each that races with it.

    racecheck's analysis names accesses and cannot order them, so a write and a read are ``RAW/WAR``. None where an
    access is of another kind, or where the pairs are not all of one kind.
    """
    pairs = [{accesses[0].access, other.access} for other in accesses[1:]]
    kinds = {"WAW": {"Write"}, "RAW/WAR": {"Read", "Write"}}
    return next((hazard for hazard, kind in kinds.items() if pairs and all(pair == kind for pair in pairs)), None)


def read_location(text: str) -> Access:
    """Read where an access is: ``FUNCTION+0xOFFSET in FILE:LINE``, as far as it is there."""
    text = text.strip()[: 4 * MAX_TEXT]
    function, plus, tail = text.rpartition("+0x")
    match = _TAIL.fullmatch(tail) if plus else None
    if match is not None:
        return _access(function, match[2], match[3], f"+0x{match[1]}")
    older = _OFFSET_FIRST.fullmatch(text)
    if older is not None:
        return _access(older[4], older[2], older[3], f"+{older[1]}")
    return _access(text, None, None, None)


def _access(function: str, file: str | None, line: str | None, offset: str | None) -> Access:
    name = None if file is None else file.rsplit("/", 1)[-1][:MAX_TEXT]
    return Access(function=function[:MAX_TEXT], file=name, line=None if line is None else int(line[:9]), offset=offset)


def _kind(tool: Tool, head: str, under: Sequence[str]) -> FindingKind | None:
    for start, kind in _HEADS:
        if head.startswith(start):
            return kind or KIND_OF_TOOL[tool]
    # A head of another version: anything that the tool places in device code is a finding.
    placed = any(line.startswith(("at ", "by thread ", _FRAME)) for line in under)
    return "other" if placed else None


def _accesses(head: str, under: Sequence[str]) -> tuple[list[Access], int]:
    """Read the places that a block names, and how many hazards the tool counted in it."""
    found: list[Access] = []
    count = 0
    for line in (head, *under):
        text = line.rstrip()
        hazards = _HAZARD_COUNT.search(text)
        if hazards:
            count += int(hazards[1][:15])
            text = text[: hazards.start()].rstrip()
        match = _ACCESS.search(text) or _HAZARD_THREAD.match(text)
        if match is not None:
            place = read_location(text[match.end() :])
            found.append(Access(place.function, place.file, place.line, place.offset, match[1]))
        elif text.startswith("at ") and not found:
            found.append(read_location(text[3:]))
    return found, count or 1


def _kernel(tool: Tool, accesses: Sequence[Access], frames: Sequence[str], target: tuple[str, ...]) -> str | None:
    """Give the full name of the kernel: the outermost device frame, else the function that has no frame around it.

    racecheck's analysis names the inlined functions alone, without frames.
    """
    if frames:
        return read_location(frames[-1]).function
    if tool == "racecheck":
        return next((access.function for access in accesses if names_target(access.function, target)), None)
    return accesses[0].function if accesses else None


def _other_thread(text: str) -> Position | None:
    threads = list(_THREAD.finditer(text))
    return _position(_THREAD, threads[1][0]) if len(threads) > 1 else None


def _position(pattern: re.Pattern[str], text: str) -> Position | None:
    match = pattern.search(text)
    return None if match is None else (int(match[1][:9]), int(match[2][:9]), int(match[3][:9]))
