"""Tokens of documents as one stream, the batch of each training step, and the windows of an evaluation.

The global batch is constant, or grows as --rampup-batch-size says, as in Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_ssm.spec.fields import divides

from .options import Options

IGNORE_INDEX = -100


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


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as one stream of tokens, in which every document is followed by the end-of-text id."""

    ids: torch.Tensor  # (tokens,), the smallest of uint8, int16 and int32 that holds every id
    text_bytes: int  # UTF-8 bytes of the documents: nats per byte = summed loss / text_bytes


def tokenize(documents: list[str], tokenizer: Any, end_of_text_id: int) -> Tokens:
    """The tokens of documents as one stream, with `end_of_text_id` after each document.

    tokenizer: A `tokenizers.Tokenizer`, whose `encode_batch` lets other threads run, unlike `encode`.
    """
    parts = []
    for document in documents:
        (encoding,) = tokenizer.encode_batch([document], add_special_tokens=False)
        parts += [np.asarray(encoding.ids, np.int32), np.array([end_of_text_id], np.int32)]
    ids = torch.from_numpy(np.concatenate(parts))
    dtype = next(d for d in (torch.uint8, torch.int16, torch.int32) if ids.max() <= torch.iinfo(d).max)
    return Tokens(ids.to(dtype), sum(len(document.encode()) for document in documents))


class Batches:
    """Training batches as a function of (seed, step), so that resuming needs only the step.

    The stream is read as a ring. An epoch starts at a random token, divides the ring into windows of seq_length tokens that
    do not overlap, and takes them in random order. The last tokens, fewer than seq_length, are left out. A batch may contain
    windows of two epochs, and a window may contain the end of a document.
    """

    def __init__(self, stream: Tokens, seq_length: int, global_batch: int, seed: int):
        """Batches of `global_batch` sequences of `seq_length` tokens.

        Raises:
            ValueError: The stream is shorter than one sequence and the label after it.
        """
        self.ids, self.seq_length, self.global_batch, self.seed = stream.ids, seq_length, global_batch, seed
        if len(self.ids) <= seq_length:
            raise ValueError(
                f"the training data has {len(self.ids)} tokens, and one sequence of {seq_length} with its last label "
                f"needs {seq_length + 1}"
            )
        self.windows_per_epoch = len(self.ids) // seq_length
        self._starts: dict[int, torch.Tensor] = {}  # of the windows of the current epoch

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a step, counted from 0, on one of `ranks` data-parallel ranks.

        Rank r gets the r-th contiguous part of the step's global batch, which is the same for every number of ranks. Returns
        (inputs, labels), both int64 (global_batch / ranks, seq_length), with labels[i] = inputs[i + 1]. ValueError unless
        the batch divides over the ranks.
        """
        divides(self.global_batch, ranks, "sequences of a global batch", "data-parallel ranks")
        rows = self.global_batch // ranks
        return self.samples(step * self.global_batch + rank * rows, rows)

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels), both int64 (count, seq_length), of the samples from number `first` on, counted from step 0."""
        starts = torch.stack([self._start(sample) for sample in range(first, first + count)])
        indices = (starts[:, None] + torch.arange(self.seq_length + 1)) % len(self.ids)
        tokens = self.ids[indices].long()  # (rows, seq_length + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _start(self, sample: int) -> torch.Tensor:
        """The index in the stream at which window number `sample`, counted from step 0, begins."""
        epoch, index = divmod(sample, self.windows_per_epoch)
        if epoch not in self._starts:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            offset = torch.randint(len(self.ids), (), generator=generator)
            order = torch.randperm(self.windows_per_epoch, generator=generator)
            self._starts = {epoch: offset + self.seq_length * order}
        return self._starts[epoch][index]


def windows(stream: Tokens, seq_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole stream in order, for evaluation.

    Every token but the first is a label exactly once. The end of the last window is filled with id 0 and label -100.

    Returns:
        (inputs, labels), both int64 (windows, seq_length).

    Raises:
        ValueError: There is no token to predict.
    """
    tokens = len(stream.ids)
    if tokens < 2:
        raise ValueError(f"the held-out data has {tokens} token(s): at least 2 are needed to predict one")
    count = -(-(tokens - 1) // seq_length)
    inputs = torch.zeros(count * seq_length, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    inputs[: tokens - 1] = stream.ids[:-1]
    labels[: tokens - 1] = stream.ids[1:]
    return inputs.view(count, seq_length), labels.view(count, seq_length)
