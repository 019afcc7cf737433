"""One finding in one line that a reader understands at once, and the allow-list entry that would accept it."""

from __future__ import annotations

import datetime
import json

from alphamoe_sanitizer_replays.results import Access, Finding
from alphamoe_tracers.symbols import base_name

ALLOWED_DAYS = 90
"""For which a proposed entry of an allow-list would hold."""


def finding_line(finding: Finding) -> str:
    """Say one finding: ``Write block_barrier planted_faults.cu:20 races with Read planted_faults.cu:22 (1,024 times)``.

    Functions are told by their base names; severity only where it is not ``error``.
    """
    first, second = finding.where, finding.other
    if finding.kind == "hazard" and first is not None and second is not None:
        told = f"{_place(first)} races with {_place(second, first)}"
        hazard = f", {finding.hazard}" if finding.hazard else ""
    else:
        told = finding.text if first is None else f"{finding.text.rstrip('.')} at {_place(first)}"
        told += f" and at {_place(second, first)}" if second is not None else ""
        hazard = f" ({finding.hazard})" if finding.hazard and f"{finding.hazard} " not in finding.text else ""
    named = first is not None and finding.kernel == base_name(first.function)
    kernel = f" in {finding.kernel}{'...' if finding.kernel_truncated else ''}" if finding.kernel and not named else ""
    return f"{told}{hazard}{kernel}{_example(finding)}{_times(finding)}{_severity(finding)}"


def allow_block(finding: Finding, tool_version: str | None, today: datetime.date) -> str:
    """Write the ``[[allow]]`` table that would accept a finding once somebody gives it a reason.

    Args:
        finding: what is to be accepted.
        tool_version: of the tool that found it.
        today: the first day.

    The finding must be one that an entry could cover (:func:`acceptable`).
    """
    version = ".".join((tool_version or "0.0").split(".")[:2])
    fields: dict[str, str | int] = {
        "symbol": _symbol(finding) or "",
        "hazard": finding.hazard or finding.kind,
        "tool": finding.tool,
        "tool_versions": f"{version}..{version}",
    }
    if finding.where is not None and finding.where.file:
        fields["file"] = finding.where.file
        if finding.where.line is not None:
            fields["line"] = finding.where.line
    # JSON's strings and numbers are TOML's. An empty reason is refused: whoever accepts must say why.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    expires = today + datetime.timedelta(days=ALLOWED_DAYS)
    return "\n".join(["[[allow]]", *lines, 'reason = ""', f"expires = {expires.isoformat()}"])


def acceptable(finding: Finding) -> bool:
    """Say whether an entry of an allow-list could cover a finding: one of device code, and of one symbol."""
    return finding.kind not in ("api", "internal", "leak") and _symbol(finding) is not None


def _symbol(finding: Finding) -> str | None:
    """Give what an entry must name: the kernel, or the function that both accesses are in."""
    names = {base_name(access.function) for access in (finding.where, finding.other) if access is not None}
    return finding.kernel or (names.pop() if len(names) == 1 else None)


def _place(access: Access, first: Access | None = None) -> str:
    """Say where: with what it repeats of the access before it left out."""
    name = base_name(access.function)
    parts = [access.access or "", "" if first is not None and name == base_name(first.function) else name]
    if access.file and access.line is not None:
        parts.append(f"{access.file}:{access.line}")
    elif access.offset:
        parts.append(access.offset)
    return " ".join(part for part in parts if part)


def _example(finding: Finding) -> str:
    """Say thread (of both accesses where it is known), block and address: of the first of those that were folded."""
    both = f" and thread {_position(finding.other_thread)}" if finding.other_thread is not None else ""
    parts = [f"thread {_position(finding.thread)}{both}"] if finding.thread is not None else []
    parts += [f"block {_position(finding.block)}"] if finding.block is not None else []
    parts += [f"CTA {finding.cluster_rank} of its cluster"] if finding.cluster_rank is not None else []
    parts += [f"address {finding.address}"] if finding.address else []
    first = "first " if finding.shown > 1 else ""
    return f", {first}{', '.join(parts)}" if parts else ""


def _position(position: tuple[int, int, int]) -> str:
    return f"({', '.join(map(str, position))})"


def _times(finding: Finding) -> str:
    times = max(finding.count, finding.shown)
    return f" ({times:,} times)" if times > 1 else ""


def _severity(finding: Finding) -> str:
    return "" if finding.severity == "error" else f" [{finding.severity}]"
