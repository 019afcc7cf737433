"""Raw buffers that libcupti 13.0 wrote on an H200 (tests/gpu/collector_probe.py), played through the collector."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphamoe_tracers.columns import column, texts
from alphamoe_tracers.cupti import Collector
from alphamoe_tracers.graph_nodes import one_row_a_node
from alphamoe_tracers.range_pairing import enclosing
from alphamoe_tracers.records import TABLES, CollectorSummary, ModuleRecord, check_table
from alphamoe_tracers.replay import Recording, ReplaySource
from alphamoe_tracers.sentinels import sentinel_numbers

RECORDING = Path(__file__).resolve().parents[1] / "data" / "h200-collector-recording.npz"
CUBIN = "599061e1a7bd1708b5d5519c6c266cb8da98435c45afdd0f07cfca9712ffc3b9"
# The probe: a warm-up, a capture of two rounds of layers, one replay; in the window two eager steps and three replays.
LAYERS, ADDS, ROUNDS, EAGER_ROUNDS, REPLAYS = 4, 3, 2, 3, 4


class Played:
    """The recording's tables and summary."""

    def __init__(self, out: Path) -> None:
        source = ReplaySource(Recording.load(RECORDING))
        collector = Collector(out, 0, source=source, flush_period_s=3600, step_sentinel_period_s=0.0)
        collector.start()
        collector.graph_sentinel()
        collector.open_window()
        for step in range(2):
            collector.step_boundary(step)
        collector.close_window()
        self.summary: CollectorSummary = collector.stop({CUBIN: "the source"})
        self.tables: dict[str, pa.Table] = {
            name: pq.ParquetFile(out / name / "rank=0" / "part-00000.parquet").read() for name in TABLES
        }
        lines = (out / "modules" / "rank=0.jsonl").read_text().splitlines()
        self.modules = [msgspec.json.decode(line, type=ModuleRecord) for line in lines]
        bases = dict(
            zip(column(self.tables["symbols"], "symbol_id"), texts(self.tables["symbols"], "base"), strict=True)
        )
        self.bases = np.array([bases[symbol] for symbol in column(self.tables["kernels"], "symbol_id")])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(tmp_path_factory.mktemp("played"))


def test_every_record_becomes_a_row(played: Played) -> None:
    """Counts are those of the run on the GPU, tables are valid and nothing is lost or doubled."""
    summary = played.summary
    assert (summary.state, summary.reason, summary.kernel_record) == ("on", None, "ActivityKernel10")
    assert summary.rows == {
        "kernels": 189,
        "transfers": 0,
        "launches": 94,
        "ranges": 47,
        "graph_nodes": 106,
        "symbols": 10,
    }
    assert [problem for name, table in played.tables.items() for problem in check_table(name, table)] == []
    assert (summary.duplicates, summary.invalid_times, summary.untimed, summary.unresolved_names) == (0, 0, 0, 0)
    assert summary.range_problems == ()


def test_kernels_are_counted_by_name(played: Played) -> None:
    """Each round of layers launches its kernels once, each replay those of two rounds; the other three fill tensors."""
    layers = LAYERS * (EAGER_ROUNDS + ROUNDS * REPLAYS)
    assert Counter(name for name in played.bases.tolist() if "sentinel" not in name) == {
        "collector_probe_kernel": layers,
        "vectorized_elementwise_kernel": layers * ADDS + 3,
    }


def test_sentinels_were_seen(played: Played) -> None:
    """Those of the window's ends, of the steps, and the node of the captured graph at each replay."""
    found = {count.kind: (count.launched, count.seen) for count in played.summary.sentinels}
    assert found == {
        "open": (1, 1),
        "close": (1, 1),
        "step": (2, 2),
        "graph_open": (1, 1),
        "graph_close": (1, 1),
        "graph_step": (1, REPLAYS),
    }
    numbers = sentinel_numbers(played.tables["kernels"])[played.bases == "alphamoe_trace_sentinel_step"]
    assert numbers.tolist() == [0, 1]


def test_replayed_kernels_lead_to_the_ranges_of_their_capture(played: Played) -> None:
    """Clone -> original -> ranges at creation, for each replayed kernel; a range without a payload has none."""
    kernels, ranges = played.tables["kernels"], played.tables["ranges"]
    nodes = one_row_a_node(played.tables["graph_nodes"])
    original = dict(zip(column(nodes, "graph_node_id"), column(nodes, "original_node_id"), strict=True))
    created = dict(zip(column(nodes, "graph_node_id"), column(nodes, "created_ns"), strict=True))
    replayed = column(kernels, "graph_node_id")[played.bases == "collector_probe_kernel"]
    times = [created[original[node]] for node in replayed[replayed != 0]]
    thread, process = column(ranges, "thread")[0], column(ranges, "process")[0]
    names, payloads = texts(ranges, "name"), ranges.column("payload").to_pylist()
    paths = Counter(
        tuple((names[row], payloads[row]) for row in line if row >= 0)
        for line in enclosing(ranges, process, thread, times).tolist()
    )
    assert paths == {(("step", 900), ("layer", layer), ("experts", None)): ROUNDS * REPLAYS for layer in range(LAYERS)}


def test_payload_null_and_zero_are_told_apart(played: Played) -> None:
    """CUPTI writes 0 for a range without a payload; step 0 and layer 0 have a 0."""
    ranges = played.tables["ranges"]
    found: dict[str, set[int | None]] = {}
    for name, payload in zip(texts(ranges, "name"), ranges.column("payload").to_pylist(), strict=True):
        found.setdefault(name, set()).add(payload)
    assert found == {
        "step": {0, 1, 900, 1000, 1001, 1002},
        "layer": {0, 1, 2, 3},
        "experts": {None},
        "torch.cuda.nvtx range": {None},
    }


def test_every_kernel_has_its_launch(played: Played) -> None:
    """No kernel without a launch, and one graph launch for each replay."""
    launches = played.tables["launches"]
    known = set(column(launches, "correlation_id").tolist())
    assert set(column(played.tables["kernels"], "correlation_id").tolist()) <= known
    calls = Counter(texts(launches, "api").tolist())
    assert (calls["cudaGraphLaunch"], calls["cuGraphLaunch"]) == (REPLAYS, 2)


def test_the_probe_kernel_is_tied_to_its_module_and_source(played: Played) -> None:
    """The image that was loaded is the cubin that was compiled; images above 64 KiB are not in the recording."""
    (module,) = [module for module in played.modules if "collector_probe_kernel" in module.kernels]
    assert (module.sha256, module.size_bytes, module.source_sha256) == (CUBIN, 3688, "the source")
    symbols = played.tables["symbols"].to_pylist()
    assert {row["module_sha256"] for row in symbols if row["base"] == "collector_probe_kernel"} == {CUBIN}
    assert len(played.modules) == 2
