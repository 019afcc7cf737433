"""One MoE layer as a serving process calls it: router, quantisation, experts, and the evidence of each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alphamoe_backend.dispatch import DispatchRecorder
from alphamoe_backend.experts.registry import Experts
from alphamoe_backend.handover import DispatchHandover
from alphamoe_backend.quantization.fp8 import per_token_group_quant_fp8
from alphamoe_backend.routing import topk_softmax
from alphamoe_backend.workspaces import Workspaces
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.ranges import RangeDomain

_SILENT = RangeDomain(enabled=False)


class AlphaMoELayer:
    """The routed experts of one decoder layer on one tensor-parallel rank.

    Args:
        index: the decoder layer's number, which submissions carry.
        router_weight: float [E, H], the same on every rank.
        experts: the experts object. What it really is decides what is submitted, whatever backend was asked for.
        recorder: takes the submissions, and the dispatches that somebody wants; None in a process without receipts.
        ranges: takes the NVTX ranges ``router``, ``quant`` and ``experts``; None pushes none.
        workspaces: owner of the buffers; None makes fresh ones in each forward.

    Raises:
        UsageError: the router weight is not [E, H].
    """

    def __init__(
        self,
        index: int,
        router_weight: Tensor,
        experts: Experts,
        *,
        recorder: DispatchRecorder | None = None,
        ranges: RangeDomain | None = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        geometry = experts.geometry
        if tuple(router_weight.shape) != (geometry.E, geometry.H):
            raise UsageError(
                f"the router weight of layer {index} is {tuple(router_weight.shape)}, not {(geometry.E, geometry.H)}"
            )
        self.index = index
        self.experts = experts
        self.recorder = recorder
        self.ranges = ranges if ranges is not None else _SILENT
        self.workspaces = workspaces
        self.router_weight = router_weight
        self._router_weight_f32: Tensor | None = None

    def router_logits(self, hidden: Tensor) -> Tensor:
        """Give float32 [M, E] router logits, summed and kept in float32 whatever the inputs' dtype."""
        weight = self.router_weight
        if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        if self._router_weight_f32 is None:
            self._router_weight_f32 = weight.to(torch.float32)
        return functional.linear(hidden.to(torch.float32), self._router_weight_f32)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute this rank's partial sum; the model adds it up over the ranks.

        Args:
            hidden: bfloat16 (or float32) [M, H], M the dispatch M, graph padding included.

        Returns:
            [M, H] in the same dtype. With workspaces it is one of their buffers, to be read before the next forward.
        """
        if hidden.shape[0] == 0:
            return torch.empty_like(hidden)
        geometry = self.experts.geometry
        with self.ranges.range("router"):
            topk_weights, topk_ids = topk_softmax(self.router_logits(hidden), geometry.top_k)
            plan = self.experts.plan(topk_ids)
        with self.ranges.range("quant"):
            q, q_scale = per_token_group_quant_fp8(hidden)
        with self.ranges.range("experts"):
            partial = self.experts.run(q, q_scale, plan, topk_weights, hidden.dtype, self.workspaces)
        if self.recorder is not None:
            self._submit(self.recorder, hidden)
            forward = self.recorder.wanted(self.index, hidden.shape[0])
            if forward is not None:
                self.recorder.hand_over(
                    DispatchHandover(
                        layer=self.index,
                        M=hidden.shape[0],
                        experts=self.experts,
                        q=q,
                        q_scale=q_scale,
                        plan=plan,
                        topk_weights=topk_weights,
                        topk_ids=topk_ids,
                        output=partial,
                        forward=forward,
                    )
                )
        return partial

    __call__ = forward

    def _submit(self, recorder: DispatchRecorder, hidden: Tensor) -> None:
        geometry, M = self.experts.geometry, hidden.shape[0]
        # -1 where there is no CUDA device: the symbol then says what was dispatched, not that a GPU ran it.
        device = hidden.device.index or 0 if hidden.is_cuda else -1
        for submission in self.experts.submissions(M):
            recorder.submit(
                layer=self.index,
                kernel=submission.kernel,
                symbol=submission.symbol,
                M=M,
                E=geometry.E,
                H=geometry.H,
                I_local=geometry.I_local,
                top_k=geometry.top_k,
                block_m=submission.block_m,
                device=device,
            )
