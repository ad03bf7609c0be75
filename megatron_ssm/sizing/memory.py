"""The memory of a rank: its weights, its sequences' cache, and the activations of a prefill.

A prefill of a whole batch at once, with prompts of equal length and without gradients, needs

    weights + cache + tokens * max(stages) + logits

- weights: every parameter, split as its `Field` says.
- cache: for each sequence the states of all operators, and the keys and values of its tokens.
- tokens: batch * prompt.
- stages: the bytes of one token's activations at each stage of a layer (`Memory.stages`); the largest counts. Operators say
  them (`stack.sizes.Sizes`).
- logits: of one position of each sequence.

Where C reads a prompt through several layers in one call, it needs less: the stages are those of a piece, and only what
enters and leaves the layers has all tokens.

A prompt that is read in chunks needs the cache and the activations of one chunk. In models without attention the number of
sequences is then limited by their states, whatever their length.

The formula is that of the C kernels, and with `on_cuda` that of the kernels of mamba-ssm and causal-conv1d. The latter was
read in their source and not measured: their selective scan needs copies with channels first, and their SSD keeps a state for
every 256 tokens. torch's scans need more. It assumes that attention does not need a matrix of seq x seq.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from megatron_ssm.stack.fields import Field
from megatron_ssm.stack.sizes import Sizes, Workload
from megatron_ssm.stack.stack import Spec, Stack, Unit

BLOCK = 64  # numbers of a quantized matrix that share a scale of 4 bytes
SMALL = {"x_proj", "dt_proj"}  # matrices that a quantized model keeps in 16 bits
CHOICES = 1000  # of tokens, at random, of which a mean is taken
KEPT = SMALL | {"gates", "conv", "use"}  # matrices that are not quantized


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs most, if `ranks` tensor-parallel ranks split a model whose elements have `itemsize`
    bytes.

    on_cuda: with the kernels of mamba-ssm and causal-conv1d. amx: on a CPU with AMX, where torch's attention in 16 bits
    copies keys and values. quantized_bits: 8 or 4 after `load(weights="int8")` or "int4"; 0: matrices are not quantized.
    expert_ranks: the number of groups of these ranks that divide the experts (`--ep`). ValueError if the model cannot be
    split over so many ranks.
    """

    config: Stack
    ranks: int = 1
    itemsize: int = 2
    on_cuda: bool = False
    amx: bool = False
    quantized_bits: int = 0
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        self.config.check_ranks(self.ranks, self.expert_ranks)
        if self.quantized_bits:
            object.__setattr__(self, "config", self.config.in_granules(BLOCK, self.ranks))

    @property
    def work(self) -> Workload:
        """What operators are asked for."""
        return Workload(self.ranks, self.itemsize, self.on_cuda, self.amx, expert_ranks=self.expert_ranks)

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element in at least fp32."""
        return self.work.wide_itemsize

    @property
    def weights(self) -> int:
        """Bytes of all parameters on rank 0; the last ranks may have fewer rows of the vocabulary.

        With a draft head also those of its copy of the vocabulary in 4 bits, of a model on a CPU.
        """
        return sum(map(self._bytes_of, self.config.fields())) + self._copied_vocabulary

    @property
    def _copied_vocabulary(self) -> int:
        """Bytes of the draft head's copy of this rank's part of the model's head, unless that has 4 bits itself."""
        rows, columns = -(-self.config.vocab_size // self.ranks), self.config.hidden_size
        is_copied = self.config.has_draft_head and not self.on_cuda and self.itemsize < 8 and self.quantized_bits != 4
        return rows * _bytes_of_row(columns, 4) if is_copied and columns % BLOCK == 0 else 0

    def _bytes_of(self, field: Field) -> int:
        shape = field.local_shape(0, self.ranks, 0, self.expert_ranks)
        if self.quantized_bits and _is_quantized(field) and shape[-1] % BLOCK == 0:
            return math.prod(shape[:-1]) * _bytes_of_row(shape[-1], self.quantized_bits)
        if self.quantized_bits and len(shape) > 1 and set(field.name.split(".")) & SMALL and shape[-1] % 2 == 0:
            return 2 * math.prod(shape)
        return math.prod(shape) * (self.wide_itemsize if field.fp32 else self.itemsize)

    @property
    def weights_read_per_token(self) -> int:
        """`weights_read` for one token."""
        return self.weights_read(1)

    def weights_read(self, tokens: int) -> int:
        """Bytes of weights that decoding a token of each of `tokens` sequences reads, on the rank that reads most.

        A shared block is read at each use, and of experts those that the tokens choose, at random. Of an untied embedding
        only a row of each token is read, which is not counted; nor is a draft head, which proposes further tokens.
        """
        config, read = replace(self.config, has_draft_head=False), 0
        for each in config.fields():
            size = self._bytes_of(each)
            read += size - int((1 - self._share_read(each, tokens)) * size)
        for index, part in enumerate(config.shared):
            size = sum(map(self._bytes_of, part.fields("shared.")))
            read += (len(config.uses(index)) - 1) * size
        looked_up = 0 if config.tie_embeddings else self._bytes_of(config.fields()[0])
        return read - looked_up

    def _share_read(self, field: Field, tokens: int) -> float:
        """The share of a rank's part of a field that some tokens are multiplied with."""
        if field.used == 1:
            return 1
        experts = field.shape[0]
        read = experts_read(experts, round(field.used * experts), self.expert_ranks, tokens)
        return read / (experts // self.expert_ranks)

    @property
    def state_per_sequence(self) -> int:
        """Bytes of one sequence's states that do not grow with its length."""
        return sum(count * sizes.state for sizes, count in sizes_of(self.config, self.work))

    @property
    def keys_and_values_per_token(self) -> int:
        """Bytes of one token's keys and values, in all layers; with a draft head also its own, and of what it reads."""
        of_head, head = 0, self.config.draft_head
        if self.config.has_draft_head and head is not None:
            parts = [part for unit in head.units for part in unit.operators]
            of_head = self.itemsize * self.config.hidden_size + sum(part.spec.sizes(self.work).keys for part in parts)
        return of_head + sum(count * sizes.keys for sizes, count in sizes_of(self.config, self.work))

    def moved_per_token(self, length: int) -> int:
        """Bytes of the cache that decoding a token of one sequence of `length` tokens reads or writes."""
        return 2 * self.state_per_sequence + length * self.keys_and_values_per_token

    def cache(self, batch: int, length: int) -> int:
        """Bytes of the cache that `model.new_cache(batch, length)` creates for `batch` sequences of `length` tokens."""
        return batch * (self.state_per_sequence + length * self.keys_and_values_per_token)

    def prefill(self, batch: int, prompt: int, before: int = 0) -> int:
        """Bytes besides the weights to read `prompt` tokens of each sequence after `before` earlier ones, cache included."""
        return self.cache(batch, before + prompt) + batch * (prompt * max(self.stages().values()) + self._logits)

    def longest_prompt(self, budget: float, batch: int) -> int:
        """How many tokens of each of `batch` sequences can be read at once within a budget in bytes (0: none)."""
        _check_positive(batch=batch)
        left = budget - self.weights - batch * (self.state_per_sequence + self._logits)
        return max(0, int(left // (batch * (max(self.stages().values()) + self.keys_and_values_per_token))))

    def largest_batch(self, budget: float, prompt: int, chunk: int) -> int:
        """How many sequences of `prompt` tokens fit into a budget in bytes, if they are read in chunks of `chunk` tokens."""
        _check_positive(prompt=prompt, chunk=chunk)
        each = self.cache(1, prompt) + min(chunk, prompt) * max(self.stages().values()) + self._logits
        return max(0, int((budget - self.weights) // each))

    def stages(self) -> dict[str, int]:
        """{stage: bytes of one token's activations that are in memory then}, in the unit that needs most.

        The first unit's input exists next to its copy in the dtype of the residual stream.
        """
        config, s, H = self.config, self.itemsize, self.config.hidden_size
        residual = (self.wide_itemsize if config.residual_in_fp32 else s) * H
        found: dict[str, int] = {}
        for unit, is_first in {(unit, not index) for layer in config.layers for index, unit in enumerate(layer)}:
            input_of_layer = 0 if is_first else residual  # the unit's own input, if it is the first
            for name, size in self._stages_of(unit, residual):
                found[name] = max(input_of_layer + size, found.get(name, 0))
        return found

    def _stages_of(self, unit: Unit, residual: int) -> Iterator[tuple[str, int]]:
        s, H, work = self.itemsize, self.config.hidden_size, self.work
        kept, x = residual, s * H if residual != s * H else 0
        if self.config.shared:
            kept, x = residual + s * H, s * H  # the embeddings; x plus the shared block's output
        if unit.side is not None:
            for name, size in unit.side.part.spec.sizes(work).stages.items():
                if name != "output":
                    yield name, kept + size
        sizes = [part.spec.sizes(work) for part in unit.operators]
        for count, each in enumerate(
            sizes
        ):  # beside the outputs of the operators before it, and inputs of those after it
            waiting = sum(later.projected for later in sizes[count + 1 :])
            for name, size in each.stages.items():
                yield name, kept + x + count * s * H + waiting + size
        converted = residual if residual != s * H and not self.on_cuda else 0  # by torch on the CPU, before it adds
        yield "sum", kept + x + len(unit.operators) * s * H + converted + residual

    @property
    def _logits(self) -> int:
        """Bytes of one position's logits: this rank's slice; with several ranks also all slices, and their concatenation."""
        width = -(-self.config.vocab_size // self.ranks)
        return self.wide_itemsize * (width if self.ranks == 1 else width + 2 * width * self.ranks)


@lru_cache
def experts_read(experts: int, chosen: int, ranks: int, tokens: int) -> float:
    """The number of experts that tokens choose on the busiest of the ranks that divide them: the mean of random choices."""
    draw, held, found = random.Random(0), experts // ranks, []
    for _ in range(max(1, CHOICES // tokens)):
        read = {expert for _ in range(tokens) for expert in draw.sample(range(experts), chosen)}
        found.append(max(Counter(expert // held for expert in read).values()))
    return fmean(found)


def _bytes_of_row(columns: int, bits: int) -> int:
    """Bytes of a row of a quantized matrix, with its scales."""
    return columns * bits // 8 + columns // BLOCK * 4


def _is_quantized(field: Field) -> bool:
    """Whether `load(weights="int8")` quantizes such a matrix, if its rows have whole blocks."""
    return len(field.shape) > 1 and field.adaptable and not field.fp32 and not set(field.name.split(".")) & KEPT


def _check_positive(**arguments: int) -> None:
    """ValueError if a number is less than 1."""
    for name, number in arguments.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")


def sizes_of(config: Stack, work: Workload) -> Iterator[tuple[Sizes, int]]:
    """(sizes, how many there are) of the operators of a model, and of uses of shared blocks; equal ones are counted."""
    counts: Counter[Spec] = Counter(spec for _, spec in config.operators)
    for spec, count in counts.items():
        yield spec.sizes(work), count
