"""On a Hopper GPU with compute-sanitizer: the fused kernel is clean under every tool, and every tool catches a mutant.

sanitizer_check.py is the long form. The inputs are made here; captures of real runs are its matter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_mutations import VARIANTS, all_mutants, write_mutant
from mutation_inputs import make_ragged
from mutation_sweep import PLAIN_LIMIT_S, TOOL_LIMIT_S, Sweep
from mutation_table import KERNEL, Case, Outcome

from alphamoe_backend.experts.alphamoe_w8a8 import implementation
from alphamoe_sanitizer_replays.capture_store import open_capture
from alphamoe_sanitizer_replays.replay_job import prepare_inputs
from alphamoe_sanitizer_replays.results import TOOLS
from alphamoe_sanitizer_replays.sanitizer import find_tool
from alphamoe_tracers.errors import AlphaMoEError

pytestmark = pytest.mark.gpu
CATCHES = (
    ("racecheck", "plan_barrier", "t16_c4", "ragged150"),
    ("racecheck", "advance_wait", "t8_c8", "ragged3"),
    ("synccheck", "staging_sync_mask", "t8_c8", "ragged3"),
    ("memcheck", "padding_row", "t8_c8", "ragged3"),
    ("initcheck", "used_blocks", "t8_c8", "ragged3"),
)
MUTANTS = {mutant.name: mutant for mutant in all_mutants()}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    device = torch.device("cuda", 0)
    if implementation(device) != "hopper":
        pytest.skip("needs compute capability 9.0")
    try:
        find_tool()
    except AlphaMoEError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("sanitizer")
    captures = make_ragged(folder / "ragged", device)
    inputs = {name: prepare_inputs(open_capture(path), folder / "inputs") for name, path in captures.items()}
    return Sweep(inputs, folder, lambda outcome: None)


def replay(sweep: Sweep, tool: str, mutant: str, variant: str, inputs: str, folder: Path) -> Outcome:
    """Replay one mutant, or the kernel itself, in a process of its own."""
    source = None if mutant == KERNEL else write_mutant(MUTANTS[mutant], folder)
    limit_s = PLAIN_LIMIT_S if tool == "none" else TOOL_LIMIT_S
    return sweep.run(Case(mutant, variant, inputs, tool), source, limit_s)


@pytest.mark.parametrize("tool", ["none", *TOOLS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernel_is_clean(sweep: Sweep, tool: str, variant: str, tmp_path: Path) -> None:
    """Every variant gives the captured output, and no tool finds anything in it, on ragged and unused parts."""
    made = replay(sweep, tool, KERNEL, variant, "ragged150", tmp_path)
    assert made.outcome == "clean", made.detail


@pytest.mark.parametrize(("tool", "mutant", "variant", "inputs"), CATCHES)
def test_the_tool_catches_its_mutant(
    sweep: Sweep, tool: str, mutant: str, variant: str, inputs: str, tmp_path: Path
) -> None:
    """A barrier, a wait, a mask or a bound gone wrong in the real kernel is found by the tool that is for it."""
    own = replay(sweep, tool, KERNEL, variant, inputs, tmp_path)
    assert own.outcome == "clean", own.detail
    assert replay(sweep, tool, mutant, variant, inputs, tmp_path).outcome == "found"


def test_the_output_check_catches_a_mutant(sweep: Sweep, tmp_path: Path) -> None:
    """A value that is pushed to one CTA less than there are gives a wrong output without any tool."""
    assert replay(sweep, "none", "peer_left_out", "t8_c8", "ragged3", tmp_path).outcome == "wrong"
