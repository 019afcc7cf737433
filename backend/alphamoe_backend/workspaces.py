"""One owner for the buffers that the experts write in each forward, with a stated lifetime.

Buffers of a captured graph are kept by graph key, shape, device and stream until the graph is released, because its
replays write to the captured addresses. Eager buffers are kept only for the latest shape on each device and stream, so
that eager memory is bounded whatever the token counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from alphamoe_tracers.errors import AlphaMoEError

_Shape = tuple[int, ...]
_Place = tuple[torch.device, int]


def _place(device: torch.device) -> _Place:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream


class Workspaces:
    """Hands out buffers by name. A buffer is valid until the same name is asked for again on its device and stream."""

    def __init__(self) -> None:
        self._eager: dict[tuple[str, _Place], Tensor] = {}
        self._graphs: dict[str, dict[tuple[str, _Shape, torch.dtype, _Place], Tensor]] = {}
        self._graph: str | None = None

    @contextmanager
    def graph(self, key: str) -> Iterator[None]:
        """Let the buffers asked for inside belong to the graph ``key``; a failed capture releases them.

        Raises:
            AlphaMoEError: another graph's scope is open.
        """
        if self._graph is not None:
            raise AlphaMoEError(f"the capture of {key} was begun inside the capture of {self._graph}")
        self._graphs[key] = {}
        self._graph = key
        finished = False
        try:
            yield
            finished = True
        finally:
            self._graph = None
            if not finished:
                self.release(key)

    def release(self, key: str) -> None:
        """Drop the buffers of a graph that will not be replayed again."""
        self._graphs.pop(key, None)

    def get(self, name: str, shape: _Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Give the buffer ``name``, uninitialised or holding what was last written to it."""
        if self._graph is not None:
            buffers = self._graphs[self._graph]
            key = (name, shape, dtype, _place(device))
            if key not in buffers:
                buffers[key] = torch.empty(shape, dtype=dtype, device=device)
            return buffers[key]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Captured by somebody who opened no scope here: an eager buffer could be freed under the graph, one
            # from the graph's own pool cannot.
            return torch.empty(shape, dtype=dtype, device=device)
        held = self._eager.get((name, _place(device)))
        if held is None or held.shape != shape or held.dtype != dtype:
            # Freed first, so that the old and the new buffer are never held together.
            self._eager.pop((name, _place(device)), None)
            del held
            held = self._eager[(name, _place(device))] = torch.empty(shape, dtype=dtype, device=device)
        return held

    def held_bytes(self) -> dict[str, int]:
        """Give the bytes held: ``eager``, and each graph by its key."""
        held = {"eager": sum(buffer.nbytes for buffer in self._eager.values())}
        for key, buffers in self._graphs.items():
            held[key] = sum(buffer.nbytes for buffer in buffers.values())
        return held


def buffer(workspaces: Workspaces | None, name: str, shape: _Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Give a buffer from ``workspaces``, or a fresh one when there are none."""
    if workspaces is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return workspaces.get(name, shape, dtype, device)
