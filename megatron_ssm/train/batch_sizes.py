"""The global batch of each step: constant, or growing as --rampup-batch-size says, as in Megatron."""

from collections.abc import Iterator
from dataclasses import dataclass

from .options import Options


@dataclass(frozen=True)
class BatchSizes:
    """The samples of each step of a run.

    Attributes:
        full: The global batch after the ramp.
        start, increment, ramp: The first global batch, what is added to it, and in how many samples it becomes full.
        step, samples: The steps done before this run began or resumed, and the samples that they have read.
    """

    full: int
    start: int = 0
    increment: int = 0
    ramp: int = 0
    step: int = 0
    samples: int = 0

    @classmethod
    def of(cls, options: Options, step: int = 0, samples: int | None = None) -> "BatchSizes":
        """The batch sizes of a run that begins after a step. samples: None for all of these steps at the full size."""
        samples = step * options.global_batch_size if samples is None else samples
        start, increment, ramp = map(int, options.rampup_batch_size or (0, 0, 0))
        return cls(options.global_batch_size, start, increment, ramp, step, samples)

    def size(self, samples: int) -> int:
        """The global batch of a step before which the run has read `samples` samples."""
        if samples >= self.ramp:
            return self.full
        return self.start + samples * self._increments // self.ramp * self.increment

    def of_step(self, step: int) -> tuple[int, int]:
        """(the samples read before a step, counted from 0; its global batch)."""
        first, samples, size = next(stage for stage in reversed([*self._stages()]) if stage[0] <= step)
        return samples + (step - first) * size, size

    def last_step(self, total: int) -> int:
        """The number of steps, those before this run included, that read at most `total` samples."""
        first, samples, size = next(s for s in reversed([*self._stages()]) if s[1] <= total or s[0] == self.step)
        return first + max(0, total - samples) // size

    @property
    def _increments(self) -> int:
        return (self.full - self.start) // self.increment

    def _stages(self) -> Iterator[tuple[int, int, int]]:
        """(step, samples before it, global batch) of the first step with each size."""
        step, samples = self.step, self.samples
        while samples < self.ramp and (size := self.size(samples)) < self.full:
            yield step, samples, size
            stage = samples * self._increments // self.ramp + 1
            steps = -(-(-(-stage * self.ramp // self._increments) - samples) // size)
            step, samples = step + steps, samples + steps * size
        yield step, samples, self.full
