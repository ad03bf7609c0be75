"""Whether means are finite: a number of each tensor, by which all ranks see the same."""

import torch


def largest(tensor) -> torch.Tensor:
    """The largest magnitude, float64: finite if all numbers are."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    least, most = tensor.aminmax()
    return torch.maximum(-least.double(), most.double())


def first_not_finite(reductions) -> str | None:
    """The name of the first gradient that is not finite, as all ranks see it.

    reductions: with `marks`, not finite if a mean is not, and `gradients`, by name, whose memory a framework may have used
    for others since.
    """
    marks = [mark for reduction in reductions for mark in reduction.marks]
    if not marks or torch.stack(marks).isfinite().all():
        return None
    wrong = next(r for r in reductions if r.marks and not torch.stack(r.marks).isfinite().all())
    return next((name for name, g in wrong.gradients.items() if not g.isfinite().all()), "a parameter")
