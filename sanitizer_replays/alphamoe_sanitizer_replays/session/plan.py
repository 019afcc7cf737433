"""What a sanitize session is asked for: its captures, chosen by rank, layer and M, and the variants of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.captures.selection import Which, among, parse_which
from alphamoe_sanitizer_replays.captures.store import StoredCapture, find_captures, open_capture
from alphamoe_sanitizer_replays.plugins.protocol import ReplayPlugin, find_plugin
from alphamoe_sanitizer_replays.reports.records import CaptureFacts
from alphamoe_sanitizer_replays.results import TOOLS, Tool
from alphamoe_tracers.errors import EvidenceError, UsageError

DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class SessionOptions:
    """What the command line asks for."""

    paths: tuple[Path, ...]
    tools: tuple[Tool, ...] = TOOLS
    """Empty for ``--tool none``: the output is checked and nothing else."""
    ranks: tuple[str, ...] = ("all",)
    layers: tuple[str, ...] = ("all",)
    Ms: tuple[str, ...] = ("all",)
    variants: tuple[str, ...] = ("rule",)
    timeout_s: float = DEFAULT_TIMEOUT_S
    jobs: int = field(default_factory=lambda: max(1, min(8, (os.cpu_count() or 2) // 2)))
    sanitizer: str | None = None
    allow_list: Path | None = None
    source: Path | None = None
    out: Path | None = None
    force: bool = False
    keep_inputs: bool = False
    device: str = "auto"


@dataclass(frozen=True)
class PlannedCapture:
    """One capture of the session."""

    stored: StoredCapture
    facts: CaptureFacts
    plugin: ReplayPlugin
    variants: tuple[str | None, ...]
    """Null for the one that the captured process launched, where the plug-in names none."""


@dataclass(frozen=True)
class Plan:
    """Everything that will be replayed."""

    captures: tuple[PlannedCapture, ...]
    damaged: tuple[str, ...]
    """One sentence for each capture that could not be opened: the session is no PASS."""
    run_id: str | None
    run: Path | None
    """The run bundle, where exactly one was named."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Every symbol that a replay watches, each once."""
        return tuple(dict.fromkeys(symbol for own in self.captures for symbol in own.facts.symbols))


def parse_tools(words: Sequence[str]) -> tuple[Tool, ...]:
    """Read ``--tool``: names, ``all`` or ``none``, separated by spaces or commas.

    Raises:
        UsageError: an unknown name, ``none`` beside a tool, or no name at all.
    """
    names = _words(words)
    if names == ["none"]:
        return ()
    known = {str(tool): tool for tool in TOOLS}
    for name in names:
        if name not in known and name != "all":
            hint = "name captures before --tool" if Path(name).exists() else f"{', '.join(known)}, all or none"
            raise UsageError(f"--tool {name}: there is no such tool", hint)
    if not names:
        raise UsageError("--tool names nothing", f"{', '.join(known)}, all or none")
    return TOOLS if "all" in names else tuple(known[name] for name in dict.fromkeys(names))


def plan_session(options: SessionOptions) -> Plan:
    """Find and choose the captures.

    Raises:
        UsageError: there are none, none passes the filters, a variant or a plug-in is unknown.
        EvidenceError: every capture that was found is damaged.
    """
    run = options.paths[0] if len(options.paths) == 1 and (options.paths[0] / "run.json").is_file() else None
    run_id = None
    if run is not None:
        from alphamoe_profiler.bundle import RunBundle

        run_id = RunBundle.open(run).run.run_id
    opened: list[StoredCapture] = []
    damaged: list[EvidenceError] = []
    for folder in _folders(options.paths):
        try:
            opened.append(open_capture(folder))
        except EvidenceError as error:
            damaged.append(error)
    if not opened and damaged:
        raise damaged[0]
    chosen = _chosen([stored.capture for stored in opened], options)
    planned = tuple(_planned(stored, options, run) for stored in opened if id(stored.capture) in chosen)
    named = {variant for own in planned for variant in own.variants}
    for variant in _variant_names(options):
        if variant not in named:
            known = sorted({name for own in planned for name in own.plugin.variants(own.stored.capture)})
            raise UsageError(f"--variants {variant}: no capture's kernel has it", f"known are {', '.join(known)}")
    return Plan(planned, tuple(str(error) for error in damaged), run_id, run)


def _folders(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        own = find_captures(path)
        if not own:
            recorded = (path / "run.json").is_file()
            raise UsageError(
                f"{path} holds no captures",
                "record it again with --capture layer=0,M=1 (alphamoe-trace trace --help says what can be captured)"
                if recorded
                else "name a run bundle, a capture, or a folder of captures",
            )
        found += [folder for folder in own if folder not in found]
    return found


def _chosen(captures: list[Capture], options: SessionOptions) -> set[int]:
    """Give the identities of the captures that pass the filters.

    Raises:
        UsageError: none does, or a filter's word is no number.
    """
    worlds = [capture.world_size for capture in captures if capture.world_size is not None]
    last_rank = max([*(world - 1 for world in worlds), *(capture.rank for capture in captures)], default=0)
    last_layer = max((capture.layer for capture in captures if capture.layer is not None), default=0)
    last_M = max((capture.M for capture in captures), default=0)
    ranks, layers, Ms = _which(options.ranks, "--ranks"), _which(options.layers, "--layers"), _which(options.Ms, "--M")
    chosen = {
        id(capture)
        for capture in captures
        if among(capture.rank, ranks, last_rank + 1)
        and among(capture.layer, layers, last_layer + 1)
        and among(capture.M, Ms, last_M + 1)
    }
    if not chosen:
        there = "; ".join(dict.fromkeys(capture.label for capture in captures))
        raise UsageError("no capture passes --ranks, --layers and --M", f"there are {there[:400]}")
    return chosen


def _which(words: Sequence[str], option: str) -> Which:
    names = _words(words)
    return "all" if "all" in names else parse_which("+".join(names), option)


def _words(words: Sequence[str]) -> list[str]:
    return [part for word in words for part in word.split(",") if part]


def _variant_names(options: SessionOptions) -> list[str]:
    return [name for name in _words(options.variants) if name not in ("rule", "all")]


def _planned(stored: StoredCapture, options: SessionOptions, run: Path | None) -> PlannedCapture:
    capture = stored.capture
    plugin = find_plugin(capture.plugin)
    known = plugin.variants(capture)
    own = capture.launch.variant if capture.launch is not None else (known[0] if known else None)
    wanted: list[str | None] = []
    for word in _words(options.variants):
        if word == "rule":
            wanted.append(own)
        elif word == "all":
            wanted += known or (own,)
        elif word in known:
            wanted.append(word)
    place = stored.path
    if run is not None and place.resolve().is_relative_to(run.resolve()):
        place = place.resolve().relative_to(run.resolve())
    return PlannedCapture(stored, CaptureFacts.of(place.as_posix(), capture), plugin, tuple(dict.fromkeys(wanted)))
