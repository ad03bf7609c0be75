"""The memory of a rank in inference: weights, cache, and the activations of a prefill.

A prefill of a whole batch at once, with prompts of equal length and without gradients, needs

    weights + cache + tokens * max(stages) + logits

- weights: all parameters, split as their `Field`s specify.
- cache: for each sequence the states of all operators, and the keys and values of its tokens.
- tokens: batch * prompt.
- stages: the bytes per token of activations at each stage of a layer (`Memory.stages`, from `spec.sizes.Sizes`).
- logits: those of one position of each sequence.

If the C tape reads a prompt through several layers in one call, less memory is needed: only the input and the output of
these layers hold all tokens; other activations hold a block of them.

A prompt that is read in chunks needs the cache and the activations of one chunk. In models without attention the number of
sequences is then limited by their states, whatever their length.

The formula holds for the C kernels, and with `on_cuda` for the kernels of mamba-ssm and causal-conv1d. The numbers for CUDA
are derived from the source of these kernels, not measured: their selective scan needs copies with channels first, and their
SSD keeps a state for every 256 tokens. torch's scans need more memory. Attention is assumed not to need a matrix of
seq x seq.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from megatron_ssm.spec.fields import Field
from megatron_ssm.spec.sizes import Sizes, Workload
from megatron_ssm.spec.stack import Spec, Stack, Unit

BLOCK = 64  # numbers of a quantized matrix that share a scale of 4 bytes
KEPT_IN_16_BITS = {"x_proj", "dt_proj"}  # matrices that a quantized model keeps in 16 bits
CHOICES = 1000  # number of tokens whose random choices of experts are averaged
UNQUANTIZED = KEPT_IN_16_BITS | {"gates", "conv", "use"}  # matrices that are not quantized


@dataclass(frozen=True)
class Memory:
    """Bytes of memory in inference, on the rank that needs most.

    Attributes:
        config: The model.
        ranks: The number of tensor-parallel ranks.
        itemsize: Bytes of an element.
        on_cuda: True for the kernels of mamba-ssm and causal-conv1d.
        amx: True for a CPU with AMX, where torch's attention in 16 bits copies keys and values.
        quantized_bits: 8 or 4 after `load(weights="int8")` or "int4"; 0 if matrices are not quantized.
        expert_ranks: The number of expert-parallel ranks (`--ep`).

    Raises:
        ValueError: The model cannot be split over this number of ranks.
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
        """The workload for which operators return their sizes."""
        return Workload(self.ranks, self.itemsize, self.on_cuda, self.amx, expert_ranks=self.expert_ranks)

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element that has at least fp32."""
        return self.work.wide_itemsize

    @property
    def weights(self) -> int:
        """Bytes of all parameters on rank 0; the last ranks may have fewer rows of the vocabulary.

        They include the 4-bit copy of the vocabulary that a draft head on a CPU has.
        """
        return sum(map(self._bytes_of, self.config.fields())) + self._copied_vocabulary

    @property
    def _copied_vocabulary(self) -> int:
        """Bytes of the draft head's copy of this rank's rows of the head; 0 if the head itself has 4 bits."""
        rows, columns = -(-self.config.vocab_size // self.ranks), self.config.hidden_size
        is_copied = self.config.has_draft_head and not self.on_cuda and self.itemsize < 8 and self.quantized_bits != 4
        return rows * _bytes_of_row(columns, 4) if is_copied and columns % BLOCK == 0 else 0

    def _bytes_of(self, field: Field) -> int:
        shape = field.local_shape(0, self.ranks, 0, self.expert_ranks)
        if self.quantized_bits and _is_quantized(field) and shape[-1] % BLOCK == 0:
            return math.prod(shape[:-1]) * _bytes_of_row(shape[-1], self.quantized_bits)
        if (
            self.quantized_bits
            and len(shape) > 1
            and set(field.name.split(".")) & KEPT_IN_16_BITS
            and shape[-1] % 2 == 0
        ):
            return 2 * math.prod(shape)
        return math.prod(shape) * (self.wide_itemsize if field.fp32 else self.itemsize)

    @property
    def weights_read_per_token(self) -> int:
        """`weights_read` for one token."""
        return self.weights_read(1)

    def weights_read(self, tokens: int) -> int:
        """Bytes of weights that decoding a token of each of `tokens` sequences reads, on the rank that reads most.

        A shared block is read at each invocation. The tokens choose experts at random, and only these are read. Not counted
        are the looked-up rows of an untied embedding, and the draft head.
        """
        config, read = replace(self.config, has_draft_head=False), 0
        for field in config.fields():
            size = self._bytes_of(field)
            read += size - int((1 - self._share_read(field, tokens)) * size)
        for index, part in enumerate(config.shared):
            size = sum(map(self._bytes_of, part.fields("shared.")))
            read += (len(config.uses(index)) - 1) * size
        looked_up = 0 if config.tie_embeddings else self._bytes_of(config.fields()[0])
        return read - looked_up

    def _share_read(self, field: Field, tokens: int) -> float:
        """The fraction of this rank's part of a field that a call with this number of tokens reads."""
        if field.used == 1:
            return 1
        experts = field.shape[0]
        read = experts_read(experts, round(field.used * experts), self.expert_ranks, tokens)
        return read / (experts // self.expert_ranks)

    @property
    def state_per_sequence(self) -> int:
        """Bytes of the states of one sequence, which do not grow with its length."""
        return sum(count * sizes.state for sizes, count in sizes_of(self.config, self.work))

    @property
    def keys_and_values_per_token(self) -> int:
        """Bytes per token of keys and values in all layers and in a draft head, and of the hidden state that the draft head
        reads.
        """
        draft_head_bytes, head = 0, self.config.draft_head
        if self.config.has_draft_head and head is not None:
            parts = [part for unit in head.units for part in unit.operators]
            draft_head_bytes = self.itemsize * self.config.hidden_size + sum(
                part.spec.sizes(self.work).keys for part in parts
            )
        return draft_head_bytes + sum(count * sizes.keys for sizes, count in sizes_of(self.config, self.work))

    def moved_per_token(self, length: int) -> int:
        """Bytes of the cache that decoding a token of one sequence of `length` tokens reads or writes."""
        return 2 * self.state_per_sequence + length * self.keys_and_values_per_token

    def cache(self, batch: int, length: int) -> int:
        """Bytes of the cache that `model.new_cache(batch, length)` creates for `batch` sequences of `length` tokens."""
        return batch * (self.state_per_sequence + length * self.keys_and_values_per_token)

    def prefill(self, batch: int, prompt: int, before: int = 0) -> int:
        """Bytes of cache, activations and logits to read `prompt` tokens of each sequence after `before` earlier tokens."""
        return self.cache(batch, before + prompt) + batch * (prompt * max(self.stages().values()) + self._logits)

    def longest_prompt(self, budget: float, batch: int) -> int:
        """The number of tokens of each of `batch` sequences that can be read at once within a budget in bytes."""
        remaining = budget - self.weights - batch * (self.state_per_sequence + self._logits)
        return max(0, int(remaining // (batch * (max(self.stages().values()) + self.keys_and_values_per_token))))

    def largest_batch(self, budget: float, prompt: int, chunk: int) -> int:
        """The number of sequences of `prompt` tokens, read in chunks of `chunk` tokens, that fit into a budget in bytes."""
        sequence = self.cache(1, prompt) + min(chunk, prompt) * max(self.stages().values()) + self._logits
        return max(0, int((budget - self.weights) // sequence))

    def stages(self) -> dict[str, int]:
        """{stage: bytes per token of the activations in memory}, in the unit that needs most."""
        config, s, H = self.config, self.itemsize, self.config.hidden_size
        residual = (self.wide_itemsize if config.residual_in_fp32 else s) * H
        stages: dict[str, int] = {}
        for unit, is_first in {(unit, not index) for layer in config.layers for index, unit in enumerate(layer)}:
            input_of_layer = 0 if is_first else residual  # the input of a layer is also that of its first unit
            for name, size in self._stages_of(unit, residual):
                stages[name] = max(input_of_layer + size, stages.get(name, 0))
        return stages

    def _stages_of(self, unit: Unit, residual: int) -> Iterator[tuple[str, int]]:
        """Pairs (stage, bytes per token) of a unit. Its input is counted twice if the residual stream has another dtype."""
        s, H, work = self.itemsize, self.config.hidden_size, self.work
        held_by_layer, x = residual, s * H if residual != s * H else 0
        if self.config.shared:
            held_by_layer, x = residual + s * H, s * H  # the embeddings; the sum of x and the shared block's output
        if unit.side is not None:
            for name, size in unit.side.part.spec.sizes(work).stages.items():
                if name != "output":
                    yield name, held_by_layer + size
        all_sizes = [part.spec.sizes(work) for part in unit.operators]
        for count, sizes in enumerate(all_sizes):  # with the outputs of earlier operators and the inputs of later ones
            waiting = sum(later.projected for later in all_sizes[count + 1 :])
            for name, size in sizes.stages.items():
                yield name, held_by_layer + x + count * s * H + waiting + size
        converted = (
            residual if residual != s * H and not self.on_cuda else 0
        )  # torch on the CPU converts before it adds
        yield "sum", held_by_layer + x + len(unit.operators) * s * H + converted + residual

    @property
    def _logits(self) -> int:
        """Bytes of the logits of one position: this rank's slice; with several ranks also all slices, twice."""
        width = -(-self.config.vocab_size // self.ranks)
        return self.wide_itemsize * (width if self.ranks == 1 else width + 2 * width * self.ranks)


@lru_cache
def experts_read(experts: int, chosen: int, ranks: int, tokens: int) -> float:
    """The number of experts that the busiest of `ranks` ranks reads, averaged over random choices of the tokens."""
    generator, per_rank, counts = random.Random(0), experts // ranks, []
    for _ in range(max(1, CHOICES // tokens)):
        read = {expert for _ in range(tokens) for expert in generator.sample(range(experts), chosen)}
        counts.append(max(Counter(expert // per_rank for expert in read).values()))
    return fmean(counts)


def _bytes_of_row(columns: int, bits: int) -> int:
    return columns * bits // 8 + columns // BLOCK * 4


def _is_quantized(field: Field) -> bool:
    """Return True if `load(weights="int8")` quantizes this matrix when its rows have whole blocks."""
    return len(field.shape) > 1 and field.adaptable and not field.fp32 and not set(field.name.split(".")) & UNQUANTIZED


def sizes_of(config: Stack, work: Workload) -> Iterator[tuple[Sizes, int]]:
    """Pairs (sizes, number of equal operators) of a model's operators; a shared block counts at each invocation."""
    counts: Counter[Spec] = Counter(spec for _, spec in config.operators)
    for spec, count in counts.items():
        yield spec.sizes(work), count
