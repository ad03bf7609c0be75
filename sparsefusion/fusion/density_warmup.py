"""The density falls from a quarter to its own over some steps, as in Deep Gradient Compression."""

from collections.abc import Callable

from sparsefusion.gradients.session import Watcher


class DensityWarmup(Watcher):
    """Watches a session: in step t of `steps` since `since` the density is max(density, 0.25^(1 + 4 t / steps)).

    helps(density): whether that sends clearly less than all; else all is sent.
    """

    def __init__(self, density: float, steps: int, since: int, helps: Callable[[float], bool]):
        self._density, self._steps, self._since, self._helps = density, steps, since, helps

    def step_began(self, session) -> None:
        """This step's density."""
        t = session.step - self._since
        density = max(self._density, 0.25 ** (1 + 4 * t / self._steps)) if t < self._steps else self._density
        session.density_ratio, session.sends_all = density / self._density, not self._helps(density)
        if t >= self._steps:
            session.watchers.remove(self)
