"""Mutants of the fused kernel's bounds: guards of scales, rows, pushes and output loosened, by one or altogether."""

from __future__ import annotations

from kernel_mutations import Mutant, mutant

SCALES, ROWS = "bounds of the scales", "rows of a run"
PUSHES, OUTPUT = "bounds of the pushes", "bounds of the output"
_NEVER_STORED = "rows of padding, or beyond the run, are computed and never stored"

ROW_BOUNDS: tuple[Mutant, ...] = (
    mutant(
        "run_end_of_window",
        ROWS,
        "t64_w@ragged150 t8_c8@one t32_c2@ragged150",
        ("kernel", "while (block + active < blocks_end && expert_ids", "while (expert_ids"),
    ),
    mutant(
        "run_expert_of_window",
        ROWS,
        "t16_c4@ragged150 t16_c4@short t64_w@ragged150",
        ("kernel", "= block == first_block ? first_expert : expert_ids[block];", "= first_expert;"),
    ),
    mutant(
        "up_loop",
        ROWS,
        "t8_c8@ragged3 t8_c8@decode t64_w@ragged150",
        ("kernel", "for (int q = 0; q < up_items; ++q)", "for (int q = 0; q <= up_items; ++q)"),
    ),
    mutant(
        "run_of_one_expert",
        ROWS,
        "t16_c4@ragged150 t16_c4@short t64_w@ragged150",
        (
            "kernel",
            "block + active < blocks_end && expert_ids[block + active] == expert)",
            "block + active < blocks_end)",
        ),
    ),
    mutant(
        "scale_rows",
        SCALES,
        "t16_c4@ragged150 t16_c4@short t32_c2@ragged150 t64_w@ragged150",
        (
            "kernel",
            "r < rows; r += WARPS) {\n            const int token",
            "r < TOKENS; r += WARPS) {\n            const int token",
        ),
    ),
    mutant(
        "scale_k",
        SCALES,
        "t8_c8@ragged3 t64_w@ragged150",
        ("kernel", "kb < k_blocks; kb += 32)", "kb <= k_blocks; kb += 32)"),
    ),
    mutant(
        "scale_padding_address",
        SCALES,
        "t8_c8@one",
        (
            "kernel",
            "hidden_scale + static_cast<size_t>(token < 0 ? 0 : token)",
            "hidden_scale + static_cast<size_t>(token)",
        ),
        harmless="a copy of no bytes does not use its address",
    ),
    mutant(
        "scale_padding_bytes",
        SCALES,
        "t8_c8@one",
        ("kernel", "src + kb, token < 0 ? 0 : 4);", "src + kb, 4);"),
        harmless=_NEVER_STORED,
    ),
    mutant(
        "up_scale_count",
        SCALES,
        "t8_c8@ragged3 t64_w@ragged150",
        ("kernel", "i < 2 * k_blocks; i += THREADS", "i <= 2 * k_blocks; i += THREADS"),
    ),
    mutant(
        "down_scale_count",
        SCALES,
        "t8_c8@ragged3 t64_w@ragged150",
        ("kernel", "for (int i = tid; i < k_blocks; i += THREADS)", "for (int i = tid; i <= k_blocks; i += THREADS)"),
    ),
    mutant(
        "weight_rows",
        ROWS,
        "t8_c8@ragged3 t8_c8@decode t64_w@ragged150",
        ("kernel", "if (tid < TOKENS) row_weight[tid]", "row_weight[tid]"),
    ),
    mutant(
        "product_k",
        ROWS,
        "t16_c4@ring3 t8_c8@ragged3 t16_c4@ragged150",
        (
            "kernel",
            "            if (kb < k_blocks) {\n                const u32 at",
            "            {\n                const u32 at",
        ),
    ),
    mutant(
        "up_tiles",
        ROWS,
        "t16_c4@short t64_w@ragged150",
        (
            "kernel",
            "                            if (nt < active) {\n                                const float2 x",
            "                            {\n                                const float2 x",
        ),
        harmless=_NEVER_STORED,
    ),
    mutant(
        "product_tiles",
        ROWS,
        "t32_c2@middle",
        ("product", "                if (nt < active) {", "                {"),
        harmless=_NEVER_STORED,
    ),
    mutant(
        "product_width_48",
        ROWS,
        "t64_w@ragged150",
        ("product", "    else if (active > 4)", "    else if (active > 6)"),
    ),
    mutant(
        "product_width_32",
        ROWS,
        "t64_w@ragged150",
        ("product", "    else if (active > 2)", "    else if (active > 3)"),
    ),
    mutant(
        "product_width_64",
        ROWS,
        "t64_w@ragged150",
        ("product", "    if (active > 6)", "    if (active > 7)"),
    ),
    mutant(
        "peer_count",
        PUSHES,
        "t8_c8@ragged3 t32_c2@middle",
        ("kernel", "peer < CLUSTER; ++peer", "peer <= CLUSTER; ++peer"),
    ),
    mutant(
        "peer_left_out",
        PUSHES,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short",
        ("kernel", "peer < CLUSTER; ++peer", "peer < CLUSTER - 1; ++peer"),
    ),
    mutant(
        "sum_units",
        PUSHES,
        "t8_c8@ragged3 t8_c8@decode t16_c4@short",
        ("kernel", "unit < UP_TILES * N_TILES; unit += WARPS", "unit <= UP_TILES * N_TILES; unit += WARPS"),
    ),
    mutant(
        "sum_tiles",
        PUSHES,
        "t16_c4@short",
        ("kernel", "                if (unit % N_TILES < active) {", "                {"),
        harmless=_NEVER_STORED,
    ),
    mutant(
        "push_tiles",
        PUSHES,
        "t32_c2@middle t64_w@ragged150",
        ("kernel", "if (nt < active) push(", "push("),
        harmless=_NEVER_STORED,
    ),
    mutant(
        "requant_rows",
        ROWS,
        "t16_c4@short t64_w@ragged150",
        (
            "kernel",
            "r < rows; r += WARPS) {\n            const float4 v",
            "r < TOKENS; r += WARPS) {\n            const float4 v",
        ),
        harmless=_NEVER_STORED,
    ),
    mutant(
        "requant_beyond_window",
        ROWS,
        "t8_c8@ragged3 t8_c8@decode t64_w@ragged150",
        (
            "kernel",
            "r < rows; r += WARPS) {\n            const float4 v",
            "r < TOKENS + BLOCK_M; r += WARPS) {\n            const float4 v",
        ),
    ),
    mutant(
        "scale_writer",
        ROWS,
        "t8_c8@decode",
        ("kernel", "            if (lane == 0) row_scale[r] = scale;", "            row_scale[r] = scale;"),
        harmless="all lanes write the same value in one instruction",
    ),
    mutant(
        "store_lanes",
        OUTPUT,
        "t8_c8@ragged3 t8_c8@decode t32_c2@middle",
        ("kernel", "lane_stores = lane < 8 * MATRICES && lane_tile", "lane_stores = lane_tile"),
    ),
    mutant(
        "store_tiles",
        OUTPUT,
        "t64_w@ragged150",
        ("kernel", "lane < 8 * MATRICES && lane_tile < down_tiles;", "lane < 8 * MATRICES;"),
    ),
    mutant(
        "store_tiles_narrow",
        OUTPUT,
        "t8_c8@ragged3 t16_c4@ragged150",
        ("kernel", "lane < 8 * MATRICES && lane_tile < down_tiles;", "lane < 8 * MATRICES;"),
        same_code="with one tile a warp the guard of the product says the same",
    ),
    mutant(
        "down_scale_tiles",
        SCALES,
        "t64_w@ragged150",
        (
            "kernel",
            "tile < down_tiles ? down_scale[(down_row0 + tile * 16) / K_BLOCK] : 0.0f;",
            "down_scale[(down_row0 + tile * 16) / K_BLOCK];",
        ),
    ),
    mutant(
        "down_scale_tiles_narrow",
        SCALES,
        "t8_c8@ragged3",
        (
            "kernel",
            "tile < down_tiles ? down_scale[(down_row0 + tile * 16) / K_BLOCK] : 0.0f;",
            "down_scale[(down_row0 + tile * 16) / K_BLOCK];",
        ),
        same_code="with one tile a warp the guard of the product says the same",
    ),
    mutant(
        "emit_tiles",
        OUTPUT,
        "t16_c4@ragged150 t16_c4@short t32_c2@ragged150 t64_w@ragged150",
        (
            "kernel",
            "                if (nt < active) {\n                    const float2 s",
            "                {\n                    const float2 s",
        ),
    ),
    mutant(
        "store_padding",
        OUTPUT,
        "t8_c8@ragged3 t8_c8@one t32_c2@middle t64_w@ragged150",
        ("kernel", "if (token >= 0) add_bf16x8(out +", "add_bf16x8(out +"),
    ),
    mutant(
        "down_loop",
        OUTPUT,
        "t8_c8@decode t64_w@ragged150",
        ("kernel", "for (int q = up_items; q < items; ++q)", "for (int q = up_items; q <= items; ++q)"),
        harmless="no warp has a tile in the round too many",
    ),
    mutant(
        "down_tile_warps",
        OUTPUT,
        "t8_c8@ragged3 t16_c4@ragged150",
        ("kernel", "            if (tile0 + warp < down_tiles) {", "            {"),
        harmless="what a warp without a tile computes is dropped by the guard of its stores",
    ),
)
