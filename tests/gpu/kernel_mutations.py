"""Test-only mutants of the fused kernel: one barrier, wait, fence or bound gone wrong each.

A mutant is one or a few replacements in copies of ``backend/alphamoe_backend/kernels/*.cu*``; ``alphamoe-trace replay
--source`` compiles such a copy. Every old text stands once in its file, and no replacement changes the number of lines,
so that what a tool says about a line is said about the kernel's own. The lists are in mutations_sync.py,
mutations_bounds.py and mutations_rows.py; mutation_sweep.py shows them to the tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "backend" / "alphamoe_backend" / "kernels"
FILES = {
    "kernel": "alphamoe_w8a8_up_down.cu",
    "ptx": "ptx.cuh",
    "product": "w8a8_product.cuh",
    "wgmma": "w8a8_wgmma.cuh",
}
SOURCES = tuple(sorted(path.name for path in KERNELS.glob("*.cu*")))
VARIANTS = ("t8_c8", "t16_c4", "t32_c2", "t64_w")
INPUTS = ("one", "decode", "short", "middle", "prefill", "ragged3", "ragged150", "ring3")
"""Captures by what they hold: M 1, an eager decode batch of 3, prompts of about 24, 48 and 900 tokens, all of real
runs, and three made by mutation_inputs.py whose sizes divide by nothing. A mutant's first run is on one of these where
they reach its code: they are small, and racecheck drowns in the hazards of a real one."""


@dataclass(frozen=True)
class Edit:
    """One replacement."""

    file: str
    """Key of :data:`FILES`."""
    old: str
    """Stands exactly once in the file; what surrounds the place meant is part of it where that is needed."""
    new: str
    """Of as many lines."""


@dataclass(frozen=True)
class Mutant:
    """One thing gone wrong."""

    name: str
    mechanism: str
    """In the words of the positive controls where there is one for it."""
    edits: tuple[Edit, ...]
    runs: tuple[tuple[str, str], ...]
    """Variant and input of each run that it may matter for."""
    harmless: str = ""
    """Why neither a tool nor the output can be expected to tell, though the code differs; empty when one must."""
    same_code: str = ""
    """Why the compiler makes the very same code of it."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Give the variants of its runs, each once."""
        return tuple(dict.fromkeys(variant for variant, _ in self.runs))


def mutant(
    name: str, mechanism: str, where: str, *edits: tuple[str, str, str], harmless: str = "", same_code: str = ""
) -> Mutant:
    """Make a mutant.

    Args:
        name: short, unique, in snake case.
        mechanism: what is at fault.
        where: runs as ``variant@input``, separated by blanks.
        edits: file, old text, new text.
        harmless: see :class:`Mutant`.
        same_code: see :class:`Mutant`.
    """
    runs = []
    for word in where.split():
        variant, _, inputs = word.partition("@")
        runs.append((variant, inputs))
    return Mutant(name, mechanism, tuple(Edit(*edit) for edit in edits), tuple(runs), harmless, same_code)


def read_sources() -> dict[str, str]:
    """Read the kernel's sources by file name."""
    return {name: (KERNELS / name).read_text() for name in SOURCES}


def apply(mutant: Mutant, sources: dict[str, str] | None = None) -> dict[str, str]:
    """Give the sources with the mutant's replacements made.

    Raises:
        ValueError: an old text does not stand exactly once where it is meant, or the lines would shift.
    """
    texts = dict(sources or read_sources())
    for edit in mutant.edits:
        file = FILES[edit.file]
        found = texts[file].count(edit.old)
        if found != 1:
            raise ValueError(f"{mutant.name}: {edit.old!r} stands {found} times in {file}")
        if edit.old.count("\n") != edit.new.count("\n"):
            raise ValueError(f"{mutant.name}: the lines of {file} would shift")
        texts[file] = texts[file].replace(edit.old, edit.new)
    return texts


def changed_lines(mutant: Mutant) -> tuple[tuple[str, int], ...]:
    """Give file name and line, counted from 1, of every line that the mutant changes."""
    before, after = read_sources(), apply(mutant)
    changed = []
    for name in SOURCES:
        pairs = zip(before[name].splitlines(), after[name].splitlines(), strict=True)
        changed += [(name, number) for number, (old, new) in enumerate(pairs, 1) if old != new]
    return tuple(changed)


def write_mutant(mutant: Mutant, folder: Path) -> Path:
    """Write the mutant's sources into a folder of its own below ``folder`` and give its .cu file."""
    home = folder / mutant.name
    home.mkdir(parents=True, exist_ok=True)
    for name, text in apply(mutant).items():
        (home / name).write_text(text)
    return home / FILES["kernel"]


def all_mutants() -> tuple[Mutant, ...]:
    """List every mutant, barriers and waits first."""
    from mutations_bounds import BOUNDS
    from mutations_rows import ROW_BOUNDS
    from mutations_sync import SYNCHRONISATION

    return SYNCHRONISATION + BOUNDS + ROW_BOUNDS
