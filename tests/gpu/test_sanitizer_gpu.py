"""On a Hopper GPU with compute-sanitizer: the fused kernel is clean under every tool, and every tool catches a mutant.

sanitizer_check.py is the long form, with captures of real runs, all variants under all tools and every mutant. Here are
20 processes on inputs that are made here, all at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_mutations import VARIANTS, all_mutants, write_mutant
from mutation_inputs import make_ragged
from mutation_schedule import Schedule, run_schedule
from mutation_sweep import Sweep, compile_all
from mutation_table import KERNEL, Case, Outcome

from alphamoe_backend.experts.alphamoe_w8a8 import implementation
from alphamoe_sanitizer_replays.captures.store import open_capture
from alphamoe_sanitizer_replays.replays.job import prepare_inputs
from alphamoe_sanitizer_replays.results import TOOLS
from alphamoe_sanitizer_replays.tool.sanitizer import find_tool
from alphamoe_tracers.errors import AlphaMoEError

pytestmark = pytest.mark.gpu
LIMIT_S = 100.0
"""Of all processes together."""
CATCHES = (
    ("racecheck", "plan_barrier", "t16_c4", "ragged150"),
    ("racecheck", "advance_wait", "t8_c8", "ragged3"),
    ("synccheck", "staging_sync_mask", "t8_c8", "ragged3"),
    ("memcheck", "padding_row", "t8_c8", "ragged3"),
    ("initcheck", "used_blocks", "t8_c8", "ragged3"),
)
CLEAN = tuple(
    (tool, variant, "ragged3" if variant == "t8_c8" else "ragged150")
    for variant in VARIANTS
    # The two ways that there are: clusters with mma, and wgmma. The variants between differ in their sizes.
    for tool in ("none", *(TOOLS if variant in ("t8_c8", "t64_w") else ("racecheck",)))
)
MUTANTS = {mutant.name: mutant for mutant in all_mutants()}


OUTPUT = ("none", "peer_left_out", "t8_c8", "ragged3")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Run everything that the tests ask about at once, each in a process of its own."""
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
    sources: dict[str, Path | None] = {KERNEL: None}
    sources |= {name: write_mutant(MUTANTS[name], folder / "sources") for _, name, _, _ in (*CATCHES, OUTPUT)}
    to_do = [Case(KERNEL, variant, name, tool) for tool, variant, name in CLEAN]
    to_do += [Case(mutant, variant, name, tool) for tool, mutant, variant, name in (*CATCHES, OUTPUT)]
    jobs = max(2, (os.cpu_count() or 4) - 1)
    deadline = time.monotonic() + LIMIT_S
    builds = {(str(sources[case.mutant]) if sources[case.mutant] else None, case.variant) for case in to_do}
    assert compile_all(builds, folder / "builds", jobs, LIMIT_S) == []
    sweep = Sweep(inputs, folder, lambda outcome: None)

    def run(case: Case, limit_s: float, watch_s: float, cut: bool) -> Outcome:
        return sweep.run(case, sources[case.mutant], limit_s, watch_s, cut)

    mutants = [MUTANTS[name] for _, name, _, _ in (*CATCHES, OUTPUT)]
    made = run_schedule(Schedule(to_do, mutants), run, jobs=jobs, deadline=deadline)
    return {outcome.case: outcome for outcome in made}


@pytest.mark.parametrize(("tool", "variant", "inputs"), CLEAN)
def test_the_kernel_is_clean(outcomes: dict[Case, Outcome], tool: str, variant: str, inputs: str) -> None:
    """Every variant gives the captured output, and no tool finds anything in it, on ragged and unused parts."""
    made = outcomes[Case(KERNEL, variant, inputs, tool)]
    assert made.outcome == "clean", f"{made.outcome}: {made.detail}"


@pytest.mark.parametrize(("tool", "mutant", "variant", "inputs"), CATCHES)
def test_the_tool_catches_its_mutant(
    outcomes: dict[Case, Outcome], tool: str, mutant: str, variant: str, inputs: str
) -> None:
    """A barrier, a wait, a mask or a bound gone wrong in the real kernel is found by the tool that is for it."""
    made = outcomes[Case(mutant, variant, inputs, tool)]
    assert made.outcome == "found", f"{made.outcome}: {made.detail}"


def test_the_output_check_catches_a_mutant(outcomes: dict[Case, Outcome]) -> None:
    """Values that one CTA of the cluster never gets make a wrong output, which is seen without any tool."""
    tool, mutant, variant, inputs = OUTPUT
    made = outcomes[Case(mutant, variant, inputs, tool)]
    assert made.outcome == "wrong", f"{made.outcome}: {made.detail}"
