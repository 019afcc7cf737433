"""Triton sources of the routing; imported only where triton is."""

# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _router_topk_softmax(
    logits, weights, ids, E: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr
):
    """Choose the TOP_K experts of one token by softmax, the lower expert first where two are equal."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BINS)
    inside = column < E
    x = tl.load(logits + row * E + column, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=0))
    p = p / tl.sum(p, axis=0)
    remaining = tl.where(inside, p, -1.0)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.float32)
    chosen_ids = tl.zeros((SLOTS,), dtype=tl.int32)
    for route in tl.static_range(TOP_K):
        best = tl.max(remaining, axis=0)
        expert = tl.min(tl.where(remaining == best, column, BINS), axis=0)
        # No element equals a NaN: any valid expert will do, its weight is NaN and shows.
        expert = tl.where(expert < E, expert, route)
        weight = tl.sum(tl.where(column == expert, p, 0.0), axis=0)
        chosen = tl.where(slot == route, weight, chosen)
        chosen_ids = tl.where(slot == route, expert, chosen_ids)
        remaining = tl.where(column == expert, -1.0, remaining)
    chosen = chosen / tl.sum(chosen, axis=0)
    tl.store(weights + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(ids + row * TOP_K + slot, chosen_ids, mask=slot < TOP_K)


@triton.jit
def _route_align_block_size(
    topk_ids,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    pairs,
    capacity,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write one expert's part of the plan; every program counts all pairs, so that none waits for another."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, pairs, CHUNK):
        inside = start + lane < pairs
        chosen = tl.load(topk_ids + start + lane, mask=inside, other=0)
        counts += tl.histogram(chosen, BINS, mask=inside)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    total = tl.sum(blocks, axis=0)

    if mine > 0:
        row = first * BLOCK_M
        for start in range(0, pairs, CHUNK):
            chosen = tl.load(topk_ids + start + lane, mask=start + lane < pairs, other=-1)
            match = (chosen == expert).to(tl.int32)
            tl.store(sorted_token_ids + row + tl.cumsum(match, axis=0) - match, start + lane, mask=match > 0)
            row += tl.sum(match, axis=0)
        pad = row + tl.arange(0, PAD)
        tl.store(sorted_token_ids + pad, tl.zeros((PAD,), tl.int32) + pairs, mask=pad < (first + mine) * BLOCK_M)
        for start in range(0, mine, CHUNK):
            block = start + lane
            tl.store(expert_ids + first + block, tl.zeros((CHUNK,), tl.int32) + expert, mask=block < mine)

    # The unused tail is shared out over the programs.
    for start in range(total * BLOCK_M + expert * CHUNK, capacity * BLOCK_M, E * CHUNK):
        tail = start + lane
        tl.store(sorted_token_ids + tail, tl.zeros((CHUNK,), tl.int32) + pairs, mask=tail < capacity * BLOCK_M)
    for start in range(total + expert * CHUNK, capacity, E * CHUNK):
        tail = start + lane
        tl.store(expert_ids + tail, tl.full((CHUNK,), -1, tl.int32), mask=tail < capacity)
    if expert == 0:
        tl.store(num_tokens_post_padded, total * BLOCK_M)
