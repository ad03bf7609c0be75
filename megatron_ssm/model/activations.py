"""The memory of a training step, in particular of the activations that forward stores for backward.

If this rank has `tokens` tokens of each sequence, a step needs in addition to parameters, gradients and optimizer state

    itemsize * max(n * (stored of all units + head), max over units (n * (stored up to the unit + backward) + weights))

- n: batch * tokens.
- stored: the numbers per token that a unit stores. With recomputation, these are its input and the results of messages.
- head: the final norm, and the logits with their gradient.
- backward: the gradients of the unit's activations, minus the stored activations that are freed by then. With
  recomputation, also the activations that the unit stores without it, because they are computed again.
- weights: the gradients of the matrices of a unit's experts, which backward computes together.

The formula holds for the C kernels in float32. It omits memory that does not grow with the tokens (states that
context ranks pass, temporary gradients of other weights, messages), the tensors that an attention schedule saves besides
queries, keys and values (`schedule.memory(...).saved` per hybrid layer), and, if context ranks exchange channels, B and C
of all tokens.
"""

from collections import Counter
from dataclasses import dataclass

from megatron_ssm.spec.sizes import LARGE_LOGITS, LOGITS_PIECE, Sizes, Workload
from megatron_ssm.spec.stack import Stack, Unit

from .memory import Memory


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of a rank in training. Properties are counts of numbers per token.

    There is no argument for P context ranks: each has 1/P of the tokens.

    Attributes:
        config: The model.
        ranks: The number of tensor-parallel ranks.
        sequence_parallel, recompute: See `load`.
        itemsize: Bytes of an element.
        expert_ranks: The number of expert-parallel ranks. Each is assumed to compute an equal number of tokens.

    Raises:
        ValueError: The model cannot be split over this number of ranks.
    """

    config: Stack
    ranks: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    itemsize: int = 4
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        self.config.check_ranks(self.ranks, self.expert_ranks)

    def step(self, batch: int, tokens: int, has_residuals: bool = False) -> int:
        """Bytes of a step: parameters, gradients, AdamW's two moments, and the activations of a micro-batch.

        Args:
            batch: The number of sequences of the micro-batch.
            tokens: The number of tokens of each sequence on this rank.
            has_residuals: True with sparse gradients, whose residuals are as large as the parameters.
        """
        copies = 5 if has_residuals else 4
        weights = Memory(self.config, self.ranks, self.itemsize, expert_ranks=self.expert_ranks).weights
        return copies * weights + self.peak(batch, tokens)

    def peak(self, batch: int, tokens: int) -> int:
        """The largest number of bytes of activations during a step; see `step` for the arguments."""
        n = batch * tokens
        before, worst = 0.0, n * (self.stored + self._head(n))
        for _, unit in self.config.units:  # when backward reaches a unit, the activations of later units are freed
            before += self._stored(unit)
            weights = max((sizes.weight_gradients for sizes in self._sizes(unit)), default=0)
            worst = max(worst, n * (before + self._backward(unit)) + weights)
        return int(self.itemsize * worst)

    @property
    def stored(self) -> float:
        """Numbers that all units store from forward to backward."""
        return sum(count * self._stored(unit) for unit, count in self._units.items())

    @property
    def work(self) -> Workload:
        """The workload for which operators return their sizes."""
        return Workload(
            self.ranks, self.itemsize, sequence_parallel=self.sequence_parallel, expert_ranks=self.expert_ranks
        )

    @property
    def _units(self) -> Counter[Unit]:
        """{unit: number of equal units}."""
        return Counter(unit for _, unit in self.config.units)

    @property
    def _hidden(self) -> float:
        """Numbers of the hidden state."""
        return self.config.hidden_size * self.work.share

    def _sizes(self, unit: Unit) -> list[Sizes]:
        return [part.spec.sizes(self.work) for part in unit.operators]

    def _stored(self, unit: Unit) -> float:
        """Numbers that a unit stores from forward to backward."""
        side = unit.side.part.spec.sizes(self.work) if unit.side else Sizes()
        if self.recompute:
            return self._hidden + side.kept + sum(sizes.kept for sizes in self._sizes(unit)) + self._after(unit)
        norm = (self._norm if unit.norm else 0) + self._scaled(unit)
        stored = sum(sizes.stored for sizes in self._sizes(unit))
        return self._hidden + norm + side.stored + stored + self._after(unit)

    @property
    def _norm(self) -> float:
        """Numbers that the norm of a unit stores in addition to its input, or to the unit's input if it is a post-norm."""
        return self.work.norm(self.config.hidden_size) - self._hidden

    def _after(self, unit: Unit) -> float:
        """Numbers that a post-norm stores, which are freed before backward reaches the operators.

        It is recomputed together with operators other than attention; then their sum over ranks is stored instead.
        """
        if unit.post_norm is None:
            return 0
        attends = any(part.spec.attention for part in unit.operators)
        return self._norm if attends or not self.recompute else self._hidden * (self.ranks > 1)

    def _scaled(self, unit: Unit) -> float:
        """Numbers of scaled copies of the operators' input, minus the input itself if every operator reads a copy."""
        scaled = sum(part.input_scale != 1.0 for part in unit.operators)
        return self.config.hidden_size * scaled - self._hidden * (scaled == len(unit.operators))

    def _backward(self, unit: Unit) -> float:
        """The largest count of numbers during a unit's backward, without those stored in forward."""
        all_sizes, hidden = self._sizes(unit), self.config.hidden_size
        largest = max((sizes.gradients for sizes in all_sizes), default=0) - self._after(unit)
        if not self.recompute:
            return largest
        recomputed = sum(sizes.stored - sizes.kept for sizes in all_sizes)
        largest += (self._norm if unit.norm else 0) + self._scaled(unit) + recomputed
        largest += hidden - self._hidden  # the gathered output of the norm, if tokens are divided
        for part, sizes in zip(unit.operators, all_sizes, strict=True):
            if part.spec.attention and len(all_sizes) > 1:  # backward frees it first, but for its projection's gradient
                largest -= sizes.kept - sizes.projected / self.itemsize
        peaks = unit.side.part.spec.sizes(self.work).peaks if unit.side else ()
        return max((largest, *peaks))

    def _head(self, tokens: int) -> float:
        """Numbers of the final norm, and the larger of its gradients and the logits with theirs (a piece of large ones).

        If tokens are divided, backward gathers the logits' input, and its gradient is that of all tokens.
        """
        gathered = self.config.hidden_size if self.sequence_parallel else 0
        width = -(-self.config.vocab_size // self.ranks)
        logits = width if tokens * width <= LARGE_LOGITS else LOGITS_PIECE / tokens
        return self.work.norm(self.config.hidden_size) + max(
            2 * logits + gathered, 3 * self._hidden, logits + 2 * gathered
        )
