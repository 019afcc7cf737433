"""Planted faults are parsed strictly: a control that silently does nothing would prove nothing."""

from __future__ import annotations

import pytest

from alphamoe_profiler.faults import Fault, parse_fault
from alphamoe_tracers.errors import UsageError


def test_a_fault_names_its_rank_and_phase_and_can_be_written_back() -> None:
    assert parse_fault("fallback:rank=2", 4) == Fault("fallback", 2, None)
    fault = parse_fault("kill:rank=1,phase=capture", 2)
    assert fault == Fault("kill", 1, "capture")
    assert fault.spec == "kill:rank=1,phase=capture"
    assert parse_fault("exception:rank=0", 1).phase == "decode"


def test_a_fault_strikes_its_rank_in_its_phase_only() -> None:
    fault = parse_fault("kill:rank=1,phase=load", 2)
    assert fault.strikes(1, "load")
    assert not fault.strikes(0, "load")
    assert not fault.strikes(1, "decode")
    assert not parse_fault("fallback:rank=1", 2).strikes(1, "decode")


@pytest.mark.parametrize(
    "spec",
    [
        "fallback",
        "fallback:rank=4",
        "fallback:rank=-1",
        "fallback:rank=02",
        "fallback:rank=1,phase=load",
        "kill:rank=1,phase=never",
        "melt:rank=0",
        "kill:rank=1,phase=load,rank=2",
        "",
    ],
)
def test_anything_else_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="--inject-fault"):
        parse_fault(spec, 4)
