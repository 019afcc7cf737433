"""A stand-in for a server: a few batches of different M through a function and a custom operator.

alphamoe-trace capture --callable moe_functions:stock_moe --op moe_example::add_residual -- python serve.py
"""

import moe_operator  # noqa: F401 -- registers the operator
import torch
from moe_functions import stock_moe

from alphamoe_backend.quantization.fp8 import quantize_blocks_fp8

E, H, I_LOCAL, TOP_K = 8, 256, 128, 2


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gate_up, gate_up_scale = quantize_blocks_fp8(drawn(E, 2 * I_LOCAL, H))
    down, down_scale = quantize_blocks_fp8(drawn(E, H, I_LOCAL))
    weights = [tensor.to(device) for tensor in (gate_up, gate_up_scale, down, down_scale)]
    for M in (1, 4, 1, 4):
        hidden = drawn(M, H).to(device, torch.bfloat16)
        chosen = torch.stack([torch.randperm(E, generator=generator)[:TOP_K] for _ in range(M)]).to(device, torch.int32)
        out = stock_moe(hidden, *weights, torch.full((M, TOP_K), 0.5, device=device), chosen)
        torch.ops.moe_example.add_residual(out, hidden, scale=0.5)


if __name__ == "__main__":
    main()
