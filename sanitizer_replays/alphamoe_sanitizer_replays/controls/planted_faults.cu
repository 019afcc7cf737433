// Planted faults: one kernel a synchronisation mechanism or memory fault, each beside a twin without the fault.
//
// A tool whose clean results are to be believed must find the fault in planted_X and nothing in sound_X. Every kernel
// does the same honest work around the one thing that is wrong, guarded by `if constexpr (FAULT)`.
// NOTES: results go to `out`, so that nothing is optimised away. 256 threads a block, as the target kernel.
// A name is a device function here and two kernels, planted_X and sound_X: the tool may print any of the three.
// Grids, clusters and dynamic shared memory of the launches are in table.py.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 256;

__device__ __forceinline__ u32 smem_address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Block barrier: a value read by another warp before the barrier that publishes it.
template <bool FAULT> __device__ __forceinline__ void block_barrier(float *out) {
    __shared__ float cell[THREADS];
    cell[threadIdx.x] = static_cast<float>(threadIdx.x);
    if constexpr (!FAULT) __syncthreads();
    out[threadIdx.x] = cell[(threadIdx.x + 32) % THREADS];
}

// Block barrier reached by only half of the threads of each warp.
template <bool FAULT> __device__ __forceinline__ void divergent_barrier(float *out) {
    if (!FAULT || threadIdx.x % 32 < 16) __syncthreads();
    out[threadIdx.x] = 1.0f;
}

// Warp sync: a value read by another lane of the warp before __syncwarp.
template <bool FAULT> __device__ __forceinline__ void warp_sync(float *out) {
    __shared__ float cell[THREADS];
    const int neighbour = (threadIdx.x & ~31) | ((threadIdx.x + 1) & 31);
    cell[threadIdx.x] = static_cast<float>(threadIdx.x);
    if constexpr (!FAULT) __syncwarp();
    out[threadIdx.x] = cell[neighbour];
}

// Warp sync whose mask leaves out lanes that call it.
template <bool FAULT> __device__ __forceinline__ void warp_mask(float *out) {
    const u32 mask = FAULT ? 0x0000FFFFu : 0xFFFFFFFFu;
    __syncwarp(mask);
    out[threadIdx.x] = 1.0f;
}

// cp.async group: shared memory read before wait_group says that the copy is there.
template <bool FAULT> __device__ __forceinline__ void cp_async(float *out, const float *in) {
    __shared__ __align__(16) float cell[THREADS * 4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(cell + threadIdx.x * 4)),
                 "l"(in + threadIdx.x * 4)
                 : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    if constexpr (!FAULT) asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    out[threadIdx.x] = cell[((threadIdx.x + 32) % THREADS) * 4];
}

// The same with the wait but without the barrier after it: other threads' copies are not published.
template <bool FAULT> __device__ __forceinline__ void cp_async_barrier(float *out, const float *in) {
    __shared__ __align__(16) float cell[THREADS * 4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(cell + threadIdx.x * 4)),
                 "l"(in + threadIdx.x * 4)
                 : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    if constexpr (!FAULT) __syncthreads();
    out[threadIdx.x] = cell[((threadIdx.x + 32) % THREADS) * 4];
}

// ldmatrix of what other warps stored, without the barrier.
template <bool FAULT> __device__ __forceinline__ void ldmatrix(float *out) {
    __shared__ __align__(16) u32 cell[THREADS * 4];
    for (int i = 0; i < 4; ++i) cell[threadIdx.x * 4 + i] = threadIdx.x;
    if constexpr (!FAULT) __syncthreads();
    u32 r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(cell + ((threadIdx.x + 32) % THREADS) * 4))
                 : "memory");
    out[threadIdx.x] = static_cast<float>(r[0] + r[1] + r[2] + r[3]);
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void store_matrix(u32 at) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(threadIdx.x)
                 : "memory");
}

// stmatrix whose rows another warp reads without the block barrier.
template <bool FAULT> __device__ __forceinline__ void stmatrix(float *out) {
    __shared__ __align__(16) u32 cell[THREADS * 4];
    store_matrix(smem_address(cell + threadIdx.x * 4));
    if constexpr (!FAULT) __syncthreads();
    out[threadIdx.x] = static_cast<float>(cell[((threadIdx.x + 32) % THREADS) * 4]);
}

// stmatrix whose rows other lanes of the same warp read before __syncwarp.
template <bool FAULT> __device__ __forceinline__ void stmatrix_warp(float *out) {
    __shared__ __align__(16) u32 cell[THREADS * 4];
    store_matrix(smem_address(cell + threadIdx.x * 4));
    if constexpr (!FAULT) __syncwarp();
    const int neighbour = (threadIdx.x & ~31) | ((threadIdx.x + 1) & 31);
    out[threadIdx.x] = static_cast<float>(cell[neighbour * 4]);
}

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile("{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; "
                 "DONE: }" ::"r"(bar), "r"(parity)
                 : "memory");
}

// Bulk copy (the tensor memory accelerator's engine) read before its mbarrier completes.
template <bool FAULT> __device__ __forceinline__ void bulk_copy(float *out, const float *in) {
    __shared__ __align__(128) float cell[THREADS];
    __shared__ __align__(8) u64 full;
    const u32 bar = smem_address(&full);
    if (threadIdx.x == 0) mbarrier_init(bar, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                     "r"(static_cast<u32>(sizeof cell))
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                smem_address(cell)),
            "l"(in), "r"(static_cast<u32>(sizeof cell)), "r"(bar)
            : "memory");
    }
    if constexpr (!FAULT) mbarrier_wait(bar, 0);
    out[threadIdx.x] = cell[threadIdx.x];
    // The copy must land before the block ends.
    if constexpr (FAULT) mbarrier_wait(bar, 0);
}

// An mbarrier that threads arrive at before anything initialised it.
template <bool FAULT> __device__ __forceinline__ void mbarrier_use(float *out) {
    __shared__ __align__(8) u64 full;
    const u32 bar = smem_address(&full);
    if (!FAULT && threadIdx.x == 0) mbarrier_init(bar, THREADS);
    __syncthreads();
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" ::"r"(bar) : "memory");
    if constexpr (!FAULT) mbarrier_wait(bar, 0);
    out[threadIdx.x] = 1.0f;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Distributed shared memory: what a peer CTA pushed is read before the cluster barrier.
template <bool FAULT> __device__ __forceinline__ void cluster_memory(float *out) {
    __shared__ float cell[THREADS];
    u32 rank, there;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cell[threadIdx.x] = -1.0f;
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(smem_address(cell + threadIdx.x)), "r"(rank ^ 1));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(1.0f) : "memory");
    if constexpr (!FAULT) {
        cluster_arrive();
        cluster_wait();
    }
    out[blockIdx.x * THREADS + threadIdx.x] = cell[threadIdx.x];
    // Neither CTA may leave while the other still writes into it.
    cluster_arrive();
    cluster_wait();
}

// Cluster barrier: the arrival is there, but what the peer pushed is read before the wait.
template <bool FAULT> __device__ __forceinline__ void cluster_split(float *out) {
    __shared__ float cell[THREADS];
    u32 rank, there;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cell[threadIdx.x] = -1.0f;
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(smem_address(cell + threadIdx.x)), "r"(rank ^ 1));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(1.0f) : "memory");
    cluster_arrive();
    if constexpr (!FAULT) cluster_wait();
    out[blockIdx.x * THREADS + threadIdx.x] = cell[threadIdx.x];
    if constexpr (FAULT) cluster_wait();
}

// Exit in a cluster: a CTA leaves while its peer still writes into its shared memory.
// NOTES: the hardware raises an exception and the context is lost.
template <bool FAULT> __device__ __forceinline__ void cluster_exit(float *out) {
    __shared__ float cell[THREADS];
    u32 rank, there;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cell[threadIdx.x] = -1.0f;
    cluster_arrive();
    cluster_wait();
    if (FAULT && rank == 1) return;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(smem_address(cell + threadIdx.x)), "r"(rank ^ 1));
    if constexpr (FAULT)
        for (int i = 0; i < 1000; ++i) __nanosleep(1000);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(1.0f) : "memory");
    cluster_arrive();
    cluster_wait();
    out[blockIdx.x * THREADS + threadIdx.x] = cell[threadIdx.x];
}

#endif // __CUDA_ARCH__ >= 900

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// One product of a tile of 8 rows of 128 bytes (swizzled), of which row r is written by warp r. It stays in flight.
__device__ __forceinline__ void wgmma_start(float (&d)[4], const u32 *tile) {
    const u64 b = static_cast<u64>((smem_address(tile) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %4, %4, %4}, %5, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(threadIdx.x), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma reads a tile that other warps are still writing: the fence is there, the block barrier is not.
template <bool FAULT> __device__ __forceinline__ void warpgroup_barrier(float *out) {
    __shared__ __align__(1024) u32 tile[8 * 32];
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    tile[threadIdx.x] = 0;
    proxy_fence();
    if constexpr (!FAULT) __syncthreads();
    wgmma_start(d, tile);
    wgmma_wait();
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

// wgmma reads through the async proxy what the generic one wrote: the block barrier is there, the fence is not.
template <bool FAULT> __device__ __forceinline__ void warpgroup_fence(float *out) {
    __shared__ __align__(1024) u32 tile[8 * 32];
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    tile[threadIdx.x] = 0;
    if constexpr (!FAULT) proxy_fence();
    __syncthreads();
    wgmma_start(d, tile);
    wgmma_wait();
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

// A tile is written again while wgmma may still read it: the wait comes after the write.
template <bool FAULT> __device__ __forceinline__ void warpgroup_wait(float *out) {
    __shared__ __align__(1024) u32 tile[8 * 32];
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    tile[threadIdx.x] = 0;
    proxy_fence();
    __syncthreads();
    wgmma_start(d, tile);
    if constexpr (!FAULT) {
        wgmma_wait();
        __syncthreads();
    }
    reinterpret_cast<volatile u32 *>(tile)[threadIdx.x] = threadIdx.x;
    if constexpr (FAULT) {
        wgmma_wait();
        __syncthreads();
    }
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

#endif // __CUDA_ARCH_FEAT_SM90_ALL

// Global race: two blocks write different values to one place, with nothing between them.
template <bool FAULT> __device__ __forceinline__ void global_race(float *out) {
    out[(FAULT ? 0 : blockIdx.x * THREADS) + threadIdx.x] = static_cast<float>(blockIdx.x);
}

// Global write one element past the end of the buffer.
template <bool FAULT> __device__ __forceinline__ void global_write(float *out, int size) {
    out[threadIdx.x + (FAULT ? size - THREADS + 1 : 0)] = 1.0f;
}

// Global read past the end, by cp.async.
template <bool FAULT> __device__ __forceinline__ void global_copy(float *out, const float *in, int size) {
    __shared__ __align__(16) float cell[THREADS * 4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(cell + threadIdx.x * 4)),
                 "l"(in + threadIdx.x * 4 + (FAULT ? size - THREADS * 4 + 4 : 0))
                 : "memory");
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    out[threadIdx.x] = cell[threadIdx.x * 4];
}

#if __CUDA_ARCH__ >= 900
// Vector reduction past the end of the buffer: how the target kernel adds to its output.
template <bool FAULT> __device__ __forceinline__ void global_reduction(float *out, int size) {
    const int at = (threadIdx.x % 32) * 4 + (FAULT ? size - 32 * 4 + 4 : 0);
    asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %1, %1, %1};" ::"l"(out + at), "r"(0x3F803F80u) : "memory");
}
#endif

// Shared write one element past the dynamic shared memory of the launch.
// NOTES: a tool that does not stop it lets the hardware lose the context.
template <bool FAULT> __device__ __forceinline__ void shared_write(float *out) {
    extern __shared__ float dynamic[];
    dynamic[threadIdx.x] = 1.0f;
    if (FAULT && threadIdx.x == 0) dynamic[THREADS] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = dynamic[threadIdx.x];
}

// Global memory that nothing wrote, read by a plain load.
template <bool FAULT> __device__ __forceinline__ void plain_read(float *out, const float *in, const float *unwritten) {
    out[threadIdx.x] = (FAULT ? unwritten : in)[threadIdx.x] + 1.0f;
}

// The same by cp.async.
template <bool FAULT> __device__ __forceinline__ void copied_read(float *out, const float *in, const float *unwritten) {
    __shared__ __align__(16) float cell[THREADS * 4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(cell + threadIdx.x * 4)),
                 "l"((FAULT ? unwritten : in) + threadIdx.x * 4)
                 : "memory");
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    out[threadIdx.x] = cell[threadIdx.x * 4] + 1.0f;
}

#if __CUDA_ARCH__ >= 900
// The same by a reduction, which reads before it writes.
template <bool FAULT> __device__ __forceinline__ void reduced_read(float *out, float *unwritten) {
    float *const to = FAULT ? unwritten : out;
    asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %1, %1, %1};" ::"l"(to + (threadIdx.x % 32) * 4),
                 "r"(0x3F803F80u)
                 : "memory");
}
#endif

// Shared memory that nothing wrote.
template <bool FAULT> __device__ __forceinline__ void shared_read(float *out) {
    extern __shared__ float dynamic[];
    if constexpr (!FAULT) dynamic[threadIdx.x] = 1.0f;
    out[threadIdx.x] = dynamic[threadIdx.x] + 1.0f;
}

#define PARAMETERS float *out, const float *in, float *unwritten, int size
#define PAIR(name, call)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) planted_##name(PARAMETERS) {       \
        constexpr bool FAULT = true;                                                         \
        call;                                                                                \
    }                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) sound_##name(PARAMETERS) {         \
        constexpr bool FAULT = false;                                                        \
        call;                                                                                \
    }

PAIR(block_barrier, block_barrier<FAULT>(out))
PAIR(divergent_barrier, divergent_barrier<FAULT>(out))
PAIR(warp_sync, warp_sync<FAULT>(out))
PAIR(warp_mask, warp_mask<FAULT>(out))
PAIR(cp_async, cp_async<FAULT>(out, in))
PAIR(cp_async_barrier, cp_async_barrier<FAULT>(out, in))
PAIR(ldmatrix, ldmatrix<FAULT>(out))
PAIR(global_race, global_race<FAULT>(out))
PAIR(global_write, global_write<FAULT>(out, size))
PAIR(global_copy, global_copy<FAULT>(out, in, size))
PAIR(shared_write, shared_write<FAULT>(out))
PAIR(plain_read, plain_read<FAULT>(out, in, unwritten))
PAIR(copied_read, copied_read<FAULT>(out, in, unwritten))
PAIR(shared_read, shared_read<FAULT>(out))
#if __CUDA_ARCH__ >= 900
PAIR(stmatrix, stmatrix<FAULT>(out))
PAIR(stmatrix_warp, stmatrix_warp<FAULT>(out))
PAIR(bulk_copy, bulk_copy<FAULT>(out, in))
PAIR(mbarrier_use, mbarrier_use<FAULT>(out))
PAIR(cluster_memory, cluster_memory<FAULT>(out))
PAIR(cluster_split, cluster_split<FAULT>(out))
PAIR(cluster_exit, cluster_exit<FAULT>(out))
PAIR(global_reduction, global_reduction<FAULT>(out, size))
PAIR(reduced_read, reduced_read<FAULT>(out, unwritten))
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
PAIR(warpgroup_barrier, warpgroup_barrier<FAULT>(out))
PAIR(warpgroup_fence, warpgroup_fence<FAULT>(out))
PAIR(warpgroup_wait, warpgroup_wait<FAULT>(out))
#endif

// The canary: a basic fault under the symbol of the kernel that a replay watches, so that it must come through the
// very filter that the replay's tool was given. CANARY says which tool's, in the order of controls.CANARIES.
#ifdef CANARY_SYMBOL
extern "C" __global__ void __launch_bounds__(THREADS) CANARY_SYMBOL(PARAMETERS) {
#if CANARY == 0
    divergent_barrier<true>(out);
#elif CANARY == 1
    block_barrier<true>(out);
#elif CANARY == 2
    global_write<true>(out, size);
#else
    plain_read<true>(out, in, unwritten);
#endif
}
#endif
