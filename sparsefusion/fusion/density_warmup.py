"""Density warm-up: the density falls from a quarter to its final value, as in Deep Gradient Compression (2018)."""

from collections.abc import Callable

from sparsefusion.gradients.session import Session, StepObserver


class DensityWarmup(StepObserver):
    """Sets the density of step t, counted from step `since`, to max(density, 0.25^(1 + 4 t / steps)).

    Args:
        density: The final density.
        steps: The number of steps of the warm-up.
        since: The number of its first step.
        sends_less: sends_less(density) returns True if this density sends clearly less than a dense step. Other steps are
            dense.
    """

    def __init__(self, density: float, steps: int, since: int, sends_less: Callable[[float], bool]):
        self._density, self._steps, self._since, self._sends_less = density, steps, since, sends_less

    def step_began(self, session: Session) -> None:
        """Set the density of this step."""
        t = session.step - self._since
        density = max(self._density, 0.25 ** (1 + 4 * t / self._steps)) if t < self._steps else self._density
        session.density_ratio, session.is_dense_step = density / self._density, not self._sends_less(density)
        if t >= self._steps:
            session.observers.remove(self)
