"""A custom torch operator that writes into an argument: ``moe_example::add_residual``."""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("moe_example", "FRAGMENT")
_LIBRARY.define("add_residual(Tensor(a!) out, Tensor residual, float scale=1.0) -> ()")


def _add_residual(out: Tensor, residual: Tensor, scale: float = 1.0) -> None:
    out.add_(residual, alpha=scale)


_LIBRARY.impl("add_residual", _add_residual, "CompositeExplicitAutograd")
