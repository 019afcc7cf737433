"""The process that writes, and what becomes of it and of the traced one when either ends early."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from alphamoe_tracers import pump as pump_module
from alphamoe_tracers import scribe as scribe_module
from alphamoe_tracers import scribe_process
from alphamoe_tracers.cupti import Collector
from alphamoe_tracers.scribe_process import ScribeProcess, wait_for_scribes
from alphamoe_tracers.source import RawBuffer
from alphamoe_tracers.synthetic import SyntheticKernel, SyntheticSource
from alphamoe_tracers.wire import Buffer, Channel, Failed, Finish, Nodes, Ready, Write

MOE = SyntheticKernel("moe")


def started(out: Path, source: SyntheticSource, period_s: float = 3600) -> Collector:
    collector = Collector(out, 0, source=source, flush_period_s=period_s)
    collector.start()
    return collector


def kernels(out: Path) -> int:
    return sum(pq.ParquetFile(path).metadata.num_rows for path in (out / "kernels" / "rank=0").glob("part-*"))


def scribe_of(collector: Collector) -> int:
    assert collector._pump is not None
    process = collector._pump.scribe_id
    assert process is not None
    return process


def test_records_are_written_by_another_process(tmp_path: Path) -> None:
    """A flush is durable, the summary is complete, and no scribe is left after the stop."""
    source = SyntheticSource()
    source.module(b"image")
    collector = started(tmp_path, source)
    scribe = scribe_of(collector)
    assert scribe != os.getpid()
    source.push("step", 0)
    source.eager(MOE)
    source.pop()
    collector.flush()
    assert kernels(tmp_path) == 1
    source.eager(MOE)
    summary = collector.stop()
    assert (summary.state, summary.rows["kernels"], summary.rows["ranges"]) == ("on", 2, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(scribe, 0)
    assert wait_for_scribes(tmp_path, timeout_s=0)


def test_scribe_that_is_killed_costs_the_recording_only(tmp_path: Path) -> None:
    """The collector goes off and says how, buffers go back, and what was written is kept and counted."""
    source = SyntheticSource()
    collector = started(tmp_path, source)
    source.eager(MOE)
    collector.flush()
    os.kill(scribe_of(collector), signal.SIGKILL)
    assert collector._pump is not None
    assert collector._pump._over.wait(10)
    assert not collector.recording
    returned = threading.Event()
    source.eager(MOE)
    records = np.frombuffer(b"".join(source._records), np.uint8).copy()
    source._records.clear()
    collector._pump.put_buffer(RawBuffer(records, returned.set))
    assert returned.wait(10)
    collector.step_boundary(1)
    collector.flush()
    summary = collector.stop()
    assert summary.state == "off"
    assert "killed by SIGKILL" in str(summary.reason)
    assert (summary.rows["kernels"], kernels(tmp_path), summary.dropped) == (1, 1, 3)


def test_scribe_that_cannot_run_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without the packages ends the scribe; its last line is told."""
    monkeypatch.setattr(scribe_process, "_environment", lambda: {"PYTHONPATH": str(tmp_path)})
    (tmp_path / "msgspec.py").write_text("raise ImportError('no msgspec here')")
    summary = started(tmp_path / "out", SyntheticSource()).stop()
    assert summary.state == "off"
    assert "exited with code 1 (" in str(summary.reason)


def test_python_that_cannot_be_started_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no recording, no exception."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    source = SyntheticSource()
    summary = started(tmp_path, source).stop()
    assert str(summary.reason).startswith("the process that writes the records cannot be started")


def test_scribe_has_no_profiler_and_no_gpu_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An injected library would record the scribe, and a CUDA context would take memory of the GPU."""
    for name in ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "LD_PRELOAD"):
        monkeypatch.setenv(name, "tool.so")
    environment = scribe_process._environment()
    assert {name for name, value in environment.items() if value == "tool.so"} == set()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    package = Path(scribe_process.__file__).parents[1]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(package)


def test_scribe_imports_no_torch() -> None:
    """It shall be up quickly and take little memory."""
    code = "import sys, alphamoe_tracers.scribe; print({'torch', 'pandas', 'cupti', 'cuda'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=scribe_process._environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


CHILD = """
import os, signal, sys, time
from pathlib import Path
from alphamoe_tracers.cupti import Collector
from alphamoe_tracers.synthetic import SyntheticKernel, SyntheticSource
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
source = SyntheticSource()
collector = Collector(Path(sys.argv[1]), 0, source=source, flush_period_s=3600)
collector.start()
source.push("step", 6)
source.eager(SyntheticKernel("moe"))
source.pop()
collector.flush()
source.push("step", 7)
for _ in range(5):
    source.eager(SyntheticKernel("moe"))
source.flush(forced=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    print("forked", os.getpid(), flush=True)
    time.sleep(60)
if sys.argv[2] == "scribe":
    os.kill(collector._pump.scribe_id, signal.SIGKILL)
    collector._pump._over.wait(10)
    for _ in range(50):
        source.eager(SyntheticKernel("moe"))
        source.flush(forced=True)
    print(collector.stop().state, flush=True)
    sys.exit(0)
time.sleep(0.3 if sys.argv[2] == "fork" else 0)
while not collector._pump._queue.empty():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def child(out: Path, how: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(out), how]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_killed_process_keeps_what_its_scribe_had_got(tmp_path: Path) -> None:
    """After SIGKILL the scribe writes what it received, open ranges too, and a launcher can wait for it."""
    process = child(tmp_path, "kill")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert wait_for_scribes(tmp_path)
    assert kernels(tmp_path) == 1 + 5
    _, last = sorted((tmp_path / "ranges" / "rank=0").iterdir())
    (row,) = pq.ParquetFile(last).read().to_pylist()
    assert (row["name"], row["payload"], row["end_ns"]) == ("step", 7, None)


def test_scribe_ends_though_a_forked_child_holds_its_sockets(tmp_path: Path) -> None:
    """The end of the traced process is noticed by its id, too."""
    process = child(tmp_path, "fork")
    assert process.stdout is not None
    forked = int(process.stdout.readline().split()[1])
    try:
        process.wait(timeout=60)
        assert wait_for_scribes(tmp_path)
        assert kernels(tmp_path) == 1 + 5
    finally:
        os.kill(forked, signal.SIGKILL)
        process.communicate(timeout=30)


def test_dead_scribe_does_not_end_a_program_with_default_sigpipe(tmp_path: Path) -> None:
    """Programs restore SIGPIPE; writing to a dead scribe must not kill them."""
    process = child(tmp_path, "scribe")
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, b"off\n")


def test_launcher_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    """A scribe that still writes is reported; a directory that is not there has none."""
    scribe = ScribeProcess(tmp_path)
    assert not wait_for_scribes(tmp_path, timeout_s=0)
    scribe.close()
    assert wait_for_scribes(tmp_path, timeout_s=0)
    assert wait_for_scribes(tmp_path / "nowhere", timeout_s=0)


def test_scribe_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop ends although the scribe does not answer, with a reason."""
    monkeypatch.setattr(pump_module, "FINISH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(pump_module, "BARRIER_TIMEOUT_S", 0.2)
    source = SyntheticSource()
    collector = started(tmp_path, source)
    os.kill(scribe_of(collector), signal.SIGSTOP)
    source.raw(np.array([8, *[0] * 13], np.uint32).tobytes())
    collector.flush()
    summary = collector.stop()
    assert "did not finish in 0.2 s" in str(summary.reason)
    assert "a flush was not on disk after 0.2 s" in summary.notes


def channels() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_frames_arrive_whole_and_aligned() -> None:
    """A blob larger than the socket's buffer, and messages without one, in order."""
    sender, receiver = channels()
    data = np.random.default_rng(1).integers(0, 255, 3 << 20, dtype=np.uint8)
    thread = threading.Thread(target=lambda: [sender.send(Buffer(), data), sender.send(Write(3)), sender.close()])
    thread.start()
    message, blob = receiver.receive() or (None, data)
    assert isinstance(message, Buffer)
    np.testing.assert_array_equal(blob, data)
    assert blob.ctypes.data % 8 == 0
    frame = receiver.receive()
    assert frame is not None
    assert frame[0] == Write(3)
    assert receiver.receive() is None
    thread.join()


def test_frame_that_is_cut_short_is_dropped() -> None:
    """What a killed process had sent half is no frame."""
    one, other = socket.socketpair()
    receiver = Channel(other)
    one.sendall(b"\x05\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00half")
    one.close()
    assert receiver.receive() is None


def test_nodes_of_a_capture_travel_together(tmp_path: Path) -> None:
    """A graph of thousands of nodes is a few frames, in order, before what was queued after it."""
    source = SyntheticSource()
    collector = started(tmp_path, source)
    assert collector._pump is not None
    sent: list[object] = []
    send = collector._pump._frame
    collector._pump._frame = lambda message, blob=b"": sent.append(message) or send(message, blob)  # type: ignore
    for _ in range(5000):
        source.node()
    summary = collector.stop()
    assert summary.rows["graph_nodes"] == 5000
    frames = [len(message.nodes) for message in sent if isinstance(message, Nodes)]
    assert sum(frames) == 5000
    assert len(frames) < 5000
    ids = [node[0] for message in sent if isinstance(message, Nodes) for node in message.nodes]
    assert ids == sorted(ids)


def test_window_opens_when_the_scribe_is_up(tmp_path: Path) -> None:
    """The window does not run beside a scribe that still imports."""
    collector = started(tmp_path, SyntheticSource())
    assert collector._pump is not None
    collector.open_window()
    assert collector._pump._ready.is_set()
    assert collector.stop().state == "on"


def test_scribe_that_does_not_come_up_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is never opened, and the reason is told; the traced program goes on."""

    def hang(data: Channel, control: Channel) -> None:
        while (frame := data.receive()) is not None and not isinstance(frame[0], Finish):
            pass

    monkeypatch.setattr(scribe_module, "serve", hang)
    monkeypatch.setattr(pump_module, "READY_TIMEOUT_S", 0.01)
    collector = Collector(tmp_path, 0, source=SyntheticSource(), flush_period_s=3600, in_process=True)
    collector.start()
    collector.open_window()
    assert not collector.recording
    summary = collector.stop()
    assert (summary.state, summary.window_open_ns, summary.sentinels) == ("off", None, ())
    assert "was not up after 0.01 s" in str(summary.reason)


def test_scribe_tells_what_it_does_not_understand(tmp_path: Path) -> None:
    """A message before the beginning ends the recording with a reason, not the scribe."""
    scribe = ScribeProcess(tmp_path, in_process=True)
    scribe.data.send(Nodes([(1, 0, 2, 3)]))
    ready = scribe.control.receive()
    assert ready is not None
    assert ready[0] == Ready()
    frame = scribe.control.receive()
    assert frame is not None
    assert isinstance(frame[0], Failed)
    assert "Nodes came before the beginning" in frame[0].reason
    scribe.close()
