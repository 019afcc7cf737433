"""From activity buffers to a verdict without a GPU: the real collector, writer, passes and rules on made-up records."""

from __future__ import annotations

import shutil
from pathlib import Path

import golden
import msgspec
import pytest
from golden import RankContent, Step
from judging import FAIL, OPEN, PASS, cell

from alphamoe_backend.experts.registry import ALPHAMOE_W8A8_SYMBOL, STOCK_SYMBOL
from alphamoe_backend.geometry import PRESETS
from alphamoe_backend.kernels.launch import launch_shape
from alphamoe_profiler.attribution import attribute
from alphamoe_profiler.bundle import BundleWriter, RankFile, RunBundle, RunInfo
from alphamoe_profiler.bundle_check import check
from alphamoe_profiler.bundle_files import read_json
from alphamoe_profiler.witness import summarise
from alphamoe_tracers.cupti import Collector
from alphamoe_tracers.receipts import ReceiptWriter
from alphamoe_tracers.synthetic import SyntheticKernel, SyntheticSource

LOCAL = PRESETS["qwen3-next-80b"].moe.local(1)


class PlayedRank:
    """A rank that serves the golden steps on a made-up device."""

    def __init__(self, path: Path, source: SyntheticSource, symbol: str = ALPHAMOE_W8A8_SYMBOL) -> None:
        model = golden.build(path.with_name("model"), world_size=1)
        self.writer = BundleWriter(path)
        self.writer.write_run(read_json(model / "run.json", RunInfo))
        for name in ("requests.jsonl", "outcome.json"):
            shutil.copy(model / name, path / name)
        self._sound = read_json(model / "ranks/0.json", RankFile)
        self._source, self._symbol = source, symbol
        self._content = RankContent(0, 1)
        self._receipts = ReceiptWriter(self.writer.receipts_path(0))
        self._written = 0
        self.collector = Collector(path, 0, flush_period_s=3600, step_sentinel_period_s=0.0, source=source)

    def serve(self) -> None:
        """Warm up, capture, open the window, serve the witness steps and close it."""
        self.collector.start()
        warm_up, *steps = golden.STEPS
        self._eager(warm_up)
        graphs = {"prefill_graph_replay": self._capture(2), "decode_graph_replay": self._capture(3)}
        self.collector.open_window()
        for step in steps:
            self.collector.step_boundary(step.step)
            if step.execution == "eager":
                self._eager(step)
            else:
                self._replay(step, graphs[step.execution])
        self.collector.close_window()

    def finish(self) -> None:
        """Stop the collector and write the rank file."""
        summary = self.collector.stop()
        self._receipts.close()
        record = msgspec.structs.replace(self._sound, collector=summary, receipts=self._written)
        self.writer.write_rank(record)

    def _kernel(self, step: Step, node: int = 0) -> SyntheticKernel:
        shape = launch_shape(LOCAL, step.M, golden.SM_COUNT)
        return SyntheticKernel(
            self._symbol, shape.grid, shape.block, shape.cluster, shape.dynamic_smem_bytes, graph_node_id=node
        )

    def _eager(self, step: Step) -> None:
        self._source.push("step", step.step)
        for layer in range(2):
            self._source.push("layer", layer)
            self._source.eager(self._kernel(step))
            self._source.pop()
        self._source.pop()
        self._receipt(step)

    def _capture(self, step: int) -> list[int]:
        self._source.push("step", step)
        captured = []
        for layer in range(2):
            self._source.push("layer", layer)
            captured.append(self._source.node())
            self._source.pop()
        self.collector.graph_sentinel()
        self._source.pop()
        return [self._source.node(original) for original in captured]

    def _replay(self, step: Step, nodes: list[int]) -> None:
        self._source.push("step", step.step)
        self._source.replay([self._kernel(step, node) for node in nodes])
        self._source.pop()
        self._receipt(step)

    def _receipt(self, step: Step) -> None:
        self._receipts.write(golden.receipt(self._content, step, self._symbol))
        self._written += 1


def test_a_sound_collection_passes_with_every_kernel_attributed(tmp_path: Path) -> None:
    rank = PlayedRank(tmp_path / "run", SyntheticSource())
    rank.serve()
    rank.finish()
    bundle = RunBundle.open(tmp_path / "run")
    assert check(bundle) == []
    kernels = attribute(bundle, 0)
    kernels.check()
    assert dict(kernels.reasons) == {"sentinel": 10, "before window": 2}
    summary = summarise(bundle)
    assert summary.verdict is PASS
    assert cell(summary, 0, "decode_graph_replay").kernels == 4


def test_a_silent_fallback_fails(tmp_path: Path) -> None:
    rank = PlayedRank(tmp_path / "run", SyntheticSource(), STOCK_SYMBOL)
    rank.serve()
    rank.finish()
    summary = summarise(RunBundle.open(tmp_path / "run"))
    assert summary.verdict is FAIL
    assert "forbidden fused_moe_kernel ran" in summary.reason


def test_a_rank_killed_after_a_flush_keeps_its_witnesses_and_proves_no_absence(tmp_path: Path) -> None:
    rank = PlayedRank(tmp_path / "run", SyntheticSource())
    rank.serve()
    rank.collector.flush()
    summary = summarise(RunBundle.open(tmp_path / "run"))
    rank.collector.stop()
    assert summary.verdict is OPEN
    own = cell(summary, 0, "eager")
    assert (own.finding.verdict, own.kernels) == (OPEN, 6)
    assert cell(summary, 0, "decode_graph_replay").kernels == 4


@pytest.mark.parametrize("trouble", ["lost sentinels", "dropped records"])
def test_a_collector_that_may_have_missed_something_proves_presence_only(tmp_path: Path, trouble: str) -> None:
    source = SyntheticSource(dropped=5 if trouble == "dropped records" else 0)
    source.loses_sentinels = trouble == "lost sentinels"
    rank = PlayedRank(tmp_path / "run", source)
    rank.serve()
    rank.finish()
    summary = summarise(RunBundle.open(tmp_path / "run"))
    assert cell(summary, 0, "eager").finding.verdict is PASS
    assert cell(summary, 0, "eager", STOCK_SYMBOL).finding.verdict is OPEN
    assert summary.verdict is OPEN
