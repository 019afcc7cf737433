// The compile-time shape of a variant and its shared memory. launch.py repeats this layout; a test holds them together.
//
// Given by -D: TOKENS, CLUSTER, WARPS_K, STAGES, DOWN_TILES, WGMMA, MIN_CTAS.
#pragma once

#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = 8;
constexpr int BLOCK_M = 8;                            // rows of a plan block: one n8 tile
constexpr int ROWS_A_PASS = THREADS / 8;              // 128-byte rows that all threads copy at once, 8 lanes a row
constexpr int K_BLOCK = 128;                          // quantisation block; also one swizzled row of shared memory
constexpr int N_TILES = TOKENS / BLOCK_M;             // n8 tiles of a full window
constexpr int UP_ROWS = 256 / CLUSTER;                // interleaved gate/up rows of this CTA
constexpr int UP_TILES = UP_ROWS / 16;                // the same in m16 tiles
constexpr int WARPS_M = WARPS / WARPS_K;              // warps along rows; the others split K
constexpr int UP_MT = UP_TILES / WARPS_M;             // m16 tiles of a warp
constexpr int RING_TOKENS = WGMMA ? 0 : TOKENS;       // token rows in a ring slot; wgmma's tokens have tiles of their own
constexpr int UP_KBLOCK_BYTES = (UP_ROWS + RING_TOKENS) * K_BLOCK;
constexpr int UP_ITEM_BYTES = WARPS_K * UP_KBLOCK_BYTES;
constexpr int DOWN_ROWS = WARPS * DOWN_TILES * 16;    // down rows of one pipeline item
constexpr int DOWN_ITEM_BYTES = DOWN_ROWS * K_BLOCK;
constexpr int SLOT_BYTES = UP_ITEM_BYTES > DOWN_ITEM_BYTES ? UP_ITEM_BYTES : DOWN_ITEM_BYTES;
constexpr int TILE_BYTES = TOKENS * K_BLOCK * (WGMMA ? 2 : 1);  // [TOKENS, 128] of f16 or e4m3, swizzled
constexpr int TILES = WGMMA ? 2 : 1;
constexpr int ACT_STRIDE = 132;                       // floats; 128 plus padding, so that a fragment hits 32 banks
constexpr int REDUCE_BYTES = WARPS_K > 1 ? WARPS_K * UP_TILES * N_TILES * 512 : 0;
constexpr int STAGING_WARP_BYTES = DOWN_TILES * 256;  // 8 tokens x 16 rows of bf16 for each m16 tile
constexpr int STAGING_BYTES = WARPS * STAGING_WARP_BYTES;
constexpr int SCRATCH_BYTES = REDUCE_BYTES > STAGING_BYTES ? REDUCE_BYTES : STAGING_BYTES;

constexpr int RING_AT = 0;
constexpr int TILES_AT = RING_AT + STAGES * SLOT_BYTES;  // the first is for the requantised values, once up is done
constexpr int ACT_AT = TILES_AT + TILES * TILE_BYTES;            // f32 [TOKENS, ACT_STRIDE]
constexpr int SCRATCH_AT = ACT_AT + TOKENS * ACT_STRIDE * 4;     // K-split partial sums, later output staging
constexpr int ROWS_AT = SCRATCH_AT + SCRATCH_BYTES;              // token, route weight, requantisation scale
constexpr int SCALES_AT = ROWS_AT + 3 * TOKENS * 4;              // x [H/128, TOKENS], gate+up [2, H/128], down [H/128]

static_assert(TOKENS % BLOCK_M == 0 && TOKENS <= 64, "a window is 1 to 8 plan blocks");
static_assert(CLUSTER == 1 || CLUSTER == 2 || CLUSTER == 4 || CLUSTER == 8, "portable cluster sizes");
static_assert(WARPS_M * WARPS_K == WARPS && UP_MT * WARPS_M == UP_TILES && UP_MT >= 1, "warps must tile the rows");
static_assert(N_TILES == 1 || N_TILES % 2 == 0, "token fragments are loaded for two n8 tiles at a time");
static_assert(DOWN_TILES == 1 || DOWN_TILES == 2, "the output staging knows one or two m16 tiles");
static_assert(!WGMMA || (CLUSTER == 1 && WARPS_K == 1 && UP_MT == 2 && DOWN_TILES == 2), "wgmma needs 64-row tiles");
static_assert(!WGMMA || TOKENS * 4 == THREADS, "four threads bring a token row into a tile");
static_assert(SLOT_BYTES % 1024 == 0 && UP_ROWS % 8 == 0 && TILES_AT % 1024 == 0, "swizzle atoms are 8 rows");
static_assert(STAGES >= 3, "one slot is being read, one refilled, one in flight");

// Byte offset of 16-byte chunk `chunk` of 128-byte row `row`: the 128-byte swizzle, which wgmma understands too.
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
    return static_cast<u32>(row * K_BLOCK + ((chunk ^ (row & 7)) << 4));
}

// The same for the output staging, where a token's row is DOWN_TILES * 32 bytes.
__device__ __forceinline__ u32 staged(int token, int matrix) {
    return DOWN_TILES == 2 ? token * 64 + ((matrix ^ ((token >> 1) & 3)) << 4)
                           : token * 32 + ((matrix ^ ((token >> 2) & 1)) << 4);
}
