// The product of one 128-wide K block of weights and tokens, both swizzled in shared memory: by warps or by warpgroups.
// Accumulators lie in the threads the same way in both.
#pragma once

#include "w8a8_shape.cuh"

#if WGMMA

// Shared memory descriptor: K-major, 128-byte swizzle, 8-row atoms 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

template <int N> __device__ __forceinline__ void wgmma_k32(float *d, u64 a, u64 b, int accumulate) {
    if constexpr (N == 16) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0; "
                     "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                     "%8, %9, p, 1, 1;}"
                     : D4(0), D4(4)
                     : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 32) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; "
                     "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1;}"
                     : D4(0), D4(4), D4(8), D4(12)
                     : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 48) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %26, 0; "
                     "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, p, 1, 1;}"
                     : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20)
                     : "l"(a), "l"(b), "r"(accumulate));
    } else {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; "
                     "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
                     "%29, %30, %31}, %32, %33, p, 1, 1;}"
                     : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
}

// Partial products of MT 64-row tiles of a warpgroup with the first N tokens, handed to `consume`.
template <int MT, int N, typename Consume>
__device__ __forceinline__ void wgmma_block(u32 weights, u32 tokens, Consume &&consume) {
    float part[MT][N / 8][4];
    const u64 b = descriptor(tokens);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
        const u64 a = descriptor(weights + mt * WARPS * 16 * K_BLOCK);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) wgmma_k32<N>(&part[mt][0][0], a + kk * 2, b + kk * 2, kk);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // NOTES: ties the accumulators to the wait, so that nothing reads them before it.
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"((&part[mt][0][0])[i])::"memory");
    consume(part);
}

#endif

template <int MT, int NT> __device__ constexpr int n_tiles(const float (&)[MT][NT][4]) { return NT; }

// One K block of 128: part[mt][nt] = (16 weight rows of this warp's tile mt) x (8 tokens of tile nt), given to
// `consume` with at least `active` n8 tiles. Tile mt of warp row `warp_m` is tile mt * TILE_STRIDE + warp_m.
template <int MT, int TILE_STRIDE, typename Consume>
__device__ __forceinline__ void multiply_block(u32 weights, u32 tokens, int warp_m, int lane, int active,
                                               Consume &&consume) {
#if WGMMA
    const u32 mine = weights + (warp_m >> 2) * 64 * K_BLOCK;
    if (active > 6)
        wgmma_block<MT, 64>(mine, tokens, consume);
    else if (active > 4)
        wgmma_block<MT, 48>(mine, tokens, consume);
    else if (active > 2)
        wgmma_block<MT, 32>(mine, tokens, consume);
    else
        wgmma_block<MT, 16>(mine, tokens, consume);
#else
    // Lane l gives the address of row l % 8 of 8x8 matrix l / 8.
    const int matrix = lane >> 3;
    const int a_row = warp_m * 16 + (matrix & 1) * 8 + (lane & 7);
    float part[MT][N_TILES][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) part[mt][nt][i] = 0.0f;
    if constexpr (N_TILES == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 b[4];
            load_matrices(b, tokens + swizzled(lane & 7, half * 4 + matrix));
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    u32 a[4];
                    load_matrices(a, weights + mt * TILE_STRIDE * 16 * K_BLOCK +
                                         swizzled(a_row, (half * 2 + k) * 2 + (matrix >> 1)));
                    mma(part[mt][0], a, b[k * 2], b[k * 2 + 1]);
                }
        }
    } else {
// Fully unrolled, this spills in the two-CTA variants.
#pragma unroll 2
        for (int kk = 0; kk < 4; ++kk) {
            u32 a[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
                load_matrices(a[mt],
                              weights + mt * TILE_STRIDE * 16 * K_BLOCK + swizzled(a_row, kk * 2 + (matrix >> 1)));
#pragma unroll
            for (int nt = 0; nt < N_TILES; nt += 2) {
                if (nt < active) {
                    u32 b[4];
                    load_matrices(b, tokens + swizzled(nt * 8 + (matrix >> 1) * 8 + (lane & 7), kk * 2 + (matrix & 1)));
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        mma(part[mt][nt], a[mt], b[0], b[1]);
                        mma(part[mt][nt + 1], a[mt], b[2], b[3]);
                    }
                }
            }
        }
    }
    consume(part);
#endif
}
