"""The work, memory and messages of an operator on one rank, which `model` and `plan` add up."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Logits of a rank above which the loss is computed in pieces, and the size of a piece
LARGE_LOGITS, LOGITS_PIECE = 2**27, 2**24


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of attention before the split over tensor-parallel ranks."""

    heads: int
    kv_heads: int
    head_dim: int

    def on_ranks(self, ranks: int) -> "AttentionSizes":
        """The heads on one of `ranks` tensor-parallel ranks; several ranks may hold the same key/value head."""
        return AttentionSizes(self.heads // ranks, max(1, self.kv_heads // ranks), self.head_dim)


@dataclass(frozen=True)
class RecurrenceSizes:
    """The sizes of a recurrence before the split. A state is (heads, head_dim, state); groups of heads share B and C.

    Attributes:
        unit: The name of the heads in errors.
        is_mapped: True if a block of tokens maps an incoming state by a matrix (state, state) of each head, False if by a
            factor of each head or element.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    unit: str = "heads"
    is_mapped: bool = False


@dataclass(frozen=True)
class Workload:
    """The conditions under which sizes are computed.

    Attributes:
        itemsize: The bytes of an element.
        on_cuda: True with the kernels of mamba-ssm and causal-conv1d.
        amx: True on a CPU with AMX, where torch's attention in 16 bits copies keys and values.
        sequence_parallel: True if each rank has a share of the tokens between the layers.
        expert_ranks: The number of expert-parallel ranks.
    """

    ranks: int = 1
    itemsize: int = 4
    on_cuda: bool = False
    amx: bool = False
    sequence_parallel: bool = False
    expert_ranks: int = 1

    @property
    def wide_itemsize(self) -> int:
        return max(4, self.itemsize)

    @property
    def share(self) -> float:
        """The fraction of the tokens that a rank has between the layers."""
        return 1 / self.ranks if self.sequence_parallel else 1

    def norm(self, width: int) -> float:
        """The number of elements that a norm over `width` stores in training: input, normalized, output and a factor."""
        return (3 * width + 1) * self.share


@dataclass(frozen=True)
class Sizes:
    """The sizes of an operator on one rank.

    Attributes:
        state: In generation, the bytes of the fixed tensors of a sequence.
        keys: In generation, the bytes for each token of a sequence.
        stages: In prompts, {stage: the bytes for each token, in addition to the operator's input}.
        projected: In prompts, the bytes for each token between `project` and `mix`.
        stored: In training, the elements for each token that are stored from forward to backward.
        kept: The same with recomputation: sums over ranks, and the tensors of attention.
        gradients: In training, the peak of elements for each token in backward, minus the ones freed by then.
        weight_gradients: In training, the elements of gradients of weights that are not added to the sums of earlier
            micro-batches before the operator's backward ends.
        peaks: With recomputation, the peaks of functions that are recomputed one by one, including their stored elements.
        columns: Elements for each token of exact columns in the all-reduce of the unit.
        outputs: Elements for each token of further all-reduces in forward that may be quantized.
        inner: Elements for each token of exact all-reduces in forward.
        backward: Elements for each token of all-reduces in backward, except that of the unit's input.
        parameters: Elements of each all-reduce of gradients of parameters that several ranks hold.
        passed: With context ranks, the elements of a state.
        mapped: With context ranks, the elements of the matrix by which a block maps a state.
        convolved: With context ranks, the channels whose last inputs are passed.
        scan, attention: One token takes scan + attention * seq floating-point operations, except products with matrices.
        summed: With expert-parallel ranks that have the same tokens, the elements for each token in their sum.
        reached: With other tokens, the average number of these ranks that a token is sent to, including its own.
        dispatched, returned: The bytes of a token on its way to such a rank, and back.
        dispatched_gradients: The bytes of the gradient of a dispatched token; that of a returned one takes `returned`.
    """

    state: int = 0
    keys: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    projected: int = 0
    stored: float = 0
    kept: float = 0
    gradients: float = 0
    weight_gradients: int = 0
    peaks: tuple[float, ...] = ()
    columns: int = 0
    outputs: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    passed: int = 0
    mapped: int = 0
    convolved: int = 0
    summed: int = 0
    reached: float = 0
    dispatched: int = 0
    dispatched_gradients: int = 0
    returned: int = 0
    scan: int = 0
    attention: int = 0
