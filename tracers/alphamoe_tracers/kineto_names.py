"""What the name of a trace file says: rank, stage, and whether it was recorded while graphs were captured."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

_EXTENSIONS = re.compile(r"(\.(gz|json|pt|trace|chrome))+$", re.IGNORECASE)
_SGLANG = re.compile(r"(?:^|-)TP-(\d+)(?:-DP-(\d+))?(?:-PP-(\d+))?(?:-EP-(\d+))?(?:-([A-Za-z]+))?$")
_VLLM = re.compile(r"(?:^|_)dp(\d+)_pp(\d+)_tp(\d+)_dcp\d+_ep(\d+)_rank(\d+)(?![0-9])")
_CAPTURE = re.compile(r"(?:^|_)bs_\d+_rank_?(\d+)$|^cuda_graph_capture-")
_CAPTURE_FOLDER = re.compile(r"^(cuda_)?(graph_)?captures?([_-](traces?|profiles?))?$")
_RANK_WORD = re.compile(r"(?:^|[^A-Za-z])(?:rank|worker)[-_]?(\d{1,6})(?![0-9])", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"^(.*)[_-](\d{1,4})$")
# A number after one of these words is a quantity, or a device index, which is never a rank.
_NOT_A_RANK = re.compile(
    r"(?:^|[^A-Za-z])(bs|batch|size|step|steps|iter|iteration|epoch|len|length|seq|tok|toks|tokens|run|id|v|version|"
    r"gpu|cuda|device|dev|node|host|pid|tp|dp|pp|ep|world|ranks|h|sm|warmup|m|c|qps|rate|time|part|try|merged?)$",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\[((?:TP|DP|PP|EP)\d+(?:-(?:TP|DP|PP|EP)\d+)*)\]")


class TraceName(msgspec.Struct, frozen=True):
    """What a file name says; null where it says nothing."""

    rank: int | None = None
    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    ep: int | None = None
    stage: str | None = None
    """SGLang's stage of a trace by stage: EXTEND or DECODE."""
    capture: bool = False


def parse_trace_name(path: Path) -> TraceName:
    """Read the name of a trace file as SGLang, vLLM, torch and common scripts spell it.

    Where data or pipeline parallelism shows in the name, the tensor-parallel rank alone does not give the rank in the
    world, which then stays unknown.

    Args:
        path: the file; of its folders only the nearest is looked at, and only for a capture folder.
    """
    stem = _EXTENSIONS.sub("", path.name)
    capture = _CAPTURE.search(stem)
    is_capture = capture is not None or _CAPTURE_FOLDER.match(path.parent.name) is not None
    if capture is not None and capture[1] is not None:
        return TraceName(rank=int(capture[1]), capture=True)
    if found := _VLLM.search(stem):
        dp, pp, tp, ep, rank = (int(group) for group in found.groups())
        return TraceName(rank=rank, tp=tp, dp=dp, pp=pp, ep=ep, capture=is_capture)
    if found := _SGLANG.search(stem):
        tensor, data, pipeline, expert = (None if group is None else int(group) for group in found.groups()[:4])
        in_world = tensor if data is None and pipeline is None else None
        stage = {"extend": "EXTEND", "prefill": "EXTEND", "decode": "DECODE"}.get((found[5] or "").lower())
        return TraceName(in_world, tensor, data, pipeline, expert, stage, is_capture)
    return TraceName(rank=_plain_rank(stem), capture=is_capture)


def parse_label(text: str) -> tuple[str, int | None] | None:
    """Read the rank label that SGLang's merged traces put before a process, for example ``[TP00-DP01] 4242``.

    Returns:
        The label and the rank (null when data or pipeline parallelism shows in it), or None when there is no label.
    """
    found = _LABEL.search(text)
    if found is None:
        return None
    parts = {part[:2]: int(part[2:]) for part in found[1].split("-")}
    rank = parts.get("TP") if "DP" not in parts and "PP" not in parts else None
    return found[1], rank


def _plain_rank(stem: str) -> int | None:
    words = _RANK_WORD.findall(stem)
    if words:
        return int(words[-1]) if len({int(word) for word in words}) == 1 else None
    number = _LAST_NUMBER.match(stem)
    if number is None or _NOT_A_RANK.search(number[1]):
        return None
    return int(number[2])
