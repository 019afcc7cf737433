// The product of one 128-wide K block of weights and tokens, both swizzled in shared memory: by warps or by warpgroups
// (w8a8_wgmma.cuh). Accumulators lie in the threads the same way in both.
#pragma once

#include "w8a8_wgmma.cuh"

template <int MT, int NT> __device__ constexpr int m_tiles(const float (&)[MT][NT][4]) { return MT; }
template <int MT, int NT> __device__ constexpr int n_tiles(const float (&)[MT][NT][4]) { return NT; }

// One K block of 128: part[mt][nt] = (16 weight rows of this warp's tile mt) x (8 tokens of tile nt), given to
// `consume(first tile, part)` with at least `active` n8 tiles, TOGETHER tiles at a time. Tile mt of warp row `warp_m` is
// tile mt * TILE_STRIDE + warp_m. `meanwhile` is called once, where it may hide behind the product.
template <int MT, int TOGETHER, int TILE_STRIDE, typename Meanwhile, typename Consume>
__device__ __forceinline__ void multiply_block(u32 weights, u32 tokens, int warp_m, int lane, int active,
                                               Meanwhile &&meanwhile, Consume &&consume) {
#if WGMMA
    static_assert(TILE_STRIDE == WARPS, "two warpgroups side by side");
    const u32 mine = weights + swizzled(warp_m * 16 + (lane >> 2), (lane & 3) * 2);
    if (active > 6)
        wgmma_block<MT, TOGETHER, 64>(mine, tokens, meanwhile, consume);
    else if (active > 4)
        wgmma_block<MT, TOGETHER, 48>(mine, tokens, meanwhile, consume);
    else if (active > 2)
        wgmma_block<MT, TOGETHER, 32>(mine, tokens, meanwhile, consume);
    else
        wgmma_block<MT, TOGETHER, 16>(mine, tokens, meanwhile, consume);
#else
    static_assert(TOGETHER == MT, "warp products are handed over all at once");
    meanwhile();
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
    consume(0, part);
#endif
}
