"""Where activity comes from: what a collector needs from CUPTI, and nothing more.

The real source is :class:`alphamoe_tracers.cupti_source.CuptiSource`; :mod:`alphamoe_tracers.replay` plays recorded and
synthetic buffers through the same collector on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from alphamoe_tracers.activity import Layouts
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.records import SentinelKind


class SourceUnavailableError(Exception):
    """The environment does not allow recording; the message is one line with the way out."""


@dataclass(frozen=True)
class RawBuffer:
    """One completed activity buffer. ``release`` gives its memory back; ``data`` is invalid from then on."""

    data: npt.NDArray[np.uint8]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class LoadedModule:
    """A copy of a module's image as it was loaded."""

    image: bytes
    loaded_ns: int


class Sink(Protocol):
    """What a source hands over to. Its methods are called from any thread, return at once and never raise."""

    def put_buffer(self, buffer: RawBuffer) -> None:
        """Take over a completed buffer."""

    def put_node(self, node: GraphNode) -> None:
        """Take over a graph node."""

    def put_module(self, module: LoadedModule) -> None:
        """Take over a module image."""


class ActivitySource(Protocol):
    """Activity records of one process."""

    layouts: Layouts
    """Valid once started."""
    process: int
    """The process id that kernel and transfer rows get (their records carry none)."""
    library: str | None
    """Path of the libcupti in use."""
    version: int | None
    """Its CUPTI_API_VERSION."""
    python_version: str | None
    """Version of the installed cupti-python."""
    skipped_api_ids: tuple[str, ...]
    """Launch callbacks that the library refused to record."""
    notes: tuple[str, ...]

    def start(self, sink: Sink) -> None:
        """Begin to record; raises SourceUnavailableError when the environment does not allow it."""

    def api_names(self) -> Mapping[tuple[int, int], str]:
        """Return the names of launch calls by (activity kind, callback id)."""

    def resolve(self, pointer: int) -> bytes:
        """Read the string at a char pointer of a record."""

    def record_starts(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return the byte offsets of a buffer's records the slow way, for a buffer that the fast walk refused."""

    def now_ns(self) -> int:
        """Return the time on the records' clock."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def launch_sentinel(self, kind: SentinelKind, number: int) -> None:
        """Launch the sentinel kernel of this kind; see :mod:`alphamoe_tracers.sentinels`."""

    def flush(self, forced: bool) -> None:
        """Have completed records handed over; forced: unfinished ones too."""

    def dropped(self) -> int:
        """Return how many records were dropped since the start."""

    def stop(self) -> None:
        """Stop recording; nothing is handed over afterwards."""
