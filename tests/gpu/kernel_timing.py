"""Timings of the fused kernel beside the stock path (see kernel_check.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from kernel_cases import Experts, kernel_tensors, make_batch

from alphamoe_backend.experts.triton_stock import StockExperts, stock_fused_experts, triton_available
from alphamoe_backend.kernels.launch import Variant, plan_blocks
from alphamoe_backend.kernels.launcher import launcher
from alphamoe_backend.workspaces import Workspaces

FLUSH_BYTES = 256 * 2**20
"""Several times the L2 of an H200 (50 MiB)."""


def graph_time_us(work: Callable[[], object], flush: torch.Tensor, repeats: int = 20) -> float:
    """Capture ``work`` into a CUDA graph and give the median time of a replay in us, the L2 flushed before each."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def time_case(experts: Experts, M: int, generator: torch.Generator, variants: tuple[Variant, ...]) -> dict[str, float]:
    """Time one M in us: the kernel by the launch rule, the zeroing before it, the stock path, each given variant."""
    geometry = experts.geometry
    device = generator.device
    batch = make_batch(geometry, M, generator)
    out = torch.zeros((M, geometry.H), dtype=torch.bfloat16, device=device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    tensors = kernel_tensors(experts, batch, out)
    blocks = plan_blocks(geometry, M)

    def fused(variant: Variant | None = None) -> None:
        launcher(device).launch(geometry, tensors, M=M, plan_blocks=blocks, routed_scaling_factor=1.0, variant=variant)

    times = {"fused": graph_time_us(fused, flush), "zero": graph_time_us(out.zero_, flush)}
    if triton_available():
        plan = StockExperts(geometry, experts.canonical).plan(batch.topk_ids)
        spaces = Workspaces()

        def stock() -> None:
            stock_fused_experts(
                batch.q, batch.q_scale, experts.canonical, plan, batch.topk_weights, geometry, workspaces=spaces
            )

        times["stock"] = graph_time_us(stock, flush)
    for variant in variants:
        times[variant.name] = graph_time_us(lambda variant=variant: fused(variant), flush)
    return times


def host_cost_us(call: Callable[[], object], calls: int = 200) -> float:
    """Give the host time of one call in us, the device kept out of it by synchronising every few calls."""
    call()
    spent = 0.0
    for _ in range(calls // 10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            call()
        spent += time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / (calls // 10 * 10) * 1e6
