"""The small records of an imported run: what was imported, and the steps that a trace's annotations name."""

from __future__ import annotations

from typing import Literal

import msgspec

from alphamoe_tracers.records import ForwardMode, Purpose

PART_SHIFT = 32
"""A rank read from several files keeps their ids apart: part k adds ``k << PART_SHIFT`` to every process id."""
SYMBOL_SHIFT = 20
"""Part k adds ``k << SYMBOL_SHIFT`` to every symbol id."""

GraphExecution = Literal["decode_graph_replay", "prefill_graph_replay"]


class ImportedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file that was given to ``alphamoe-trace import``."""

    path: str
    size_bytes: int
    rank: int | None
    """Null where the file was not used, or holds several ranks."""
    part: int
    """Its number among the files of its rank: ``process >> PART_SHIFT`` in every table."""
    bucket: str | None = None
    """What ``--bucket`` found in its name."""
    stage: str | None = None
    """``EXTEND`` or ``DECODE`` where one rank's profile was split by stage."""
    sha256: str | None = None
    used: bool = True
    reason: str | None = None
    """Why it was not used, or why it could not be read."""


class ImportInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an imported run came about, and what the user stated that no trace says."""

    files: tuple[ImportedFile, ...]
    purpose: Purpose = "witness"
    """Of the traffic in the traces, as stated by the user; steps of a graph capture are never more than capture."""
    graph_execution: GraphExecution = "decode_graph_replay"
    """What graph replays count as where no step annotation of their rank says which forward they belong to."""
    window_open_ns: int | None = None
    """Request window on the traces' clock as stated by the user; null: the whole trace."""
    window_close_ns: int | None = None


class ImportedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step annotation, a line of ``steps/rank=N.jsonl``. It is no receipt and no witness."""

    step: int
    """Numbered by start; ranks and their steps are never joined by it."""
    name: str
    engine: str
    forward_mode: ForwardMode | None
    real_tokens: int | None
    padded: int | None
    batch_size: int | None
    capture: bool
    process: int
    thread: int
    start_ns: int
    end_ns: int | None
