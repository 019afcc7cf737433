"""Runs without the tool that show which kernels a call launches, for calls whose plug-in cannot tell."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from fake_sanitizer import CAPTURE, EQUAL, TARGET, caught
from made_captures import make_capture
from test_verdict import TODAY, a_run

from alphamoe_profiler.verdicts import Verdict
from alphamoe_sanitizer_replays.replays import process as process_module
from alphamoe_sanitizer_replays.replays import witness as witness_module
from alphamoe_sanitizer_replays.replays.job import prepare_inputs
from alphamoe_sanitizer_replays.replays.process import refuse_tools, triton_launches
from alphamoe_sanitizer_replays.replays.witness import Witnesses, run_witness, witness_of
from alphamoe_sanitizer_replays.results import ReplayResult, Witness
from alphamoe_sanitizer_replays.verdicts.allow_list import AllowList
from alphamoe_sanitizer_replays.verdicts.judge import ToolVerdict, judge
from alphamoe_tracers.errors import UsageError

UNKNOWN = ReplayResult(status="launched", symbols=(TARGET,), launches=None, device="H200", caching_allocator=False)


def judged(
    witness: Witness | None, *, symbols: tuple[str, ...] = (TARGET,), seen: dict[str, int] | None = None
) -> ToolVerdict:
    run = a_run(result=msgspec.structs.replace(UNKNOWN, symbols=symbols, seen=seen), witness=witness)
    capture = msgspec.structs.replace(CAPTURE, plugin="callable", symbols=symbols)
    controls = caught("memcheck")
    return judge(run, capture=capture, output=EQUAL, controls=controls, allow=AllowList(), today=TODAY)


def test_what_a_run_without_the_tool_launched_proves_nothing_of_the_run_under_it() -> None:
    """A call may step aside under a slow tool; its full name counts as its base name all the same."""
    found = judged(Witness(kernels={f"void ns::{TARGET}<(int)4>(float*, int)": 2, "void fill(float*)": 1}))
    assert found.target is Verdict.INCONCLUSIVE
    assert found.reasons[0].startswith(f"the call launched {TARGET} without the tool, and nothing shows that it did")


def test_what_tritons_hook_tells_is_known_of_the_run_under_the_tool() -> None:
    """No word of another run is needed then; and where it told of the kernel without the tool alone, nothing ran."""
    witness = Witness(kernels={TARGET: 1}, seen={TARGET: 1})
    for other in (witness, None, Witness(problem="it ended by SIGSEGV")):
        found = judged(other, seen={TARGET: 1})
        assert (found.target, found.reasons) == (Verdict.PASS, ())
        assert found.notes == (f"seen under the tool by Triton's launch hook: {TARGET} (1 launched)",)
    for seen in (None, {}, {"fallback": 1}):
        gone = judged(witness, seen=seen)
        assert gone.target is Verdict.INCONCLUSIVE
        assert gone.reasons[0] == f"the call launched {TARGET} without the tool, and not under it"


def test_triton_tells_of_its_launches_only_while_it_is_asked() -> None:
    """Its exit hook speaks after a launch that succeeded; nothing of a kernel's author is called."""
    knobs = pytest.importorskip("triton.knobs")
    with triton_launches(load=False) as seen:
        knobs.runtime.launch_exit_hook(SimpleNamespace(data={"name": TARGET}))
    knobs.runtime.launch_exit_hook(SimpleNamespace(data={"name": TARGET}))
    assert seen == {TARGET: 1}


def test_triton_is_loaded_only_for_a_call_that_may_load_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that imports it when it is launched is followed all the same; a machine without it is no fault."""
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    with triton_launches(load=False) as seen:
        assert seen is None
    hooks: set[object] = set()
    made = ModuleType("triton.knobs")
    made.__dict__["runtime"] = SimpleNamespace(launch_exit_hook=hooks)

    def load(name: str) -> None:
        monkeypatch.setitem(sys.modules, name, made)

    monkeypatch.setattr(process_module.importlib, "import_module", load)
    with triton_launches(load=True) as seen:
        assert (seen, len(hooks)) == ({}, 1)
    assert not hooks
    monkeypatch.delitem(sys.modules, "triton.knobs")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(process_module.importlib, "import_module", missing)
    with triton_launches(load=True) as seen:
        assert seen is None


@pytest.mark.parametrize(
    ("witness", "told"),
    [
        (None, "nothing tells that moe_gemm was launched"),
        (Witness(problem="it ended by SIGSEGV"), "in a run without the tool: it ended by SIGSEGV"),
        (Witness(kernels={"void fill(float*)": 1}), "did not launch moe_gemm, it launched fill"),
        (Witness(kernels={"void moe_gemm_gptq(float*)": 1}), "did not launch moe_gemm, it launched moe_gemm_gptq"),
    ],
)
def test_a_call_that_was_not_seen_to_launch_the_target_proves_nothing(witness: Witness | None, told: str) -> None:
    """Not seen, seen in vain, and a namesake."""
    found = judged(witness)
    assert found.target is Verdict.INCONCLUSIVE
    assert told in found.reasons[0]


def test_a_capture_that_names_no_kernel_is_told_what_there_is() -> None:
    """The witness does not choose the kernel under test; it says what could be named."""
    found = judged(Witness(kernels={"void fill(float*)": 1}), symbols=())
    assert found.target is Verdict.INCONCLUSIVE
    assert "--symbol" in found.reasons[0]
    assert "it launched fill" in found.reasons[0]


def test_on_a_cpu_no_kernel_is_seen(tmp_path: Path) -> None:
    """The whole child runs, and says that there was nothing to see; its outputs are not kept."""
    inputs = prepare_inputs(make_capture(tmp_path / "captures"), tmp_path)
    seen = run_witness(inputs, tmp_path / "w", device="cpu", variant=None, source=None, timeout_s=60)
    assert seen == Witness(problem="the call started no kernel: on a CPU there is none to see")
    assert not list((tmp_path / "w").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (ReplayResult(status="failed", error="it broke", caching_allocator=False), "it broke"),
        (ReplayResult(status="launched", caching_allocator=False), "it was not watched"),
        (ReplayResult(status="launched", caching_allocator=False, witnessed={}, device="H200"), "saw none"),
    ],
)
def test_a_witness_run_that_saw_nothing_says_why(result: ReplayResult, told: str) -> None:
    """Failed, not watched, nothing started."""
    assert told in witness_of(result).problem


def test_a_witness_run_is_refused_under_a_tool() -> None:
    """Two subscribers make either of them blind."""
    refuse_tools({"PATH": "/bin"})
    for variable in ("NV_SANITIZER_INJECTION_PORT_BASE", "CUDA_INJECTION64_PATH"):
        with pytest.raises(UsageError, match=variable):
            refuse_tools({variable: "1"})


def test_all_tools_of_a_call_share_one_witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one process for a capture and variant, not one for each tool."""
    made: list[Path] = []

    def once(inputs: object, folder: Path, **_: object) -> Witness:
        made.append(folder)
        return Witness(kernels={TARGET: 1})

    monkeypatch.setattr(witness_module, "run_witness", once)
    inputs = prepare_inputs(make_capture(tmp_path / "captures", store_weights=True), tmp_path)
    witnesses = Witnesses()
    for variant in ("a", "a", "b"):
        witnesses.of(inputs, tmp_path / variant, device="cuda", variant=variant, source=None, timeout_s=1)
    assert made == [tmp_path / "a" / "witness", tmp_path / "b" / "witness"]
