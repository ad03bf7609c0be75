"""Detects NaN and Inf in means of gradients by their largest magnitudes, so that all ranks come to the same verdict."""

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
    maxima = [each for reduction in reductions for each in reduction.maxima]
    return torch.stack(maxima).nan_to_num(math.inf, math.inf).max().item() if maxima else 0.0


def first_nonfinite(reductions: Sequence) -> str | None:
    """The name of the first gradient whose mean is not finite, or None; the same on all ranks.

    reductions: each has `maxima`, which are not finite if a mean is not, and `gradients` by name. The framework may
    have reused the memory of a gradient since; then the name is "a parameter".
    """
    if math.isfinite(largest_mean(reductions)):
        return None
    bad = next(r for r in reductions if r.maxima and not torch.stack(r.maxima).isfinite().all())
    return next((name for name, g in bad.gradients.items() if not g.isfinite().all()), "a parameter")
