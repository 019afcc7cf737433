"""Outputs of other people's calls: what is compared, by which scale, and what proves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alphamoe_sanitizer_replays.captures.records import Capture, GeometryRecord, TensorInfo
from alphamoe_sanitizer_replays.captures.store import StoredCapture
from alphamoe_sanitizer_replays.plugins.callable_call import CallableCall
from alphamoe_sanitizer_replays.results import OutputCheck
from alphamoe_tracers.errors import EvidenceError


class Held(StoredCapture):
    """A capture whose outputs lie in memory."""

    held: Mapping[str, Tensor]

    def load(self, name: str) -> Tensor:
        return self.held[name]


def compared(captured: list[Tensor], replayed: list[Tensor]) -> OutputCheck:
    outputs = {f"result.{number}": tensor for number, tensor in enumerate(captured)}
    fields: dict[str, Any] = dict.fromkeys(("run_id", "gpu_name", "compute_capability"))
    infos = tuple(
        TensorInfo(name, "output", str(tensor.dtype)[6:], tuple(tensor.shape), "0" * 64, None)
        for name, tensor in outputs.items()
    )
    capture = Capture(
        plugin="callable", symbols=(), rank=0, rank_source="none", M=1, tensors=infos, versions={}, created="", **fields
    )
    stored = Held(Path(), capture, "")
    object.__setattr__(stored, "held", outputs)
    return CallableCall().check(stored, {}, dict(zip(outputs, replayed, strict=True)))


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ({"M": 4096}, "M 4096 is no size"),
        ({"layer": 47}, "a layer is claimed"),
        ({"geometry": GeometryRecord(512, 2048, 128, 10, 8)}, "a geometry is claimed"),
    ],
)
def test_a_capture_of_a_call_claims_no_more_than_its_tensors_hold(claim: dict[str, Any], told: str) -> None:
    """A report's sentence is of these labels."""
    info = TensorInfo("args.0", "input", "float32", (4, 64), "0" * 64, None)
    fields: dict[str, Any] = dict.fromkeys(("run_id", "gpu_name", "compute_capability"))
    fields |= {"plugin": "callable", "symbols": (), "rank": 0, "rank_source": "none", "M": 4, "tensors": (info,)}
    fields |= {"versions": {}, "created": "", "callable": "module:function"}
    CallableCall().validate(StoredCapture(Path(), Capture(**fields), ""))
    with pytest.raises(EvidenceError, match=told):
        CallableCall().validate(StoredCapture(Path(), Capture(**(fields | claim)), ""))


def noise(seed: int) -> Tensor:
    return torch.randn((4, 64), generator=torch.Generator().manual_seed(seed))


NAN = torch.full((3,), torch.nan)


@pytest.mark.parametrize(
    ("captured", "told"),
    [
        ([NAN], "no finite element"),
        ([noise(0), NAN], "no finite element"),
        ([torch.empty((0, 4))], "every output is empty"),
        ([], "gave and changed no tensor"),
    ],
)
def test_where_nothing_finite_was_compared_nothing_is_proven(captured: list[Tensor], told: str) -> None:
    """NaN is equal to NaN and nothing to nothing, which says nothing of a kernel."""
    found = compared(captured, [tensor.clone() for tensor in captured])
    assert found.verdict == "INCONCLUSIVE"
    assert told in found.reason


def test_an_empty_output_beside_a_real_one_is_no_obstacle() -> None:
    """What there is was compared."""
    assert compared([torch.empty(0), noise(0)], [torch.empty(0), noise(0)]).verdict == "PASS"


def test_one_huge_element_does_not_make_the_tolerance_of_the_others() -> None:
    """Neither those of its row nor those of other rows may be anything beside it."""
    captured, elsewhere, beside = noise(0), noise(0), noise(0)
    captured[0, 0] = elsewhere[0, 0] = beside[0, 0] = 1e30
    elsewhere[3, 5] += 0.1
    beside[0, 5] += 0.1
    assert compared([captured], [captured.clone()]).verdict == "PASS"
    assert compared([captured], [elsewhere]).verdict == "FAIL"
    assert compared([captured], [beside]).verdict == "FAIL"


def test_the_last_bit_of_every_element_is_allowed_and_more_is_not() -> None:
    """An element is held against its own magnitude where that is greater than its row's RMS."""
    captured = noise(1).to(torch.bfloat16)
    next_up = (captured.view(torch.int16) + 1).view(torch.bfloat16)
    found = compared([captured], [next_up])
    assert found.verdict == "PASS"
    assert "row's RMS: result.0 0.016" in found.tolerance
    assert compared([captured], [captured * 1.05]).verdict == "FAIL"


def test_nan_must_lie_in_the_same_places() -> None:
    """Elsewhere the two differ, whatever the finite elements do."""
    one = torch.tensor([1.0, torch.nan, 2.0])
    assert compared([one], [one.clone()]).verdict == "PASS"
    assert compared([one], [torch.tensor([torch.nan, 1.0, 2.0])]).verdict == "FAIL"
    assert compared([one], [torch.tensor([1.0, torch.inf, 2.0])]).verdict == "FAIL"
