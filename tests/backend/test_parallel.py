"""Four real gloo processes: the same tokens at 1, 2 and 4 ranks, collectives, cuts, and disagreement."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import multiprocessing

from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.engine import Engine, EngineConfig, NoObserver, Request
from alphamoe_backend.parallel import NCCL_DEFAULTS, TensorParallelGroup
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import Receipt

REQUESTS = (
    Request("a", tuple((place * 7919 + 13) % 32768 for place in range(70))),
    Request("b", tuple((place * 104729 + 5) % 32768 for place in range(33))),
)
NEW_TOKENS = 12


def serve(group: TensorParallelGroup) -> dict[str, Any]:
    """Serve two requests in float32 and give tokens and receipts."""
    receipts: list[Receipt] = []
    config = EngineConfig(
        model="tiny",
        layers=2,
        rank=group.rank,
        world_size=group.world_size,
        device="cpu",
        dtype="float32",
        moe_runner_backend="flashinfer_alphamoe",
        executions=("eager",),
        max_new_tokens=NEW_TOKENS,
        nvtx=False,
    )
    engine = Engine(config, DispatchRecorder("run", group.rank, receipts.append), NoObserver(), group)
    engine.load()
    engine.warm_up()
    engine.capture([len(request.prompt_ids) for request in REQUESTS], batch_size=2)
    completions = engine.serve(REQUESTS, ("eager",))
    engine.close()
    return {
        "tokens": [list(completion.token_ids) for completion in completions],
        "steps": [[receipt.step, receipt.M, receipt.real_tokens, receipt.forward_mode] for receipt in receipts],
        "I_local": sorted({kernel.I_local for receipt in receipts for kernel in receipt.kernels}),
    }


class Cutter:
    """Takes the collectives that a capture would cut at."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def cut(self, name: str, layer: int | None, step: Any) -> None:
        """Keep the step for later."""
        self.steps.append((name, layer, step))


def collectives(group: TensorParallelGroup) -> dict[str, Any]:
    """Sum, cut, agree and disagree."""
    summed = group.all_reduce(torch.full((3,), float(group.rank + 1), dtype=torch.bfloat16)).tolist()
    cutter = Cutter()
    tensor = torch.full((2,), float(group.rank))
    with group.cutting(cutter):
        group.all_reduce(tensor, layer=5)
    before = tensor.tolist()
    name, layer, step = cutter.steps[0]
    step()
    agreed = group.agreed(torch.tensor([4, 32767]))
    try:
        group.agreed(torch.tensor([4, 100 + (group.rank == 2)]))
        disagreement = ""
    except AlphaMoEError as error:
        disagreement = str(error)
    return {
        "summed": summed,
        "cut": [name, layer, before, tensor.tolist()],
        "agreed": agreed,
        "disagreement": disagreement,
    }


def rank_main(rank: int, folder: str) -> None:
    """Be one of four ranks, then (the first two) one of two."""
    result: dict[str, Any] = {}
    group = TensorParallelGroup.connect(rank, 4, "gloo", f"file://{folder}/four", timeout_s=60)
    result["collectives"] = collectives(group)
    result["4"] = serve(group)
    group.close()
    if rank < 2:
        group = TensorParallelGroup.connect(rank, 2, "gloo", f"file://{folder}/two", timeout_s=60)
        result["2"] = serve(group)
        group.close()
    Path(folder, f"{rank}.json").write_bytes(msgspec.json.encode(result))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(rank_main, (str(folder),), nprocs=4)
    return [msgspec.json.decode(Path(folder, f"{rank}.json").read_bytes()) for rank in range(4)]


@pytest.mark.slow
def test_greedy_tokens_are_the_same_at_1_2_and_4_ranks_in_float32(ranks: list[dict[str, Any]]) -> None:
    """Every rank of every world gives the tokens of one rank alone, and they are not all one token."""
    alone = serve(TensorParallelGroup())
    for world_size in ("2", "4"):
        for result in ranks[: int(world_size)]:
            assert result[world_size]["tokens"] == alone["tokens"]
    assert all(len(set(tokens)) > NEW_TOKENS // 2 for tokens in alone["tokens"])
    assert (alone["I_local"], ranks[0]["2"]["I_local"], ranks[0]["4"]["I_local"]) == ([512], [256], [128])


@pytest.mark.slow
def test_step_ids_and_token_counts_are_equal_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Ids rise by one over warm-up and serving."""
    steps = ranks[0]["4"]["steps"]
    assert all(result["4"]["steps"] == steps for result in ranks)
    assert [step for step, *_ in steps] == list(range(len(steps)))
    assert [M for _, M, _, _ in steps] == [8, 1, 1, 70, 33, *[2] * (NEW_TOKENS - 1)]


@pytest.mark.slow
def test_all_reduce_sums_in_place_or_hands_the_sum_to_a_cut(ranks: list[dict[str, Any]]) -> None:
    """bfloat16 too; a cut collective leaves the tensor alone until its step runs."""
    for rank, result in enumerate(ranks):
        assert result["collectives"]["summed"] == [10.0, 10.0, 10.0]
        assert result["collectives"]["cut"] == ["all_reduce", 5, [rank, rank], [6.0, 6.0]]


@pytest.mark.slow
def test_ranks_that_disagree_on_a_token_all_stop_with_the_ids(ranks: list[dict[str, Any]]) -> None:
    """One rank alone sampled another token; equal tokens pass."""
    for result in ranks:
        assert result["collectives"]["agreed"] == [4, 32767]
        assert "ids up to [4, 101], down to [4, 100]" in result["collectives"]["disagreement"]


def test_a_missing_rank_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    """The one that came says which group it could not join."""
    with pytest.raises(AlphaMoEError, match="rank 0 could not join the group of 2"):
        TensorParallelGroup.connect(0, 2, "gloo", f"file://{tmp_path}/store", timeout_s=0.5)


def test_a_world_of_one_needs_no_process_group() -> None:
    """Its sum is the tensor itself, and it agrees with itself."""
    group = TensorParallelGroup.connect(0, 1, "gloo", "file:///nowhere")
    tensor = torch.ones(2)
    assert group.all_reduce(tensor) is tensor
    assert group.agreed(torch.tensor([3])) == [3]
    assert group.capturable
    assert not torch.distributed.is_initialized()


class FakeDistributed:
    """Stands in for torch.distributed where NCCL cannot run, and remembers how it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.aborted = threading.Event()
        self.released = threading.Event()
        monkeypatch.setattr(torch.distributed, "init_process_group", self.init_process_group)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", self.abort)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def init_process_group(self, backend: str, **asked: Any) -> None:
        """Join at once; what NCCL would read from the environment is kept."""
        read = {name: os.environ.get(name) for name in NCCL_DEFAULTS}
        self.asked = {"backend": backend, "environment": read, **asked}

    def abort(self) -> None:
        """Hang, as NCCL does while captured graphs hold the communicator."""
        self.aborted.set()
        self.released.wait(30)


def test_nccl_is_bound_to_the_device_of_the_rank_and_uses_no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is the process's own, never the rank's number; what the user set stays."""
    fake = FakeDistributed(monkeypatch)
    monkeypatch.setattr(os, "environ", {"PATH": ""})
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    group = TensorParallelGroup.connect(1, 2, "nccl", "file:///nowhere", timeout_s=7)
    assert (fake.asked["backend"], fake.asked["device_id"]) == ("nccl", torch.device("cuda", 3))
    assert fake.asked["timeout"].total_seconds() == 7
    assert fake.asked["environment"] == {**NCCL_DEFAULTS, "NCCL_NVLS_ENABLE": "1"}
    assert group.capturable


def test_gloo_is_bound_to_no_device_and_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a GPU have no NCCL to configure."""
    fake = FakeDistributed(monkeypatch)
    monkeypatch.setattr(os, "environ", {"PATH": ""})
    group = TensorParallelGroup.connect(1, 2, "gloo", "file:///nowhere")
    assert fake.asked["device_id"] is None
    assert not any(fake.asked["environment"].values())
    assert not group.capturable


def test_an_nccl_group_is_abandoned_without_waiting_for_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort is begun; that it does not return holds nobody up."""
    fake = FakeDistributed(monkeypatch)
    TensorParallelGroup(0, 2, "nccl").abandon(wait_s=0.01)
    assert fake.aborted.wait(10)
    fake.released.set()


def test_a_gloo_group_and_a_lone_rank_have_nothing_to_abandon(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo tells of a lost peer by itself."""
    fake = FakeDistributed(monkeypatch)
    TensorParallelGroup(0, 2, "gloo").abandon()
    TensorParallelGroup().abandon()
    assert not fake.aborted.is_set()
