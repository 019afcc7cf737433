// Fused W8A8 mixture-of-experts kernel for Hopper (sm_90a): one launch does the up GEMM, SwiGLU, the requantisation
// to e4m3 and the down GEMM of every expert, and adds the weighted rows into `out` (bf16, zeroed by the caller).
//
// Layouts are those of FlashInfer's alphamoe_fp8_block_scale_aligned_moe (see experts/alphamoe_w8a8.py).
//
// How the work is cut:
//   * a window is TOKENS / 8 consecutive plan blocks of 8 rows; a run is a stretch of a window with one expert;
//   * a cluster of CLUSTER CTAs owns (window, 128-wide slice of the intermediate); CTA r of it owns 256 / CLUSTER
//     interleaved gate/up rows over all of H, then H / CLUSTER rows of the down weights over the slice;
//   * between the two GEMMs the CTAs push their SwiGLU values into each other's shared memory, because the scale of
//     the requantisation is a maximum over the whole slice.
// Weight rows are the M operand of the tensor core and tokens the N operand. The 8-row interleave puts 8 gate and
// 8 up rows in each 16-row tile, so accumulators c0/c2 and c1/c3 of one thread are gate/up pairs of one token.
//
// The compile-time shape is in w8a8_shape.cuh; launch.py lists the variants in use.

#include "w8a8_product.cuh"

__device__ __forceinline__ float silu_times(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
kernel_alpha_moe_w8a8_up_down(const u8 *__restrict__ hidden, const float *__restrict__ hidden_scale,
                              const u8 *__restrict__ gemm1, const float *__restrict__ gemm1_scale,
                              const u8 *__restrict__ gemm2, const float *__restrict__ gemm2_scale,
                              const int *__restrict__ sorted_token_ids, const int *__restrict__ expert_ids,
                              const int *__restrict__ num_tokens_post_padded, const float *__restrict__ topk_weights,
                              u16 *out, int M, int E, int H, int I, int top_k, int plan_blocks, float routed_scale) {
    extern __shared__ __align__(1024) u8 smem[];
    const int tid = threadIdx.x;
    const int warp = tid >> 5;
    const int lane = tid & 31;
    const int group = lane >> 2;  // row of an accumulator tile (and + 8)
    const int quad = lane & 3;    // columns 2 * quad and 2 * quad + 1
    const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int window = blockIdx.x / CLUSTER;
    const int slice = blockIdx.y;
    const int k_blocks = H / K_BLOCK;

    const u32 base = smem_address(smem);
    float *const act = reinterpret_cast<float *>(smem + ACT_AT);
    float *const scratch = reinterpret_cast<float *>(smem + SCRATCH_AT);
    int *const row_token = reinterpret_cast<int *>(smem + ROWS_AT);  // -1 for padding
    float *const row_weight = reinterpret_cast<float *>(smem + ROWS_AT) + TOKENS;
    float *const row_scale = reinterpret_cast<float *>(smem + ROWS_AT) + 2 * TOKENS;
    float *const x_scale = reinterpret_cast<float *>(smem + SCALES_AT);
    float *const up_scale = x_scale + k_blocks * TOKENS;
    float *const down_scale = up_scale + 2 * k_blocks;

    {
        u32 given;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(given));
        if (given < SCALES_AT + static_cast<u32>(k_blocks) * (TOKENS + 3) * 4u) __trap();
    }

    // Step 1: the plan. Its three arrays are read at once, to pay one latency; what lies beyond num_tokens_post_padded
    // is dropped unseen. The whole cluster leaves together.
    const int first_block = window * N_TILES;
    int flat = -1;
    if (tid < TOKENS && first_block * BLOCK_M + tid < plan_blocks * BLOCK_M)
        flat = sorted_token_ids[first_block * BLOCK_M + tid];
    const int first_expert = expert_ids[first_block];
    int blocks_end = *num_tokens_post_padded / BLOCK_M;
    blocks_end = blocks_end < plan_blocks ? blocks_end : plan_blocks;
    blocks_end = blocks_end < first_block + N_TILES ? blocks_end : first_block + N_TILES;
    if (first_block >= blocks_end) return;

    float weight = 0.0f;
    if (tid < TOKENS) {
        const bool used = tid < (blocks_end - first_block) * BLOCK_M;
        if (!used || static_cast<u32>(flat) >= static_cast<u32>(M * top_k)) flat = -1;
        row_token[tid] = flat < 0 ? -1 : flat / top_k;
        if (flat >= 0) weight = topk_weights[flat];
    }
    __syncthreads();

#pragma unroll 1
    for (int block = first_block; block < blocks_end;) {
        const int expert = block == first_block ? first_expert : expert_ids[block];
        int active = 1;
        while (block + active < blocks_end && expert_ids[block + active] == expert) ++active;
        const int row0 = (block - first_block) * BLOCK_M;
        block += active;
        if (static_cast<u32>(expert) >= static_cast<u32>(E)) continue;
        const int rows = active * BLOCK_M;

        // Peers may write into this CTA's `act` from here on: its last readers passed the barrier that ended the run.
        if constexpr (CLUSTER > 1) cluster_arrive();

        const u8 *const up_rows = gemm1 + (static_cast<size_t>(expert) * 2 * I + slice * 256 + rank * UP_ROWS) * H;
        const u8 *const down_rows = gemm2 + static_cast<size_t>(expert) * H * I + slice * 128;
        const int down_tiles = H / 16 / CLUSTER;          // m16 tiles of this CTA
        const int down_row0 = rank * down_tiles * 16;
        const int up_items = (k_blocks + WARPS_K - 1) / WARPS_K;
        const int items = up_items + (down_tiles + WARPS * DOWN_TILES - 1) / (WARPS * DOWN_TILES);

        // Copies 16-byte chunks of pipeline item `item` into ring slot `slot`; items past the end copy nothing.
        auto issue = [&](int item, int slot) {
            const u32 at = base + RING_AT + slot * SLOT_BYTES;
            const int chunk = tid & 7;
            if (item < up_items) {
#pragma unroll
                for (int k = 0; k < WARPS_K; ++k) {
                    const int kb = item * WARPS_K + k;
                    if (kb < k_blocks) {
                        // One running pointer instead of an address a row: registers are what the wide variants lack.
                        const u8 *src = up_rows + static_cast<u32>((tid >> 3) * H + kb * K_BLOCK + chunk * 16);
                        const u32 dst = at + k * UP_KBLOCK_BYTES + swizzled(tid >> 3, chunk);
#pragma unroll
                        for (int r = 0; r < UP_ROWS; r += ROWS_A_PASS) {
                            copy16(dst + r * K_BLOCK, src, 16);
                            src = advanced(src, ROWS_A_PASS * H);
                        }
                    }
                }
                for (int i = tid; i < WARPS_K * RING_TOKENS * 8; i += THREADS) {
                    const int row = (i >> 3) % TOKENS;
                    const int k = (i >> 3) / TOKENS;
                    const int kb = item * WARPS_K + k;
                    if (kb < k_blocks && row < rows) {
                        const int token = row_token[row0 + row];
                        const u8 *const src =
                            hidden + static_cast<size_t>(token < 0 ? 0 : token) * H + kb * K_BLOCK + chunk * 16;
                        copy16(at + k * UP_KBLOCK_BYTES + UP_ROWS * K_BLOCK + swizzled(row, chunk), src,
                               token < 0 ? 0 : 16);
                    }
                }
            } else if (item < items) {
                const int tile0 = (item - up_items) * WARPS * DOWN_TILES;
                const u8 *src = down_rows + static_cast<u32>((down_row0 + tile0 * 16 + (tid >> 3)) * I + chunk * 16);
                const u32 dst = at + swizzled(tid >> 3, chunk);
#pragma unroll
                for (int r = 0; r < DOWN_ROWS; r += ROWS_A_PASS) {
                    if (tile0 * 16 + r + (tid >> 3) < down_tiles * 16) copy16(dst + r * K_BLOCK, src, 16);
                    src = advanced(src, ROWS_A_PASS * I);
                }
            }
        };

        // Step 2: fill the pipeline. The scales ride in the first group. One commit an item, always, also when it is
        // empty, so that "all but the newest STAGES - 2 groups" is item q in iteration q.
        TokenLoader loader;
        if constexpr (WGMMA) {
            const int token = loader.row() < rows ? row_token[row0 + loader.row()] : -1;
            loader.start(token < 0 ? nullptr : hidden + static_cast<size_t>(token) * H);
            loader.load(0, k_blocks);
        }
        for (int r = warp; r < rows; r += WARPS) {
            const int token = row_token[row0 + r];
            const float *const src = hidden_scale + static_cast<size_t>(token < 0 ? 0 : token) * k_blocks;
            for (int kb = lane; kb < k_blocks; kb += 32)
                copy4(smem_address(x_scale + kb * TOKENS + r), src + kb, token < 0 ? 0 : 4);
        }
        {
            const int slices = I / 128;
            const float *const s1 = gemm1_scale + (static_cast<size_t>(expert) * 2 * slices + 2 * slice) * k_blocks;
            const float *const s2 = gemm2_scale + static_cast<size_t>(expert) * k_blocks * slices + slice;
            for (int i = tid; i < 2 * k_blocks; i += THREADS) copy4(smem_address(up_scale + i), s1 + i, 4);
            for (int i = tid; i < k_blocks; i += THREADS) copy4(smem_address(down_scale + i), s2 + i * slices, 4);
        }
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) {
            issue(s, s);
            copies_commit();
        }
        // Stored only now, so that its load does not hold up the copies.
        if (tid < TOKENS) row_weight[tid] = weight * routed_scale;
        if constexpr (WGMMA) {
            loader.store(base + TILES_AT);
            loader.load(1, k_blocks);
        }

        int slot = 0;
        int refill = STAGES - 1;
        // Waits for item q, lets every thread leave item q - 1, then refills the slot of q - 1.
        auto advance = [&](int q) {
            copies_wait<STAGES - 2>();
            if constexpr (WGMMA) show_to_wgmma();
            __syncthreads();
            issue(q + STAGES - 1, refill);
            copies_commit();
        };
        auto next_slot = [&]() {
            refill = slot;
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        };

        // Step 3: up GEMM. fp32 partial of one K block, then acc += partial * weight scale * token scale.
        const int warp_m = warp % WARPS_M;
        const int warp_k = warp / WARPS_M;
        float acc[UP_MT][N_TILES][4];
#pragma unroll
        for (int mt = 0; mt < UP_MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[mt][nt][i] = 0.0f;

#pragma unroll 1
        for (int q = 0; q < up_items; ++q) {
            advance(q);
            const int kb = q * WARPS_K + warp_k;
            if (kb < k_blocks) {
                const u32 at = base + RING_AT + slot * SLOT_BYTES + warp_k * UP_KBLOCK_BYTES;
                const u32 tokens = WGMMA ? base + TILES_AT + (q & 1) * TILE_BYTES : at + UP_ROWS * K_BLOCK;
                // The other tile is free: its readers passed the barrier.
                auto next_tokens = [&]() {
                    if constexpr (WGMMA) {
                        loader.store(base + TILES_AT + ((q + 1) & 1) * TILE_BYTES);
                        loader.load(q + 2, k_blocks);
                    }
                };
                multiply_block<UP_MT, WGMMA ? 1 : UP_MT, WARPS_M>(
                    at, tokens, warp_m, lane, active, next_tokens, [&](int first, const auto &part) {
                        const float gate = up_scale[kb];
                        const float up = up_scale[k_blocks + kb];
#pragma unroll
                        for (int nt = 0; nt < n_tiles(part); ++nt) {
                            if (nt < active) {
                                const float2 x =
                                    *reinterpret_cast<const float2 *>(x_scale + kb * TOKENS + nt * 8 + quad * 2);
#pragma unroll
                                for (int mt = 0; mt < m_tiles(part); ++mt) {
                                    acc[first + mt][nt][0] += part[mt][nt][0] * (gate * x.x);
                                    acc[first + mt][nt][1] += part[mt][nt][1] * (gate * x.y);
                                    acc[first + mt][nt][2] += part[mt][nt][2] * (up * x.x);
                                    acc[first + mt][nt][3] += part[mt][nt][3] * (up * x.y);
                                }
                            }
                        }
                    });
            }
            next_slot();
        }

        // Step 4: SwiGLU, pushed to every CTA of the cluster.
        if constexpr (CLUSTER > 1) cluster_wait();
        auto push = [&](int tile, int nt, const float (&c)[4]) {
            const int column = (rank * UP_TILES + tile) * 8 + group;
            const int token = nt * 8 + quad * 2;
            const float v0 = silu_times(c[0], c[2]);
            const float v1 = silu_times(c[1], c[3]);
            float *const at0 = act + token * ACT_STRIDE + column;
            if constexpr (CLUSTER > 1) {
                const u32 local = smem_address(at0);
#pragma unroll
                for (int peer = 0; peer < CLUSTER; ++peer) {
                    const u32 there = peer_address(local, peer);
                    peer_store(there, v0);
                    peer_store(there + ACT_STRIDE * 4, v1);
                }
            } else {
                at0[0] = v0;
                at0[ACT_STRIDE] = v1;
            }
        };
        if constexpr (WARPS_K > 1) {
            float4 *const sums = reinterpret_cast<float4 *>(scratch);  // [WARPS_K][UP_TILES * N_TILES][32]
#pragma unroll
            for (int mt = 0; mt < UP_MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < N_TILES; ++nt) {
                    const int unit = (mt * WARPS_M + warp_m) * N_TILES + nt;
                    sums[(warp_k * UP_TILES * N_TILES + unit) * 32 + lane] =
                        make_float4(acc[mt][nt][0], acc[mt][nt][1], acc[mt][nt][2], acc[mt][nt][3]);
                }
            __syncthreads();
            for (int unit = warp; unit < UP_TILES * N_TILES; unit += WARPS) {
                if (unit % N_TILES < active) {
                    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                    for (int k = 0; k < WARPS_K; ++k) {
                        const float4 v = sums[(k * UP_TILES * N_TILES + unit) * 32 + lane];
                        c[0] += v.x;
                        c[1] += v.y;
                        c[2] += v.z;
                        c[3] += v.w;
                    }
                    push(unit / N_TILES, unit % N_TILES, c);
                }
            }
        } else {
#pragma unroll
            for (int mt = 0; mt < UP_MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < N_TILES; ++nt)
                    if (nt < active) push(mt * WARPS_M + warp_m, nt, acc[mt][nt]);
        }
        if constexpr (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        }
        __syncthreads();

        // Step 5: requantise, a warp a token. NOTES: fmaxf drops NaN, so a NaN cannot raise the scale, and its own
        // quotient stays NaN; a zero scale multiplies instead of dividing, so zeros stay zeros and NaN stays NaN.
        for (int r = warp; r < rows; r += WARPS) {
            const float4 v = *reinterpret_cast<const float4 *>(act + r * ACT_STRIDE + lane * 4);
            float peak = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, d));
            const float scale = __fdiv_rn(peak, 448.0f);
            const u32 q = scale > 0.0f ? pack_e4m3(__fdiv_rn(v.x, scale), __fdiv_rn(v.y, scale),
                                                   __fdiv_rn(v.z, scale), __fdiv_rn(v.w, scale))
                                       : pack_e4m3(v.x * 0.0f, v.y * 0.0f, v.z * 0.0f, v.w * 0.0f);
            if constexpr (WGMMA) {
                u32 low, high;
                widen(low, high, q);
                *reinterpret_cast<u32 *>(smem + TILES_AT + tile_chunk(r, lane & 7, 0) + (lane >> 3) * 4) = low;
                *reinterpret_cast<u32 *>(smem + TILES_AT + tile_chunk(r, lane & 7, 1) + (lane >> 3) * 4) = high;
            } else {
                *reinterpret_cast<u32 *>(smem + TILES_AT + swizzled(r, lane >> 2) + (lane & 3) * 4) = q;
            }
            if (lane == 0) row_scale[r] = scale;
        }

        // Step 6: down GEMM, one K block, and the weighted bf16 sums. Matrix i of a warp's staging is 8 output columns
        // (half of an m16 tile) x 8 tokens, transposed on the way in, so that a token's 8 columns are 16 bytes.
        constexpr int MATRICES = DOWN_TILES * 2;
        const u32 staging = base + SCRATCH_AT + warp * STAGING_WARP_BYTES;
        auto emit = [&](const auto &part, int tile0) {
            const int lane_token = lane / MATRICES;
            const int lane_matrix = lane % MATRICES;
            const int lane_tile = tile0 + (lane_matrix >> 1) * WARPS + warp;
            const int lane_column = down_row0 + lane_tile * 16 + (lane_matrix & 1) * 8;
            const bool lane_stores = lane < 8 * MATRICES && lane_tile < down_tiles;
            float ws[DOWN_TILES];
#pragma unroll
            for (int mt = 0; mt < DOWN_TILES; ++mt) {
                const int tile = tile0 + mt * WARPS + warp;
                ws[mt] = tile < down_tiles ? down_scale[(down_row0 + tile * 16) / K_BLOCK] : 0.0f;
            }
#pragma unroll
            for (int nt = 0; nt < n_tiles(part); ++nt) {
                if (nt < active) {
                    const float2 s = *reinterpret_cast<const float2 *>(row_scale + nt * 8 + quad * 2);
                    const float f0 = s.x * row_weight[row0 + nt * 8 + quad * 2];
                    const float f1 = s.y * row_weight[row0 + nt * 8 + quad * 2 + 1];
                    u32 packed[MATRICES];
#pragma unroll
                    for (int mt = 0; mt < DOWN_TILES; ++mt) {
                        packed[mt * 2] = pack_bf16(part[mt][nt][0] * f0 * ws[mt], part[mt][nt][1] * f1 * ws[mt]);
                        packed[mt * 2 + 1] = pack_bf16(part[mt][nt][2] * f0 * ws[mt], part[mt][nt][3] * f1 * ws[mt]);
                    }
                    store_transposed(staging + staged(lane & 7, (lane >> 3) % MATRICES), packed);
                    __syncwarp();
                    if (lane_stores) {
                        const int token = row_token[row0 + nt * 8 + lane_token];
                        const uint4 v = load_shared16(staging + staged(lane_token, lane_matrix));
                        if (token >= 0) add_bf16x8(out + static_cast<size_t>(token) * H + lane_column, v);
                    }
                    __syncwarp();
                }
            }
        };
        // The barrier inside advance() publishes step 5, and its fence shows step 5 to wgmma.
#pragma unroll 1
        for (int q = up_items; q < items; ++q) {
            advance(q);
            const int tile0 = (q - up_items) * WARPS * DOWN_TILES;
            if (tile0 + warp < down_tiles) {
                multiply_block<DOWN_TILES, DOWN_TILES, WARPS>(
                    base + RING_AT + slot * SLOT_BYTES, base + TILES_AT, warp, lane, active, []() {},
                    [&](int, const auto &part) { emit(part, tile0); });
            }
            next_slot();
        }
        if constexpr (N_TILES == 1) break;  // a window of one block has no other run
        copies_wait<0>();
        __syncthreads();
    }
}
