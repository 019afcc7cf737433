"""What one rank's process does, from its first instruction to ``ranks/N.json``."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from alphamoe_profiler.bundle_writer import BundleWriter
from alphamoe_profiler.faults import Fault, parse_fault
from alphamoe_profiler.memory import snapshot
from alphamoe_profiler.rank_messages import (
    EXIT_FAILED,
    EXIT_STOPPED,
    CaptureFactory,
    RankCaptures,
    RankDevice,
    RankMessage,
    RankTask,
    ServedRequest,
    one_line,
    send,
)
from alphamoe_profiler.run_records import MemorySnapshot, RankFile
from alphamoe_profiler.watchdog import Watchdog, die_with_launcher
from alphamoe_tracers.errors import AlphaMoEError
from alphamoe_tracers.records import EXECUTIONS, CollectorSummary, Execution, Receipt

if TYPE_CHECKING:
    from alphamoe_backend.engine import Engine
    from alphamoe_backend.parallel import TensorParallelGroup
    from alphamoe_tracers.cupti import Collector
    from alphamoe_tracers.receipts import ReceiptWriter

CLOCK = "cuptiGetTimestamp"


class StopRequestedError(AlphaMoEError):
    """The launcher asked this rank to end at the next step."""


def run_rank(task: RankTask, connection: Connection, captures: CaptureFactory | None = None) -> None:
    """Serve the requests on one rank and leave its files in the bundle. Never returns: the process ends here.

    Interpreter and CUDA teardown are skipped on purpose: after ``ranks/N.json`` nothing may make the rank fail.
    ``captures`` makes what stores the inputs of chosen dispatches; None stores none.
    """
    die_with_launcher(task.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watchdog = Watchdog(connection, task.launcher_pid)
    watchdog.start()
    log = _redirect_output(task)
    rank = RankRun(task, connection, watchdog, captures)
    code = rank.run()
    watchdog.ending.set()
    connection.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk
            stream.flush()
    if code == 0 and log is not None and log.stat().st_size == 0:
        log.unlink()
    os._exit(code)


def _redirect_output(task: RankTask) -> Path | None:
    """Send what libraries print, and the traceback of a crash, to ``reports/logs/rank=N.log`` of the bundle."""
    path = Path(task.out) / "reports" / "logs" / f"rank={task.rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # a full disk is told by the files that matter
        return None
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.enable(file=handle)
    return path


class RankRun:
    """The run of one rank. It is also the engine's observer: phases, step boundaries and graph sentinels pass here."""

    def __init__(
        self, task: RankTask, connection: Connection, watchdog: Watchdog, captures: CaptureFactory | None
    ) -> None:
        self._task = task
        self._connection = connection
        self._watchdog = watchdog
        self._fault: Fault | None = parse_fault(task.inject_fault, task.world_size) if task.inject_fault else None
        self._writer = BundleWriter.join(task.out)
        self._capture_factory = captures
        self._captures: RankCaptures | None = None
        self._collector: Collector | None = None
        self._receipts: ReceiptWriter | None = None
        self._receipt_count = 0
        self._engine_at_work: Engine | None = None
        self._group: TensorParallelGroup | None = None
        self._served_with: dict[str, set[Execution]] = {}
        self._forwards = Counter[str]()
        self._memory: list[MemorySnapshot] = []
        self._wall_s: dict[str, float] = {}
        self._gpu_name: str | None = None
        self._gpu_uuid: str | None = task.gpu_uuid
        self._sm_count: int | None = None
        self._compute_capability: str | None = None

    def run(self) -> int:
        """Run to the end and return the exit code."""
        try:
            self.on_phase("start_up")
            self._serve()
            self._finish("complete", None)
            self._tell("done")
        except Exception as error:  # whatever ended this rank is named, and what was recorded is kept
            self._watchdog.ending.set()
            stopped = isinstance(error, StopRequestedError)
            text = one_line(error)
            if not stopped:
                self._try_to_tell_failure(text)
                _log_traceback()
            if self._group is not None:
                self._group.abandon()  # the collector waits for an idle device, where a peer may be missing
            try:
                self._finish("interrupted" if stopped else "exception", text)
            except Exception:  # the first error is the one that counts; the rank is cut short without ranks/N.json
                _log_traceback()
            return EXIT_STOPPED if stopped else EXIT_FAILED
        return 0

    # ---- the engine's observer

    def on_phase(self, name: str) -> None:
        """Note that a phase begins, tell the launcher, and let a planted fault strike."""
        if name == "serve":
            name = "prefill"  # serving begins with one, and the engine leaves the rest to the receipts
        self._tell("phase", phase=name)
        if self._fault is not None and self._fault.strikes(self._task.rank, name):
            self._strike(self._fault)

    def step_boundary(self, step: int) -> None:
        """Let the collector launch a numbered sentinel when one is due; here a rank that was told to stop leaves."""
        if self._watchdog.stop_requested.is_set():
            raise StopRequestedError(f"stopped by the launcher before step {step}")
        if self._collector is not None:
            self._collector.step_boundary(step)

    def graph_sentinel(self) -> None:
        """Launch a sentinel into the graph that is being captured."""
        if self._collector is not None:
            self._collector.graph_sentinel()

    # ---- the run

    def _serve(self) -> None:
        task = self._task
        # Ranks of one machine meet over loopback: a host name that does not resolve must not matter.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("OMP_NUM_THREADS", str(task.threads))
        # The survey numbers GPUs as NVML does; CUDA's own order puts the fastest first.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self._start_collector()
        from alphamoe_backend.engine import Request
        from alphamoe_backend.parallel import TensorParallelGroup

        self._prepare_device()
        group = self._group = TensorParallelGroup.connect(
            task.rank, task.world_size, task.communication, task.rendezvous, timeout_s=min(task.timeout_s, 600.0)
        )
        engine = self._engine_at_work = self._engine(group)
        self._wall_s["start_up"] = (time.monotonic_ns() - task.spawned_ns) / 1e9
        self._remember("after_start_up")
        engine.load()
        engine.warm_up()
        requests = [Request(item.request_id, item.prompt_ids) for item in task.requests]
        engine.capture([len(item.prompt_ids) for item in requests], batch_size=len(requests))
        self._remember("after_graph_capture")
        group.barrier()  # the first step's skew shall not be that of capturing
        if self._collector is not None:
            self._collector.open_window()
        completions = engine.serve(requests, task.executions)
        if self._collector is not None:
            self._collector.close_window()
        self._remember("after_run")
        # No rank may leave while another is still inside its last collective. The engine is not closed: that would
        # unload modules whose names the collector has yet to read, and the process is about to end anyway.
        group.barrier()
        if task.rank == 0:
            served = tuple(
                ServedRequest(
                    request_id=item.request_id,
                    token_ids=tuple(item.token_ids),
                    finish_reason=item.finish_reason,
                    executions=tuple(e for e in EXECUTIONS if e in self._served_with.get(item.request_id, ())),
                    timings_s=dict(item.timings),
                )
                for item in completions
            )
            self._tell_served(tuple(engine.notes), served)
        if self._captures is not None:
            self._wall_s["dispatch_captures"] = self._captures.wall_s
            self._tell_served(self._captures.notes())

    def _start_collector(self) -> None:
        if self._task.collector_off is not None:
            return
        from alphamoe_tracers.cupti import Collector, prepare_environment

        # Both before CUDA and NVTX are first used: NVTX asks for its tool once.
        prepare_environment()
        collector = Collector(Path(self._task.out), self._task.rank)
        collector.start()
        self._collector = collector
        self._watchdog.save = collector.flush

    def _prepare_device(self) -> None:
        import torch

        torch.set_num_threads(self._task.threads)
        device = torch.device(self._task.device)
        if device.type != "cuda":
            return
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        self._gpu_name = properties.name
        self._sm_count = properties.multi_processor_count
        self._compute_capability = f"{properties.major}.{properties.minor}"
        uuid = getattr(properties, "uuid", None)
        if uuid is not None:
            # NVML numbers and CUDA numbers may differ; what torch opened is what is measured.
            self._gpu_uuid = f"GPU-{uuid}" if not str(uuid).startswith(("GPU-", "MIG-")) else str(uuid)

    def _engine(self, group: TensorParallelGroup) -> Engine:
        from alphamoe_backend.dispatch import DispatchRecorder
        from alphamoe_backend.engine import Engine, EngineConfig

        task = self._task
        if task.receipts:
            from alphamoe_tracers.receipts import ReceiptWriter

            self._receipts = ReceiptWriter(self._writer.receipts_path(task.rank))
        config = EngineConfig(
            model=task.model,
            layers=task.layers,
            rank=task.rank,
            world_size=task.world_size,
            device=task.device,
            dtype=task.dtype,
            moe_runner_backend=task.moe_runner_backend,
            executions=task.executions,
            cuda_graph_bs_decode=task.cuda_graph_bs_decode,
            cuda_graph_bs_prefill=task.cuda_graph_bs_prefill,
            max_new_tokens=task.max_new_tokens,
            seed=task.seed,
            nvtx=task.nvtx,
            inject_fault=self._fault.spec if self._fault is not None and self._fault.kind == "fallback" else None,
        )
        if self._capture_factory is not None:
            opened = RankDevice(self._gpu_name, self._compute_capability, self._sm_count)
            self._captures = self._capture_factory(task, opened)
        recorder = DispatchRecorder(task.run_id, task.rank, self._take_receipt, self._captures)
        return Engine(config, recorder, self, group)

    def _take_receipt(self, receipt: Receipt) -> None:
        for request_id in receipt.request_ids:
            self._served_with.setdefault(request_id, set()).add(receipt.execution)
        if self._receipts is not None:
            self._receipts.write(receipt)
            self._receipt_count += 1
        if receipt.purpose == "witness":
            self._announce_turn(receipt.forward_mode)

    def _announce_turn(self, forward_mode: str) -> None:
        """Announce ``decode`` after a pass's last prefill, and ``prefill`` after its last decode step."""
        task = self._task
        self._forwards[forward_mode] += 1
        if forward_mode == "EXTEND" and task.max_new_tokens > 1 and self._forwards["EXTEND"] % len(task.requests) == 0:
            self.on_phase("decode")
        elif forward_mode == "DECODE" and self._forwards["DECODE"] % (task.max_new_tokens - 1) == 0:
            passes = len({execution == "eager" for execution in task.executions})
            if self._forwards["DECODE"] < passes * (task.max_new_tokens - 1):
                self.on_phase("prefill")

    def _remember(self, label: str) -> None:
        if not self._task.device.startswith("cuda"):
            self._memory.append(snapshot(label))
            return
        import torch

        numbers = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
        self._memory.append(snapshot(label, self._gpu_uuid, numbers))

    # ---- the end

    def _finish(self, ended: Literal["complete", "exception", "interrupted"], error: str | None) -> None:
        """Stop the collector and write ``ranks/N.json``, the last file of this rank."""
        if ended == "complete":
            self.on_phase("collection")
        if self._engine_at_work is not None:
            self._wall_s.update(self._engine_at_work.wall_s)
        before = time.monotonic()
        if self._receipts is not None:
            self._receipts.close()
        summary = self._stop_collector()
        self._wall_s["collection"] = time.monotonic() - before
        task = self._task
        record = RankFile(
            run_id=task.run_id,
            rank=task.rank,
            world_size=task.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=task.device,
            gpu_name=self._gpu_name,
            gpu_uuid=self._gpu_uuid,
            sm_count=self._sm_count,
            compute_capability=self._compute_capability,
            shared_gpu=task.shared_gpu,
            collector=summary,
            receipts=self._receipt_count,
            sha256={},
            memory=tuple(self._memory),
            wall_s=self._wall_s,
            ended=ended,
            error=error,
            clock=CLOCK if summary.state == "on" else "none",
            communication=task.communication if task.world_size > 1 else None,
        )
        self._writer.write_rank(record)

    def _stop_collector(self) -> CollectorSummary:
        if self._collector is None:
            return collector_off(self._task.collector_off or "the rank ended before it was started")
        from alphamoe_backend.kernels.jit import known_sources

        return self._collector.stop(known_sources())

    def _tell(
        self, kind: Literal["phase", "failed", "done"], phase: str | None = None, error: str | None = None
    ) -> None:
        send(self._connection, RankMessage(kind, self._task.rank, time.monotonic_ns(), phase=phase, error=error))

    def _tell_served(self, notes: tuple[str, ...], served: tuple[ServedRequest, ...] = ()) -> None:
        send(self._connection, RankMessage("served", self._task.rank, time.monotonic_ns(), served=served, notes=notes))

    def _try_to_tell_failure(self, error: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the watchdog ends this process
            self._tell("failed", error=error)

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "exception":
            raise AlphaMoEError(f"planted by --inject-fault {fault.spec}")
        elif fault.kind == "disk-full":
            # Every write of this process fails from here on; Python ignores SIGXFSZ, so they raise OSError.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _log_traceback() -> None:
    with contextlib.suppress(OSError):  # the log is on the same full disk
        traceback.print_exc()


def collector_off(reason: str) -> CollectorSummary:
    """Return the summary of a collector that never recorded."""
    return CollectorSummary(
        state="off",
        reason=reason,
        cupti_library=None,
        cupti_version=None,
        cupti_python_version=None,
        kernel_record=None,
        window_open_ns=None,
        window_close_ns=None,
        rows={},
        dropped=0,
        duplicates=0,
        invalid_times=0,
        untimed=0,
        unresolved_names=0,
        sentinels=(),
        skipped_api_ids=(),
        range_problems=(),
    )
