"""Negative controls: faults that a user plants to see that the evidence, and the launcher, notice them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from alphamoe_tracers.errors import UsageError

FaultKind = Literal["fallback", "kill", "exception", "disk-full"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
PHASES = ("start_up", "load", "warm_up", "capture", "prefill", "decode", "collection")
"""Phases of a rank, in order. A fault other than ``fallback`` strikes when the rank enters one."""

EXAMPLES = "fallback:rank=2, kill:rank=1,phase=decode, exception:rank=0,phase=load, disk-full:rank=0,phase=decode"
_SPEC = re.compile(r"(?P<kind>[a-z-]+):rank=(?P<rank>0|[1-9][0-9]{0,5})(?:,phase=(?P<phase>[a-z_]+))?\Z")


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    ``fallback`` makes the rank dispatch the stock experts instead of the chosen backend, silently. ``kill`` ends the
    rank with SIGKILL, ``exception`` raises in it and ``disk-full`` makes every write of it fail from that phase on.
    """

    kind: FaultKind
    rank: int
    phase: str | None

    @property
    def spec(self) -> str:
        """The fault as it is written on the command line."""
        return f"{self.kind}:rank={self.rank}" + (f",phase={self.phase}" if self.phase else "")

    def strikes(self, rank: int, phase: str) -> bool:
        """Say whether the fault strikes this rank on entering this phase."""
        return self.kind != "fallback" and self.rank == rank and self.phase == phase


def parse_fault(spec: str, world_size: int) -> Fault:
    """Parse ``KIND:rank=R[,phase=P]``.

    Raises:
        UsageError: another form, an unknown kind or phase, a rank outside the run, or a phase where none belongs.
    """
    match = _SPEC.match(spec)
    if match is None:
        raise UsageError(f"--inject-fault {spec!r} is not KIND:rank=R[,phase=P]", f"for example {EXAMPLES}")
    kind, rank, phase = match["kind"], int(match["rank"]), match["phase"]
    if kind not in KINDS:
        raise UsageError(f"--inject-fault knows no {kind!r}", f"it knows {', '.join(KINDS)}")
    if rank >= world_size:
        raise UsageError(f"--inject-fault names rank {rank}, but the ranks are 0 to {world_size - 1}")
    if kind == "fallback":
        if phase is not None:
            raise UsageError("--inject-fault fallback takes no phase", "it holds for the whole run: fallback:rank=2")
    elif phase is None:
        phase = "decode"
    elif phase not in PHASES:
        raise UsageError(f"--inject-fault knows no phase {phase!r}", f"the phases are {', '.join(PHASES)}")
    known: dict[str, FaultKind] = {name: name for name in KINDS}
    return Fault(known[kind], rank, phase)
