"""How requests become forwards: each request of a wave is prefilled alone, then all of them decode together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphamoe_backend.capture_sizes import GraphKind
from alphamoe_backend.readback import Read
from alphamoe_backend.serving import Completion, Request


@dataclass(frozen=True)
class Batch:
    """The real tokens of one forward, in request order."""

    kind: GraphKind
    request_ids: tuple[str, ...]
    input_ids: list[int] | None
    """None where each request goes on with the token that the step before sampled, which the device holds."""
    positions: list[int]
    """Place of each token in its request, from 0."""
    slots: list[int]
    """KV cache slot of each token's request."""


def wave_sizes(requests: int, slots: int) -> tuple[int, ...]:
    """Give the number of requests in each wave, where ``slots`` requests fit in one."""
    full, rest = divmod(requests, slots)
    return (slots,) * full + ((rest,) if rest else ())


def rehearse(tokens: int, decodes: int, vocab: int, submit: Callable[[Batch], Read]) -> None:
    """Prefill a made-up request of ``tokens`` tokens in slot 0 and decode it ``decodes`` times."""
    ids = [(7 * place + 1) % vocab for place in range(tokens)]
    last = submit(Batch("prefill", ("warmup",), ids, list(range(tokens)), [0] * tokens))()
    for place in range(tokens, tokens + decodes):
        last = submit(Batch("decode", ("warmup",), last, [place], [0]))()


def serve_wave(
    wave: Sequence[Request], name: str, max_new_tokens: int, submit: Callable[[Batch], Read], *, run_ahead: bool
) -> list[Completion]:
    """Serve a wave to its end.

    Args:
        wave: as many requests as slots at most; request i lives in slot i.
        name: the pass, appended to the request ids as ``@name``.
        max_new_tokens: tokens of each completion.
        submit: submits one forward and gives what reads the sampled token of each of its requests.
        run_ahead: read a decode step's tokens after the next one was submitted, not before.

    Returns:
        One completion a request, in order.
    """
    ids = tuple(f"{request.request_id}@{name}" for request in wave)
    tokens: list[list[int]] = []
    prefill_s: list[float] = []
    for slot, (request, request_id) in enumerate(zip(wave, ids, strict=True)):
        length = len(request.prompt_ids)
        begun = time.perf_counter()
        prompt = Batch("prefill", (request_id,), list(request.prompt_ids), list(range(length)), [slot] * length)
        tokens.append(submit(prompt)())
        prefill_s.append(time.perf_counter() - begun)

    def take(read: Read) -> None:
        for line, token in zip(tokens, read(), strict=True):
            line.append(token)

    slots = list(range(len(wave)))
    unread: Read | None = None
    begun = time.perf_counter()
    for generated in range(max_new_tokens - 1):
        positions = [len(request.prompt_ids) + generated for request in wave]
        input_ids = [line[-1] for line in tokens] if unread is None else None
        read = submit(Batch("decode", ids, input_ids, positions, slots))
        if unread is not None:
            take(unread)
        if run_ahead:
            unread = read
        else:
            take(read)
    if unread is not None:
        take(unread)
    decode_s = time.perf_counter() - begun
    return [
        Completion(request_id, tuple(line), "length", {"prefill_s": own_s, "decode_s": decode_s})
        for request_id, line, own_s in zip(ids, tokens, prefill_s, strict=True)
    ]
