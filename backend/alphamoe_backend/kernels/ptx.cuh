// PTX that the kernels use, a wrapper an instruction. No header of the toolkit is needed, so NVRTC compiles it anywhere.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 smem_address(const void *p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// `bytes` below the copy size zero-fills the rest; 0 reads nothing.
__device__ __forceinline__ void copy16(u32 dst, const void *src, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy4(u32 dst, const void *src, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// NOTES: wgmma reads shared memory through the async proxy, st.shared writes through the generic one. Call this between
// the writes and the barrier that publishes them.
__device__ __forceinline__ void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 peer_address(u32 local, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(local), "r"(rank));
    return r;
}

__device__ __forceinline__ void peer_store(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Round to nearest even, saturating; a NaN stays a NaN.
__device__ __forceinline__ u32 pack_e4m3(float v0, float v1, float v2, float v3) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v1), "f"(v0));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v3), "f"(v2));
    return static_cast<u32>(low) | (static_cast<u32>(high) << 16);
}

// Four e4m3 as two pairs of f16, exactly; NaN stays NaN. Volatile, to keep its place among wgmma's fences and waits.
__device__ __forceinline__ void widen(u32 &low, u32 &high, u32 packed) {
    asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
                 : "=r"(low), "=r"(high)
                 : "r"(packed));
}

// Transposing store of 8x8 bf16 matrices: lane l gives the address of stored row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared16(u32 address, const uint4 &v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Zeros where not wanted.
__device__ __forceinline__ uint2 load_global8(const u8 *src, int wanted) {
    uint2 v;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0; "
                 "@p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];}"
                 : "=&r"(v.x), "=&r"(v.y)
                 : "l"(src), "r"(wanted));
    return v;
}

__device__ __forceinline__ void add_bf16x8(u16 *dst, const uint4 &v) {
    asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// Opaque to the compiler, which would otherwise keep a hoisted 64-bit address for each row.
__device__ __forceinline__ const u8 *advanced(const u8 *p, int bytes) {
    asm volatile("{.reg .s64 w; cvt.s64.s32 w, %1; add.s64 %0, %0, w;}" : "+l"(p) : "r"(bytes));
    return p;
}
