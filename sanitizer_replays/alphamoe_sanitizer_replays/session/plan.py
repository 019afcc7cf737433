"""What a sanitize session is asked for: its captures, chosen by rank, layer and M, and the variants of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from alphamoe_profiler.bundle_files import is_of_a_run
from alphamoe_sanitizer_replays.captures.selection import Which, among
from alphamoe_sanitizer_replays.captures.store import FoundCaptures, StoredCapture, look_for_captures, open_capture
from alphamoe_sanitizer_replays.plugins.protocol import find_plugin
from alphamoe_sanitizer_replays.replays.job import stumble
from alphamoe_sanitizer_replays.reports.records import CaptureFacts, many
from alphamoe_sanitizer_replays.results import TOOLS, Tool
from alphamoe_sanitizer_replays.session.choice import choose, split_words, which_of
from alphamoe_sanitizer_replays.session.vouched import bundle_of, open_bundle, place_within, unproven_captures
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError

if TYPE_CHECKING:
    from alphamoe_profiler.bundle import RunBundle

DEFAULT_TIMEOUT_S = 300.0
_NOT_OURS = "where it is another program's, move the captures to a folder of their own and name that"


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
    plugin: str | None = None
    """Replays every capture instead of the plug-in that it names."""
    out: Path | None = None
    force: bool = False
    keep_inputs: bool = False
    device: str = "auto"


@dataclass(frozen=True)
class PlannedCapture:
    """One capture of the session."""

    stored: StoredCapture
    facts: CaptureFacts
    variants: tuple[str | None, ...]
    """Those that will be launched. Null for the captured process's own, where the plug-in names none."""
    refused: tuple[Refused, ...] = ()
    """Those that were asked for and cannot be: entries of the report all the same."""


class Refused(NamedTuple):
    """A variant that cannot be replayed."""

    variant: str | None
    reason: str
    hint: str


@dataclass(frozen=True)
class Plan:
    """Everything that will be replayed."""

    captures: tuple[PlannedCapture, ...]
    damaged: tuple[str, ...]
    """One sentence for each capture that could not be opened, and each part of one: the session is no PASS."""
    unproven: tuple[str, ...]
    """One sentence for each reason why captures of a run are not known to be its own: the session is no PASS."""
    notes: tuple[str, ...]
    """What a reader should know of the captures."""
    run_id: str | None
    run: Path | None
    """The run bundle, where exactly one was named."""
    found: tuple[Path, ...]
    """Every capture, and what looks like one, chosen or not."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Every symbol that a replay watches, each once."""
        return tuple(dict.fromkeys(symbol for own in self.captures for symbol in own.facts.symbols))


def parse_tools(words: Sequence[str]) -> tuple[Tool, ...]:
    """Read ``--tool``: names, ``all`` or ``none``, separated by spaces or commas.

    Raises:
        UsageError: an unknown name, ``none`` beside a tool, or no name at all.
    """
    names = split_words(words, "--tool", f"{', '.join(TOOLS)}, all or none")
    if names == ["none"]:
        return ()
    known = {str(tool): tool for tool in TOOLS}
    for name in names:
        if name == "none":
            raise UsageError("--tool none stands alone", "leave it out, or the other names")
        if name not in known and name != "all":
            hint = "name captures before --tool" if Path(name).exists() else f"{', '.join(known)}, all or none"
            raise UsageError(f"--tool {name}: there is no such tool", hint)
    return TOOLS if "all" in names else tuple(known[name] for name in dict.fromkeys(names))


def plan_session(options: SessionOptions) -> Plan:
    """Find and choose the captures.

    Raises:
        UsageError: there are none, a filter names what no capture is of, a variant is unknown, or the files of a run
            contradict each other.
        EvidenceError: every capture that was found or that an option names is damaged, or those of a run are gone.
    """
    folders = {path: look_for_captures(path) for path in options.paths}
    bundles, unread = _bundles(folders)
    _refuse_empty(folders, bundles, unread)
    run = options.paths[0] if len(options.paths) == 1 else None
    run_id = next((own.run.run_id for own in bundles if run is not None and own.path.samefile(run)), None)
    run = run if run_id is not None else None
    opened: list[StoredCapture] = []
    # One capture that is reached in two ways is one.
    reached: dict[Path, Path] = {}
    for folder in (folder for found in folders.values() for folder in found.captures):
        reached.setdefault(folder.resolve(), folder)
    left_out = dict.fromkeys(str(own) for found in folders.values() for own in found.left_out)
    damaged: list[AlphaMoEError] = [EvidenceError(text, "repair or remove it") for text in left_out]
    for folder in reached.values():
        try:
            opened.append(open_capture(folder, options.plugin))
        except AlphaMoEError as error:
            damaged.append(error)
    if not opened and damaged:
        raise damaged[0]
    ranks = which_of(options.ranks, "--ranks")
    strangers = _strangers(unread, folders)
    unproven = [f"{error}; {_NOT_OURS}" for root, error in unread.items() if root not in strangers]
    unproven += [
        problem
        for bundle in bundles
        for problem in unproven_captures(bundle, _ranks_of(bundle, ranks, folders, opened))
    ]
    choice = choose([own.capture for own in opened], options.ranks, options.layers, options.Ms)
    may_hold = (*map(str, damaged), *unproven)
    for word in choice.unmatched:
        if not may_hold:
            raise word
        if not choice.identities:
            raise EvidenceError(f"{word}; one that is damaged or gone may be of it: {may_hold[0]}", word.hint)
    single, copies = _without_copies([own for own in opened if id(own.capture) in choice.identities], damaged)
    planned = _told_apart([_planned(own, options, run, _model_layers(own, bundles)) for own in single])
    named = {variant for own in planned for variant in own.variants}
    for variant in _variants(options):
        if variant not in ("rule", "all") and variant not in named:
            known = sorted({name for own in planned for name in own.facts.variants})
            unknown = f"--variants {variant}: no capture's kernel has it"
            hint = f"known are {', '.join(known)}"
            if may_hold:
                raise EvidenceError(f"{unknown}; one that is damaged or gone may have it: {may_hold[0]}", hint)
            raise UsageError(unknown, hint)
    return Plan(
        planned,
        tuple(str(error) for error in damaged),
        tuple(unproven),
        (
            *(f"{word}; one that is damaged or gone may be of it" for word in choice.unmatched),
            *(f"{root / 'run.json'} is another program's, and no capture lies in its captures/" for root in strangers),
            *copies,
            *_on_their_word(planned, bundles),
        ),
        run_id,
        run,
        tuple(place for own in folders.values() for place in (*own.captures, *(left.path for left in own.left_out))),
    )


def _without_copies(
    opened: Sequence[StoredCapture], damaged: list[AlphaMoEError]
) -> tuple[list[StoredCapture], list[str]]:
    """Leave out captures of which another says all the same, whenever it was written: they are one dispatch.

    A sound one is kept. Others that their hashes do not prove are no copies, but damaged.

    Returns:
        (the captures that are left, a note for each copy).
    """
    alike: dict[bytes, list[StoredCapture]] = {}
    for own in opened:
        said = msgspec.structs.replace(own.capture, created="", wall_s={})
        alike.setdefault(msgspec.json.encode(said, order="sorted"), []).append(own)
    kept, notes = [], []
    for group in alike.values():
        faults = {own.path: _fault(own) for own in group} if len(group) > 1 else {}
        first = next((own for own in group if faults.get(own.path) is None), group[0])
        kept.append(first)
        for own in group:
            fault = faults.get(own.path)
            if own is not first and fault is not None:
                damaged.append(fault)
            elif own is not first:
                notes.append(f"{own.path} is a copy of {first.path}: one dispatch, replayed once")
    return kept, notes


def _fault(own: StoredCapture) -> AlphaMoEError | None:
    try:
        own.verify()
    except AlphaMoEError as error:
        return error
    return None


def _on_their_word(planned: Sequence[PlannedCapture], bundles: list[RunBundle]) -> tuple[str, ...]:
    """Tell of captures that name a run which does not vouch for them: they lie in no bundle."""
    counted: dict[str, int] = {}
    for own in planned:
        run_id = own.stored.capture.run_id
        if run_id is not None and all(place_within(own.stored.path, bundle.path) is None for bundle in bundles):
            counted[run_id] = counted.get(run_id, 0) + 1
    return tuple(
        f"{many(count, 'capture')} of run {run_id} by {'its' if count == 1 else 'their'} own word alone: "
        "outside a run bundle nothing vouches for it"
        for run_id, count in counted.items()
    )


def _bundles(folders: Mapping[Path, FoundCaptures]) -> tuple[list[RunBundle], dict[Path, EvidenceError]]:
    """Open every run bundle that was named, in whole or in part, or lies below what was named; by a link or not.

    Returns:
        (the bundles, why others are none by folder: their ``run.json`` is damaged, or another program's).
    """
    every = list(dict.fromkeys(folder for found in folders.values() for folder in found.captures))
    below = (bundle for found in folders.values() for bundle in found.bundles)
    roots: dict[Path, Path] = {}
    for place in (*folders, *below, *every):
        for root in filter(None, (bundle_of(place), bundle_of(place.resolve()))):
            roots.setdefault(root.resolve(), root.absolute())
    bundles: list[RunBundle] = []
    unread: dict[Path, EvidenceError] = {}
    for root in roots.values():
        try:
            found = [within for own in every if (within := place_within(own, root)) is not None]
            bundles.append(open_bundle(root, found))
        except EvidenceError as error:
            unread[root] = error
    return bundles, unread


def _strangers(unread: Mapping[Path, EvidenceError], folders: Mapping[Path, FoundCaptures]) -> list[Path]:
    """Give the folders whose ``run.json`` is another program's, and vouches for no capture that was found."""
    every = [folder for found in folders.values() for folder in found.captures]
    return [
        root
        for root in unread
        if not is_of_a_run(root / "run.json") and all(place_within(own, root / "captures") is None for own in every)
    ]


def _ranks_of(bundle: RunBundle, asked: Which, folders: Iterable[Path], opened: Sequence[StoredCapture]) -> list[int]:
    """Give the ranks of a run whose captures were asked for: of all that pass, those whose folder a path is or holds,
    or lies in, and those of the captures that were opened; whatever is left of them.
    """
    here = {own.capture.rank for own in opened if place_within(own.path, bundle.path) is not None}
    named = [path.resolve() for path in folders]
    for rank in bundle.ranks:
        own_folder = bundle.path.resolve() / "captures" / f"rank={rank}"
        if any(path.is_relative_to(own_folder) or own_folder.is_relative_to(path) for path in named):
            here.add(rank)
    return [rank for rank in bundle.ranks if among(rank, asked, bundle.world_size) and rank in here]


def _refuse_empty(
    folders: Mapping[Path, FoundCaptures], bundles: list[RunBundle], unread: Mapping[Path, EvidenceError]
) -> None:
    for path, found in folders.items():
        if found.captures or found.left_out:
            continue
        for root, error in unread.items():
            if place_within(path, root) is not None or place_within(root, path) is not None:
                raise EvidenceError(str(error), _NOT_OURS)
        for bundle in bundles:
            gone = unproven_captures(bundle, _ranks_of(bundle, "all", [path], ()))
            if gone:
                raise EvidenceError(f"{path} holds no captures: {gone[0]}", "record it again")
        if (path / "run.json").is_file():
            raise UsageError(
                f"{path} holds no captures",
                "record it again with --capture layer=0,M=1 (alphamoe-trace trace --help says what can be captured)",
            )
        raise UsageError(f"{path} holds no captures", "name a run bundle, a capture, or a folder of captures")


def _variants(options: SessionOptions) -> list[str]:
    return split_words(options.variants, "--variants", "rule, all, or names of variants")


def _planned(
    stored: StoredCapture, options: SessionOptions, run: Path | None, model_layers: int | None
) -> PlannedCapture:
    capture = stored.capture
    place = stored.path
    if run is not None and place.resolve().is_relative_to(run.resolve()):
        place = place.resolve().relative_to(run.resolve())
    facts = CaptureFacts.of(place.as_posix(), capture, model_layers=model_layers)
    try:
        known = find_plugin(capture.plugin).variants(capture)
    except AlphaMoEError as error:
        return PlannedCapture(stored, facts, (), (Refused(None, str(error), error.hint),))
    except Exception as error:  # somebody else's code
        return PlannedCapture(
            stored, facts, (), (Refused(None, f"the plug-in {capture.plugin}: {stumble(error)}", ""),)
        )
    facts = msgspec.structs.replace(facts, variants=tuple(known))
    own = capture.launch.variant if capture.launch is not None else (known[0] if known else None)
    wanted: list[str | None] = []
    refused = []
    for word in _variants(options):
        if word == "rule":
            wanted.append(own)
        elif word == "all":
            wanted += known or (own,)
        elif word in known:
            wanted.append(word)
        else:
            has = f"it has {', '.join(known)}" if known else "it has one shape only"
            refused.append(Refused(word, f"the kernel of {facts.label} has no variant {word}: {has}", ""))
    return PlannedCapture(stored, facts, tuple(dict.fromkeys(wanted)), tuple(dict.fromkeys(refused)))


def _model_layers(own: StoredCapture, bundles: list[RunBundle]) -> int | None:
    """Say how many MoE layers the model of a captured run has, where its bundle says."""
    runs = (bundle.run for bundle in bundles if place_within(own.path, bundle.path) is not None)
    return next((run.geometry.layers for run in runs if run.geometry is not None), None)


def _told_apart(planned: list[PlannedCapture]) -> tuple[PlannedCapture, ...]:
    """Give captures of the same label what tells them apart: the run, the step, the call, else the folder."""
    alike: dict[str, list[PlannedCapture]] = {}
    for own in planned:
        alike.setdefault(own.facts.label, []).append(own)
    apart: dict[str, str] = {}
    for group in alike.values():
        if len(group) == 1:
            continue
        captures = [own.stored.capture for own in group]
        words: list[tuple[str, list[object]]] = [
            ("run", [capture.run_id for capture in captures]),
            ("step", [capture.step for capture in captures]),
            ("call", [capture.call for capture in captures]),
        ]
        telling = [(name, values) for name, values in words if len(set(values)) > 1]
        told = [
            " ".join(f"{name} {values[index]}" for name, values in telling if values[index] is not None)
            for index in range(len(group))
        ]
        if len(set(told)) < len(told):
            told = [own.facts.path for own in group]
        apart |= {own.facts.path: words for own, words in zip(group, told, strict=True)}
    return tuple(
        replace(own, facts=msgspec.structs.replace(own.facts, apart=apart.get(own.facts.path, ""))) for own in planned
    )
