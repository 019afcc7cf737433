"""A small serving engine: prefill and batched greedy decode, eagerly and by CUDA graph replay, on one rank.

Every rank runs the same engine over the same requests. Phases, in order: ``load``, ``warm_up``, ``capture``,
``serve``; graphs, their workspaces and the KV cache live from ``capture`` to :meth:`Engine.close`. Requests are served
in waves of at most the batch size: each request of a wave is prefilled alone, then all decode together.

Decode runs one step ahead: a step leaves its sampled tokens on the device as the next one's inputs, which is submitted
before they are read (:mod:`alphamoe_backend.readback`). Under gloo the host waits inside each step anyway, and reads
before it goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from alphamoe_backend.capture_sizes import CaptureSizes, GraphKind
from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.experts.factory import create_experts
from alphamoe_backend.faults import parse_fault
from alphamoe_backend.geometry import preset
from alphamoe_backend.graphs import FORWARD_MODES, REPLAYS, CapturedForward, GraphRunner, run_padding
from alphamoe_backend.inputs import ForwardOutput, StaticInputs
from alphamoe_backend.kv_cache import KVCache
from alphamoe_backend.layer import AlphaMoELayer
from alphamoe_backend.model import MoELayer, Qwen3MoEModel, RotaryTable
from alphamoe_backend.parallel import TensorParallelGroup
from alphamoe_backend.readback import Read, Readback
from alphamoe_backend.serving import Completion, EngineConfig, NoObserver, Request, StepObserver, check_requests
from alphamoe_backend.waves import Batch, rehearse, serve_wave, wave_sizes
from alphamoe_backend.weights import SeededWeights
from alphamoe_backend.workspaces import Workspaces
from alphamoe_tracers.errors import AlphaMoEError, UsageError
from alphamoe_tracers.ranges import RangeDomain
from alphamoe_tracers.records import Execution, Purpose

__all__ = ["Completion", "Engine", "EngineConfig", "NoObserver", "Request", "StepObserver"]

WARM_UP_TOKENS = 8
WARM_UP_DECODES = 2


def _cores() -> int:
    """Give the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Engine:
    """One rank's engine.

    Attributes:
        wall_s: seconds by phase: ``load``, ``warm_up``, ``capture``, ``prefill``, ``decode``.
        notes: what a reader of the run must know, one sentence each, for example a prompt too long for any graph.
        run_ahead: whether decode steps are submitted before the tokens of the one before are read.
        next_step: the id of the next forward; ids rise over the engine's life and are equal on all ranks.
    """

    def __init__(
        self, config: EngineConfig, recorder: DispatchRecorder, observer: StepObserver, group: TensorParallelGroup
    ) -> None:
        """Check the configuration; nothing is allocated yet.

        Args:
            config: see :class:`EngineConfig`.
            recorder: where dispatches become receipts.
            observer: who records the run.
            group: this rank's collectives; its owner closes it.

        Raises:
            UsageError: for what cannot be served.
        """
        config.check()
        if (group.rank, group.world_size) != (config.rank, config.world_size):
            raise AlphaMoEError(
                f"rank {config.rank} of {config.world_size} was given the group of rank {group.rank} "
                f"of {group.world_size}"
            )
        self.config = config
        self.preset = preset(config.model)
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._sizes = CaptureSizes.of(config.cuda_graph_bs_decode, config.cuda_graph_bs_prefill)
        self._fault = parse_fault(config.inject_fault, config.world_size)
        self.wall_s: dict[str, float] = {}
        self.notes: list[str] = []
        self.run_ahead = config.run_ahead and group.capturable
        self.next_step = 0
        self.ranges = RangeDomain(enabled=config.nvtx)
        self.workspaces = Workspaces()
        self._weights = SeededWeights(
            self.preset, layers=config.layers, seed=config.seed, dtype=self._dtype, device=self._device
        )
        self._recorder = recorder
        self._observer = observer
        self._group = group
        self._model: Qwen3MoEModel | None = None
        self._cache: KVCache | None = None
        self._rotary: RotaryTable | None = None
        self._runner: GraphRunner | None = None
        self._eager_inputs: dict[GraphKind, StaticInputs] = {}
        self._readback = Readback(self._device)
        self._advanced: StaticInputs | None = None
        """The inputs that hold what the last decode sampled."""

    # ---- phases

    @torch.inference_mode()
    def load(self) -> None:
        """Draw this rank's weights and build the model."""
        config = self.config
        with self._phase("load"):
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            else:
                torch.set_num_threads(max(1, _cores() // config.world_size))
            self._model = Qwen3MoEModel(
                self.preset,
                layers=config.layers,
                weights=self._weights,
                group=self._group,
                ranges=self.ranges,
                build_moe=self._build_moe,
            )
            if self._device.type == "cuda":
                # Drawing and quantising leave a gigabyte of cached blocks that ranks on one GPU would each sit on.
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a short request, so that modules are compiled and loaded; its KV cache is dropped again."""
        with self._phase("warm_up"):
            self._allocate(slots=1, max_len=WARM_UP_TOKENS + WARM_UP_DECODES)
            self._rehearse(WARM_UP_TOKENS)
            self._cache = None

    @torch.inference_mode()
    def capture(self, prompt_lengths: Sequence[int], batch_size: int) -> None:
        """Allocate the KV cache for these requests and capture the graphs that serving them replays, and no others.

        Args:
            prompt_lengths: tokens of each prompt that will be served.
            batch_size: requests decoded together at most.

        Raises:
            AlphaMoEError: when a capture fails.
        """
        if self._runner is not None:
            raise AlphaMoEError("graphs were captured already; a larger KV cache would leave them with dead addresses")
        with self._phase("capture"):
            longest = max(prompt_lengths)
            self._allocate(slots=batch_size, max_len=longest + max(self.config.max_new_tokens, WARM_UP_DECODES))
            if self._device.type == "cuda":
                self._rehearse(longest)
                self._capture_graphs(prompt_lengths, wave_sizes(len(prompt_lengths), batch_size))

    @torch.inference_mode()
    def serve(
        self, requests: Sequence[Request], executions: Sequence[Execution], purpose: Purpose = "witness"
    ) -> list[Completion]:
        """Serve the requests once eagerly if ``eager`` is asked for, and once with the graphs asked for.

        Args:
            requests: non-empty prompts of known tokens.
            executions: which of the engine's executions to exercise. In the pass with graphs, the half whose replay
                is not asked for, or that fits no captured graph, runs eagerly.
            purpose: why, for the receipts.

        Returns:
            The completions of the passes one after the other.

        Raises:
            UsageError: for an execution that the configuration does not name, a prompt that is empty or holds a token
                outside the vocabulary.
            AlphaMoEError: when a prompt does not fit the KV cache that graphs were captured over, or ranks disagree.
        """
        unprepared = [execution for execution in executions if execution not in self.config.executions]
        if unprepared or not executions:
            raise UsageError(
                f"executions {', '.join(unprepared) or 'none'} were not prepared",
                "Name what will be served in the engine's configuration.",
            )
        self._observer.on_phase("serve")
        slots = self._prepared_slots(requests)
        replays = [execution for execution in executions if execution != "eager"]
        completions: list[Completion] = []
        if "eager" in executions:
            completions += self._pass(requests, "eager", (), purpose, slots)
        if replays:
            completions += self._pass(requests, "graphs", replays, purpose, slots)
        return completions

    def close(self) -> None:
        """Free graphs, their workspaces and registrations, the KV cache and the model."""
        if self._runner is not None:
            for forward in self._runner.captured.values():
                self._recorder.forget(forward.key)
                self.workspaces.release(forward.key)
            self._runner.close()
        self._runner = self._cache = self._rotary = self._model = self._advanced = None
        self._eager_inputs.clear()
        self.workspaces = Workspaces()

    # ---- one forward

    def forward(self, inputs: StaticInputs) -> ForwardOutput:
        """Run the model over ``inputs`` and choose greedily; also what graphs capture."""
        if self._model is None or self._cache is None or self._rotary is None:
            raise AlphaMoEError("the engine was not loaded and prepared", "Call load(), warm_up() and capture() first.")
        logits = self._model.forward(inputs, self._cache, self._rotary)
        token_ids = logits.argmax(dim=-1)
        if not inputs.prefill:
            inputs.advance(token_ids)
        return ForwardOutput(token_ids, logits)

    def _submit(self, batch: Batch, purpose: Purpose, captured: CapturedForward | None = None) -> Read:
        """Submit one step and give what reads the sampled token of each request."""
        count, requests = len(batch.positions), len(batch.request_ids)
        step = self._take_step()
        self._observer.step_boundary(step)
        inputs = self._eager(batch.kind, count) if captured is None else captured.inputs
        if batch.input_ids is not None:
            inputs.fill(batch.input_ids, batch.positions, batch.slots)
        elif inputs is not self._advanced:
            raise AlphaMoEError(f"step {step} goes on from a decode that left its tokens in other inputs")
        self._advanced = None if inputs.prefill else inputs
        with self.ranges.range("step", step):
            with self._recorder.forward(
                step=step,
                purpose=purpose,
                request_ids=batch.request_ids,
                forward_mode=FORWARD_MODES[batch.kind],
                execution="eager" if captured is None else REPLAYS[batch.kind],
                M=inputs.rows,
                real_tokens=count,
                batch_size=requests,
                graph_key=None if captured is None else captured.key,
            ):
                if captured is None:
                    output = self.forward(inputs)
                else:
                    captured.graph.replay()
                    output = captured.output
            sampled = output.token_ids[:requests]
            if self.run_ahead:
                return self._readback.begin(self._group.compare(sampled), self._group.settle)
            agreed = self._group.agreed(sampled)
            return lambda: agreed

    def _take_step(self) -> int:
        step = self.next_step
        self.next_step += 1
        return step

    def _eager(self, kind: GraphKind, rows: int) -> StaticInputs:
        """Give eager inputs of ``rows``; only the latest size of each kind is kept."""
        held = self._eager_inputs.get(kind)
        if held is None or held.rows != rows:
            held = self._eager_inputs[kind] = self._inputs(kind, rows)
        return held

    def _inputs(self, kind: GraphKind, rows: int) -> StaticInputs:
        if self._cache is None:
            raise AlphaMoEError("there is no KV cache yet", "Call capture() before serve().")
        scratch = self._cache.scratch_slot
        return StaticInputs(rows, prefill=kind == "prefill", scratch_slot=scratch, device=self._device)

    # ---- serving

    def _pass(
        self, requests: Sequence[Request], name: str, replays: Sequence[Execution], purpose: Purpose, slots: int
    ) -> list[Completion]:
        def submit(batch: Batch) -> Read:
            def timed_read() -> list[int]:
                with self._timed(batch.kind):
                    return read()

            with self._timed(batch.kind):
                read = self._submit(batch, purpose, self._graph_for(batch, replays))
            return timed_read

        completions: list[Completion] = []
        for first in range(0, len(requests), slots):
            wave = requests[first : first + slots]
            completions += serve_wave(wave, name, self.config.max_new_tokens, submit, run_ahead=self.run_ahead)
        return completions

    def _graph_for(self, batch: Batch, replays: Sequence[Execution]) -> CapturedForward | None:
        """Give the graph to replay for a batch, or None where it runs eagerly."""
        if self._runner is None or REPLAYS[batch.kind] not in replays:
            return None
        bucket = self._sizes.bucket(batch.kind, len(batch.positions))
        return None if bucket is None else self._runner.captured.get((batch.kind, bucket))

    def _prepared_slots(self, requests: Sequence[Request]) -> int:
        """Check the requests, allocate for them if nothing was prepared, and give the size of a wave."""
        check_requests(requests, self.preset.vocab)
        longest = max(len(request.prompt_ids) for request in requests)
        needed = longest + self.config.max_new_tokens
        cache = self._cache
        if cache is None or (cache.max_len < needed and self._runner is None):
            cache = self._allocate(slots=len(requests) if cache is None else cache.slots, max_len=needed)
        if cache.max_len < needed:
            raise AlphaMoEError(
                f"a prompt of {longest} tokens does not fit the KV cache of {cache.max_len} tokens a request",
                "Give capture() the lengths of all prompts that will be served.",
            )
        return cache.slots

    # ---- preparation

    def _build_moe(self, layer: int, router_weight: Tensor) -> MoELayer:
        config = self.config
        backend = config.moe_runner_backend
        if self._fault is not None and self._fault.rank == config.rank:
            backend = "triton"
        experts = create_experts(
            backend,
            self.preset.moe.local(config.world_size),
            self._weights.experts(layer, config.rank, config.world_size),
        )
        return AlphaMoELayer(
            layer, router_weight, experts, recorder=self._recorder, ranges=self.ranges, workspaces=self.workspaces
        )

    def _allocate(self, *, slots: int, max_len: int) -> KVCache:
        """Replace the KV cache (and with it the inputs, which name its scratch slot)."""
        self._cache = None
        self._eager_inputs.clear()
        self._cache = KVCache(
            layers=self.config.layers,
            slots=slots,
            kv_heads=max(self.preset.kv_heads // self.config.world_size, 1),
            max_len=max_len,
            head_dim=self.preset.head_dim,
            dtype=self._dtype,
            device=self._device,
        )
        self._rotary = RotaryTable(self.preset.head_dim, self.preset.rope_theta, self._cache.max_len, self._device)
        return self._cache

    def _rehearse(self, tokens: int) -> None:
        """Serve a made-up request in slot 0, so that what first use costs is paid."""
        rehearse(tokens, WARM_UP_DECODES, self.preset.vocab, lambda batch: self._submit(batch, "warmup"))

    def _capture_graphs(self, prompt_lengths: Sequence[int], decode_sizes: Sequence[int]) -> None:
        counts: dict[GraphKind, Sequence[int]] = {"prefill": prompt_lengths, "decode": decode_sizes}
        wanted = [kind for kind in counts if REPLAYS[kind] in self.config.executions]
        if not wanted:
            return
        self._runner = GraphRunner(
            "runner0",
            forward=self.forward,
            group=self._group,
            recorder=self._recorder,
            workspaces=self.workspaces,
            ranges=self.ranges,
            device=self._device,
            graph_sentinel=self._observer.graph_sentinel,
        )
        padding = partial(
            run_padding, forward=self.forward, recorder=self._recorder, ranges=self.ranges, take_step=self._take_step
        )
        for kind in wanted:
            self.notes += self._sizes.too_large(kind, counts[kind])
            breakable = kind == "prefill" or self.config.break_graphs or not self._group.capturable
            # Largest first: the smaller graphs then fit in the pool that it made.
            for rows in reversed(self._sizes.needed(kind, counts[kind])):
                self._runner.capture(
                    kind,
                    self._inputs(kind, rows),
                    breakable=breakable,
                    warm_up=padding,
                    take_step=self._take_step,
                )

    # ---- phases and times

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._observer.on_phase(name)
        with self._timed(name):
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.perf_counter() - begun
