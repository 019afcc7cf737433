"""Attribution: every kernel lands in (request, step, layer, execution, M) or is counted with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import golden
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from golden import RankContent, Row, Step

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL
from alphamoe_profiler.attributed_kernels import AttributedKernels
from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle import GpuInfo, RunBundle
from alphamoe_profiler.range_paths import range_paths

Damage = Callable[[RankContent], None]


def attributed(path: Path, damage: Damage | None = None, **settings: object) -> AttributedKernels:
    """Build a golden run, damage rank 0 of one, and attribute it; the invariant is held before anything else."""
    bundle = RunBundle.open(golden.build(path / "run", damage, world_size=1, **settings))  # type: ignore[arg-type]
    result = attribute(bundle, 0)
    result.check()
    return result


def row(result: AttributedKernels, symbol: str = ALPHAMOE_W8A8_SYMBOL, **wanted: int) -> pd.Series:
    frame = result.frame[result.frame["base"] == symbol]
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_all_kernels_of_a_sound_run_are_attributed_but_sentinels_and_warm_up(tmp_path: Path) -> None:
    result = attributed(tmp_path)
    assert dict(result.reasons) == {"sentinel": 10, "before window": 6}
    assert result.attributed == 36


def test_an_eager_kernel_gets_its_step_layer_request_and_m(tmp_path: Path) -> None:
    kernel = row(attributed(tmp_path), step=4, layer=1)
    assert kernel[["execution", "purpose", "forward_mode", "requests", "phase", "path"]].tolist() == [
        "eager", "witness", "EXTEND", "gsm8k-17", "experts", "step>layer>experts",
    ]  # fmt: skip
    assert kernel[["kernel_M", "dispatch_M", "real_tokens"]].tolist() == [13, 13, 13]
    assert kernel["shape_ok"] is np.True_ or kernel["shape_ok"] is True


def test_a_replayed_kernel_gets_its_layer_from_the_capture_and_its_step_from_the_replay(tmp_path: Path) -> None:
    result = attributed(tmp_path)
    kernel = row(result, step=9, layer=1)
    assert kernel["execution"] == "decode_graph_replay"
    assert kernel[["kernel_M", "dispatch_M", "real_tokens"]].tolist() == [2, 2, 1]
    assert kernel["api"] == "cudaGraphLaunch"
    assert result.capture_steps == {2, 3}


def test_three_kernels_with_one_correlation_id_are_three_kernels(tmp_path: Path) -> None:
    frame = attributed(tmp_path).frame
    shared = frame[frame["step"] == 8]
    assert shared["correlation_id"].nunique() == 1
    assert len(shared) == 6


def _launch_of(content: RankContent, kernel: Row) -> Row:
    return next(entry for entry in content.launches if entry["correlation_id"] == kernel["correlation_id"])


def change(symbol: str, step: int, **fields: object) -> Damage:
    def damage(content: RankContent) -> None:
        for kernel in content.of(symbol, step):
            kernel.update(fields)

    return damage


def drop_rows(name: str, keep: Callable[[Row], bool]) -> Damage:
    def damage(content: RankContent) -> None:
        setattr(content, name, [entry for entry in getattr(content, name) if keep(entry)])

    return damage


@pytest.mark.parametrize(
    ("damage", "reason", "count"),
    [
        (change(golden.NORM, 4, correlation_id=0), "no correlation id", 2),
        (change(golden.NORM, 4, correlation_id=None), "no correlation id", 2),
        (change(golden.NORM, 4, correlation_id=99_999), "no launch record", 2),
        (drop_rows("receipts", lambda r: r.step != 5), "no receipt for step", 6),  # type: ignore[attr-defined]
        (drop_rows("ranges", lambda r: (r["name"], r["payload"]) != ("step", 5)), "launch outside any step", 6),
        (drop_rows("ranges", lambda r: False), "launch outside any range", 36),
        (drop_rows("graph_nodes", lambda r: False), "graph node unknown", 18),
        (drop_rows("graph_nodes", lambda r: r["original_node_id"] is not None), "graph node unknown", 18),
        (change(ALPHAMOE_W8A8_SYMBOL, 8, graph_node_id=None), "graph node id missing", 2),
        (drop_rows("ranges", lambda r: r["name"] != "layer"), "outside any layer", 12),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_gap_in_the_evidence_is_counted_under_its_own_reason(
    tmp_path: Path, damage: Damage, reason: str, count: int
) -> None:
    result = attributed(tmp_path, damage)
    assert result.reasons[reason] == count


def test_correlation_id_zero_never_joins_even_when_a_launch_says_zero_too(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 4)[0]["correlation_id"] = 0
        content.launches.append(content.launches[0] | {"correlation_id": 0})

    result = attributed(tmp_path, damage)
    assert result.reasons["no correlation id"] == 1
    assert pd.isna(result.frame.loc[result.frame["correlation_id"].isna(), "step"]).all()


def test_launches_of_another_process_with_the_same_ids_do_not_join(tmp_path: Path) -> None:
    result = attributed(tmp_path, change(golden.NORM, 4, process=4242))
    assert result.reasons["no launch record"] == 2


def test_a_runtime_call_and_the_driver_call_under_it_are_one_launch(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        for launch in [entry for entry in content.launches if entry["api"] == "cuLaunchKernelEx"]:
            around = {"start_ns": launch["start_ns"] - 20, "end_ns": launch["end_ns"] + 20}
            content.launches.append(launch | around | {"api": "cudaLaunchKernelExC_v11060"})

    result = attributed(tmp_path, damage)
    assert result.attributed == 36
    assert row(result, step=4, layer=0)["api"] == "cudaLaunchKernelExC_v11060"


def test_a_launch_from_another_thread_is_not_given_to_the_nearest_range(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        _launch_of(content, content.of(golden.NORM, 4)[0])["thread"] = 701

    result = attributed(tmp_path, damage)
    assert result.reasons["launch outside any range"] == 1
    assert result.attributed == 35


def test_kernels_from_before_the_session_are_kept_but_counted_outside_the_window(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        stale = content.of(ALPHAMOE_W8A8_SYMBOL, 4)[0] | {"start_ns": 400, "end_ns": 500, "correlation_id": 77_777}
        content.kernels.append(stale)

    result = attributed(tmp_path, damage)
    assert result.reasons["before window"] == 7
    assert int(result.frame["in_window"].sum()) == 46


def test_untimed_and_impossible_times_stay_present_but_out_of_every_duration(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        first, second, third = content.of(golden.NORM, 4) + content.of(golden.NORM, 5)[:1]
        first.update(start_ns=0, end_ns=0)
        second.update(end_ns=second["start_ns"] - 3)
        third.update(end_ns=third["start_ns"] + 4)

    result = attributed(tmp_path, damage)
    frame = result.frame[(result.frame["base"] == golden.NORM) & (result.frame["step"].isin([4, 5]))]
    assert (int(frame["untimed"].sum()), int(frame["invalid"].sum())) == (1, 1)
    assert frame["duration_ns"].isna().sum() == 2
    assert result.frame["duration_ns"].dropna().min() == 4
    assert result.attributed == 36
    assert not result.frame.select_dtypes("float").isin([np.inf, -np.inf]).any().any()


def test_a_kernel_just_before_its_launch_is_tolerated_and_one_long_before_is_flagged(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        near, far = content.of(golden.NORM, 4)
        near.update(start_ns=near["start_ns"] - 5_000)
        far.update(start_ns=far["start_ns"] - 50_000)

    result = attributed(tmp_path, damage)
    assert int(result.frame["early"].sum()) == 1
    assert result.attributed == 36


def test_an_eager_launch_in_a_replay_step_is_no_graph_execution(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        launch = _launch_of(content, content.of(golden.NORM, 8)[0])
        content.launches.append(launch | {"correlation_id": 5_000, "api": "cuLaunchKernelEx"})
        content.of(ALPHAMOE_W8A8_SYMBOL, 8)[0].update(correlation_id=5_000, graph_node_id=None, graph_id=None)

    result = attributed(tmp_path, damage)
    assert result.reasons["launched outside the graph"] == 1
    chosen = result.frame[result.frame["reason"] == "launched outside the graph"]
    assert chosen["execution"].isna().all()


def test_a_fallback_kernel_without_a_submission_keeps_its_step_and_layer(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(golden.NORM, 4)[0]["_base"] = STOCK_SYMBOL

    kernel = row(attributed(tmp_path, damage), STOCK_SYMBOL)
    assert (kernel["step"], kernel["layer"], kernel["execution"]) == (4, 0, "eager")
    assert pd.isna(kernel["kernel_M"])


def test_a_launch_shape_of_another_m_is_found(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(ALPHAMOE_W8A8_SYMBOL, 4)[0]["dynamic_smem_bytes"] += 128

    frame = attributed(tmp_path, damage).frame
    assert frame["shape_ok"].value_counts(dropna=False).to_dict() == {True: 13, False: 1, pd.NA: 38}


def test_without_the_number_of_multiprocessors_no_shape_is_judged(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.rank_file = {"sm_count": None}

    assert attributed(tmp_path, damage).frame["shape_ok"].isna().all()


def test_the_launch_rule_of_hopper_judges_no_other_architecture(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.rank_file = {"compute_capability": capability}

    capability: str | None = "10.0"
    assert attributed(tmp_path / "a", damage).frame["shape_ok"].isna().all()
    # Where the rank file does not say it, run.json says it of the same GPU.
    capability = None
    gpus = (GpuInfo(index=0, name="NVIDIA B200", uuid="GPU-0", compute_capability="10.0"),)
    assert attributed(tmp_path / "b", damage, run={"gpus": gpus}).frame["shape_ok"].isna().all()


def test_a_name_that_only_holds_the_symbol_is_another_symbol(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.of(ALPHAMOE_W8A8_SYMBOL, 4)[0]["_base"] = f"{ALPHAMOE_W8A8_SYMBOL}_v2"

    frame = attributed(tmp_path, damage).frame
    assert pd.isna(frame.loc[frame["base"] == f"{ALPHAMOE_W8A8_SYMBOL}_v2", "kernel_M"]).all()


def test_a_layer_that_submits_one_symbol_at_several_m_matches_them_in_order(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        step = Step(4, "eager", "EXTEND", 13, 13)
        one, _ = golden.submissions(content, step, ALPHAMOE_W8A8_SYMBOL)
        chunks = tuple(type(one)(**{**_fields(one), "M": M}) for M in (8, 5))
        receipts = [r if r.step != 4 else type(r)(**{**_fields(r), "kernels": chunks}) for r in content.receipts]
        content.receipts = receipts
        first, second = content.of(ALPHAMOE_W8A8_SYMBOL, 4)
        second["correlation_id"] = first["correlation_id"]

    frame = attributed(tmp_path, damage).frame
    chosen = frame[(frame["base"] == ALPHAMOE_W8A8_SYMBOL) & (frame["step"] == 4)]
    assert chosen["kernel_M"].tolist() == [8, 5]


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]


def test_the_same_name_in_two_phases_stays_two_paths() -> None:
    rows = [
        _range("prefill", 0, 100, 0), _range("moe", 10, 20, 1),
        _range("decode", 200, 300, 0), _range("moe", 210, 220, 1),
    ]  # fmt: skip
    paths = range_paths(golden.table("ranges", rows), *_moments([15, 215, 50, 150]))
    assert list(paths.path) == ["prefill>moe", "decode>moe", "prefill", np.nan]
    assert paths.any.tolist() == [True, True, True, False]


def test_ranges_of_other_domains_and_start_end_ranges_say_nothing() -> None:
    rows = [
        _range("step", 0, 100, 0) | {"payload": 7},
        _range("step", 0, 100, 0) | {"payload": 8, "domain": "torch"},
        _range("layer", 0, 100, 0) | {"payload": 9, "kind": "start_end"},
    ]
    paths = range_paths(golden.table("ranges", rows), *_moments([50]))
    assert (paths.step.tolist(), paths.layer.tolist()) == ([7], [-1])


def _range(name: str, start: int, end: int, depth: int) -> Row:
    return {
        "process": 1, "thread": 1, "start_ns": start, "end_ns": end, "domain": "alphamoe", "name": name,
        "payload": None, "depth": depth, "kind": "push_pop",
    }  # fmt: skip


def _moments(times: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.ones(len(times), np.int64), np.ones(len(times), np.int64), np.array(times, np.int64)


def test_an_empty_rank_attributes_nothing_and_says_so(tmp_path: Path) -> None:
    def damage(content: RankContent) -> None:
        content.kernels, content.launches, content.ranges, content.graph_nodes, content.receipts = [], [], [], [], []

    result = attributed(tmp_path, damage)
    assert len(result.frame) == 0
    assert result.attributed == 0


@pytest.mark.slow
def test_half_a_million_kernels_are_attributed_in_seconds(tmp_path: Path) -> None:
    path = golden.build(tmp_path / "run", world_size=1)
    part = path / "kernels/rank=0/part-00000.parquet"
    import pyarrow.parquet as pq

    table = pq.ParquetFile(part).read()
    times = 10_000
    big = pa.concat_tables([table] * times)
    shift = np.repeat(np.arange(times), table.num_rows)
    for name in ("start_ns", "end_ns"):
        position = big.column_names.index(name)
        big = big.set_column(position, big.schema.field(name), pa.array(big.column(name).to_numpy() + shift))
    pq.write_table(big, part)
    bundle = RunBundle.open(path)
    started = time.perf_counter()
    result = attribute(bundle, 0)
    elapsed_s = time.perf_counter() - started
    result.check()
    assert len(result.frame) == 52 * times
    assert elapsed_s < 20  # 1 s on two idle cores; a quadratic pass would take hours
