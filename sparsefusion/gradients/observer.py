"""What can follow the steps of a session: the profiler, the trial of several plans, the warm-up of the density."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session


class StepObserver:
    """Is told of the steps of a session. This base class does nothing."""

    def step_began(self, session: "Session") -> None:
        """Called before the first atom of a step."""

    def atom_arrived(self, names: Sequence[str]) -> None:
        """Called when the framework hands over an atom with the gradients of these parameters."""

    def dense_reduction_started(self) -> None:
        """Called when the framework has started its own reduction of the last atom.

        If the framework waits for the result, the means are already there.
        """

    def step_ended(self, session: "Session") -> None:
        """Called when all means are in the gradients."""
