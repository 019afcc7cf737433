"""Code modules as CUPTI saw them loaded: the identity behind a symbol."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from alphamoe_tracers.records import ModuleRecord


def kernels_of_image(image: bytes) -> tuple[str, ...]:
    """Return the mangled names of the kernels in a cubin, or nothing for an image that is not ELF.

    nvcc and NVRTC put each kernel's code in a section of its own, ``.text.<mangled name>``.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        sections = ELFFile(io.BytesIO(image)).iter_sections()
        return tuple(section.name[6:] for section in sections if section.name.startswith(".text."))
    except (ELFError, UnicodeDecodeError, ValueError):
        return ()


@dataclass
class ModuleLog:
    """The modules of one rank, one JSON line each, appended and flushed as they come."""

    path: Path
    records: dict[str, ModuleRecord] = field(default_factory=dict)
    """By hash, in order of loading; an image that is loaded again is the same module."""

    def add(self, image: bytes, loaded_ns: int) -> None:
        """Hash an image and write its line; raises OSError when the disk is full."""
        digest = hashlib.sha256(image).hexdigest()
        if digest in self.records:
            return
        kernels = kernels_of_image(image)
        record = ModuleRecord(digest, len(image), loaded_ns, kernels, held=len(kernels))
        self.records[digest] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def finish(self, known_sources: Mapping[str, str], ran: Collection[str]) -> None:
        """Write the file anew by rename, with the sources that are known and without kernels that never ran.

        A symbol defined in a module of ours keeps its hash even when the driver rewrote the image: only equal hashes
        are tied to a source.

        Args:
            known_sources: sha256 of the CUDA source by sha256 of the cubin.
            ran: mangled names that the recording holds.
        """
        for digest, record in self.records.items():
            self.records[digest] = msgspec.structs.replace(
                record,
                kernels=tuple(name for name in record.kernels if name in ran),
                source_sha256=known_sources.get(digest),
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in self.records.values()))
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def module_of(self) -> dict[str, str | None]:
        """Map each kernel's mangled name to the hash of the one module that holds it, or to None if several do."""
        owner: dict[str, str | None] = {}
        for digest, record in self.records.items():
            for name in record.kernels:
                owner[name] = None if name in owner else digest
        return owner
