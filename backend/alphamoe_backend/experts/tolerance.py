"""How far an output of the fused experts may lie from a float64 oracle.

Each element may differ by ``max(0.1 + 0.1 |ref|, 2 * sum|terms| * 2**-7)``, where the reference rounds the intermediate
to e4m3 as the operator does (that rounding alone is 2.4 % of the output's norm, more than single elements near zero may
be off) and the second part is for the bfloat16 additions, whose order the kernel does not fix. That alone would let a
wrong small output pass, so the whole output must also lie within 3 % in the Frobenius norm of the exact result, without
that rounding, and the reference must be large enough (RMS >= 1) for the absolute 0.1 to mean something.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RELATIVE_ERROR = 0.03
MIN_REFERENCE_RMS = 1.0


@dataclass(frozen=True)
class Comparison:
    """What one output looks like beside the oracle."""

    elements: int
    bad_elements: int
    """Elements beyond their tolerance, NaN and infinities among them."""
    relative_error: float
    """Frobenius norm of the difference to the exact result over that of the result; NaN when the output holds one."""
    max_abs_error: float
    reference_rms: float
    worst: str
    """Coordinates and both values of the element that is furthest beyond its tolerance; empty when none is."""

    @property
    def ok(self) -> bool:
        """Whether the output is right and the comparison meant something."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Why the output is not accepted, or an empty string."""
        if not self.elements:
            return "nothing was compared"
        if self.bad_elements:
            return f"{self.bad_elements} of {self.elements} elements are out of tolerance, worst {self.worst}"
        # Written so that a NaN fails.
        if not self.relative_error <= MAX_RELATIVE_ERROR:
            return f"relative error {self.relative_error:.4f} is above {MAX_RELATIVE_ERROR}"
        if not self.reference_rms >= MIN_REFERENCE_RMS:
            return f"reference RMS {self.reference_rms:.3g} is below {MIN_REFERENCE_RMS}: the tolerance means nothing"
        return ""


def element_tolerance(reference: Tensor, sum_abs_terms: Tensor) -> Tensor:
    """Give the greatest difference allowed at each element, float64 in the shape of ``reference``."""
    return torch.maximum(0.1 + 0.1 * reference.abs(), 2.0 * sum_abs_terms * 2.0**-7)


def compare(out: Tensor, reference: Tensor, sum_abs_terms: Tensor, exact: Tensor | None = None) -> Comparison:
    """Compare an output with the oracle.

    Args:
        out: any float dtype [M, H].
        reference: float64 [M, H], finite, with the intermediate rounded to e4m3.
        sum_abs_terms: float64 [M, H], the sum of the magnitudes of all contributions to each element.
        exact: float64 [M, H] without that rounding, for the error of the whole; the reference when absent.

    Returns:
        The comparison; ``.ok`` and ``.problem`` judge it.
    """
    if out.shape != reference.shape or out.numel() == 0:
        return Comparison(0, 0, float("nan"), float("nan"), float("nan"), "")
    values = out.to(torch.float64)
    difference = (values - reference).abs()
    excess = difference - element_tolerance(reference, sum_abs_terms)
    bad = ~(excess <= 0)
    bad_elements = int(bad.sum())
    worst = ""
    if bad_elements:
        ranked = torch.where(torch.isnan(excess), torch.full_like(excess, torch.inf), excess)
        row, column = divmod(int(ranked.argmax()), out.shape[1])
        worst = f"[{row}, {column}]: {values[row, column].item():.6g} for {reference[row, column].item():.6g}"
    whole = reference if exact is None else exact
    return Comparison(
        elements=out.numel(),
        bad_elements=bad_elements,
        relative_error=float((values - whole).norm() / whole.norm()),
        max_abs_error=float(difference.max()),
        reference_rms=float(reference.square().mean().sqrt()),
        worst=worst,
    )
