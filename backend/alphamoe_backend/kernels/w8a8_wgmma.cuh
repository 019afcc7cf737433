// The warpgroup product: f16 wgmma with fp32 accumulators over e4m3 weights and tokens.
//
// NOTES: wgmma on e4m3 operands keeps about 14 bits of a sum, which now and then rounds an intermediate value to the
// neighbouring e4m3 step. Every e4m3 value is an f16 value, so both operands are widened, and products are exact.
//
// Weights are widened in registers, tokens on their way into a tile of shared memory. So that a thread's weights are
// whole 16-byte chunks, K is permuted within its block of 128, the same way for both: step s (of 8, 16 wide) holds, for
// quad q of the instruction's fragment, k = 32 q + 4 s + {0, 1} at 2 q + {0, 1} and {2, 3} at 2 q + 8 + {0, 1}.
#pragma once

#include "w8a8_shape.cuh"

// Byte offset, in an f16 tile, of the 16-byte chunk with positions 8 * half .. 8 * half + 7 of step `step`. A tile is
// two panels of 64 positions, each [TOKENS, 128 bytes], swizzled; the word of quad q is the chunk's q-th.
__device__ __forceinline__ u32 tile_chunk(int row, int step, int half) {
    return (step >> 2) * TOKENS * K_BLOCK + swizzled(row, (step & 3) * 2 + half);
}

// Brings the tokens of one K block after another from global memory into f16 tiles, through registers.
struct TokenLoader {
    // Four threads a row, each 8 bytes of every 32. The 8 threads of a quarter warp hit 8 different chunks.
    static __device__ __forceinline__ int row() { return (threadIdx.x >> 4) * 4 + ((threadIdx.x >> 1) & 3); }
    static __device__ __forceinline__ int part() { return (threadIdx.x & 1) + ((threadIdx.x >> 3) & 1) * 2; }

    const u8 *from = nullptr;  // null for padding, which becomes zeros
    uint2 raw[4];

    __device__ __forceinline__ void start(const u8 *token_row) { from = token_row ? token_row + part() * 8 : nullptr; }

    // Without a branch, because this runs while wgmma is in flight.
    __device__ __forceinline__ void load(int kb, int k_blocks) {
        const int wanted = from != nullptr && kb < k_blocks;
#pragma unroll
        for (int q = 0; q < 4; ++q) raw[q] = load_global8(from + kb * K_BLOCK + q * 32, wanted);
    }

    __device__ __forceinline__ void store(u32 tile) const {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            uint4 low, high;
            widen(low.x, high.x, s ? raw[0].y : raw[0].x);
            widen(low.y, high.y, s ? raw[1].y : raw[1].x);
            widen(low.z, high.z, s ? raw[2].y : raw[2].x);
            widen(low.w, high.w, s ? raw[3].y : raw[3].x);
            store_shared16(tile + tile_chunk(row(), part() * 2 + s, 0), low);
            store_shared16(tile + tile_chunk(row(), part() * 2 + s, 1), high);
        }
    }
};

#if WGMMA

// Shared memory descriptor: K-major, 128-byte swizzle, 8-row atoms 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

template <int N> __device__ __forceinline__ void wgmma_k16(float *d, const u32 (&a)[4], u64 b, int accumulate) {
    if constexpr (N == 16) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0; "
                     "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                     "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
                     : D4(0), D4(4)
                     : A4, "l"(b), "r"(accumulate));
    } else if constexpr (N == 32) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; "
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
                     : D4(0), D4(4), D4(8), D4(12)
                     : A4, "l"(b), "r"(accumulate));
    } else if constexpr (N == 48) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0; "
                     "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, "
                     "%28, p, 1, 1, 0;}"
                     : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20)
                     : A4, "l"(b), "r"(accumulate));
    } else {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; "
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
                     "%29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                     : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
                     : A4, "l"(b), "r"(accumulate));
    }
}

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// NOTES: ties accumulators to the wait before it, so that nothing reads them earlier.
template <int COUNT> __device__ __forceinline__ void settle(float *d) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Partial products of MT 64-row tiles of a warpgroup with the first N tokens. `consume(first, part)` gets TOGETHER
// tiles at a time; `meanwhile()` runs once behind the first products. A unit is half a tile's K: while one multiplies,
// the weights of the next are widened. `weights` is the chunk 2 * quad of this thread's first row.
template <int MT, int TOGETHER, int N, typename Meanwhile, typename Consume>
__device__ __forceinline__ void wgmma_block(u32 weights, u32 tokens, Meanwhile &&meanwhile, Consume &&consume) {
    static_assert(TOGETHER == MT || TOGETHER == 1, "tiles are handed over all at once or one by one");
    constexpr int UNITS = MT * 2;
    float part[MT / TOGETHER][TOGETHER][N / 8][4];
    u32 a[2][4][4];
    const u64 b = descriptor(tokens);
    auto prepare = [&](u32 (&into)[4][4], int unit) {
        const u32 at = (weights ^ ((unit & 1) << 4)) + (unit >> 1) * WARPS * 16 * K_BLOCK;
        const uint4 upper = load_shared16(at);
        const uint4 lower = load_shared16(at + 8 * K_BLOCK);
        widen(into[0][0], into[0][2], upper.x);
        widen(into[0][1], into[0][3], lower.x);
        widen(into[1][0], into[1][2], upper.y);
        widen(into[1][1], into[1][3], lower.y);
        widen(into[2][0], into[2][2], upper.z);
        widen(into[2][1], into[2][3], lower.z);
        widen(into[3][0], into[3][2], upper.w);
        widen(into[3][1], into[3][3], lower.w);
    };
    prepare(a[0], 0);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int tile = unit >> 1;
        float *const d = &part[tile / TOGETHER][tile % TOGETHER][0][0];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < 4; ++s)
            wgmma_k16<N>(d, a[unit & 1][s], b + (unit & 1) * (TOKENS * K_BLOCK / 16) + s * 2, (unit & 1) | s);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (unit == 0) meanwhile();
        // The unit before this one is done with its weights, and if it ended a tile, with the tile.
        if (unit + 1 < UNITS) {
            wgmma_wait<1>();
            prepare(a[(unit + 1) & 1], unit + 1);
        }
        if (TOGETHER < MT && (unit & 1) && unit > 1) {
            settle<N / 2>(&part[tile - 1][0][0][0]);
            consume(tile - 1, part[tile - 1]);
        }
    }
    wgmma_wait<0>();
    settle<TOGETHER * N / 2>(&part[MT / TOGETHER - 1][0][0][0]);
    consume(MT - TOGETHER, part[MT / TOGETHER - 1]);
}

#endif
