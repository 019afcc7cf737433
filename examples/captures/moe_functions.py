"""The stock Triton path as one function of plain tensors, which the hook can wrap and a replay can call again.

On a GPU it launches ``fused_moe_kernel`` twice, on a CPU the same in plain torch.
"""

from torch import Tensor

from alphamoe_backend.experts.triton_stock import StockExperts
from alphamoe_backend.geometry import LocalGeometry
from alphamoe_backend.quantization.fp8 import ExpertWeights


def stock_moe(
    hidden_states: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> Tensor:
    """Give the routed experts' sum [M, H] of hidden_states [M, H]; weights as ``ExpertWeights`` describes them."""
    E, H, I_local = down.shape
    geometry = LocalGeometry(E=E, H=H, I_local=I_local, top_k=topk_ids.shape[1], block_m=8)
    experts = StockExperts(geometry, ExpertWeights(gate_up, gate_up_scale, down, down_scale))
    return experts.dispatch(hidden_states, topk_weights, topk_ids)
