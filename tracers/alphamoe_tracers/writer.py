"""From what a traced process hands over to parts on disk: the part of the scribe that knows records and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from alphamoe_tracers import tables
from alphamoe_tracers.activity import BrokenBufferError, Kind, Layouts, decode_buffer
from alphamoe_tracers.graph_nodes import GraphNode, graph_nodes_table
from alphamoe_tracers.modules import ModuleLog
from alphamoe_tracers.parts import Parts
from alphamoe_tracers.range_pairing import RangePairer
from alphamoe_tracers.records import TABLES
from alphamoe_tracers.replay import Recording
from alphamoe_tracers.source import LoadedModule
from alphamoe_tracers.wire import Begin


class Traced(Protocol):
    """What the writer must ask the traced process for."""

    def texts(self, pointers: list[int]) -> list[bytes] | None:
        """Return the C strings at these addresses of the traced process, or None when it is gone."""

    def record_starts(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return the byte offsets of a buffer's records by the library's own walk."""


@dataclass
class NameBook:
    """Texts by char pointer.

    Each buffer's pointers are asked for anew, all at once: after a module is unloaded its address may hold another
    name. When the traced process is gone, what a pointer held last is the best that is known.
    """

    ask: Callable[[list[int]], list[bytes] | None]
    texts: dict[int, bytes] = field(default_factory=dict)

    def learn(self, *pointers: np.ndarray) -> None:
        """Ask for the texts of all pointers in these arrays."""
        wanted = np.unique(np.concatenate(pointers))
        wanted = wanted[wanted != 0]
        if len(wanted):
            answers = self.ask(wanted.tolist())
            if answers is not None:
                self.texts.update(zip(wanted.tolist(), answers, strict=True))

    def text(self, pointer: int) -> bytes:
        """Return the text of a pointer, or nothing when it was never learned."""
        return self.texts.get(pointer, b"")


class RecordWriter:
    """Decodes buffers, gathers nodes and modules, and writes them as parts."""

    def __init__(self, begin: Begin, traced: Traced) -> None:
        out = Path(begin.out)
        self.parts = {name: Parts(out, name, begin.rank) for name in TABLES}
        self.modules = ModuleLog(out / "modules" / f"rank={begin.rank}.jsonl")
        self.names = NameBook(traced.texts)
        self.symbols = tables.StringTable(self.names.text)
        self.labels = tables.StringTable(self.names.text)
        self.pairer = RangePairer()
        self.broken_buffers = 0
        self.process = begin.process
        self._traced = traced
        self._layouts = Layouts.restored(begin.sizes, begin.fields, begin.kernel_record)
        self._api_names = {(kind, cbid): name for kind, cbid, name in begin.api_names}
        self._nodes: list[GraphNode] = []
        self._symbols_written = 0
        self.raw: Recording | None = None
        """What was handed over, as it came, when it is to be kept."""
        if begin.keep_raw is not None:
            self.raw = Recording([], {}, dict(begin.sizes), self._api_names, process=begin.process)
            self.raw.version = begin.version

    def add_buffer(self, data: npt.NDArray[np.uint8]) -> None:
        """Decode a completed buffer and stage its rows."""
        layouts = self._layouts
        if self.raw is not None:
            self.raw.buffers.append(data)
        try:
            records = decode_buffer(data, layouts)
        except BrokenBufferError:
            self.broken_buffers += 1
            records = decode_buffer(data, layouts, self._traced.record_starts(data))

        def of(kind: Kind) -> np.ndarray:
            return records.get(kind, np.empty(0, layouts.dtypes[kind]))

        kernels, markers = of(Kind.CONCURRENT_KERNEL), of(Kind.MARKER)
        self.names.learn(kernels["name"], markers["name"], markers["domain"])
        stage = self.parts
        stage["kernels"].append(tables.kernels_table(kernels, self.process, self.symbols))
        if Kind.RUNTIME in records or Kind.DRIVER in records:
            launches = tables.launches_table(of(Kind.RUNTIME), of(Kind.DRIVER), self._api_names)
            stage["launches"].append(launches)
        if Kind.MEMCPY in records or Kind.MEMSET in records:
            stage["transfers"].append(tables.transfers_table(of(Kind.MEMCPY), of(Kind.MEMSET), self.process))
        if Kind.MARKER in records or Kind.MARKER_DATA in records:
            marker_rows = tables.markers(markers, self.labels)
            payload_rows = tables.payloads(of(Kind.MARKER_DATA))
            stage["ranges"].append(self.pairer.add(marker_rows, payload_rows, self.labels.strings))

    def add_nodes(self, nodes: list[GraphNode]) -> None:
        """Gather graph nodes."""
        self._nodes += nodes
        if self.raw is not None:
            self.raw.nodes += nodes

    def add_module(self, module: LoadedModule) -> None:
        """Hash a module and write its line."""
        self.modules.add(module.image, module.loaded_ns)
        if self.raw is not None:
            self.raw.modules.append(module)

    def write_parts(self) -> None:
        """Make everything so far durable; raises OSError when it cannot be written."""
        self._stage_nodes()
        names = self.symbols.strings
        if len(names) > self._symbols_written:
            self.parts["symbols"].append(tables.symbols_table(names, self._symbols_written, {}))
            self._symbols_written = len(names)
        for parts in self.parts.values():
            parts.write()

    def close(self) -> None:
        """Stage what waited for a partner that will not come."""
        self._stage_nodes()
        self.parts["ranges"].append(self.pairer.finish(self.labels.strings))

    def _stage_nodes(self) -> None:
        if self._nodes:
            self.parts["graph_nodes"].append(graph_nodes_table(self._nodes, self.process))
            self._nodes = []
