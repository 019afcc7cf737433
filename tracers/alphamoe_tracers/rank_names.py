"""Which rank a file's name states, for the names that SGLang, vLLM, PyTorch and common scripts give to traces.

A name states a rank only where its writer is known to put one there. A device index, a host number or a process id is
never a rank: what cannot be read stays null, and an explicit map settles it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

_SUFFIXES = re.compile(r"(?:\.(?:gz|json|sqlite3?|db|log|txt|trace|pt|nsys-rep))+\Z", re.IGNORECASE)
_SGLANG = re.compile(
    r"(?P<profile>.*?)(?:\A|-)TP-(?P<tp>\d{1,6})(?:-DP-(?P<dp>\d{1,6}))?(?:-PP-(?P<pp>\d{1,6}))?(?:-EP-(?P<ep>\d{1,6}))?"
    r"(?:-(?P<stage>[A-Za-z]+))?\Z"
)
_VLLM = re.compile(
    r"(?:\A|_)dp(?P<dp>\d+)_pp(?P<pp>\d+)_tp(?P<tp>\d+)(?:_[a-z]+\d+)*_rank(?P<rank>\d{1,6})(?:\.\d+)?\Z", re.IGNORECASE
)
_RANK_WORD = re.compile(
    r"(?<![A-Za-z0-9])(?P<before>[A-Za-z]+[_-])?rank[_-]?(?P<rank>\d{1,6})(?![A-Za-z0-9])", re.IGNORECASE
)
_NOT_THIS_RANK = frozenset({"local", "node", "group", "pp", "dp", "ep", "cp", "dcp"})
_LAST_NUMBER = re.compile(r"(?:\A|[_.-])(?P<rank>\d{1,3})\Z")
"""A number glued to a word is none: ``report1`` and ``qwen3`` name no rank."""
_COUNTING_WORDS = re.compile(
    r"(?:\A|[^A-Za-z])(?:batch|bsz?|device|epoch|gpu|iter|iteration|layers?|len|m|pid|run|seed|seq|seqlen|size|steps?"
    r"|tok(?:en)?s?|tp|trial|v|version|worker|x)\Z",
    re.IGNORECASE,
)
_CAPTURE_FILE = re.compile(r"(?:\A|[_.-])(?:cuda_graph_capture\b|capture_trace|bs_\d+_rank\d+\Z)", re.IGNORECASE)
_CAPTURE_FOLDER = re.compile(r"\A(?:graph_capture_profile|capture_traces?|cuda_graph_capture\w*)\Z", re.IGNORECASE)


@dataclass(frozen=True)
class NamedRank:
    """What a trace file's name says."""

    rank: int | None
    """The tensor-parallel rank, null where the name states none."""
    tp: int | None = None
    """The TP index of a name that has one; not the rank where several TP groups exist."""
    stage: str | None = None
    """``EXTEND`` or ``DECODE`` where one rank's profile was split by stage."""
    profile: str | None = None
    """The profile's own id in SGLang's names: files of two profiles are not one run."""
    merged: bool = False
    """All ranks in one file."""
    capture: bool = False
    """Recorded while graphs were captured: shapes, never executions."""
    why: str | None = None
    """Why a name with an index in it states no rank."""


def rank_of_trace_name(path: PurePath | str) -> NamedRank:
    """Read the rank, the stage and the kind of a trace from its name (and its folder's, for capture traces).

    Args:
        path: a file's path; only its last two parts are looked at.
    """
    pure = PurePath(path)
    whole = pure.name
    stem = _SUFFIXES.sub("", whole)
    capture = bool(_CAPTURE_FILE.search(stem)) or any(_CAPTURE_FOLDER.match(part) for part in pure.parts[:-1][-2:])
    if stem.startswith("merged-"):
        return NamedRank(None, merged=True, profile=stem.removeprefix("merged-"), capture=capture)
    if (match := _VLLM.search(stem)) is not None:
        return NamedRank(int(match["rank"]), tp=int(match["tp"]), capture=capture)
    if (match := _SGLANG.match(stem)) is not None:
        return _sglang(match, capture)
    if (word := _rank_word(stem)) is not None:
        return NamedRank(word.rank, why=word.why, capture=capture)
    # torch's own handler writes HOST_PID.TIME.pt.trace.json: its last number is a process, not a rank.
    if re.search(r"\.pt\.trace\.json(\.gz)?\Z", whole, re.IGNORECASE):
        return NamedRank(None, capture=capture)
    if (match := _LAST_NUMBER.search(stem)) is not None and not _COUNTING_WORDS.search(stem[: match.start()]):
        return NamedRank(int(match["rank"]), capture=capture)
    return NamedRank(None, capture=capture)


def _sglang(match: re.Match[str], capture: bool) -> NamedRank:
    """Read SGLang's name. The DP and PP parts are written only when there are several such groups."""
    tp = int(match["tp"])
    stage = match["stage"].upper() if match["stage"] else None
    stage = {"PREFILL": "EXTEND"}.get(stage or "", stage)
    several = [name.upper() for name in ("dp", "pp") if match[name] is not None]
    why = (
        f"TP {tp} of several {' and '.join(several)} groups: the name does not give the global rank"
        if several
        else None
    )
    return NamedRank(None if several else tp, tp, stage, match["profile"] or None, capture=capture, why=why)


def _rank_word(stem: str) -> NamedRank | None:
    ranks = set()
    for match in _RANK_WORD.finditer(stem):
        if (match["before"] or "").rstrip("_-").lower() not in _NOT_THIS_RANK:
            ranks.add(int(match["rank"]))
    if len(ranks) > 1:
        return NamedRank(None, why=f"the name gives several ranks ({', '.join(map(str, sorted(ranks)))})")
    return NamedRank(ranks.pop()) if ranks else None
