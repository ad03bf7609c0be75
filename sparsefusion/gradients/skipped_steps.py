"""Steps that the training skips because a gradient is not finite: residuals return to their values before the step."""

from collections.abc import Callable

from .error_feedback import ErrorFeedback


class SkippedSteps:
    """Remembers whether the last step was skipped, until `roll_back`.

    count: returns how many steps the framework has skipped, the same number on all ranks.
    """

    def __init__(self, feedback: ErrorFeedback, count: Callable[[], int]):
        self._feedback, self._count = feedback, count
        self._last_count, self._was_skipped = count(), False

    def step_ended(self, was_skipped: bool) -> None:
        """A step ended; was_skipped: it is known to be skipped by the training."""
        self._was_skipped, self._last_count = was_skipped, self._count()

    def step_failed(self) -> None:
        """An error ended the step."""
        self._was_skipped = True

    def forget(self) -> None:
        """Residuals were replaced: there is nothing to roll back."""
        self._was_skipped = False

    def roll_back(self) -> bool:
        """Restore residuals if the last step was skipped. Returns whether the framework has skipped a step since then."""
        before, self._last_count = self._last_count, self._count()
        has_new = self._last_count > before
        if self._was_skipped or has_new:
            self._feedback.roll_back()
        self._was_skipped = False
        return has_new
