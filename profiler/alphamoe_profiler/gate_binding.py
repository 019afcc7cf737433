"""What binds evidence to the question: commit, tree, world size, versions, and the code behind a symbol."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from alphamoe_profiler.bundle import RunBundle, readable_rank_file
from alphamoe_profiler.gate_cells import Where, look
from alphamoe_profiler.policy import PlacedPolicy, RequireRule
from alphamoe_profiler.policy_match import Selector
from alphamoe_profiler.verdicts import Finding, Verdict
from alphamoe_tracers.errors import EvidenceError
from alphamoe_tracers.records import ModuleRecord

if TYPE_CHECKING:
    from alphamoe_profiler.evidence import Evidence
    from alphamoe_profiler.run_records import RunInfo

_SHORTEST_COMMIT = 7
_BOUND_RUN = "record the run again from the head under review"


def binding_findings(
    run: RunInfo, expect_commit: str | None, expect_tree: str | None, world_sizes: Iterable[tuple[int, int, str | None]]
) -> list[tuple[str, int, str | None, Finding, str | None]]:
    """Judge whether the evidence is of the code and the size that are asked for.

    Args:
        run: of the bundle.
        expect_commit: commit under review, in full or at least seven digits of it.
        expect_tree: hash of the packages under test, as run.json holds it.
        world_sizes: (ranks, line, file) of each policy that names a world size.

    Returns:
        Title, line, file, finding and what would settle it, for each thing that was asked.
    """
    found: list[tuple[str, int, str | None, Finding, str | None]] = []
    if expect_commit is not None:
        found.append((f"commit {expect_commit[:12]}", 1, None, _commit(run, expect_commit), _BOUND_RUN))
    if expect_tree is not None:
        found.append((f"tree {expect_tree[:12]}", 1, None, _tree(run, expect_tree), _BOUND_RUN))
    for wanted, line, path in world_sizes:
        if wanted == run.world_size:
            finding = Finding(Verdict.PASS, "", must_be_seen=False)
        else:
            text = f"the run has {run.world_size} ranks, the policy asks for {wanted}"
            finding = Finding(Verdict.FAIL, text, must_be_seen=False)
        found.append((f"world size {wanted}", line, path, finding, None))
    return found


def _commit(run: RunInfo, wanted: str) -> Finding:
    source = run.source
    low = wanted.lower()
    if source.commit is None:
        return Finding(
            Verdict.INCONCLUSIVE, "run.json names no commit, so nothing says which code ran", must_be_seen=False
        )
    if len(low) < _SHORTEST_COMMIT or not source.commit.lower().startswith(low):
        text = f"stale evidence: it was recorded at commit {source.commit[:12]}, not at {wanted[:12]}"
        return Finding(Verdict.FAIL, text, must_be_seen=False)
    if source.dirty:
        return Finding(Verdict.FAIL, "it was recorded with uncommitted changes on that commit", must_be_seen=False)
    if source.dirty is None:
        text = "nothing says whether there were uncommitted changes on that commit"
        return Finding(Verdict.INCONCLUSIVE, text, must_be_seen=False)
    return Finding(Verdict.PASS, "", must_be_seen=False)


def _tree(run: RunInfo, wanted: str) -> Finding:
    tree = run.source.tree_sha256
    if tree is None:
        text = "run.json holds no hash of the packages under test"
        return Finding(Verdict.INCONCLUSIVE, text, must_be_seen=False)
    if tree.lower() != wanted.lower():
        text = f"stale evidence: it was recorded with tree {tree[:12]}, not with {wanted[:12]}"
        return Finding(Verdict.FAIL, text, must_be_seen=False)
    return Finding(Verdict.PASS, "", must_be_seen=False)


def version_warnings(bundle: RunBundle, policies: Iterable[PlacedPolicy]) -> list[str]:
    """Warn where a policy was written for other versions than the run names, or for none that it names."""
    known = dict(bundle.run.versions)
    if bundle.run.kind == "imported":
        known = {}  # what imported the traces says nothing of what was traced
    for rank in bundle.ranks:
        record = readable_rank_file(bundle, rank)
        for item in record.imported if record else ():
            known |= item.versions
    warnings = []
    for placed in policies:
        wanted = placed.policy.versions
        named = {_normal(name): value for name, value in known.items()}
        told = {name: named[_normal(name)] for name in wanted if _normal(name) in named}
        for name, version in told.items():
            if not any(fnmatchcase(version, pattern) for pattern in wanted[name]):
                asked = ", ".join(wanted[name])
                warnings.append(f"{placed.source} was written for {name} {asked}; the run has {version}")
        if wanted and not told:
            names = ", ".join(wanted)
            warnings.append(f"{placed.source} is tied to versions of {names}; the run names none of them")
    return warnings


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").removesuffix("-version")


def pin_finding(evidence: Evidence, where: Where, rule: RequireRule, selector: Selector) -> Finding:
    """Judge whether the loaded code behind a symbol is what the rule pins, on one rank.

    A kernel record does not say which of several modules that hold its name it ran, so each of them must be pinned.
    """
    seen = look(evidence, selector, where, True)
    if not seen.kernels:
        return Finding(Verdict.INCONCLUSIVE, "no kernel was witnessed, so no code is behind it")
    frame = evidence.kernels[where.rank].frame
    loaded = _modules(evidence.bundle, where.rank)
    by_hash = {module.sha256: module for module in loaded}
    behind: dict[str, ModuleRecord | None] = {}
    unknown = 0
    pairs = frame.loc[seen.mask, ["mangled", "module_sha256"]].astype(object)
    counts = pairs.groupby(["mangled", "module_sha256"], dropna=False).size().rename("kernels").reset_index()
    for mangled, module, count in zip(*(counts[name].tolist() for name in counts.columns), strict=True):
        names = [module] if isinstance(module, str) else [own.sha256 for own in loaded if mangled in own.kernels]
        unknown += 0 if names else int(count)
        behind |= {name: by_hash.get(name) for name in names}
    for name, record in sorted(behind.items()):
        source = record.source_sha256 if record else None
        if rule.module_sha256 and name not in rule.module_sha256:
            text = f"another module is loaded under the symbol: {name[:12]} is not pinned"
            return Finding(Verdict.FAIL, text, seen.kernels)
        if rule.source_sha256 and source not in rule.source_sha256:
            told = f"source {source[:12]}" if source else "an unknown source"
            text = f"other code is loaded under the symbol: module {name[:12]} of {told} is not pinned"
            return Finding(Verdict.FAIL, text, seen.kernels)
    if unknown or not behind:
        text = f"no loaded module is known to hold the {unknown or seen.kernels} kernels"
        return Finding(Verdict.INCONCLUSIVE, text, seen.kernels)
    return Finding(Verdict.PASS, "", seen.kernels)


def _modules(bundle: RunBundle, rank: int) -> list[ModuleRecord]:
    try:
        return bundle.modules(rank)
    except EvidenceError:  # told by bundle_check.check(); no module is known then
        return []
