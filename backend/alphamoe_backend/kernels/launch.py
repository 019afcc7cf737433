"""The launch rule of the fused kernel: which variant, grid, cluster and shared memory a geometry and an M give.

The launcher obeys this rule and the profiler checks recorded launches against it, so a launch's shape tells M, up to
the window that the grid is rounded to. No torch here. The shared memory layout repeats that of ``w8a8_shape.cuh``; the
kernel traps on a mismatch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from alphamoe_backend.geometry import LocalGeometry
from alphamoe_tracers.errors import UsageError

SOURCE_NAME = "alphamoe_w8a8_up_down"
SYMBOL = "kernel_alpha_moe_w8a8_up_down"
THREADS = 256
WARPS = THREADS // 32
K_BLOCK = 128
BLOCK_M = 8
MAX_E, MAX_H, MAX_I_LOCAL, MAX_TOP_K = 512, 6144, 512, 16
SM_SMEM_BYTES = 233_472
"""Shared memory of one Hopper multiprocessor."""
RESERVED_SMEM_BYTES = 1024
"""What the system takes of it for each resident CTA."""


@dataclass(frozen=True)
class Variant:
    """One compile-time shape of the kernel; a cubin of its own, under the same symbol."""

    name: str
    tokens: int
    """Rows of a window: 8 for each plan block."""
    cluster: int
    """CTAs that share a window and a 128-wide slice of the intermediate."""
    warps_k: int
    """Warps that split K; the other 8 / warps_k split the weight rows."""
    stages: int
    """Slots of the ring that weights and activations stream through."""
    down_tiles: int
    """16-row tiles of the down weights that a warp takes from one slot."""
    wgmma: bool
    """Warpgroup products in f16 instead of warp products in e4m3; both are exact."""
    ctas_per_sm: int
    """CTAs that fit on a multiprocessor; caps the registers."""

    def defines(self) -> dict[str, int]:
        """Give the macro definitions that the source is compiled with."""
        return {
            "TOKENS": self.tokens,
            "CLUSTER": self.cluster,
            "WARPS_K": self.warps_k,
            "STAGES": self.stages,
            "DOWN_TILES": self.down_tiles,
            "WGMMA": int(self.wgmma),
            "MIN_CTAS": self.ctas_per_sm,
        }

    def dynamic_smem_bytes(self, H: int) -> int:
        """Give the dynamic shared memory of a CTA for hidden size H."""
        up_rows = 256 // self.cluster
        up_item = self.warps_k * (up_rows + (0 if self.wgmma else self.tokens)) * K_BLOCK
        down_item = WARPS * self.down_tiles * 16 * K_BLOCK
        partial_sums = self.warps_k * (up_rows // 16) * (self.tokens // 8) * 512 if self.warps_k > 1 else 0
        scratch = max(partial_sums, WARPS * self.down_tiles * 256)
        return (
            self.stages * max(up_item, down_item)
            + self.tokens * K_BLOCK * (4 if self.wgmma else 1)  # requantised activations; two tiles of f16 for wgmma
            + self.tokens * 132 * 4  # float32 activations, padded rows
            + scratch
            + 3 * self.tokens * 4  # token, routing weight and scale of each row
            + H // K_BLOCK * (self.tokens + 3) * 4  # scales of the activations, of gate and up, of the down weights
        )


_VARIANTS = (
    Variant("t8_c8", 8, 8, warps_k=4, stages=5, down_tiles=1, wgmma=False, ctas_per_sm=2),
    Variant("t16_c4", 16, 4, warps_k=2, stages=4, down_tiles=1, wgmma=False, ctas_per_sm=2),
    Variant("t32_c2", 32, 2, warps_k=1, stages=4, down_tiles=1, wgmma=False, ctas_per_sm=2),
    Variant("t64_w", 64, 1, warps_k=1, stages=4, down_tiles=2, wgmma=True, ctas_per_sm=1),
)
_FASTEST_UP_TO = (
    (1.5, "t8_c8"),
    (3.0, "t16_c4"),
    (5.0, "t32_c2"),
    (7.0, "t16_c4"),  # t32_c2 fills the card once and a half there: its second wave is half empty
    (float("inf"), "t64_w"),
)
"""Fastest variant up to a load (:func:`load`), as timed on an H200 with E 512, H 2048, I 128, top_k 10."""


@dataclass(frozen=True)
class LaunchShape:
    """One launch of the fused kernel."""

    variant: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int


def variants() -> tuple[Variant, ...]:
    """List every compiled variant."""
    return _VARIANTS


def variant(name: str) -> Variant:
    """Look a variant up by name.

    Raises:
        UsageError: no such variant.
    """
    for candidate in _VARIANTS:
        if candidate.name == name:
            return candidate
    raise UsageError(f"the fused kernel has no variant {name!r}", hint=f"one of {[v.name for v in _VARIANTS]}")


def plan_blocks(geometry: LocalGeometry, M: int) -> int:
    """Give the capacity, in blocks, of the plan that ``routing.align_block_size`` makes for M tokens."""
    pairs = M * geometry.top_k
    nonempty = min(geometry.E, pairs)
    return nonempty + (pairs - nonempty) // geometry.block_m


def check_geometry(geometry: LocalGeometry) -> None:
    """Refuse what the kernel was not written for.

    Raises:
        UsageError: naming the first limit that is broken.
    """
    limits = (
        (geometry.block_m == BLOCK_M, f"block_m is {geometry.block_m}, the kernel knows {BLOCK_M} only"),
        (
            0 < geometry.H <= MAX_H and geometry.H % K_BLOCK == 0,
            f"H is {geometry.H}, not a multiple of {K_BLOCK} up to {MAX_H}",
        ),
        (
            0 < geometry.I_local <= MAX_I_LOCAL and geometry.I_local % K_BLOCK == 0,
            f"I_local is {geometry.I_local}, not a multiple of {K_BLOCK} up to {MAX_I_LOCAL}",
        ),
        (0 < geometry.top_k <= MAX_TOP_K, f"top_k is {geometry.top_k}, not 1 to {MAX_TOP_K}"),
        (geometry.top_k <= geometry.E <= MAX_E, f"E is {geometry.E}, not top_k to {MAX_E}"),
    )
    for holds, message in limits:
        if not holds:
            raise UsageError(f"the fused kernel cannot run this geometry: {message}", hint="use the triton backend")


def load(geometry: LocalGeometry, M: int, sm_count: int) -> float:
    """Give the plan blocks, times 128-wide slices of the intermediate, that fall to one multiprocessor."""
    return plan_blocks(geometry, M) * (geometry.I_local // K_BLOCK) / sm_count


def choose_variant(geometry: LocalGeometry, M: int, sm_count: int) -> Variant:
    """Choose by the load: wide windows read weights less often, narrow ones keep all multiprocessors busy."""
    carried = load(geometry, M, sm_count)
    return variant(next(name for limit, name in _FASTEST_UP_TO if carried <= limit))


@functools.lru_cache(maxsize=4096)
def shape_for_blocks(geometry: LocalGeometry, chosen: Variant, blocks: int) -> LaunchShape:
    """Give the launch of one variant over a plan of ``blocks`` blocks."""
    windows = -(-blocks * BLOCK_M // chosen.tokens)
    return LaunchShape(
        variant=chosen.name,
        grid=(windows * chosen.cluster, geometry.I_local // K_BLOCK, 1),
        block=(THREADS, 1, 1),
        cluster=(chosen.cluster, 1, 1),
        dynamic_smem_bytes=chosen.dynamic_smem_bytes(geometry.H),
    )


@functools.lru_cache(maxsize=4096)
def launch_shape(geometry: LocalGeometry, M: int, sm_count: int = 132) -> LaunchShape:
    """Give the launch for M tokens (padding tokens included).

    Args:
        geometry: the rank's routed experts.
        M: rows of the hidden states.
        sm_count: multiprocessors of the device; the choice of the variant depends on it.

    Raises:
        UsageError: the geometry is outside the kernel's limits, or M is not positive.
    """
    check_geometry(geometry)
    if M < 1 or sm_count < 1:
        raise UsageError(f"a launch needs at least one token and one multiprocessor, not M={M}, sm_count={sm_count}")
    return shape_for_blocks(geometry, choose_variant(geometry, M, sm_count), plan_blocks(geometry, M))
