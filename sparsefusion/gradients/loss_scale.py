"""The loss scale of each step, from a function of the user, whose errors all ranks share."""

from collections.abc import Callable, Iterable

import torch


class LossScale:
    """Calls the user's function, and keeps its error until all ranks of the step can raise one.

    The function is called in the middle of a backward pass. If it raised there on one rank only, the other ranks would
    wait for its gradients. Instead this rank reduces its gradients with a NaN in each, by which all ranks see that the
    step failed; they then compare why.

    function: returns the scale of the gradients, or None: they are not scaled.
    """

    def __init__(self, function: Callable[[], float] | None):
        self._function = function
        self.value = 1.0  # of the last step for which the function returned one
        self.error: Exception | None = None  # of this step

    def update(self) -> None:
        """Call the function for a new step. If it fails, `value` stays, and `error` is set."""
        self.error = None
        if self._function is None:
            return
        try:
            value = float(self._function())
            if not value > 0:
                raise ValueError(f"it returned {value}, which is not above 0")
            self.value = value
        except Exception as error:  # of any kind: the other ranks wait for this rank's gradients
            self.error = error

    def forget_error(self) -> None:
        """Begin a step that needs no loss scale."""
        self.error = None

    def mark_failed(self, gradients: Iterable[torch.Tensor]) -> None:
        """Set the first element of each gradient to NaN, if the function failed in this step."""
        if self.error is not None:
            for gradient in gradients:
                gradient[:1] = torch.nan

    def raise_error(self, step: int) -> str:
        """The values that ranks compare after a step that is not finite. ValueError: the function failed in that step."""
        if self.error is not None:
            raise ValueError(f"step {step}: loss_scale() failed: {self.error!r}")
        return f"the loss scale of step {step}"
