"""Mutants of the fused kernel's bounds: guards of the plan and of the copies loosened, by one or altogether."""

from __future__ import annotations

from kernel_mutations import Mutant, mutant

PLAN, COPIES = "bounds of the plan", "bounds of the copies"

BOUNDS: tuple[Mutant, ...] = (
    mutant(
        "smem_trap",
        PLAN,
        "t8_c8@one",
        ("kernel", "* (TOKENS + 3) * 4u) __trap();", "* (TOKENS + 3) * 4u) {}"),
        harmless="the launch rule gives enough; a test holds it and the layout together",
    ),
    mutant(
        "plan_read_threads",
        PLAN,
        "t64_w@one",
        ("kernel", "if (tid < TOKENS && first_block * BLOCK_M", "if (first_block * BLOCK_M"),
        harmless="threads beyond the window read entries of the next one and drop them",
    ),
    mutant(
        "plan_read_capacity",
        PLAN,
        "t64_w@one t32_c2@one t64_w@ragged150",
        ("kernel", "if (tid < TOKENS && first_block * BLOCK_M + tid < plan_blocks * BLOCK_M)", "if (tid < TOKENS)"),
    ),
    mutant(
        "used_blocks",
        PLAN,
        "t8_c8@ragged3 t64_w@ragged150",
        ("kernel", "int blocks_end = *num_tokens_post_padded / BLOCK_M;", "int blocks_end = plan_blocks;"),
    ),
    mutant(
        "plan_capacity",
        PLAN,
        "t64_w@ragged150",
        ("kernel", "    blocks_end = blocks_end < plan_blocks ? blocks_end : plan_blocks;", ""),
        harmless="no plan that is right uses more blocks than it has",
    ),
    mutant(
        "window_end",
        PLAN,
        "t16_c4@ragged150 t16_c4@short t32_c2@ragged150 t64_w@ragged150",
        ("kernel", "    blocks_end = blocks_end < first_block + N_TILES ? blocks_end : first_block + N_TILES;", ""),
    ),
    mutant(
        "unused_window",
        PLAN,
        "t8_c8@ragged3 t64_w@ragged150",
        ("kernel", "    if (first_block >= blocks_end) return;", ""),
        harmless="the loop over runs does not begin there either; the return only saves time",
    ),
    mutant(
        "row_writers",
        PLAN,
        "t8_c8@ragged3 t8_c8@one",
        ("kernel", "    if (tid < TOKENS) {\n        const bool used", "    {\n        const bool used"),
    ),
    mutant(
        "row_used",
        PLAN,
        "t64_w@ragged150",
        ("kernel", "if (!used || static_cast<u32>(flat)", "if (static_cast<u32>(flat)"),
        harmless="no run reaches a row of an unused block, and its ids must still pass the next condition",
    ),
    mutant(
        "padding_row",
        PLAN,
        "t8_c8@ragged3 t8_c8@one t16_c4@short t32_c2@middle t64_w@ragged150",
        (
            "kernel",
            "if (!used || static_cast<u32>(flat) >= static_cast<u32>(M * top_k)) flat = -1;",
            "if (!used) flat = -1;",
        ),
    ),
    mutant(
        "padding_row_by_one",
        PLAN,
        "t8_c8@ragged3 t8_c8@one t64_w@ragged150",
        (
            "kernel",
            "static_cast<u32>(flat) >= static_cast<u32>(M * top_k)",
            "static_cast<u32>(flat) > static_cast<u32>(M * top_k)",
        ),
    ),
    mutant(
        "padding_token",
        PLAN,
        "t8_c8@one",
        ("kernel", "row_token[tid] = flat < 0 ? -1 : flat / top_k;", "row_token[tid] = flat / top_k;"),
        harmless="-1 / top_k is token 0, whose weight here is 0: zeros are added to it",
    ),
    mutant(
        "padding_weight",
        PLAN,
        "t8_c8@ragged3 t8_c8@one t64_w@ragged150",
        ("kernel", "if (flat >= 0) weight = topk_weights[flat];", "weight = topk_weights[flat];"),
    ),
    mutant(
        "expert_known",
        PLAN,
        "t8_c8@ragged3",
        ("kernel", "        if (static_cast<u32>(expert) >= static_cast<u32>(E)) continue;", ""),
        harmless="every used block of a plan that is right has an expert of this rank",
    ),
    mutant(
        "up_items",
        COPIES,
        "t8_c8@ragged3 t8_c8@decode t64_w@ragged150",
        ("kernel", "            if (item < up_items) {", "            if (item <= up_items) {"),
    ),
    mutant(
        "weights_k",
        COPIES,
        "t8_c8@ragged3 t16_c4@ragged150",
        ("kernel", "                    if (kb < k_blocks) {\n", "                    {\n"),
    ),
    mutant(
        "weights_rows",
        COPIES,
        "t8_c8@ragged3 t16_c4@ragged150",
        ("kernel", "r < UP_ROWS; r += ROWS_A_PASS", "r < UP_ROWS + ROWS_A_PASS; r += ROWS_A_PASS"),
    ),
    mutant(
        "token_chunks",
        COPIES,
        "t8_c8@decode t32_c2@middle",
        ("kernel", "i < WARPS_K * RING_TOKENS * 8; i +=", "i < WARPS_K * RING_TOKENS * 8 + THREADS; i +="),
    ),
    mutant(
        "token_k",
        COPIES,
        "t8_c8@ragged3 t16_c4@ragged150",
        ("kernel", "if (kb < k_blocks && row < rows) {", "if (row < rows) {"),
    ),
    mutant(
        "token_rows",
        COPIES,
        "t16_c4@ragged150 t16_c4@short t32_c2@ragged150",
        ("kernel", "if (kb < k_blocks && row < rows) {", "if (kb < k_blocks) {"),
    ),
    mutant(
        "padding_address",
        COPIES,
        "t8_c8@one",
        (
            "kernel",
            "hidden + static_cast<size_t>(token < 0 ? 0 : token) * H + kb",
            "hidden + static_cast<size_t>(token) * H + kb",
        ),
        harmless="a copy of no bytes does not use its address",
    ),
    mutant(
        "padding_bytes",
        COPIES,
        "t8_c8@one t32_c2@middle",
        ("kernel", "                               token < 0 ? 0 : 16);", "                               16);"),
        harmless="rows of padding are computed and never stored",
    ),
    mutant(
        "down_items",
        COPIES,
        "t8_c8@decode t64_w@ragged150",
        ("kernel", "            } else if (item < items) {", "            } else {"),
        harmless="the guard of each row of the down weights leaves nothing to copy past the end",
    ),
    mutant(
        "down_rows",
        COPIES,
        "t8_c8@ragged3 t16_c4@ragged150 t64_w@ragged150",
        ("kernel", "if (tile0 * 16 + r + (tid >> 3) < down_tiles * 16) copy16", "copy16"),
    ),
    mutant(
        "down_copy_rows",
        COPIES,
        "t64_w@ragged150",
        ("kernel", "r < DOWN_ROWS; r += ROWS_A_PASS", "r < DOWN_ROWS + ROWS_A_PASS; r += ROWS_A_PASS"),
    ),
    mutant(
        "loader_rows",
        COPIES,
        "t64_w@ragged150 t64_w@decode",
        ("kernel", "loader.row() < rows ? row_token[row0 + loader.row()] : -1;", "row_token[row0 + loader.row()];"),
    ),
    mutant(
        "loader_padding",
        COPIES,
        "t64_w@ragged150",
        ("kernel", "loader.start(token < 0 ? nullptr : hidden +", "loader.start(hidden +"),
    ),
    mutant(
        "loader_null",
        COPIES,
        "t64_w@ragged150",
        ("wgmma", "from != nullptr && kb < k_blocks;", "kb < k_blocks;"),
    ),
    mutant(
        "loader_k",
        COPIES,
        "t64_w@ragged150",
        ("wgmma", "from != nullptr && kb < k_blocks;", "from != nullptr;"),
    ),
)
