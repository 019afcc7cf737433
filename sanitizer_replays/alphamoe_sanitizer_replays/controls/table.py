"""Positive controls: planted faults that a tool must catch, in the same session, before its clean results count.

Each planted fault has a sound twin, which the tool must not flag. One basic fault more of each tool, the canary, is
compiled under the symbol of the kernel that the replays watch and must come through the same filter, past a decoy that
the filter must hold back. The kernels are in ``planted_faults.cu``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from alphamoe_sanitizer_replays.results import Tool

THREADS = 256
"""Of a block, for every control."""
BUFFER_FLOATS = 2048
"""Of each of the three buffers: output, input, never written."""
PLANTED, SOUND = "planted_", "sound_"

# A caught fault makes these terminate the context, and what would come next in the process never runs.
_STOPPING: frozenset[Tool] = frozenset({"memcheck", "synccheck"})


@dataclass(frozen=True)
class Control:
    """One planted fault and its sound twin, and how both are launched."""

    name: str
    mechanism: str
    meant_for: tuple[Tool, ...]
    """Tools that claim to find such faults."""
    blocks: int = 1
    cluster: int = 1
    dynamic_smem_bytes: int = 0
    fatal: bool = False
    """The hardware loses the context when no tool stops the fault."""

    def alone(self, tool: Tool) -> bool:
        """Say whether the planted fault needs a process of its own under a tool."""
        return self.fatal or tool in _STOPPING


_SMEM = THREADS * 4
CONTROLS: tuple[Control, ...] = (
    Control("block_barrier", "block barrier", ("racecheck",)),
    Control("divergent_barrier", "block barrier", ("synccheck",)),
    Control("warp_sync", "warp sync", ("racecheck",)),
    Control("warp_mask", "warp sync", ("synccheck",)),
    Control("cp_async", "cp.async group", ("racecheck",)),
    Control("cp_async_barrier", "cp.async group", ("racecheck",)),
    Control("ldmatrix", "ldmatrix/stmatrix", ("racecheck",)),
    Control("stmatrix", "ldmatrix/stmatrix", ("racecheck",)),
    Control("stmatrix_warp", "stmatrix in a warp", ("racecheck",)),
    Control("bulk_copy", "mbarrier and bulk copy (TMA)", ("racecheck",)),
    Control("mbarrier_use", "mbarrier and bulk copy (TMA)", ("synccheck",), fatal=True),
    Control("cluster_memory", "distributed shared memory", ("racecheck",), blocks=2, cluster=2),
    Control("cluster_split", "cluster barrier", ("racecheck",), blocks=2, cluster=2),
    Control("cluster_exit", "CTA exit in a cluster", ("memcheck", "synccheck"), blocks=2, cluster=2, fatal=True),
    Control("warpgroup_barrier", "wgmma (async proxy)", ("racecheck",)),
    Control("warpgroup_fence", "wgmma (async proxy)", ("racecheck",)),
    Control("warpgroup_wait", "wgmma (async proxy)", ("racecheck",)),
    Control("global_race", "global race between blocks", ("racecheck",), blocks=2),
    Control("global_write", "global bounds", ("memcheck",)),
    Control("global_copy", "global bounds", ("memcheck",)),
    Control("global_reduction", "global bounds", ("memcheck",)),
    Control("shared_write", "shared bounds", ("memcheck",), dynamic_smem_bytes=_SMEM, fatal=True),
    Control("plain_read", "uninitialised global", ("initcheck",)),
    Control("copied_read", "uninitialised global", ("initcheck",)),
    Control("reduced_read", "uninitialised global", ("initcheck",)),
    Control("shared_read", "uninitialised shared", ("initcheck",), dynamic_smem_bytes=_SMEM),
)
BY_NAME: Mapping[str, Control] = {control.name: control for control in CONTROLS}

CANARIES: Mapping[Tool, tuple[str, str]] = {
    "synccheck": ("divergent_barrier", "warp_mask"),
    "racecheck": ("block_barrier", "ldmatrix"),
    "memcheck": ("global_write", "global_copy"),
    "initcheck": ("plain_read", "copied_read"),
}
"""For each tool its basic control, which is the canary's fault, and the decoy. The order gives CANARY of the source."""


@dataclass(frozen=True)
class ControlJob:
    """One process of controls under one tool."""

    tool: Tool
    name: str
    """Of its folder: ``planted``, ``planted_shared_write``, ``sound``, ``canary_0``."""
    kernels: tuple[str, ...]
    """Launched in this order, each once."""
    symbols: tuple[str, ...]
    """What the tool's filter is given."""
    canary: str | None = None
    """Symbol that the tool's canary is compiled under."""


def control_jobs(tool: Tool, targets: tuple[str, ...]) -> tuple[ControlJob, ...]:
    """Plan the control processes of one tool.

    Args:
        tool: the tool.
        targets: every symbol that the session's replays watch, each once.
    """
    meant = [control for control in CONTROLS if tool in control.meant_for]
    together = tuple(PLANTED + control.name for control in meant if not control.alone(tool))
    jobs = [ControlJob(tool, "planted", together, (PLANTED,))] if together else []
    for control in meant:
        if control.alone(tool):
            own = PLANTED + control.name
            jobs.append(ControlJob(tool, own, (own,), (PLANTED,)))
    jobs.append(ControlJob(tool, "sound", tuple(SOUND + control.name for control in CONTROLS), (SOUND,)))
    decoy = PLANTED + CANARIES[tool][1]
    for number, symbol in enumerate(targets):
        if is_identifier(symbol):
            # The decoy first: a canary that is caught may end the context.
            jobs.append(ControlJob(tool, f"canary_{number}", (decoy, symbol), (symbol,), symbol))
    return tuple(jobs)


def is_identifier(symbol: str) -> bool:
    """Say whether a kernel can be compiled under exactly this symbol."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", symbol, re.ASCII) is not None
