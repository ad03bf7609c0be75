"""Steps that the training skips because a gradient is not finite; the residuals before such a step are restored."""

from collections.abc import Callable

from .error_feedback import ErrorFeedback


class SkippedSteps:
    """Remembers until `roll_back` whether the last step was skipped.

    Args:
        feedback: The residuals.
        count: Returns the number of steps that the framework has skipped, equal on all ranks.
    """

    def __init__(self, feedback: ErrorFeedback, count: Callable[[], int]):
        self._feedback, self._count = feedback, count
        self._last_count, self._was_skipped = count(), False

    def step_ended(self, was_skipped: bool) -> None:
        """Record the end of a step. was_skipped: the training is known to skip it."""
        self._was_skipped, self._last_count = was_skipped, self._count()

    def step_failed(self) -> None:
        """Record that an error ended the step."""
        self._was_skipped = True

    def forget(self) -> None:
        """Record that residuals were replaced, so there is nothing to roll back."""
        self._was_skipped = False

    def roll_back(self) -> bool:
        """Restore residuals if the last step was skipped. Returns True if the framework has skipped a step since then."""
        before, self._last_count = self._last_count, self._count()
        has_new = self._last_count > before
        if self._was_skipped or has_new:
            self._feedback.roll_back()
        self._was_skipped = False
        return has_new
