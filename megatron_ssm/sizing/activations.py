"""The memory of a training step, above all its activations: what forward stores for backward.

A step in which this rank has `tokens` tokens of each sequence needs, besides parameters, gradients and optimizer state,

    itemsize * batch * tokens * the largest of (all units' stored + head, the stored of each unit and those before it +
                                                the unit in backward)

- stored: the numbers that a unit stores for each token. With recomputation these are its input, and what ranks have sent
  each other.
- head: the last norm, and the logits with their gradient.
- a unit in backward: the gradients of its activations, minus the stored ones that are freed by then. With recomputation
  also what the layer stores otherwise, because it is computed again.

The formula is that of the C kernels in float32. Memory that does not grow with the tokens is not counted: states that
context ranks pass, temporary gradients of weights, messages. Neither is what an attention schedule keeps besides queries,
keys and values, which is `schedule.memory(...).saved` for each hybrid layer; nor are B and C of all tokens of the sequence,
if context ranks exchange channels.
"""

from collections import Counter
from dataclasses import dataclass

from megatron_ssm.stack.sizes import LARGE_LOGITS, LOGITS_PIECE, Sizes, Workload
from megatron_ssm.stack.stack import Stack, Unit

from .memory import Memory


@dataclass(frozen=True)
class TrainingMemory:
    """What a rank holds, if `ranks` tensor-parallel ranks split a model. Its properties are numbers for each token.

    sequence_parallel, recompute: as for `load`. itemsize: bytes of an element. P context ranks need no argument: each has
    1/P of the tokens. expert_ranks: those with other tokens that divide the experts, of which tokens choose equally many.
    ValueError if the model cannot be split over so many ranks.
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

        batch: sequences of the micro-batch. tokens: of each on this rank. has_residuals: of sparse gradients, which are as
        large as the parameters.
        """
        copies = 5 if has_residuals else 4
        weights = Memory(self.config, self.ranks, self.itemsize, expert_ranks=self.expert_ranks).weights
        return copies * weights + self.peak(batch, tokens)

    def peak(self, batch: int, tokens: int) -> int:
        """Bytes of activations at the worst moment of a step. tokens: of each sequence on this rank."""
        before, worst = 0.0, self.stored + self._head(batch * tokens)
        for _, unit in self.config.units:  # what the units after it have stored is freed when backward reaches it
            before += self._stored(unit)
            worst = max(worst, before + self._backward(unit))
        return int(self.itemsize * batch * tokens * worst)

    @property
    def stored(self) -> float:
        """What all units store from forward to backward."""
        return sum(count * self._stored(unit) for unit, count in self._units.items())

    @property
    def work(self) -> Workload:
        """What operators are asked for."""
        return Workload(
            self.ranks, self.itemsize, sequence_parallel=self.sequence_parallel, expert_ranks=self.expert_ranks
        )

    @property
    def _units(self) -> Counter[Unit]:
        """Equal units are counted."""
        return Counter(unit for _, unit in self.config.units)

    @property
    def _hidden(self) -> float:
        """The hidden state of a token."""
        return self.config.hidden_size * self.work.share

    def _sizes(self, unit: Unit) -> list[Sizes]:
        return [part.spec.sizes(self.work) for part in unit.operators]

    def _stored(self, unit: Unit) -> float:
        """What a unit stores from forward to backward."""
        side = unit.side.part.spec.sizes(self.work) if unit.side else Sizes()
        if self.recompute:
            return self._hidden + side.kept + sum(each.kept for each in self._sizes(unit)) + self._after(unit)
        norm = (self._norm if unit.norm else 0) + self._scaled(unit)
        return self._hidden + norm + side.stored + sum(each.stored for each in self._sizes(unit)) + self._after(unit)

    @property
    def _norm(self) -> float:
        """What a norm of a hidden state stores besides its input, or, after the operators, besides the unit's input."""
        return self.work.norm(self.config.hidden_size) - self._hidden

    def _after(self, unit: Unit) -> float:
        """What a norm after the operators stores, which is freed before these are in backward.

        It is recomputed together with operators that do not attend, and then their sum over ranks is kept.
        """
        if unit.post_norm is None:
            return 0
        attends = any(part.spec.attention for part in unit.operators)
        return self._norm if attends or not self.recompute else self._hidden * (self.ranks > 1)

    def _scaled(self, unit: Unit) -> float:
        """The copies of the operators' input that are multiplied by constants; if no operator reads it, they replace it."""
        scaled = sum(part.input_scale != 1.0 for part in unit.operators)
        return self.config.hidden_size * scaled - self._hidden * (scaled == len(unit.operators))

    def _backward(self, unit: Unit) -> float:
        """What exists in the worst moment of a unit's backward, besides what units store in forward."""
        sizes, hidden = self._sizes(unit), self.config.hidden_size
        most = max((each.gradients for each in sizes), default=0) - self._after(unit)
        if not self.recompute:
            return most
        most += (self._norm if unit.norm else 0) + self._scaled(unit) + sum(each.stored - each.kept for each in sizes)
        most += hidden - self._hidden  # the gathered output of the norm, if tokens are divided
        for part, each in zip(unit.operators, sizes, strict=True):
            if part.spec.attention and len(sizes) > 1:  # it comes first, and leaves the gradient of its projection
                most -= each.kept - each.projected / self.itemsize
        peaks = unit.side.part.spec.sizes(self.work).peaks if unit.side else ()
        return max((most, *peaks))

    def _head(self, tokens: int) -> float:
        """The last norm with its gradients, or with the logits and their gradient, of many only a piece."""
        width = -(-self.config.vocab_size // self.ranks)
        logits = width if tokens * width <= LARGE_LOGITS else LOGITS_PIECE / tokens
        return self.work.norm(self.config.hidden_size) + max(2 * logits, 3 * self._hidden)
