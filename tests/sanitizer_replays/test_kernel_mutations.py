"""Mutants of the fused kernel: each changes what it says, none is forgotten, and the sweep over them counts right."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from kernel_mutations import (
    INPUTS,
    VARIANTS,
    all_mutants,
    apply,
    changed_lines,
    mutant,
    read_sources,
)
from mutant_builds import build_problem
from mutation_inputs import GEOMETRY, make_ragged
from mutation_sweep import read_run

from alphamoe_backend.environ import CACHE_DIR
from alphamoe_backend.kernels import launch
from alphamoe_sanitizer_replays.captures.store import open_capture
from alphamoe_sanitizer_replays.replays.job import check_outputs, prepare_inputs, prepare_job
from alphamoe_sanitizer_replays.results import Finding, ReplayResult, Summary, ToolLog, ToolRun
from alphamoe_sanitizer_replays.tool.environment import child_environment
from alphamoe_sanitizer_replays.tool.sanitizer import run_plain

MUTANTS = all_mutants()
BY_NAME = {made.name: made for made in MUTANTS}
NAMES = [made.name for made in MUTANTS]
SAMPLE = ("cluster_pushed t8_c8", "padding_row t8_c8", "wgmma_commit t64_w")
"""Built in every run of the tests; ``-m slow`` or tests/gpu/mutant_builds.py builds all."""
SYNCHRONISES = re.compile(
    r"__syncthreads\(\)|__syncwarp\(|cluster_arrive\(\)|cluster_wait\(\)|copies_wait<|copies_commit\(\)|"
    r"show_to_wgmma\(\)|wgmma_wait<\d|wgmma\.fence|wgmma\.commit|settle<|__shfl"
)
GUARDS = re.compile(r"\bif \(|\bwhile \(|\bfor \(| \? ")
COMPILE_TIME = re.compile(
    r"< (4|2|UNITS|UP_MT|N_TILES|WARPS_K|MT|DOWN_TILES|COUNT|UP_ROWS|CLUSTER|[nm]_tiles\(part\)); |d > 0;|"
    r"WGMMA \?|CLUSTER > 1 \?"
)
NO_BOUND = {
    "for (int block = first_block; block < blocks_end;) {": "blocks_end itself is loosened in several ways",
    "const u32 q = scale > 0.0f ? pack_e4m3(__fdiv_rn(v.x, scale), __fdiv_rn(v.y, scale),": "arithmetic",
    "if (lane_stores) {": "both of its parts are loosened where it is made",
    "if (unit == 0) meanwhile();": "of compile-time values",
    "if (unit + 1 < UNITS) {": "of compile-time values",
    "if (TOGETHER < MT && (unit & 1) && unit > 1) {": "of compile-time values",
}


def code_lines() -> Iterator[tuple[str, int, str]]:
    """Give file, line and text of everything that runs; definitions of wrappers and comments left out."""
    for name, text in read_sources().items():
        if name not in ("ptx.cuh", "w8a8_shape.cuh"):
            for number, line in enumerate(text.splitlines(), 1):
                if not line.lstrip().startswith(("//", "#", "template", "__device__")):
                    yield name, number, line.strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_applies_once_and_keeps_the_lines(name: str) -> None:
    """Every replacement is made at its one place, changes something, and shifts no line."""
    made = BY_NAME[name]
    before, after = read_sources(), apply(made)
    assert {name: text.count("\n") for name, text in before.items()} == {n: t.count("\n") for n, t in after.items()}
    assert 1 <= len(changed_lines(made)) <= 3


def test_a_text_that_is_not_unique_is_refused() -> None:
    """A replacement that could be made at two places, or nowhere, raises instead of choosing."""
    for old in ("__syncthreads();", "__nothing();"):
        with pytest.raises(ValueError, match="times in"):
            apply(mutant("wrong", "none", "t8_c8@one", ("kernel", old, "")))
    with pytest.raises(ValueError, match="would shift"):
        apply(mutant("wrong", "none", "t8_c8@one", ("kernel", "        copies_wait<0>();\n", "")))


def test_names_variants_and_inputs_are_known() -> None:
    """Names are unique, and every run names a variant that is launched and an input that is made."""
    assert len(set(NAMES)) == len(NAMES)
    assert tuple(known.name for known in launch.variants()) == VARIANTS
    for made in MUTANTS:
        assert made.runs
        assert all(variant in VARIANTS and inputs in INPUTS for variant, inputs in made.runs), made.name
        assert not (made.harmless and made.same_code), made.name


def test_every_barrier_wait_commit_and_fence_has_a_mutant() -> None:
    """No line that synchronises is left as it is by all mutants."""
    touched = {place for made in MUTANTS for place in changed_lines(made)}
    lines = [(file, number, text) for file, number, text in code_lines() if SYNCHRONISES.search(text)]
    assert len(lines) > 15
    assert [line for line in lines if line[:2] not in touched] == []


def test_every_guard_has_a_mutant_or_a_reason() -> None:
    """No condition or loop bound that is known at run time is left as it is by all mutants, but for those listed."""
    touched = {place for made in MUTANTS for place in changed_lines(made)}
    lines = [(file, number, text) for file, number, text in code_lines() if GUARDS.search(text)]
    runtime = [line for line in lines if not COMPILE_TIME.search(line[2]) and not line[2].startswith("widen(")]
    assert len(runtime) > 40
    assert [line for line in runtime if line[:2] not in touched and line[2] not in NO_BOUND] == []
    assert set(NO_BOUND) <= {text for _, _, text in runtime}


@pytest.fixture
def cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("cuda.bindings", reason="NVRTC is for Linux only")
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("build", SAMPLE)
def test_a_sample_of_mutants_compiles_to_other_code(cubins: Path, build: str) -> None:
    """A mutant compiles and its machine code differs, unless it is listed as being the same."""
    name, variant = build.split()
    assert build_problem(BY_NAME[name], variant, cubins) == ""


@pytest.mark.slow
@pytest.mark.skipif("ALPHAMOE_ALL_MUTANTS" not in os.environ, reason="minutes: set ALPHAMOE_ALL_MUTANTS=1")
def test_all_mutants_compile_to_other_code(cubins: Path) -> None:
    """The same of every mutant and every variant that it matters for."""
    builds = [(made, variant) for made in MUTANTS for variant in made.variants]
    problems = {f"{made.name} {variant}": build_problem(made, variant, cubins) for made, variant in builds}
    assert {build: problem for build, problem in problems.items() if problem} == {}


def test_the_ragged_captures_replay_and_bring_the_guards_into_play(tmp_path: Path) -> None:
    """They verify, their replay gives their output, windows are cut and full, and a tail and experts are unused."""
    for name, path in make_ragged(tmp_path / "ragged", torch.device("cpu")).items():
        inputs = prepare_inputs(open_capture(path), tmp_path / "inputs")
        job = prepare_job(inputs, tmp_path / name, device="cpu")
        run = run_plain(
            job.argv, folder=tmp_path / name, timeout_s=120, env=child_environment(), result_file=job.result
        )
        assert check_outputs(inputs, job, run.result).verdict == "PASS", run
        experts = inputs.tensors["expert_ids"].tolist()
        used = int(inputs.tensors["num_tokens_post_padded"]) // GEOMETRY.block_m
        assert used < len(experts)
        assert set(experts[used:]) == {6}
        assert {6, 7, 14}.isdisjoint(experts[:used])
        assert experts[used - 1] == GEOMETRY.E - 1
        if name == "ragged150":
            assert {1, 3, 6, 7, 8} <= set(window_runs(experts[:used], 8))
            assert {1, 2, 3, 4} == set(window_runs(experts[:used], 4))


def window_runs(experts: list[int], blocks: int) -> Iterator[int]:
    """Give the length of every run of one expert in windows of ``blocks`` blocks."""
    for start in range(0, len(experts), blocks):
        window = experts[start : start + blocks]
        for expert in dict.fromkeys(window):
            yield window.count(expert)


def a_run(tool: str = "racecheck", **changes: object) -> ToolRun:
    """Make the record of a clean run, changed."""
    fields: dict[str, object] = {
        "tool": tool,
        "tool_path": "compute-sanitizer",
        "tool_version": "2025.3.1.0",
        "argv": (),
        "error_exitcode": 86,
        "exit_code": 0,
        "timeout_s": 60.0,
        "wall_s": 1.0,
        "log_file": None,
        "log": ToolLog(tool="racecheck", banner=True, summaries=(Summary(errors=0),), findings=()),
        "result": ReplayResult(status="launched", caching_allocator=False),
    }
    return ToolRun(**{**fields, **changes})  # type: ignore[arg-type]


def a_log(**changes: object) -> ToolLog:
    """Make a log with one finding, changed."""
    finding = {"tool": "racecheck", "severity": "warning", "kind": "hazard", "text": "a hazard", "in_target": True}
    made = Finding(**{**finding, **changes})  # type: ignore[arg-type]
    return ToolLog(tool="racecheck", banner=True, summaries=(Summary(errors=0, warnings=1),), findings=(made,))


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "clean"),
        ({"log": a_log(), "exit_code": 86}, "found"),
        ({"log": a_log(), "exit_code": None, "timed_out": True, "result": None}, "found"),
        ({"log": a_log(kind="api"), "exit_code": 86}, "unclear"),
        ({"log": a_log(in_target=False), "exit_code": 86}, "unclear"),
        ({"log": a_log(severity="info")}, "unclear"),
        ({"timed_out": True, "exit_code": None, "result": None}, "hang"),
        ({"result": None, "exit_code": 139}, "crash"),
        ({"result": ReplayResult(status="failed", error="lost", caching_allocator=False)}, "crash"),
        ({"exit_code": 86}, "unclear"),
        ({"log": None}, "unclear"),
        ({"problems": ("the tool wrote no log",)}, "unclear"),
        ({"tool": "none", "log": None}, "clean"),
    ],
)
def test_a_tool_run_is_read_for_what_it_shows(changes: dict[str, object], outcome: str) -> None:
    """Only a finding in the kernel counts as one, a hang or crash is none, and whatever is odd is not clean."""
    assert read_run(a_run(**changes))[0] == outcome  # type: ignore[arg-type]
