"""The collector from completed buffers to sorted parts and a summary, on synthetic activity."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphamoe_tracers import parts as parts_module
from alphamoe_tracers.activity import Kind
from alphamoe_tracers.cupti import NVTX_INJECTION, Collector, prepare_environment
from alphamoe_tracers.records import TABLES, CollectorSummary, SentinelKind, check_table
from alphamoe_tracers.replay import Recording, ReplaySource
from alphamoe_tracers.sentinels import NUMBERS, sentinel_numbers, sentinel_shape
from alphamoe_tracers.source import Sink, SourceUnavailableError
from alphamoe_tracers.synthetic import SyntheticKernel, SyntheticSource

MOE = SyntheticKernel("kernel_alpha_moe_w8a8_up_down", grid=(4, 8, 1), block=(192, 1, 1), dynamic_smem_bytes=154752)
FILL = SyntheticKernel("_ZN2at6native4fillEv")
NEVER_S = 3600.0


def table(out: Path, name: str, rank: int = 0) -> pa.Table:
    files = sorted((out / name / f"rank={rank}").glob("part-*.parquet"))
    found = [pq.ParquetFile(file).read() for file in files]
    return pa.concat_tables(found).unify_dictionaries() if found else TABLES[name].empty_table()


def rows(out: Path, name: str) -> list[dict[str, object]]:
    return table(out, name).to_pylist()


def started(out: Path, source: SyntheticSource, **options: object) -> Collector:
    options = {"in_process": True, "step_sentinel_period_s": 0.0, **options}
    collector = Collector(out, 0, source=source, flush_period_s=NEVER_S, **options)  # type: ignore[arg-type]
    collector.start()
    return collector


def kernels_of(out: Path, symbol: str) -> list[dict[str, object]]:
    names = {row["symbol_id"]: row["base"] for row in rows(out, "symbols")}
    return [row for row in rows(out, "kernels") if names[row["symbol_id"]] == symbol]


def sentinels(summary: CollectorSummary) -> dict[SentinelKind, tuple[int, int]]:
    return {count.kind: (count.launched, count.seen) for count in summary.sentinels}


@pytest.fixture
def source() -> SyntheticSource:
    return SyntheticSource()


def recorded_run(out: Path, source: SyntheticSource, **options: object) -> CollectorSummary:
    """Two eager steps of two layers and three replays of a graph with two MoE nodes."""
    collector = started(out, source, **options)
    collector.graph_sentinel()
    clones = [source.node(source.node()) for _ in range(2)]
    collector.open_window()
    for step in range(2):
        collector.step_boundary(step)
        source.push("step", step)
        for layer in range(2):
            source.push("layer", layer)
            source.eager(FILL)
            source.eager(MOE)
            source.pop()
        source.pop()
    for _ in range(3):
        source.replay([SyntheticKernel(MOE.symbol, graph_node_id=node) for node in clones])
    source.memcpy(1, 4096)
    source.memset(64)
    collector.close_window()
    return collector.stop()


def test_every_table_is_written_counted_and_valid(tmp_path: Path, source: SyntheticSource) -> None:
    """Known activity gives exactly its rows, one part per table, and tables that pass their own check."""
    summary = recorded_run(tmp_path, source)
    assert (summary.state, summary.reason, summary.kernel_record) == ("on", None, "ActivityKernel10")
    assert summary.rows == {
        "kernels": 8 + 6 + 6,
        "transfers": 2,
        "launches": 8 + 3 + 6,
        "ranges": 6,
        "graph_nodes": 1 + 4 + 4,
        "symbols": 7,
    }
    for name in TABLES:
        found = table(tmp_path, name)
        assert check_table(name, found) == []
        assert found.num_rows == summary.rows[name]
        assert [path.name for path in (tmp_path / name / "rank=0").iterdir()] == ["part-00000.parquet"]
    starts = [row["start_ns"] for row in rows(tmp_path, "kernels")]
    assert starts == sorted(starts)
    assert len(kernels_of(tmp_path, MOE.symbol)) == 4 + 6


def test_kernel_rows_carry_the_launch_shape_and_null_ids(tmp_path: Path, source: SyntheticSource) -> None:
    """Shape, shared memory and ids are those of the record; CUPTI's 0 for an id is null."""
    recorded_run(tmp_path, source)
    eager, *_, replayed = kernels_of(tmp_path, MOE.symbol)
    assert [eager[f"grid_{axis}"] for axis in "xyz"] == [4, 8, 1]
    assert (eager["block_x"], eager["dynamic_smem_bytes"], eager["graph_node_id"]) == (192, 154752, None)
    assert replayed["graph_node_id"] is not None
    assert eager["process"] == source.process


def test_sentinels_are_counted_from_the_records(tmp_path: Path, source: SyntheticSource) -> None:
    """Launched and seen agree when the collector was live; a step sentinel carries its number."""
    summary = recorded_run(tmp_path, source)
    assert sentinels(summary) == {
        "open": (1, 1),
        "close": (1, 1),
        "step": (2, 2),
        "graph_open": (1, 1),
        "graph_close": (1, 1),
        "graph_step": (1, 0),
    }
    steps = kernels_of(tmp_path, "alphamoe_trace_sentinel_step")
    assert sentinel_numbers(pa.Table.from_pylist(steps)).tolist() == [0, 1]
    assert {row["dynamic_smem_bytes"] for row in steps} == {0}
    assert {row["class"] for row in rows(tmp_path, "symbols") if "sentinel" in str(row["base"])} == {
        "collector.sentinel"
    }
    assert summary.window_open_ns is not None
    assert summary.window_close_ns is not None
    assert summary.window_open_ns < summary.window_close_ns


def test_step_sentinels_keep_their_distance(tmp_path: Path, source: SyntheticSource) -> None:
    """Before the window and at its first step one is launched; the next ones wait for the period to pass."""
    collector = started(tmp_path, source, step_sentinel_period_s=NEVER_S)
    collector.step_boundary(7)
    collector.step_boundary(8)
    collector.open_window()
    for step in range(9, 13):
        collector.step_boundary(step)
    summary = collector.stop()
    assert sentinels(summary)["step"] == (2, 2)
    steps = kernels_of(tmp_path, "alphamoe_trace_sentinel_step")
    assert sentinel_numbers(pa.Table.from_pylist(steps)).tolist() == [7, 9]


def test_sentinel_numbers_survive_their_launch_shape() -> None:
    """Blocks and threads stay launchable, and numbers wrap where they end; old recordings used shared memory."""
    numbers = [0, 1, 1023, 1024, 1025, NUMBERS - 1, NUMBERS, NUMBERS + 5]
    shapes = [sentinel_shape(number) for number in numbers]
    assert all(1 <= blocks <= 48 and 1 <= threads <= 1024 for blocks, threads in shapes)
    grid, block = zip(*shapes, strict=True)
    kernels = pa.table({"grid_x": grid, "block_x": block, "dynamic_smem_bytes": [0] * len(numbers)})
    assert sentinel_numbers(kernels).tolist() == [number % NUMBERS for number in numbers]
    old = pa.table({"grid_x": [1], "block_x": [1], "dynamic_smem_bytes": [1700]})
    assert sentinel_numbers(old).tolist() == [1700]


def test_sentinels_without_records_prove_nothing(tmp_path: Path, source: SyntheticSource) -> None:
    """A collector that was deaf launched its sentinels and saw none."""
    source.loses_sentinels = True
    assert set(sentinels(recorded_run(tmp_path, source)).values()) == {(1, 0), (2, 0)}


def test_graph_sentinel_needs_a_node_id(tmp_path: Path, source: SyntheticSource) -> None:
    """A graph sentinel recorded without its node says that tracing was not node-level."""
    collector = started(tmp_path, source)
    source.loses_sentinels = True
    collector.open_window()
    source.eager(SyntheticKernel("alphamoe_trace_sentinel_graph_open"))
    assert sentinels(collector.stop())["graph_open"] == (1, 0)


def test_runtime_and_driver_rows_are_one_launch(tmp_path: Path, source: SyntheticSource) -> None:
    """The folded row spans both calls and carries the runtime name; a failed call is no submission."""
    collector = started(tmp_path, source)
    source.eager(MOE)
    failed = {"cbid": 211, "start": 1, "end": 2, "correlation_id": 99, "return_value": 9}
    source.record(Kind.RUNTIME, failed)
    collector.stop()
    (launch,) = rows(tmp_path, "launches")
    assert (launch["api"], int(str(launch["end_ns"])) - int(str(launch["start_ns"]))) == ("cudaLaunchKernel", 30)


def kernel_record(source: SyntheticSource, start: int, end: int, stream: int, correlation: int, node: int = 0) -> None:
    fields = {"start": start, "end": end, "stream_id": stream, "correlation_id": correlation, "graph_node_id": node}
    source.record(Kind.CONCURRENT_KERNEL, {**fields, "name": source.pointer("k")})


def test_records_delivered_twice_are_kept_once(tmp_path: Path) -> None:
    """Exact duplicates are dropped and counted; a different stream or node is another kernel (case T7)."""
    source = SyntheticSource(start_ns=10)
    collector = started(tmp_path, source)
    for _ in range(2):
        kernel_record(source, 100, 150, 7, 33)
    for start, end, node in ((200, 210, 1), (210, 230, 2), (230, 260, 3)):
        kernel_record(source, start, end, 7, 44, node)
    kernel_record(source, 300, 310, 7, 55)
    kernel_record(source, 300, 310, 9, 55)
    source.memset(8)
    source.repeat_last()
    summary = collector.stop()
    assert (summary.rows["kernels"], summary.rows["transfers"], summary.duplicates) == (6, 1, 2)


def test_untimed_and_impossible_kernels_are_kept_and_counted(tmp_path: Path) -> None:
    """A kernel without times ran; one that ends before it starts is kept as evidence of damage (case T8)."""
    source = SyntheticSource(start_ns=10)
    collector = started(tmp_path, source)
    kernel_record(source, 0, 0, 7, 1)
    kernel_record(source, 1010, 1007, 7, 2)
    kernel_record(source, 1000, 1004, 7, 3)
    summary = collector.stop()
    assert (summary.rows["kernels"], summary.untimed, summary.invalid_times) == (3, 1, 1)


def test_kernels_of_an_earlier_session_are_dropped_with_a_note(tmp_path: Path) -> None:
    """What ended before the collector started does not count (case C8)."""
    source = SyntheticSource(start_ns=1000)
    collector = started(tmp_path, source)
    kernel_record(source, 400, 450, 7, 1)
    kernel_record(source, 1500, 1550, 7, 2)
    summary = collector.stop()
    assert summary.rows["kernels"] == 1
    assert any(note.startswith("1 kernels that ended before") for note in summary.notes)


def test_dropped_records_are_reported(tmp_path: Path) -> None:
    """The library's own count reaches the summary (case C5)."""
    assert recorded_run(tmp_path, SyntheticSource(dropped=3)).dropped == 3


def test_names_that_are_no_utf8_or_missing_stay_countable(tmp_path: Path, source: SyntheticSource) -> None:
    """A bad byte is replaced, a null name reads <unresolved> and is counted (case A7)."""
    collector = started(tmp_path, source)
    source.eager(SyntheticKernel("moe_gemm"))
    source._strings[source.pointer("moe_gemm")] = b"moe\x9fgemm"
    source.record(Kind.CONCURRENT_KERNEL, {"start": 10**9, "end": 10**9 + 5})
    summary = collector.stop()
    assert summary.unresolved_names == 1
    assert {row["mangled"] for row in rows(tmp_path, "symbols")} == {"moe\ufffdgemm", "<unresolved>"}


def test_flush_makes_rows_durable_while_the_run_goes_on(tmp_path: Path, source: SyntheticSource) -> None:
    """Closed parts hold everything up to the flush, and the last part joins them at the stop."""
    collector = started(tmp_path, source)
    source.push("step", 0)
    source.eager(MOE)
    source.pop()
    collector.flush()
    assert [len(rows(tmp_path, name)) for name in ("kernels", "launches", "ranges", "symbols")] == [1, 2, 1, 1]
    source.eager(MOE)
    collector.flush()
    assert sorted(path.name for path in (tmp_path / "kernels" / "rank=0").iterdir()) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    assert collector.stop().rows["kernels"] == 2
    assert len(rows(tmp_path, "kernels")) == 2


def test_records_are_flushed_by_period(tmp_path: Path) -> None:
    """The collector asks for completed records on its own, without force."""
    asked = threading.Event()

    class Watched(SyntheticSource):
        def flush(self, forced: bool) -> None:
            if not forced:
                asked.set()
            super().flush(forced)

    collector = Collector(tmp_path, 0, source=Watched(), flush_period_s=0.01)
    collector.start()
    assert asked.wait(10)
    assert collector.stop().state == "on"


class Refusing(SyntheticSource):
    """CUPTI that another tool holds."""

    def start(self, sink: Sink) -> None:
        raise SourceUnavailableError("cuptiSubscribe failed with CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)")


def test_collector_that_cannot_start_is_off_with_a_reason(tmp_path: Path) -> None:
    """No method raises, nothing is written, and a later collector may succeed (cases C1, C2)."""
    collector = started(tmp_path, Refusing())
    collector.open_window()
    collector.step_boundary(1)
    collector.graph_sentinel()
    collector.flush()
    collector.close_window()
    summary = collector.stop()
    assert summary.state == "off"
    assert summary.reason is not None
    assert "(39)" in summary.reason
    assert (set(summary.rows.values()), summary.sentinels, summary.window_open_ns) == ({0}, (), None)
    assert list(tmp_path.iterdir()) == []
    assert recorded_run(tmp_path, SyntheticSource()).state == "on"


def test_source_that_breaks_while_starting_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on recording into a collector that is off."""
    source = SyntheticSource()
    stopped: list[bool] = []
    monkeypatch.setattr(source, "now_ns", lambda: 1 / 0)
    monkeypatch.setattr(source, "stop", lambda: stopped.append(True))
    collector = started(tmp_path, source)
    assert stopped == [True]
    assert "ZeroDivisionError" in str(collector.stop().reason)


def test_collector_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without CUDA the reason begins with what a reader looks for."""
    monkeypatch.delenv(NVTX_INJECTION, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings", type(sys)("cuda.bindings"))
    monkeypatch.setattr(
        sys.modules["cuda.bindings"], "driver", type("D", (), {"cuInit": staticmethod(_no_driver)}), raising=False
    )
    collector = Collector(tmp_path, 0)
    collector.start()
    summary = collector.stop()
    assert summary.state == "off"
    assert str(summary.reason).startswith("no CUDA device")


def _no_driver(flags: int) -> tuple[int]:
    raise RuntimeError("Failed to dlopen libcuda.so.1")


def test_stop_twice_gives_one_summary(tmp_path: Path, source: SyntheticSource) -> None:
    """The second stop finds everything done."""
    collector = started(tmp_path, source)
    source.eager(MOE)
    assert collector.stop() is collector.stop()


def test_full_disk_ends_the_recording_and_keeps_closed_parts(
    tmp_path: Path, source: SyntheticSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector goes off with a reason; the traced program goes on, and earlier parts are readable."""
    collector = started(tmp_path, source)
    source.eager(MOE)
    collector.flush()

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parts_module, "write_table", no_space)
    source.eager(MOE)
    collector.flush()
    assert not collector.recording
    collector.step_boundary(1)
    summary = collector.stop()
    assert summary.state == "off"
    assert "No space left on device" in str(summary.reason)
    assert (summary.rows["kernels"], len(rows(tmp_path, "kernels"))) == (1, 1)


def test_full_disk_at_the_stop_keeps_closed_parts(
    tmp_path: Path, source: SyntheticSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction that cannot be written leaves the parts and a reason."""
    collector = started(tmp_path, source)
    source.eager(MOE)
    collector.flush()
    monkeypatch.setattr(
        parts_module.pq, "write_table", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
    )
    summary = collector.stop()
    assert (summary.state, len(rows(tmp_path, "kernels"))) == ("off", 1)
    assert "No space left" in str(summary.reason)


def test_fault_of_the_collector_itself_is_told(
    tmp_path: Path, source: SyntheticSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error in the writer thread ends the recording, not the program."""
    collector = started(tmp_path, source)
    monkeypatch.setattr(source, "resolve", lambda pointer: 1 / 0)
    source.eager(MOE)
    collector.flush()
    summary = collector.stop()
    assert "fault of the collector, ZeroDivisionError" in str(summary.reason)


def test_buffer_that_surprises_is_walked_by_the_library(
    tmp_path: Path, source: SyntheticSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record whose size the table does not know is stepped over by the library's own walk, with a note."""
    collector = started(tmp_path, source)
    source.memset(8)
    source.raw(np.array([63, 63, 0, 0], np.uint32).tobytes())
    source.memset(8)
    monkeypatch.setattr(source, "record_starts", lambda data: np.array([0, 88, 104]))
    summary = collector.stop()
    assert (summary.state, summary.rows["transfers"]) == ("on", 2)
    assert "1 activity buffers were read record by record" in summary.notes


def test_refused_sentinel_is_a_note_and_not_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that refuses leaves the window unproven, once in the notes."""
    source = SyntheticSource()

    def refuse(kind: SentinelKind, number: int) -> None:
        raise SourceUnavailableError("cuModuleLoadData failed")

    monkeypatch.setattr(source, "launch_sentinel", refuse)
    collector = started(tmp_path, source)
    collector.step_boundary(1)
    collector.step_boundary(2)
    summary = collector.stop()
    assert summary.sentinels == ()
    assert summary.notes.count("sentinel step: cuModuleLoadData failed") == 1


def test_replay_of_raw_buffers_gives_the_same_tables(tmp_path: Path, source: SyntheticSource) -> None:
    """A stored recording, played again, ends in equal rows, sentinels and window."""
    raw = tmp_path / "raw.npz"
    source.module(b"an image")
    first = recorded_run(tmp_path / "first", source, keep_raw=raw)
    replay = Collector(tmp_path / "again", 0, source=ReplaySource(Recording.load(raw)), flush_period_s=NEVER_S)
    replay.start()
    replay.open_window()
    replay.close_window()
    second = replay.stop()
    for name in TABLES:
        assert rows(tmp_path / "again", name) == rows(tmp_path / "first", name)
    assert (second.window_open_ns, second.window_close_ns) == (first.window_open_ns, first.window_close_ns)
    assert sentinels(second)["graph_open"] == (1, 1)
    modules = [(tmp_path / run / "modules" / "rank=0.jsonl").read_text() for run in ("first", "again")]
    assert modules[0] == modules[1]


def test_environment_is_left_alone_without_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool's injection stays, and where there is no CUPTI nothing is set."""
    monkeypatch.setenv(NVTX_INJECTION, "/somebody/else.so")
    assert prepare_environment() == "/somebody/else.so"
    monkeypatch.delenv(NVTX_INJECTION)
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert prepare_environment() is None
    assert NVTX_INJECTION not in os.environ


CHILD = """
import sys
from pathlib import Path
from alphamoe_tracers.cupti import Collector
from alphamoe_tracers.synthetic import SyntheticKernel, SyntheticSource
source = SyntheticSource()
source.module(b"image")
collector = Collector(Path(sys.argv[1]), 2, source=source, flush_period_s=3600)
collector.start()
collector.open_window()
for step in range(5):
    source.push("step", step)
    source.eager(SyntheticKernel("moe"))
    source.pop()
collector.flush()
source.eager(SyntheticKernel("lost"))
print("flushed", flush=True)
sys.stdin.read()
"""


def test_killed_process_keeps_what_was_flushed(tmp_path: Path) -> None:
    """After SIGKILL the closed parts hold every witness up to the last flush."""
    path = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"flushed\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    assert table(tmp_path, "kernels", 2).num_rows == 5 + 2
    assert table(tmp_path, "ranges", 2).num_rows == 5
    symbols = table(tmp_path, "symbols", 2).column("base").to_pylist()
    assert "moe" in symbols
    assert "lost" not in symbols
    (module,) = (tmp_path / "modules" / "rank=2.jsonl").read_text().splitlines()
    assert json.loads(module)["sha256"] == hashlib.sha256(b"image").hexdigest()
