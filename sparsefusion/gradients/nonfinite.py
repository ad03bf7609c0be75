"""Whether means are finite: a number of each tensor, by which all ranks see the same."""

import math

import torch


def largest(tensor) -> torch.Tensor:
    """The largest magnitude, float64: finite if all numbers are."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    least, most = tensor.aminmax()
    return torch.maximum(-least.double(), most.double())


def largest_mean(reductions) -> float:
    """Of the marks of all, each the largest magnitude of some means; 0 without one, inf if one is not finite."""
    marks = [mark for reduction in reductions for mark in reduction.marks]
    return torch.stack(marks).nan_to_num(math.inf, math.inf).max().item() if marks else 0.0


def first_not_finite(reductions) -> str | None:
    """The name of the first gradient that is not finite, as all ranks see it.

    reductions: with `marks`, not finite if a mean is not, and `gradients`, by name, whose memory a framework may have used
    for others since.
    """
    if math.isfinite(largest_mean(reductions)):
        return None
    wrong = next(r for r in reductions if r.marks and not torch.stack(r.marks).isfinite().all())
    return next((name for name, g in wrong.gradients.items() if not g.isfinite().all()), "a parameter")
