"""The traced runs whose captures the sanitizer check replays, and the kinds of captures that are in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

RANKS, LAYERS = 4, 4
_BOTH = "rank=0+3,layer=0+3"
SHORT = "text:Name three prime numbers and say in one short sentence what it is that makes any number prime at all."
MIDDLE = (
    "text:A baker sells twelve loaves each morning and nine each afternoon. Each loaf costs three dollars and rent is "
    "fifty dollars a day. How much does she keep each day, and why is that so?"
)
RUNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "long": (("gsm8k:17",), (f"{_BOTH},M=1", f"{_BOTH},M=prefill")),
    "batch": (("gsm8k:17", "gsm8k:18", "gsm8k:19"), (f"{_BOTH},M=3",)),
    "short": ((SHORT,), (f"{_BOTH},M=prefill",)),
    "middle": ((MIDDLE,), (f"{_BOTH},M=prefill",)),
}
"""Prompts and captures of each run."""
WANTED: Mapping[str, tuple[str, range]] = {
    "one": ("long", range(1, 2)),
    "prefill": ("long", range(500, 1200)),
    "decode": ("batch", range(3, 4)),
    "short": ("short", range(20, 40)),  # so that the launch rule gives t16_c4 on 132 multiprocessors
    "middle": ("middle", range(40, 67)),  # t32_c2
}
"""Run and M of each kind of capture."""
_NAME = re.compile(r"rank=(\d+)/layer=(\d+)-M=(\d+)-")


def find(home: Path) -> dict[str, list[Path]]:
    """List the captures of each kind that lie in the runs below a folder, rank 0 and layer 0 first."""
    found: dict[str, list[Path]] = {}
    for kind, (run, sizes) in WANTED.items():
        keyed = []
        for path in sorted((home / f"run-{run}" / "captures").glob("rank=*/layer=*/capture.json")):
            match = _NAME.search(path.as_posix())
            if match and int(match[3]) in sizes:
                keyed.append((int(match[1]), int(match[2]), path.parent))
        found[kind] = [path for _, _, path in sorted(keyed)]
    return found


def choose_captures(results: Path) -> dict[str, Path]:
    """Give one capture of each kind, of rank 0 and layer 0, below the results of this check."""
    homes = (results, results / "sanitizer")
    best = max((find(home) for home in homes), key=lambda found: sum(map(len, found.values())))
    return {kind: paths[0] for kind, paths in best.items() if paths}
