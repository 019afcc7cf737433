"""What ``--capture`` asks for, and how large it can get. No torch.

``--capture layer=0,M=1`` names dispatches; ``rank``, ``execution``, ``every`` and ``purpose`` narrow or widen it. Each
option is one :class:`CaptureRequest`, and several add up.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal, get_args

from alphamoe_profiler.run_records import RunInfo
from alphamoe_sanitizer_replays.captures.selection import Which, among, parse_which
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.records import EXECUTIONS, ForwardMode, Purpose

EXAMPLES = "--capture layer=0,M=1, --capture rank=all,layer=last,M=prefill, --capture rank=0+3,M=decode,every=bucket"
KEYS = ("layer", "M", "rank", "execution", "every", "purpose")
WARM_UP_MS = (8, 1)
"""M of the engine's own rehearsals on a CPU; on a GPU it also rehearses the longest prompt."""


@dataclass(frozen=True)
class CaptureRequest:
    """Which dispatches one ``--capture`` wants. It crosses to the rank processes by pickle, written and read by us."""

    text: str
    """As it was written."""
    layers: Which = "all"
    M: int | Literal["decode", "prefill", "all"] = "all"
    ranks: Which = "all"
    every: Literal["bucket"] | None = None
    """``bucket``: one capture for each distinct M; null: only the first that matches. Both for each layer and rank."""
    purpose: Purpose = "witness"

    def of_rank(self, rank: int, world_size: int) -> bool:
        """Say whether this rank captures anything."""
        return among(rank, self.ranks, world_size)

    def told(self) -> str:
        """Say in words what is taken."""
        what = {"all": "dispatch", "prefill": "prefill", "decode": "decode"}.get(str(self.M), f"dispatch of M {self.M}")
        where = f"rank {_words(self.ranks)}, layer {_words(self.layers)}"
        if self.every:
            return f"the first eager {what} of each M, {where}"
        wider = ", which is a prefill; every=bucket takes one of each M" if self.M == "all" else ""
        return f"the first eager {what} alone, {where}{wider}"

    def matches(self, layer: int, layers: int, M: int, forward_mode: ForwardMode, purpose: Purpose) -> bool:
        """Say whether one eager dispatch is among those asked for, whatever was captured before."""
        if purpose != self.purpose or not among(layer, self.layers, layers):
            return False
        if isinstance(self.M, int):
            return self.M == M
        return self.M == "all" or ("prefill" if forward_mode == "EXTEND" else "decode") == self.M


def parse_capture(text: str) -> CaptureRequest:
    """Parse ``KEY=VALUE,...``.

    Raises:
        UsageError: an unknown key, a key twice, a value that is none, or an execution whose inputs cannot be captured.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in KEYS or not equals:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
            listed = f"the keys are {', '.join(KEYS)}; for example {EXAMPLES}"
            raise UsageError(
                f"--capture {text!r}: {part.strip()!r} is no KEY=VALUE that it knows",
                f"did you mean {near[0]}=? {listed}" if near else listed,
            )
        if key in found:
            raise UsageError(f"--capture {text!r} gives {key} twice", "several --capture add up")
        found[key] = value.strip()
    execution = found.get("execution", "eager")
    if execution != "eager":
        if execution not in EXECUTIONS:
            raise UsageError(f"--capture {text!r}: no execution {execution!r}", "only eager dispatches can be captured")
        raise UsageError(
            f"--capture {text!r}: the inputs of a {execution} cannot be captured",
            "they live in the graph's own buffers; capture execution=eager, and the sanitizer's scope says that graph "
            "replays are not covered",
        )
    every = found.get("every")
    if every not in (None, "bucket"):
        raise UsageError(f"--capture {text!r}: every is bucket, not {every!r}", "one capture for each distinct M")
    purposes: dict[str, Purpose] = {name: name for name in get_args(Purpose)}
    purpose = found.get("purpose", "witness")
    if purpose not in purposes:
        raise UsageError(f"--capture {text!r}: no purpose {purpose!r}", f"the purposes are {', '.join(purposes)}")
    return CaptureRequest(
        text=text,
        layers=parse_which(found.get("layer", "all"), f"--capture {text!r}: layer"),
        M=_rows(text, found.get("M", "all")),
        ranks=parse_which(found.get("rank", "all"), f"--capture {text!r}: rank"),
        every="bucket" if every else None,
        purpose=purposes[purpose],
    )


@dataclass(frozen=True)
class CaptureEstimate:
    """An upper bound of what captures of one run will be."""

    captures: int
    bytes: int
    """Of the tensors, shared weights counted once."""


def estimate(requests: tuple[CaptureRequest, ...], run: RunInfo, *, weights: bool) -> CaptureEstimate:
    """Check requests against the run and bound what they will store.

    Args:
        requests: what is asked for.
        run: what run.json will say.
        weights: whether weights are stored.

    Raises:
        UsageError: a rank, layer or M that the run will not have, or a run without eager forwards.
    """
    geometry = run.geometry
    if geometry is None or run.max_new_tokens is None:
        raise UsageError("only a run that is recorded here can be captured from")
    prefill = {prompt.token_count for prompt in run.prompts}
    decode = {len(run.prompts)} if run.max_new_tokens > 1 else set()
    captures = total = 0
    held: set[tuple[int, int]] = set()
    for request in requests:
        if request.purpose == "witness" and "eager" not in run.executions:
            raise UsageError(f"--capture {request.text!r}: this run has no eager forward", "add eager to --executions")
        ranks = _chosen(request.text, "rank", request.ranks, run.world_size)
        layers = _chosen(request.text, "layer", request.layers, geometry.layers)
        sizes = _sizes(request, prefill, decode)
        times = len(sizes) if request.every else 1
        rows = sum(sizes) if request.every else max(sizes)
        captures += len(ranks) * len(layers) * times
        for M in sizes if request.every else (rows,):
            total += len(ranks) * len(layers) * _call_bytes(M, geometry.E, geometry.H, geometry.top_k)
        held |= {(rank, layer) for rank in ranks for layer in layers}
    if weights:
        total += len(held) * _weight_bytes(geometry.E, geometry.H, geometry.I // run.world_size)
    return CaptureEstimate(captures, total)


def _sizes(request: CaptureRequest, prefill: set[int], decode: set[int]) -> tuple[int, ...]:
    """List every M that may match; what a rehearsal has is only known in the rank, so it is bounded."""
    possible = {"prefill": prefill, "decode": decode}.get(str(request.M), prefill | decode)
    if request.purpose != "witness":
        possible = possible | set(WARM_UP_MS)
        return (request.M,) if isinstance(request.M, int) else tuple(sorted(possible))
    if isinstance(request.M, int):
        if request.M not in possible:
            there = [f"{M} (prefill)" for M in sorted(prefill)] + [f"{M} (decode)" for M in sorted(decode)]
            raise UsageError(
                f"--capture {request.text!r}: no eager forward of this run has M={request.M}",
                f"it will have {', '.join(there)}; decode has one row for each --prompt",
            )
        return (request.M,)
    if not possible:
        raise UsageError(f"--capture {request.text!r}: a run of one new token never decodes", "--max-new-tokens 2")
    return tuple(sorted(possible))


def _call_bytes(M: int, E: int, H: int, top_k: int) -> int:
    """Bound the bytes of one dispatch's own tensors; plan blocks are bounded by the stock path's 128 rows."""
    pairs = M * top_k
    blocks = min(E, pairs) + pairs // 8
    plan_rows = pairs + min(E, pairs) * 127
    return M * H + M * (H // 128) * 4 + M * top_k * 8 + blocks * 4 + plan_rows * 4 + 4 + M * H * 4


def _weight_bytes(E: int, H: int, width: int) -> int:
    return E * (3 * width * H + 3 * -(-width // 128) * (H // 128) * 4)


def _words(which: Which) -> str:
    return which if isinstance(which, str) else "+".join(map(str, which))


def _chosen(text: str, what: str, which: Which, count: int) -> list[int]:
    if which != "all":
        outside = [item for item in which if item != "last" and item >= count]
        if outside:
            raise UsageError(f"--capture {text!r}: no {what} {outside[0]}", f"the run has {what}s 0 to {count - 1}")
    return [item for item in range(count) if among(item, which, count)]


def _rows(text: str, value: str) -> int | Literal["decode", "prefill", "all"]:
    words: dict[str, Literal["decode", "prefill", "all"]] = {"decode": "decode", "prefill": "prefill", "all": "all"}
    if value in words:
        return words[value]
    if not re.fullmatch(r"[0-9]{1,7}", value) or int(value) < 1:
        raise UsageError(f"--capture {text!r}: M is a number of rows, decode, prefill or all, not {value!r}")
    return int(value)
