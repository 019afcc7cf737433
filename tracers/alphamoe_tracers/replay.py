"""Recorded activity: raw buffers on disk, and a source that plays them through the collector without a GPU."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from alphamoe_tracers.activity import BrokenBufferError, Layouts
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.records import SentinelKind
from alphamoe_tracers.source import LoadedModule, RawBuffer, Sink

_MOST_IMAGE_BYTES = 64 << 10


@dataclass
class Recording:
    """What a source handed over, as data."""

    buffers: list[npt.NDArray[np.uint8]]
    strings: dict[int, bytes]
    """Text by the char pointer that records hold."""
    sizes: dict[int, int]
    """Record sizes by kind, of the library that wrote the buffers."""
    api_names: dict[tuple[int, int], str]
    nodes: list[GraphNode] = field(default_factory=list)
    modules: list[LoadedModule] = field(default_factory=list)
    clock: list[int] = field(default_factory=list)
    """What the clock said each time that the collector asked."""
    process: int = 0
    version: int | None = None

    def save(self, path: Path) -> None:
        """Write one compressed ``.npz`` without pickled objects; module images above 64 KiB are left out."""
        modules = [module for module in self.modules if len(module.image) <= _MOST_IMAGE_BYTES]
        meta = {
            "strings": {str(pointer): text.decode("latin-1") for pointer, text in self.strings.items()},
            "sizes": {str(kind): size for kind, size in self.sizes.items()},
            "api_names": [[kind, cbid, name] for (kind, cbid), name in self.api_names.items()],
            "nodes": self.nodes,
            "modules": [[len(module.image), module.loaded_ns] for module in modules],
            "clock": self.clock,
            "process": self.process,
            "version": self.version,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                data=np.concatenate([np.empty(0, np.uint8), *self.buffers]),
                lengths=np.array([len(buffer) for buffer in self.buffers], np.int64),
                images=np.frombuffer(b"".join(module.image for module in modules), np.uint8),
                meta=np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8),
            )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a recording; raises EvidenceError when it cannot be read."""
        try:
            with np.load(path, allow_pickle=False) as file:
                data, lengths, images = file["data"], file["lengths"], file["images"].tobytes()
                meta = json.loads(file["meta"].tobytes())
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise EvidenceError(f"{path}: not a recording of activity buffers ({error})") from error
        ends = np.cumsum(lengths)
        modules, at = [], 0
        for size, loaded_ns in meta["modules"]:
            modules.append(LoadedModule(images[at : at + size], loaded_ns))
            at += size
        return cls(
            # Copies, because decoding needs each buffer aligned to eight bytes.
            buffers=[data[end - length : end].copy() for length, end in zip(lengths, ends, strict=True)],
            strings={int(pointer): text.encode("latin-1") for pointer, text in meta["strings"].items()},
            sizes={int(kind): size for kind, size in meta["sizes"].items()},
            api_names={(kind, cbid): name for kind, cbid, name in meta["api_names"]},
            nodes=[GraphNode(*node) for node in meta["nodes"]],
            modules=modules,
            clock=list(meta["clock"]),
            process=meta["process"],
            version=meta["version"],
        )


class ReplaySource:
    """Plays a recording: everything is handed over at the first flush, and the clock answers as it did then.

    Sentinels are in the recording already, so launching them does nothing.
    """

    def __init__(self, recording: Recording, exposed: Mapping[str, np.dtype] | None = None) -> None:
        self.layouts = Layouts.choose(recording.sizes, exposed)
        self.process = recording.process
        self.library: str | None = "a recording"
        self.version = recording.version
        self.python_version: str | None = None
        self.skipped_api_ids: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ("played from recorded activity buffers",)
        self._recording = recording
        self._clock = list(recording.clock)
        self._sink: Sink | None = None
        self._played = False

    def start(self, sink: Sink) -> None:
        """Remember where to play to."""
        self._sink = sink

    def api_names(self) -> Mapping[tuple[int, int], str]:
        """Return the recorded names."""
        return self._recording.api_names

    def resolve(self, pointer: int) -> bytes:
        """Return the recorded text, or nothing for a pointer that was not recorded."""
        return self._recording.strings.get(pointer, b"")

    def record_starts(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """A recording has no library that could walk it."""
        raise BrokenBufferError(f"a recorded buffer of {len(data)} bytes cannot be walked by its record sizes")

    def now_ns(self) -> int:
        """Return the recorded answers in order; after the last one, that one again."""
        return self._clock.pop(0) if len(self._clock) > 1 else (self._clock or [0])[0]

    def synchronize(self) -> None:
        """There is no device to wait for."""

    def launch_sentinel(self, kind: SentinelKind, number: int) -> None:
        """The recording holds the sentinels that were launched then."""

    def flush(self, forced: bool) -> None:
        """Hand everything over, once."""
        if self._sink is None or self._played:
            return
        self._played = True
        for module in self._recording.modules:
            self._sink.put_module(module)
        for node in self._recording.nodes:
            self._sink.put_node(node)
        for buffer in self._recording.buffers:
            self._sink.put_buffer(RawBuffer(buffer))

    def dropped(self) -> int:
        """Nothing is dropped in a replay."""
        return 0

    def stop(self) -> None:
        """Play what was not played yet."""
        self.flush(forced=True)
