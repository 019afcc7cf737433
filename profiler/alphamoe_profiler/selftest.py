"""Prove that the gate can fail: evidence that is damaged, or whole and wrong, must each get its verdict."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL
from alphamoe_profiler.bundle import RunBundle
from alphamoe_profiler.gate import Expected, evaluate
from alphamoe_profiler.policy_source import parse_policy
from alphamoe_profiler.selftest_run import (
    COMMIT,
    DECODE,
    EAGER,
    NORM,
    SOURCE,
    SelftestRank,
    sound_rank,
    write_run,
)
from alphamoe_profiler.verdicts import Verdict
from alphamoe_profiler.windows import SENTINEL_PREFIX
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError
from alphamoe_tracers.records import ModuleRecord

POLICY = f"""
backend = "flashinfer_alphamoe"
world_size = 2

[[require]]
symbol = "{ALPHAMOE_W8A8_SYMBOL}"
equals_receipts = true
equal_across_ranks = true
per_layer = 1
source_sha256 = ["{SOURCE}"]
"""
PASS, FAIL, OPEN, CONFIG = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.CONFIG_ERROR

Damage = Callable[[SelftestRank], None]
OnDisk = Callable[[Path], None]


def _nothing(_: Any) -> None:
    return


@dataclass(frozen=True)
class Case:
    """One way in which evidence can be wrong."""

    name: str
    expected: Verdict
    damage: Damage = _nothing
    """Of rank 1, before it is written."""
    both: Damage = _nothing
    """Of every rank."""
    on_disk: OnDisk = _nothing
    """Of the written bundle."""
    leave_out: tuple[int, ...] = ()
    """Ranks that leave nothing."""
    run: dict[str, Any] = field(default_factory=dict)
    """Fields of run.json."""
    policy: str = POLICY
    told: str = ""
    """What the reason must say."""


@dataclass(frozen=True)
class CaseResult:
    """What one case came to."""

    case: Case
    verdict: Verdict
    reason: str

    @property
    def right(self) -> bool:
        """It got its verdict, for its reason."""
        return self.verdict is self.case.expected and self.case.told in self.reason


def run_selftest(folder: Path) -> list[CaseResult]:
    """Run every case in a directory of its own.

    Args:
        folder: an empty directory that may be written.
    """
    return [run_case(case, folder / f"{number:02d}") for number, case in enumerate(cases())]


def run_case(case: Case, path: Path) -> CaseResult:
    """Write the damaged recording of one case and gate it."""
    ranks = [sound_rank(rank) for rank in (0, 1) if rank not in case.leave_out]
    for own in ranks:
        case.both(own)
        if own.rank == 1:
            case.damage(own)
    try:
        write_run(path, ranks, **case.run)
        case.on_disk(path)
        report = evaluate(RunBundle.open(path), [parse_policy(case.policy, "selftest")], Expected(commit=COMMIT))
    except EvidenceError as error:
        return CaseResult(case, OPEN, str(error))
    except AlphaMoEError as error:
        return CaseResult(case, CONFIG, str(error))
    return CaseResult(case, report.verdict, report.reason)


def cases() -> tuple[Case, ...]:
    """Return every case, the sound recording first."""
    return (
        Case("a sound recording", PASS),
        Case("one rank removed", OPEN, leave_out=(1,), told="rank 1"),
        Case("one rank without its rank file", OPEN, damage=_without_rank_file, told="rank 1"),
        Case("one symbol renamed", FAIL, both=_renamed, told="not seen"),
        Case("a fallback on one rank", FAIL, damage=_fallback, told="forbidden"),
        Case("one forbidden kernel among many", FAIL, damage=_one_forbidden, told="ran 1 times"),
        Case("a cut kernels file", OPEN, on_disk=_cut_kernels, told="rank 1"),
        Case("a cut receipts file", OPEN, on_disk=_cut_receipts, told="rank 1"),
        Case("a dropped sentinel", OPEN, damage=_without_sentinel, told="close sentinel seen 0 times of 1"),
        Case("dropped records", OPEN, damage=_dropped, told="dropped"),
        Case("a graph sentinel without its node", OPEN, damage=_graph_as_block, told="graph_open sentinel"),
        Case("no kernels at all", OPEN, both=_no_kernels),
        Case("warm-up only", OPEN, both=_warm_up_only, told="not exercised"),
        Case("capture only, decode never exercised", OPEN, both=_never_replayed, told="not exercised"),
        Case("receipts without kernels", FAIL, damage=_without_moe_kernels, told="not seen"),
        Case("kernels without receipts", FAIL, damage=_without_receipts, told="without a receipt"),
        Case("kernels beyond the receipts", FAIL, damage=_surplus),
        Case("M against the launch shape", FAIL, damage=_wrong_shape, told="M"),
        Case("two variants swapped", FAIL, damage=_variants_swapped, told="M"),
        Case("ranks disagree on M", FAIL, damage=_other_m, told="integrity"),
        Case("another module under the symbol", FAIL, damage=_other_module, told="not pinned"),
        Case("one rank's recording cloned as another", CONFIG, on_disk=_cloned, told="rank"),
        Case("a rank of another run", CONFIG, damage=_of_another_run, told="run"),
        Case("a stale commit", FAIL, run={"source": _source("0" * 40, False)}, told="stale"),
        Case("uncommitted changes", FAIL, run={"source": _source(COMMIT, True)}, told="uncommitted"),
        Case("a backend that was asked for and did not run", FAIL, both=_all_fallback, told="forbidden"),
        Case("a policy without a rule", CONFIG, policy="world_size = 2\n", told="no symbol"),
        Case("a rule that can match nothing", CONFIG, policy=_require("ns::kernel<float>"), told="can match nothing"),
        Case("a misspelt symbol", FAIL, policy=_require("kernel_alpha_moe_w8a8_updown"), told="not seen"),
        Case("an expired known gap", CONFIG, policy=POLICY + _gap("2020-01-01"), told="expired"),
        Case("another world size", FAIL, policy=POLICY.replace("= 2", "= 4", 1), told="2 ranks"),
    )


def _source(commit: str, dirty: bool) -> Any:
    from alphamoe_profiler.run_records import SourceRevision

    return SourceRevision(commit=commit, dirty=dirty, tree_sha256="7e" * 32)


def _require(symbol: str) -> str:
    return f'[[require]]\nsymbol = "{symbol}"\n'


def _gap(expires: str) -> str:
    return f'[[known_gap]]\nsymbol = "{ALPHAMOE_W8A8_SYMBOL}"\nreason = "selftest"\nexpires = {expires}\n'


def _without_rank_file(own: SelftestRank) -> None:
    own.write_rank_file = False


def _renamed(own: SelftestRank) -> None:
    for row in own.of(ALPHAMOE_W8A8_SYMBOL):
        row["_name"] = "kernel_alpha_moe_w8a8_up_dawn"


def _fallback(own: SelftestRank) -> None:
    for row in own.of(ALPHAMOE_W8A8_SYMBOL):
        row["_name"] = STOCK_SYMBOL
    own.receipts = [
        msgspec.structs.replace(
            receipt, kernels=tuple(msgspec.structs.replace(k, symbol=STOCK_SYMBOL) for k in receipt.kernels)
        )
        for receipt in own.receipts
    ]


def _all_fallback(own: SelftestRank) -> None:
    _fallback(own)


def _one_forbidden(own: SelftestRank) -> None:
    own.of(NORM, DECODE)[0]["_name"] = STOCK_SYMBOL


def _cut_kernels(path: Path) -> None:
    _cut(path / "kernels" / "rank=1" / "part-00000.parquet")


def _cut_receipts(path: Path) -> None:
    _cut(path / "receipts" / "rank=1.jsonl")


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def _without_sentinel(own: SelftestRank) -> None:
    own.drop(own.of(f"{SENTINEL_PREFIX}close"))


def _dropped(own: SelftestRank) -> None:
    own.dropped = 3


def _graph_as_block(own: SelftestRank) -> None:
    for row in own.of(f"{SENTINEL_PREFIX}graph_open"):
        row["graph_node_id"] = None


def _no_kernels(own: SelftestRank) -> None:
    own.kernels = []


def _warm_up_only(own: SelftestRank) -> None:
    own.receipts = [receipt for receipt in own.receipts if receipt.purpose == "warmup"]
    own.drop([row for row in own.kernels if row["_step"] in (EAGER, DECODE)])


def _never_replayed(own: SelftestRank) -> None:
    own.receipts = [receipt for receipt in own.receipts if receipt.step != DECODE]
    own.drop([row for row in own.kernels if row["_step"] == DECODE])


def _without_moe_kernels(own: SelftestRank) -> None:
    own.drop(own.of(ALPHAMOE_W8A8_SYMBOL, EAGER))


def _without_receipts(own: SelftestRank) -> None:
    own.receipts = []


def _surplus(own: SelftestRank) -> None:
    again = dict(own.of(ALPHAMOE_W8A8_SYMBOL, EAGER)[-1])
    again |= {"start_ns": again["start_ns"] + 1, "end_ns": again["end_ns"] + 1}
    own.kernels.append(again)


def _wrong_shape(own: SelftestRank) -> None:
    for row in own.of(ALPHAMOE_W8A8_SYMBOL, EAGER):
        row["grid_x"] += 1


def _variants_swapped(own: SelftestRank) -> None:
    names = [name for name in own.kernels[0] if name.split("_")[0] in ("grid", "block", "cluster", "dynamic")]
    eager, decode = (own.of(ALPHAMOE_W8A8_SYMBOL, step)[0] for step in (EAGER, DECODE))
    for name in names:
        eager[name], decode[name] = decode[name], eager[name]


def _other_m(own: SelftestRank) -> None:
    own.receipts = [msgspec.structs.replace(r, M=r.M + 1) if r.M and r.step == EAGER else r for r in own.receipts]


def _other_module(own: SelftestRank) -> None:
    own.modules = [ModuleRecord("ee" * 32, 10, 1, (ALPHAMOE_W8A8_SYMBOL,), None)]


def _cloned(path: Path) -> None:
    for table in ("kernels", "launches", "ranges", "graph_nodes"):
        shutil.copyfile(path / table / "rank=0" / "part-00000.parquet", path / table / "rank=1" / "part-00000.parquet")


def _of_another_run(own: SelftestRank) -> None:
    own.run_id = "another"
    own.receipts = [msgspec.structs.replace(receipt, run_id="another") for receipt in own.receipts]
