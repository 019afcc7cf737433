"""Mutants of the fused kernel's synchronisation: every barrier, wait, commit and fence, gone or weaker."""

from __future__ import annotations

from kernel_mutations import Mutant, mutant

BLOCK, WARP, ASYNC = "block barrier", "warp sync", "cp.async group"
CLUSTER, WGMMA = "cluster barrier", "wgmma (async proxy)"

_PLAN = ("kernel", "    }\n    __syncthreads();\n\n#pragma unroll 1", "    }\n\n\n#pragma unroll 1")
_PUSHED = "            cluster_arrive();\n            cluster_wait();\n"

SYNCHRONISATION: tuple[Mutant, ...] = (
    mutant("plan_barrier", BLOCK, "t8_c8@ragged3 t8_c8@one t16_c4@short t32_c2@middle t64_w@ragged150", _PLAN),
    mutant(
        "plan_barrier_half_warp",
        BLOCK,
        "t8_c8@ragged3 t8_c8@one",
        ("kernel", "    }\n    __syncthreads();\n\n#pragma", "    }\n    if (lane < 16) __syncthreads();\n\n#pragma"),
    ),
    mutant(
        "advance_barrier",
        BLOCK,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short t32_c2@middle t64_w@ragged150",
        ("kernel", "show_to_wgmma();\n            __syncthreads();", "show_to_wgmma();\n"),
    ),
    mutant(
        "advance_barrier_half_warp",
        BLOCK,
        "t8_c8@ragged3 t64_w@ragged150",
        (
            "kernel",
            "show_to_wgmma();\n            __syncthreads();",
            "show_to_wgmma();\n            if (lane < 16) __syncthreads();",
        ),
    ),
    mutant(
        "advance_barrier_one_warp_absent",
        BLOCK,
        "t8_c8@ragged3",
        (
            "kernel",
            "show_to_wgmma();\n            __syncthreads();",
            "show_to_wgmma();\n            if (warp != 7) __syncthreads();",
        ),
    ),
    mutant(
        "split_k_barrier",
        BLOCK,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short",
        (
            "kernel",
            "                }\n            __syncthreads();\n            for (int unit",
            "                }\n\n            for (int unit",
        ),
    ),
    mutant(
        "act_barrier",
        BLOCK,
        "t64_w@ragged150 t64_w@decode",
        ("kernel", "        }\n        __syncthreads();\n\n        // Step 5", "        }\n\n\n        // Step 5"),
    ),
    mutant(
        "act_barrier_in_clusters",
        BLOCK,
        "t8_c8@decode t16_c4@short t32_c2@middle",
        (
            "kernel",
            "        }\n        __syncthreads();\n\n        // Step 5",
            "        }\n        if constexpr (CLUSTER == 1) __syncthreads();\n\n        // Step 5",
        ),
        harmless="the cluster barrier just before it holds all threads of the CTA, too",
    ),
    mutant(
        "run_end_barrier",
        BLOCK,
        "t16_c4@ragged150 t16_c4@short t32_c2@middle t64_w@ragged150",
        ("kernel", "        copies_wait<0>();\n        __syncthreads();", "        copies_wait<0>();\n"),
    ),
    mutant(
        "run_end_wait",
        ASYNC,
        "t16_c4@short t64_w@ragged150",
        ("kernel", "        copies_wait<0>();\n", "\n"),
        harmless="advance() waited for the last item; only groups without a copy are pending",
    ),
    mutant(
        "advance_wait",
        ASYNC,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short t32_c2@middle t64_w@ragged150",
        ("kernel", "            copies_wait<STAGES - 2>();\n", "\n"),
    ),
    mutant(
        "advance_wait_one_less",
        ASYNC,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short t32_c2@middle t64_w@ragged150",
        ("kernel", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
    ),
    mutant(
        "advance_commit",
        ASYNC,
        "t8_c8@ragged3 t8_c8@decode t64_w@ragged150",
        ("kernel", "issue(q + STAGES - 1, refill);\n            copies_commit();", "issue(q + STAGES - 1, refill);\n"),
    ),
    mutant(
        "prologue_commit",
        ASYNC,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short",
        ("kernel", "            issue(s, s);\n            copies_commit();", "            issue(s, s);\n"),
    ),
    mutant(
        "prologue_short",
        ASYNC,
        "t8_c8@decode t64_w@ragged150",
        ("kernel", "for (int s = 0; s < STAGES - 1; ++s)", "for (int s = 0; s < STAGES - 2; ++s)"),
    ),
    mutant(
        "refill_live_slot",
        ASYNC,
        "t8_c8@decode t32_c2@middle t64_w@ragged150",
        ("kernel", "issue(q + STAGES - 1, refill);", "issue(q + STAGES - 1, slot);"),
    ),
    mutant(
        "ring_one_slot_short",
        ASYNC,
        "t8_c8@decode t32_c2@middle",
        ("kernel", "slot = slot + 1 == STAGES ? 0 : slot + 1;", "slot = slot + 2 >= STAGES ? 0 : slot + 1;"),
    ),
    mutant(
        "staging_stored_sync",
        WARP,
        "t8_c8@ragged3 t8_c8@decode t32_c2@middle t64_w@ragged150",
        ("kernel", "packed);\n                    __syncwarp();", "packed);\n"),
    ),
    mutant(
        "staging_read_sync",
        WARP,
        "t8_c8@ragged3 t32_c2@middle t64_w@ragged150",
        ("kernel", "                    }\n                    __syncwarp();", "                    }\n"),
    ),
    mutant(
        "staging_sync_mask",
        WARP,
        "t8_c8@ragged3 t8_c8@decode t64_w@ragged150",
        (
            "kernel",
            "packed);\n                    __syncwarp();",
            "packed);\n                    __syncwarp(0x0000FFFFu);",
        ),
    ),
    mutant(
        "staging_sync_half_warp",
        WARP,
        "t8_c8@decode t8_c8@ragged3",
        (
            "kernel",
            "packed);\n                    __syncwarp();",
            "packed);\n                    if (lane < 16) __syncwarp();",
        ),
    ),
    mutant(
        "peak_shuffle_mask",
        WARP,
        "t8_c8@ragged3 t8_c8@decode",
        ("kernel", "__shfl_xor_sync(0xFFFFFFFFu, peak, d)", "__shfl_xor_sync(0x0000FFFFu, peak, d)"),
        harmless="the warp is together here, and then the compiler's shuffle is an instruction that knows no mask "
        "(SHFL behind BRA.DIV); only its path for a divided warp uses it",
    ),
    mutant(
        "cluster_open",
        CLUSTER,
        "t16_c4@ragged150 t16_c4@short t8_c8@decode t32_c2@middle",
        ("kernel", "        if constexpr (CLUSTER > 1) cluster_arrive();", ""),
        ("kernel", "        if constexpr (CLUSTER > 1) cluster_wait();", ""),
    ),
    mutant(
        "cluster_open_arrive",
        CLUSTER,
        "t8_c8@ragged3",
        ("kernel", "        if constexpr (CLUSTER > 1) cluster_arrive();", ""),
    ),
    mutant(
        "cluster_open_wait",
        CLUSTER,
        "t8_c8@ragged3",
        ("kernel", "        if constexpr (CLUSTER > 1) cluster_wait();", ""),
    ),
    mutant(
        "cluster_pushed",
        CLUSTER,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short t32_c2@middle",
        ("kernel", _PUSHED, "\n\n"),
    ),
    mutant(
        "cluster_pushed_arrive",
        CLUSTER,
        "t8_c8@ragged3",
        ("kernel", _PUSHED, "\n            cluster_wait();\n"),
    ),
    mutant(
        "cluster_pushed_wait",
        CLUSTER,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short",
        ("kernel", _PUSHED, "            cluster_arrive();\n\n"),
    ),
    mutant(
        "cluster_pushed_half_warp",
        CLUSTER,
        "t8_c8@ragged3",
        ("kernel", _PUSHED, "            if (lane < 16) cluster_arrive();\n            cluster_wait();\n"),
    ),
    mutant(
        "cluster_relaxed",
        CLUSTER,
        "t8_c8@decode t16_c4@short",
        ("ptx", "barrier.cluster.arrive.release.aligned;", "barrier.cluster.arrive.relaxed.aligned;"),
    ),
    mutant(
        "proxy_fence",
        WGMMA,
        "t64_w@ragged150 t64_w@prefill",
        ("kernel", "            if constexpr (WGMMA) show_to_wgmma();", ""),
    ),
    mutant(
        "token_tile_not_doubled",
        WGMMA,
        "t64_w@ragged150",
        (
            "kernel",
            "loader.store(base + TILES_AT + ((q + 1) & 1) * TILE_BYTES);",
            "loader.store(base + TILES_AT + (q & 1) * TILE_BYTES);",
        ),
    ),
    mutant(
        "wgmma_fence",
        WGMMA,
        "t64_w@ragged150",
        ("wgmma", '        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', ""),
        harmless="the assembler sees it, waits for every product itself and says so (C7518, C7520)",
    ),
    mutant(
        "wgmma_commit",
        WGMMA,
        "t64_w@ragged150",
        ("wgmma", '        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");', ""),
        same_code="the assembler waits by products; the commit becomes no instruction of its own",
    ),
    mutant(
        "wgmma_unit_wait",
        WGMMA,
        "t64_w@ragged150 t64_w@middle",
        ("wgmma", "            wgmma_wait<1>();\n", "\n"),
        harmless="the assembler sees it, waits for every product itself and says so (C7518, C7520)",
    ),
    mutant(
        "wgmma_unit_wait_one_less",
        WGMMA,
        "t64_w@ragged150 t64_w@prefill",
        ("wgmma", "            wgmma_wait<1>();\n", "            wgmma_wait<2>();\n"),
    ),
    mutant(
        "wgmma_last_wait",
        WGMMA,
        "t64_w@ragged150 t64_w@middle",
        ("wgmma", "    wgmma_wait<0>();\n", "\n"),
        harmless="the assembler sees it, waits for every product itself and says so (C7518, C7520)",
    ),
    mutant(
        "wgmma_last_wait_one_less",
        WGMMA,
        "t64_w@ragged150",
        ("wgmma", "    wgmma_wait<0>();\n", "    wgmma_wait<1>();\n"),
        harmless="the assembler sees it, waits for every product itself and says so (C7518, C7520)",
    ),
    mutant(
        "settle_tile",
        WGMMA,
        "t64_w@ragged150",
        ("wgmma", "            settle<N / 2>(&part[tile - 1][0][0][0]);", ""),
        same_code="it holds the compiler back from an order that this one does not choose",
    ),
    mutant(
        "settle_last",
        WGMMA,
        "t64_w@ragged150",
        ("wgmma", "    settle<TOGETHER * N / 2>(&part[MT / TOGETHER - 1][0][0][0]);", ""),
        same_code="it holds the compiler back from an order that this one does not choose",
    ),
)
