"""Detects NaN and Inf in means of gradients by their largest magnitudes, with the same result on all ranks."""

import math
from collections.abc import Sequence

import torch


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a tensor, a float64 scalar: it is finite if and only if all elements are finite."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    least, most = tensor.aminmax()
    return torch.maximum(-least.double(), most.double())


def largest_mean(reductions: Sequence) -> float:
    """The largest of all `maxima` of these reductions: 0 if there are none, inf if one is not finite."""
    maxima = [maximum for reduction in reductions for maximum in reduction.maxima]
    return torch.stack(maxima).nan_to_num(math.inf, math.inf).max().item() if maxima else 0.0


def first_nonfinite(reductions: Sequence) -> str | None:
    """The name of the first gradient whose mean is not finite, or None; the same on all ranks.

    If the framework has reused the memory of the gradient, the name is "a parameter". reductions: objects with `gradients`
    by name, and with `maxima`, of which one is not finite if a mean is not.
    """
    if math.isfinite(largest_mean(reductions)):
        return None
    bad = next(r for r in reductions if r.maxima and not torch.stack(r.maxima).isfinite().all())
    return next((name for name, g in bad.gradients.items() if not g.isfinite().all()), "a parameter")
