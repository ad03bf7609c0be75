"""The work, memory and messages of an operator on one rank, as numbers that `sizing` and `advice` add up."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Logits of a rank that the loss computes piece by piece, and of a piece
LARGE_LOGITS, LOGITS_PIECE = 2**27, 2**24


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of an attention before it is split over tensor-parallel ranks."""

    heads: int
    kv_heads: int
    head_dim: int

    def on_ranks(self, ranks: int) -> "AttentionSizes":
        """The heads of one of `ranks` tensor-parallel ranks, of which several may hold the same key/value head."""
        return AttentionSizes(self.heads // ranks, max(1, self.kv_heads // ranks), self.head_dim)


@dataclass(frozen=True)
class RecurrenceSizes:
    """The sizes of a recurrence before it is split. A state is (heads, head_dim, state); groups of heads share B and C.

    unit: what the heads are called in errors. is_mapped: whether a block maps an incoming state by a matrix (state, state)
    of each head, and not by a factor of each head or number.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    unit: str = "heads"
    is_mapped: bool = False


@dataclass(frozen=True)
class Workload:
    """The workload whose sizes are computed: one of `ranks` tensor-parallel ranks, with elements of `itemsize` bytes.

    on_cuda: with the kernels of mamba-ssm and causal-conv1d. amx: on a CPU with AMX, where torch's attention in 16 bits
    copies keys and values. sequence_parallel: each rank has a share of the tokens between the layers. expert_ranks: those
    that divide the experts.
    """

    ranks: int = 1
    itemsize: int = 4
    on_cuda: bool = False
    amx: bool = False
    sequence_parallel: bool = False
    expert_ranks: int = 1

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element in at least fp32."""
        return max(4, self.itemsize)

    @property
    def share(self) -> float:
        """The share of the tokens that a rank has between the layers."""
        return 1 / self.ranks if self.sequence_parallel else 1

    def norm(self, width: int) -> float:
        """The numbers that a norm over `width` stores in training: input, normalized input, output and one factor."""
        return (3 * width + 1) * self.share


@dataclass(frozen=True)
class Sizes:
    """The sizes of an operator on one rank.

    Generation, in bytes: state, of one sequence, whatever its length; keys, of each token of a sequence; stages, {stage: of
    one token of a prompt, besides the operator's input}; projected, what waits of one token while other operators of the
    unit compute.

    Training, in numbers for each token of the rank: stored from forward to backward; kept, the same where activations are
    recomputed (sums over ranks, and what attention stores); gradients, the most that exists in backward minus what is freed
    by then. peaks: the same of functions that are recomputed one by one, everything included.

    Messages, in numbers for each token: columns, exact ones in the sum of the unit; outputs, of further sums that may be
    quantized; inner, of exact sums; backward, of sums in backward besides that of the unit's input. parameters: numbers of
    each sum of gradients of parameters that several ranks hold.

    Context ranks: passed, the numbers of a state; mapped, those of the matrix by which a block maps one; convolved, the
    channels whose last inputs are passed.

    Expert-parallel ranks: summed, the numbers of a token in their sum if they have the same tokens. Otherwise a token goes
    to `reached` of them on average, this rank included, in `dispatched` bytes, and comes back in `returned` ones; so do
    their gradients, in `returned` and `dispatched_gradients` bytes.

    operations(seq): floating-point operations for one token, besides products with matrices, are scan + attention * seq.
    """

    state: int = 0
    keys: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    projected: int = 0
    stored: float = 0
    kept: float = 0
    gradients: float = 0
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
