"""Compile mutants as a replay does, without a GPU, and tell whether the machine code differs from the kernel's own.

python tests/gpu/mutant_builds.py [--only NAME ...]     compile every mutant for every variant it matters for
python tests/gpu/mutant_builds.py --cache BUILDS.json   put listed (source or null, variant) into the disk cache
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import sys
import tempfile
from pathlib import Path

from kernel_mutations import Mutant, all_mutants, changed_lines, write_mutant

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in ("backend", "tracers")]

from alphamoe_backend.kernels import jit, launch  # noqa: E402  (found by the line above when run by hand)

ARCH = "sm_90a"


def machine_code(cubin: bytes) -> bytes:
    """Give the kernel's own instructions: its .text section, without line tables and other sections."""
    from elftools.elf.elffile import ELFFile

    section = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{launch.SYMBOL}")
    return bytes(section.data())


@functools.cache
def original_code(variant: str) -> bytes:
    """Compile the kernel's own source for one variant and give its instructions."""
    defines = launch.variant(variant).defines()
    return machine_code(jit.compile_cubin(launch.SOURCE_NAME, ARCH, defines).code)


def mutant_code(source: Path, variant: str) -> bytes:
    """Compile a mutant's source for one variant and give its instructions.

    Raises:
        AlphaMoEError: it does not compile.
    """
    jit.replace_source(launch.SOURCE_NAME, source)
    try:
        return machine_code(jit.compile_cubin(launch.SOURCE_NAME, ARCH, launch.variant(variant).defines()).code)
    finally:
        jit.replace_source(launch.SOURCE_NAME, None)


def build_problem(mutant: Mutant, variant: str, folder: Path) -> str:
    """Say what is wrong with a mutant's build for one variant, or give an empty string."""
    try:
        code = mutant_code(write_mutant(mutant, folder), variant)
    except jit.AlphaMoEError as error:
        return f"does not compile: {str(error).splitlines()[-1]}"
    same = code == original_code(variant)
    if same and not mutant.same_code:
        return "the machine code is that of the kernel"
    if not same and mutant.same_code:
        return "the machine code differs, although it is listed as the same"
    return ""


def cache(builds: list[tuple[str | None, str]]) -> int:
    """Compile into the disk cache, where replays find it; prints what does not compile, one line each."""
    wrong = 0
    for source, variant in builds:
        text = jit.file_text(Path(source)) if source else jit.source_text(launch.SOURCE_NAME)
        try:
            jit.compile_source(launch.SOURCE_NAME, text, ARCH, launch.variant(variant).defines())
        except jit.AlphaMoEError as error:
            wrong += 1
            print(f"{source} {variant}: {str(error).splitlines()[-1]}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--cache", type=Path, metavar="BUILDS")
    arguments = parser.parse_args()
    if arguments.cache:
        return 1 if cache(json.loads(arguments.cache.read_text())) else 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for mutant in all_mutants():
            if arguments.only and mutant.name not in arguments.only:
                continue
            where = ", ".join(f"{file}:{line}" for file, line in changed_lines(mutant))
            for variant in mutant.variants:
                problem = build_problem(mutant, variant, Path(folder))
                wrong += bool(problem)
                print(f"{mutant.name:32} {variant:7} {problem or 'ok':45} {where}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
