"""Step annotations of serving engines: forward mode, real tokens, padded size and batch size from a range's name.

The formats are those of SGLang, vLLM and ATOM. An annotation says what the engine scheduled; it is no receipt and no
witness. What a name does not say stays null.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import msgspec

from alphamoe_tracers.records import ForwardMode

Engine = Literal["sglang", "vllm", "atom"]
_PREFIXES = ("step[", "execute_", "prefill[", "decode[", "mixed[", "capture_")


class StepAnnotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one annotation says of one forward."""

    engine: Engine
    forward_mode: ForwardMode | None
    """Null for forwards that are neither (SGLang's VERIFY and DRAFT) and where the name does not say."""
    stage: str | None = None
    """The engine's own word for the forward."""
    real_tokens: int | None = None
    """Tokens of the requests, padding left out."""
    padded: int | None = None
    """Rows that the forward ran with, graph padding included, where the name gives them apart from the real ones."""
    batch_size: int | None = None
    """Requests, padding left out."""
    padded_batch_size: int | None = None
    context_requests: int | None = None
    context_tokens: int | None = None
    generation_requests: int | None = None
    generation_tokens: int | None = None
    capture: bool = False
    """Made while a graph was captured: a shape, never an execution."""

    def problems(self) -> list[str]:
        """Say which of its own numbers contradict each other."""
        if self.real_tokens is not None and self.padded is not None and self.real_tokens > self.padded:
            return [f"{self.real_tokens} real tokens exceed the padded size {self.padded}"]
        return []


@lru_cache(maxsize=65536)
def parse_step(name: str) -> StepAnnotation | None:
    """Read the name of a range as a step annotation.

    Args:
        name: of a ``user_annotation`` or an NVTX range.

    Returns:
        What it says, or None when it is no step annotation of an engine that is known here.
    """
    if not name.startswith(_PREFIXES):
        return None
    for pattern, build in _FORMATS:
        match = pattern.fullmatch(name)
        if match is not None:
            return build(match)
    return None


def _sglang(match: re.Match[str]) -> StepAnnotation:
    """``step[EXTEND bs=2 toks=14721 ...]``: in a decode step each request has one token unless ``g_sq`` says more."""
    stage = match["stage"].upper()
    mode: ForwardMode | None = stage if stage in ("EXTEND", "DECODE", "MIXED") else None  # type: ignore[assignment]
    pairs = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)(?![\w/.])", match["rest"])}
    batch, context, generation = pairs.get("bs"), pairs.get("c_sq"), pairs.get("g_sq")
    tokens = pairs.get("toks")
    if tokens is None and (context is not None or generation is not None):
        tokens = (context or 0) + (generation or 0)
    if tokens is None and mode == "DECODE":
        tokens = batch
    return StepAnnotation(
        engine="sglang",
        forward_mode=mode,
        stage=stage,
        real_tokens=tokens,
        batch_size=batch,
        context_tokens=context,
        generation_tokens=generation,
    )


def _vllm(match: re.Match[str]) -> StepAnnotation:
    """``execute[_ALL]_context_R(T[_...])_generation_R(T)``: requests, and their tokens in parentheses."""
    contexts, generations = int(match["contexts"]), int(match["generations"])
    context, generation = _tokens(match["context"]), _tokens(match["generation"])
    known = context is not None and generation is not None
    total = int(match["all"]) if match["all"] else ((context or 0) + (generation or 0) if known else None)
    mode: ForwardMode | None = None
    if contexts or generations:
        mode = "MIXED" if contexts and generations else ("EXTEND" if contexts else "DECODE")
    return StepAnnotation(
        engine="vllm",
        forward_mode=mode,
        real_tokens=total,
        batch_size=contexts + generations,
        context_requests=contexts,
        context_tokens=context,
        generation_requests=generations,
        generation_tokens=generation,
    )


def _tokens(text: str) -> int | None:
    """``6144``, ``888_788544`` (tokens, then their squares), ``sq6144sk7144...`` (queries and keys)."""
    match = re.match(r"(?:sq)?(\d+)", text)
    return int(match[1]) if match else None


def _atom(match: re.Match[str]) -> StepAnnotation:
    """``prefill[bs=2 tok=14721 ...]``, ``decode[bs=117/128 tok=117 d=117]``: real/padded, kept apart."""
    pairs = {key: (int(real), int(padded) if padded else None) for key, real, padded in _PAIR.findall(match["rest"])}
    batch, padded_batch = pairs.get("bs", (None, None))
    tokens, padded = pairs.get("tok", (None, None))
    mode: ForwardMode = {"prefill": "EXTEND", "decode": "DECODE", "mixed": "MIXED"}[match["stage"]]  # type: ignore[assignment]
    if padded is None and padded_batch is not None and mode == "DECODE" and tokens == batch:
        padded = padded_batch  # one row a request, so the padded batch is the padded size
    return StepAnnotation(
        engine="atom",
        forward_mode=mode,
        stage=match["stage"],
        real_tokens=tokens,
        padded=padded,
        batch_size=batch,
        padded_batch_size=padded_batch,
    )


def _capture(match: re.Match[str]) -> StepAnnotation:
    """``capture_128_decode``, ``capture_32_FULL``, ``capture_8192_PIECEWISE``: the size that a graph is made for."""
    kind = match["kind"]
    mode: ForwardMode | None = {"decode": "DECODE", "prefill": "EXTEND"}.get(kind.lower())  # type: ignore[assignment]
    return StepAnnotation(engine="atom", forward_mode=mode, stage=kind, padded=int(match["size"]), capture=True)


_PAIR = re.compile(r"\b(\w+)=(\d{1,12})(?:/(\d{1,12}))?(?![\w.])")
_FORMATS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], StepAnnotation]], ...] = (
    (re.compile(r"step\[(?P<stage>[A-Za-z_]+)(?P<rest>(?: [^\]]*)?)\]"), _sglang),
    (
        re.compile(
            r"execute_(?:(?P<all>\d{1,12})_)?context_(?P<contexts>\d{1,9})\((?P<context>[^)]*)\)"
            r"_generation_(?P<generations>\d{1,9})\((?P<generation>[^)]*)\)"
        ),
        _vllm,
    ),
    (re.compile(r"(?P<stage>prefill|decode|mixed)\[(?P<rest>.*)\]", re.DOTALL), _atom),
    (re.compile(r"capture_(?P<size>\d{1,12})_(?P<kind>decode|prefill|FULL|PIECEWISE)"), _capture),
)
