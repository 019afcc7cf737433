"""Check and time the fused kernel on a Hopper GPU.

    python tests/gpu/kernel_check.py [--quick] [--tune] [--no-timing] [--json FILE]
    compute-sanitizer --tool racecheck python tests/gpu/kernel_check.py --sanitize

Every output is held against float64 oracles made from fresh random inputs (kernel_cases.py, tolerance.py). Exits 1 when
any check fails. ``--sanitize`` launches each variant once, eagerly and without triton, for a tool wrapped around it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "tracers"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from kernel_cases import (  # noqa: E402
    GLM,
    QWEN,
    QWEN_TP2,
    SMALL,
    Batch,
    Experts,
    Oracles,
    kernel_tensors,
    levelled,
    make_batch,
    make_experts,
    oracles,
    spoil_tail,
)
from torch import Tensor  # noqa: E402

from alphamoe_backend.experts.alphamoe_w8a8 import (  # noqa: E402
    alphamoe_fp8_block_scale_aligned_moe,
    implementation,
    prepare,
)
from alphamoe_backend.experts.tolerance import Comparison, compare  # noqa: E402
from alphamoe_backend.geometry import LocalGeometry  # noqa: E402
from alphamoe_backend.kernels.launch import Variant, choose_variant, plan_blocks, variants  # noqa: E402
from alphamoe_backend.kernels.launcher import launcher  # noqa: E402
from alphamoe_backend.routing import align_block_size  # noqa: E402

ALL_M = (1, 2, 7, 8, 9, 64, 512, 911, 4096, 16384)
QUICK_M = (1, 8, 64, 512, 911)
TIMED_M = (1, 8, 64, 512, 4096)
TUNED_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
GUARD = 7.0
SEEDED = 3.0
MOST_SPREAD = 0.15
"""Between runs at an RMS of 1.15: some bfloat16 steps of the largest outputs, and none of them a lost addition."""


class Report:
    """Counts failures, prints each check as it ends, and keeps rows for the JSON file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed = 0
        self.checked = 0

    def check(self, name: str, problem: str, **numbers: Any) -> None:
        self.checked += 1
        self.failed += bool(problem)
        self.rows.append({"check": name, "problem": problem, **numbers})
        shown = "  ".join(
            f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in numbers.items()
        )
        print(f"{'FAIL' if problem else 'ok  '} {name:58} {shown} {problem}", flush=True)


def run_kernel(
    experts: Experts,
    batch: Batch,
    *,
    variant: Variant | None = None,
    routed_scaling_factor: float = 1.0,
    seeded: float = 0.0,
) -> tuple[Tensor, bool]:
    """Launch once into rows between guard rows; give the output and whether the guards are whole."""
    M, H = batch.q.shape
    held = torch.full((M + 2, H), GUARD, dtype=torch.bfloat16, device=batch.q.device)
    out = held[1:-1]
    out.fill_(float("nan"))
    out.zero_()
    out += seeded
    tensors = kernel_tensors(experts, batch, out)
    if variant is None:
        alphamoe_fp8_block_scale_aligned_moe(
            *tensors[:-1], top_k=experts.geometry.top_k, routed_scaling_factor=routed_scaling_factor, out=out
        )
    else:
        launcher(out.device).launch(
            experts.geometry,
            tensors,
            M=M,
            plan_blocks=plan_blocks(experts.geometry, M),
            routed_scaling_factor=routed_scaling_factor,
            variant=variant,
        )
    torch.cuda.synchronize()
    return out, bool((held[0] == GUARD).all() and (held[-1] == GUARD).all())


def judge(out: Tensor, guarded: bool, oracle: Oracles) -> tuple[str, Comparison]:
    comparison = compare(out, oracle.requantised, oracle.sum_abs_terms, oracle.exact)
    return comparison.problem if guarded else "wrote outside of out", comparison


def multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def stock_comparison(experts: Experts, batch: Batch, oracle: Oracles) -> Comparison | None:
    """Compare the stock Triton path on the same inputs."""
    from alphamoe_backend.experts.triton_stock import StockExperts, triton_available

    if not triton_available():
        return None
    stock = StockExperts(experts.geometry, experts.canonical)
    out = stock.run(batch.q, batch.q_scale, stock.plan(batch.topk_ids), batch.topk_weights, torch.bfloat16)
    return compare(out, oracle.requantised, oracle.sum_abs_terms, oracle.exact)


def describe(geometry: LocalGeometry, M: int) -> str:
    return f"E{geometry.E} H{geometry.H} I{geometry.I_local} k{geometry.top_k} M{M}"


def check_geometry(report: Report, geometry: LocalGeometry, tokens: Iterable[int], seed: int) -> None:
    """Check the launch rule's variant at each M, and the other variants at a few, for both routings."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    experts = make_experts(geometry, generator)
    for M in tokens:
        for skewed in (False, True):
            batch = make_batch(geometry, M, generator, skewed=skewed)
            batch, oracle = levelled(experts, batch)
            batch = dataclasses.replace(batch, plan=spoil_tail(batch.plan, generator))
            chosen = choose_variant(geometry, M, multiprocessors())
            label = f"{describe(geometry, M)} {'skewed' if skewed else 'balanced'}"
            problem, comparison = judge(*run_kernel(experts, batch), oracle)
            numbers: dict[str, Any] = {
                "error": comparison.relative_error,
                "bad": comparison.bad_elements,
                "max_abs": comparison.max_abs_error,
            }
            stock = stock_comparison(experts, batch, oracle)
            if stock is not None:
                numbers |= {"stock": stock.relative_error, "stock_bad": stock.bad_elements}
            report.check(f"{label} {chosen.name}", problem, **numbers)
            for variant in variants() if M in (1, 9, 64, 911) else ():
                if variant is not chosen:
                    problem, comparison = judge(*run_kernel(experts, batch, variant=variant), oracle)
                    numbers = {"error": comparison.relative_error, "bad": comparison.bad_elements}
                    report.check(f"{label} {variant.name}", problem, **numbers)


def check_behaviour(report: Report, variant: Variant) -> None:
    """Check what an accuracy table does not show, for one variant."""
    geometry = LocalGeometry(E=16, H=384, I_local=256, top_k=4)
    generator = torch.Generator(device="cuda").manual_seed(77)
    experts = make_experts(geometry, generator)
    batch, oracle = levelled(experts, make_batch(geometry, 150, generator))

    out, guarded = run_kernel(experts, batch, variant=variant, seeded=SEEDED)
    seeded = Oracles(oracle.requantised + SEEDED, oracle.exact + SEEDED, oracle.sum_abs_terms + SEEDED)
    report.check(f"{variant.name} adds to what out holds", judge(out, guarded, seeded)[0])

    scaled = oracles(experts, batch, 2.5)
    report.check(
        f"{variant.name} routed scaling factor",
        judge(*run_kernel(experts, batch, variant=variant, routed_scaling_factor=2.5), scaled)[0],
    )

    poisoned = batch.q_scale.clone()
    poisoned[3] = float("nan")
    out, _ = run_kernel(experts, dataclasses.replace(batch, q_scale=poisoned), variant=variant)
    others = torch.arange(150, device="cuda") != 3
    whole = bool(out[3].isnan().all()) and bool(out[others].isfinite().all())
    report.check(f"{variant.name} a NaN token stays NaN, alone", "" if whole else "a NaN was hidden or spread")

    silent = batch.q_scale.clone()
    silent[5] = 0.0
    out, _ = run_kernel(experts, dataclasses.replace(batch, q_scale=silent), variant=variant)
    zero = bool((out[5] == 0).all()) and bool(out.isfinite().all())
    report.check(f"{variant.name} a zero token gives zeros", "" if zero else "zeros became something else")

    ids = batch.topk_ids % 8
    ids = (ids[:, :1] + torch.arange(4, device="cuda", dtype=torch.int32)) % 8
    idle = dataclasses.replace(batch, topk_ids=ids, plan=align_block_size(ids, 8, geometry.E))
    scale = experts.gate_up_scale.clone()
    scale[8:] = float("nan")
    unused = dataclasses.replace(experts, gate_up_scale=scale)
    idle, wanted = levelled(experts, idle)
    report.check(
        f"{variant.name} experts without tokens are not read",
        judge(*run_kernel(unused, idle, variant=variant), wanted)[0],
    )

    runs = [run_kernel(experts, batch, variant=variant)[0].float() for _ in range(5)]
    spread = max(float((run - runs[0]).abs().max()) for run in runs)
    report.check(
        f"{variant.name} run to run (order of bf16 reduce-adds)", "" if spread < MOST_SPREAD else "large", spread=spread
    )


def check_the_check(report: Report) -> None:
    """Make sure that wrong outputs fail: all zero, one NaN, gate and up swapped."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    experts = make_experts(SMALL, generator)
    batch, oracle = levelled(experts, make_batch(SMALL, 64, generator))
    out, _ = run_kernel(experts, batch)
    nan = out.clone()
    nan[7, 11] = float("nan")
    rows = experts.gate_up.view(torch.uint8).view(SMALL.E, -1, 2, 8, SMALL.H).flip(2)
    swapped = dataclasses.replace(experts, gate_up=rows.reshape(experts.gate_up.shape).contiguous().view(batch.q.dtype))
    wrong = {"all zero": torch.zeros_like(out), "one NaN": nan, "gate and up swapped": run_kernel(swapped, batch)[0]}
    for name, output in wrong.items():
        accepted = compare(output, oracle.requantised, oracle.sum_abs_terms, oracle.exact).ok
        report.check(f"the check refuses: {name}", "it was accepted" if accepted else "")


def measure(report: Report, tokens: Iterable[int], tuned: tuple[Variant, ...]) -> None:
    """Time the kernel beside the stock path in this run, and print the ratios."""
    from kernel_timing import host_cost_us, time_case

    generator = torch.Generator(device="cuda").manual_seed(9)
    experts = make_experts(QWEN, generator)
    print(
        f"\nus a dispatch, {describe(QWEN, 0)[:-3]}, CUDA graph, L2 flushed; ratio = stock / (fused + zero)", flush=True
    )
    for M in tokens:
        times = time_case(experts, M, generator, tuned)
        ratio = times.get("stock", float("nan")) / (times["fused"] + times["zero"])
        shown = "  ".join(f"{name} {value:8.1f}" for name, value in times.items())
        chosen = choose_variant(QWEN, M, multiprocessors()).name
        print(f"M {M:6} {chosen:7} {shown}  ratio {ratio:.2f}", flush=True)
        report.rows.append({"timing_us": times, "M": M, "variant": chosen, "ratio": ratio})
    batch = make_batch(QWEN, 1, generator)
    out = torch.zeros_like(batch.q, dtype=torch.bfloat16)
    tensors = kernel_tensors(experts, batch, out)
    whole = host_cost_us(lambda: alphamoe_fp8_block_scale_aligned_moe(*tensors[:-1], top_k=QWEN.top_k, out=out))
    bare = host_cost_us(
        lambda: launcher(out.device).launch(QWEN, tensors, M=1, plan_blocks=10, routed_scaling_factor=1.0)
    )
    print(f"host us a call: {whole:.1f} with checks, {bare:.1f} launch alone", flush=True)
    report.rows.append({"host_us": {"operator": whole, "launch": bare}})


def sanitize(report: Report) -> None:
    """Launch every variant once on a small geometry, at a full and a ragged window, and compare."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    geometry = LocalGeometry(E=8, H=512, I_local=128, top_k=2)
    experts = make_experts(geometry, generator)
    for variant in variants():
        batch = make_batch(geometry, {8: 3, 16: 24, 32: 70, 64: 150}[variant.tokens], generator)
        batch, oracle = levelled(experts, batch)
        problem, comparison = judge(*run_kernel(experts, batch, variant=variant), oracle)
        report.check(
            f"sanitized {describe(geometry, len(batch.q))} {variant.name}", problem, error=comparison.relative_error
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer token counts and no large geometry")
    parser.add_argument("--tune", action="store_true", help="time every variant at many token counts")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--sanitize", action="store_true", help="one small eager launch of each variant, nothing else")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or implementation(torch.device("cuda")) != "hopper":
        sys.exit("kernel_check needs a GPU of compute capability 9.0")
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    prepare(torch.device("cuda"))
    print(f"compiled and loaded {len(variants())} variants in {time.monotonic() - began:.1f} s", flush=True)
    report = Report()
    if arguments.sanitize:
        sanitize(report)
    else:
        check_geometry(report, SMALL, (1, 9, 64, 911), seed=1)
        check_the_check(report)
        for variant in variants():
            check_behaviour(report, variant)
        check_geometry(report, QWEN, QUICK_M if arguments.quick else ALL_M, seed=2)
        if not arguments.quick:
            check_geometry(report, QWEN_TP2, (1, 64, 512, 4096), seed=3)
            check_geometry(report, GLM, (1, 9, 64, 911, 4096), seed=4)
        if not arguments.no_timing:
            measure(report, TUNED_M if arguments.tune else TIMED_M, variants() if arguments.tune else ())
    print(
        f"\n{report.checked - report.failed} of {report.checked} checks ok, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"failed": report.failed, "rows": report.rows}, indent=1) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
