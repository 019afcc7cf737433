"""What an engine is asked to serve, what it answers, and who may watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from alphamoe_backend.faults import parse_fault
from alphamoe_backend.geometry import preset
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.records import EXECUTIONS, Execution

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class EngineConfig:
    """What one rank serves, and how."""

    model: str
    """Name of a preset."""
    layers: int
    rank: int
    world_size: int
    device: str
    """``cpu`` or ``cuda:N``."""
    dtype: str
    """``bfloat16`` or ``float32``, of dense weights and activations."""
    moe_runner_backend: str
    executions: tuple[Execution, ...]
    """What will be asked of :meth:`Engine.serve`: graphs are captured for the replays among them."""
    cuda_graph_bs_decode: tuple[int, ...] | None = None
    """Decode batch sizes to capture; None for :data:`DEFAULT_DECODE_SIZES`."""
    cuda_graph_bs_prefill: tuple[int, ...] | None = None
    """Prefill token counts to capture; None for :data:`DEFAULT_PREFILL_SIZES`."""
    max_new_tokens: int = 32
    seed: int = 0
    nvtx: bool = True
    inject_fault: str | None = None
    """See :mod:`alphamoe_backend.faults`."""
    run_ahead: bool = True
    """Submit each decode step before the tokens of the one before are read. Groups whose collectives block the host
    (gloo) read first all the same."""
    break_graphs: bool = False
    """Cut decode graphs at the all-reduces even where a capture could hold them."""

    def check(self) -> None:
        """Refuse what cannot be served.

        Raises:
            UsageError: with the way out.
        """
        preset(self.model).check_world_size(self.world_size)
        if self.layers < 1:
            raise UsageError(f"{self.layers} layers were asked for", "Ask for at least one.")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not supported", f"Use one of: {', '.join(DTYPES)}.")
        if self.max_new_tokens < 1:
            raise UsageError(f"{self.max_new_tokens} new tokens were asked for", "Ask for at least one.")
        unknown = [name for name in self.executions if name not in EXECUTIONS]
        if unknown or not self.executions:
            raise UsageError(
                f"unknown executions {unknown}" if unknown else "no execution was asked for",
                f"Use some of: {', '.join(EXECUTIONS)}.",
            )
        if not self.device.startswith("cuda") and set(self.executions) != {"eager"}:
            raise UsageError("graph replays need a CUDA device", "Use --executions eager on a CPU.")
        if parse_fault(self.inject_fault, self.world_size) and self.moe_runner_backend == "triton":
            raise UsageError(
                "a rank of the stock experts has nothing to fall back to",
                "Leave --inject-fault or --moe-runner-backend triton out.",
            )


@dataclass(frozen=True)
class Request:
    """A prompt to be continued."""

    request_id: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """What became of a request in one pass."""

    request_id: str
    """The request's id with ``@eager`` or ``@graphs``, the pass that served it."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """``length``: seeded models have no end-of-text token."""
    timings: dict[str, float] = field(default_factory=dict)
    """``prefill_s``, and ``decode_s`` of the wave that the request decoded in."""


class StepObserver(Protocol):
    """Who records the run; :class:`NoObserver` where nobody does."""

    def on_phase(self, name: str) -> None:
        """Note that a phase begins."""

    def step_boundary(self, step: int) -> None:
        """Note that a step is about to be submitted, for example by a numbered sentinel kernel now and then."""

    def graph_sentinel(self) -> None:
        """Launch a sentinel kernel into the graph that is being captured."""


class NoObserver:
    """Observes nothing."""

    def on_phase(self, name: str) -> None:
        """Do nothing."""

    def step_boundary(self, step: int) -> None:
        """Do nothing."""

    def graph_sentinel(self) -> None:
        """Do nothing."""


def check_requests(requests: Sequence[Request], vocab: int) -> None:
    """Refuse what the model cannot be asked; on a GPU a wrong token would be a device-side assertion.

    Raises:
        UsageError: for no request, two of one id, an empty prompt or a token outside the vocabulary.
    """
    if not requests:
        raise UsageError("there is no request to serve", "Give at least one prompt.")
    if len({request.request_id for request in requests}) < len(requests):
        raise UsageError("two requests have the same id", "Give each prompt once.")
    for request in requests:
        ids = request.prompt_ids
        if not ids or min(ids) < 0 or max(ids) >= vocab:
            raise UsageError(
                f"prompt {request.request_id} is empty or holds a token outside the vocabulary of {vocab}",
                "Tokenize it with the tokenizer of this model.",
            )
