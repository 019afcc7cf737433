"""What a traced run is asked to do, and the defaults that depend on the machine."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from alphamoe_backend.geometry import PRESETS, ModelPreset
from alphamoe_profiler.faults import Fault, parse_fault
from alphamoe_profiler.memory import GpuSurvey
from alphamoe_profiler.rank_messages import Communication
from alphamoe_tracers.errors import AlphaMoEError, UsageError
from alphamoe_tracers.records import EXECUTIONS, Execution

GPU_MODEL, GPU_LAYERS = "qwen3-next-80b", 4
CPU_MODEL = "tiny"
ROOM_BYTES = 24 << 30
"""Free memory that a GPU needs for four layers of qwen3-next-80b: 8 GiB of weights, four ranks' contexts and graphs."""
MAX_RANKS, MAX_LAYERS, MAX_NEW_TOKENS = 4096, 512, 32_768
"""More is a slip of the keyboard, and would take the machine's memory before anything could say so."""
MAX_TIMEOUT_S = 1_000_000
"""Eleven days."""
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class TraceConfig:
    """The options of ``alphamoe-trace trace``; null means the machine's default."""

    prompts: tuple[str, ...]
    ranks: int = 1
    model: str | None = None
    layers: int | None = None
    max_new_tokens: int = 32
    moe_runner_backend: str = "flashinfer_alphamoe"
    executions: tuple[str, ...] | None = None
    cuda_graph_bs_decode: tuple[int, ...] | None = None
    cuda_graph_bs_prefill: tuple[int, ...] | None = None
    device: str = "auto"
    dtype: str | None = None
    seed: int = 0
    out: Path | None = None
    force: bool = False
    inject_fault: str | None = None
    collector: bool = True
    nvtx: bool = True
    receipts: bool = True
    timeout_s: float = 1800.0
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolved:
    """A configuration with every default filled in and checked against the machine and the backend."""

    config: TraceConfig
    preset: ModelPreset
    layers: int
    device_kind: str
    """``cpu`` or ``cuda``."""
    executions: tuple[Execution, ...]
    dtype: str
    fault: Fault | None
    survey: GpuSurvey
    notes: tuple[str, ...]
    """Defaults that a user may want to know of, one sentence each."""

    @property
    def gpu_count(self) -> int:
        """GPUs that the ranks are spread over; 0 on a CPU."""
        return len(self.survey.gpus) if self.device_kind == "cuda" else 0

    def device_of(self, rank: int) -> str:
        """Return the torch device of a rank: ``cuda:N``, round robin over the GPUs, or ``cpu``."""
        return f"cuda:{rank % self.gpu_count}" if self.gpu_count else "cpu"

    def shares_gpu(self, rank: int) -> bool:
        """Say whether another rank uses the same GPU as this one."""
        ranks = range(self.config.ranks)
        return bool(self.gpu_count) and any(
            other != rank and other % self.gpu_count == rank % self.gpu_count for other in ranks
        )

    @property
    def communication(self) -> Communication:
        """What the group is made of, for all ranks alike: NCCL, which refuses two ranks on one GPU, or else gloo."""
        return "nccl" if 0 < self.config.ranks <= self.gpu_count else "gloo"


def resolve(config: TraceConfig, survey: GpuSurvey) -> Resolved:
    """Fill in the defaults and refuse what cannot run, before anything is written or started.

    Raises:
        UsageError: an option that is wrong, or wrong for this machine.
    """
    check_numbers(config)
    device_kind = _device_kind(config, survey)
    notes: list[str] = []
    preset, layers = _model(config, device_kind, survey, notes)
    if layers < 1:
        raise UsageError(f"--layers must be at least 1, not {layers}")
    if layers > MAX_LAYERS:
        raise UsageError(f"--layers must be at most {MAX_LAYERS}, not {layers}")
    preset.check_world_size(config.ranks)
    fault = parse_fault(config.inject_fault, config.ranks) if config.inject_fault else None
    return Resolved(
        config=config,
        preset=preset,
        layers=layers,
        device_kind=device_kind,
        executions=_executions(config.executions, device_kind),
        dtype=_dtype(config.dtype, device_kind),
        fault=fault,
        survey=survey,
        notes=tuple(notes),
    )


def check_numbers(config: TraceConfig) -> None:
    """Refuse numbers that cannot be, before anything is made for each rank.

    Raises:
        UsageError: the first of them.
    """
    if config.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, not {config.ranks}", "for example --ranks 4")
    if config.ranks > MAX_RANKS:
        raise UsageError(f"--ranks must be at most {MAX_RANKS}, not {config.ranks}", "for example --ranks 4")
    if config.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, not {config.max_new_tokens}")
    if config.max_new_tokens > MAX_NEW_TOKENS:
        raise UsageError(f"--max-new-tokens must be at most {MAX_NEW_TOKENS}, not {config.max_new_tokens}")
    if not 0 < config.timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(f"--timeout must be above 0 and at most {MAX_TIMEOUT_S} seconds, not {config.timeout_s:g}")
    if not 0 <= config.seed < 2**63:
        raise UsageError(f"--seed must be between 0 and 2**63 - 1, not {config.seed}")
    if not config.prompts:
        raise UsageError("a run needs a prompt", "for example --prompt gsm8k:17")


def _device_kind(config: TraceConfig, survey: GpuSurvey) -> str:
    if config.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device knows no {config.device!r}", "it is auto, cpu or cuda")
    if config.device == "cuda" and not survey.gpus:
        raise UsageError(f"--device cuda: {survey.reason or 'no CUDA device'}", "run alphamoe-trace doctor")
    if config.device == "auto":
        return "cuda" if survey.gpus else "cpu"
    return config.device


def _model(config: TraceConfig, kind: str, survey: GpuSurvey, notes: list[str]) -> tuple[ModelPreset, int]:
    if config.model is not None:
        if config.model not in PRESETS:
            near = difflib.get_close_matches(config.model, PRESETS, n=1, cutoff=0.4)
            presets = f"the presets are {', '.join(PRESETS)}"
            raise UsageError(
                f"unknown model {config.model!r}", f"did you mean {near[0]}? {presets}" if near else presets
            )
        preset = PRESETS[config.model]
        default = preset.layers if config.model == CPU_MODEL else min(preset.layers, GPU_LAYERS)
        return preset, config.layers if config.layers is not None else default
    if kind == "cpu":
        preset = PRESETS[CPU_MODEL]
        return preset, config.layers if config.layers is not None else preset.layers
    used = survey.gpus[: config.ranks]
    least = min(gpu.free_bytes for gpu in used)
    if least < ROOM_BYTES:
        notes.append(
            f"a GPU has {least / 2**30:.0f} GiB free and {GPU_MODEL} needs {ROOM_BYTES >> 30}: running {CPU_MODEL}"
        )
        preset = PRESETS[CPU_MODEL]
        return preset, config.layers if config.layers is not None else preset.layers
    return PRESETS[GPU_MODEL], config.layers if config.layers is not None else GPU_LAYERS


def _executions(asked: tuple[str, ...] | None, kind: str) -> tuple[Execution, ...]:
    if asked is None:
        return EXECUTIONS if kind == "cuda" else ("eager",)
    listed = f"it takes {', '.join(EXECUTIONS)}, comma-separated"
    if not asked:
        raise UsageError("--executions is empty", listed)
    for name in asked:
        if name not in EXECUTIONS:
            near = difflib.get_close_matches(name, EXECUTIONS, n=1)
            raise UsageError(f"--executions knows no {name!r}", f"did you mean {near[0]}? {listed}" if near else listed)
    if kind == "cpu" and set(asked) != {"eager"}:
        raise UsageError("CUDA graphs need a CUDA device", "use --executions eager on a CPU")
    return tuple(name for name in EXECUTIONS if name in asked)


def _dtype(asked: str | None, kind: str) -> str:
    if asked is None:
        return "bfloat16" if kind == "cuda" else "float32"
    if asked not in DTYPES:
        raise UsageError(f"--dtype knows no {asked!r}", f"it takes {', '.join(DTYPES)}")
    return asked


def cpu_threads(ranks: int) -> int:
    """Return how many threads each rank may use so that together they fill the CPUs that this process may use."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, available // ranks)


def default_out(run_root: Path, created: str, prompt: str, run_id: str) -> Path:
    """Return the directory of a run that was not given one: ``ROOT/20260131T235959Z-gsm8k-17-1f2e3d``.

    Raises:
        AlphaMoEError: the root is a file.
    """
    if run_root.exists() and not run_root.is_dir():
        raise AlphaMoEError(f"{run_root} is not a directory", "choose another with --out")
    stamp = created.replace("-", "").replace(":", "").split(".")[0].removesuffix("+0000").removesuffix("Z") + "Z"
    kind, _, rest = prompt.partition(":")
    label = f"{kind}-{rest}" if kind == "gsm8k" else kind
    return run_root / f"{stamp}-{label}-{run_id[:6]}"
