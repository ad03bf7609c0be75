"""The blocks of a sequence that context ranks share: their owners, and messages from one block to the next.

A sequence is cut into blocks of equal length. In zigzag order (that of Megatron and attention2d) there are two blocks for
each of the P ranks, and rank p holds blocks p and 2P-1-p; in contiguous order there is one, and rank p holds block p. A rank
computes its blocks as separate sequences: activations are (batch * blocks of a rank, block length, ...). The blocks of a
sequence are consecutive, so (batch, tokens of a rank, ...) can be viewed in this shape without a copy.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives import counted
from commfabric.collectives.counted import Counter

from .recomputation import Recomputation

BLOCKS_PER_RANK = {"zigzag": 2, "contiguous": 1}


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share each sequence. ValueError for an order in which a rank's tokens are not blocks.

    Attributes:
        group: The process group; None for one rank.
        counter: A counter of the messages of this rank.
        order: The order of blocks, "zigzag" or "contiguous".
        recomputation: Stores the results of communication if activations are recomputed.
        exchanges_channels: True if scans without a cache exchange channels instead of states (`channel_exchange`).
    """

    group: ProcessGroup | None
    counter: Counter
    order: str = "zigzag"
    recomputation: Recomputation = field(default_factory=Recomputation)
    exchanges_channels: bool = False

    def __post_init__(self) -> None:
        if self.order not in BLOCKS_PER_RANK:
            orders = " or ".join(BLOCKS_PER_RANK)
            raise ValueError(f"state-space layers need a sequence in {orders} order, not in {self.order} order")

    def __deepcopy__(self, memo: dict) -> "ContextRanks":
        return self  # process groups are handles

    @cached_property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @cached_property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @cached_property
    def blocks_per_rank(self) -> int:
        return BLOCKS_PER_RANK[self.order] if self.size > 1 else 1

    @cached_property
    def blocks(self) -> int:
        return self.blocks_per_rank * self.size

    def blocks_of_rank(self, rank: int) -> tuple[int, ...]:
        """The blocks of a rank, in the order of its tokens."""
        return (rank, self.blocks - 1 - rank)[: self.blocks_per_rank]

    def rank_of_block(self, block: int) -> tuple[int, int]:
        """(the rank that holds a block, the index of the block on this rank)."""
        return (block, 0) if block < self.size else (self.blocks - 1 - block, 1)

    def to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens of this rank, ...) -> (batch * blocks of this rank, block length, ...); a view if x has no gaps."""
        return x.reshape(x.shape[0] * self.blocks_per_rank, x.shape[1] // self.blocks_per_rank, *x.shape[2:])

    def from_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // self.blocks_per_rank, x.shape[1] * self.blocks_per_rank, *x.shape[2:])


def shift(values: torch.Tensor, context: ContextRanks, step: int) -> torch.Tensor:
    """Send the value of each block to the block `step` (1 or -1) further in the sequence.

    values: (batch, blocks of a rank, ...), one value for each block. Returns, in the same shape, the value of the block
    before (step 1) or after (step -1) each of this rank's blocks, or zeros at the ends of the sequence. Sends each value
    to a neighbouring rank, unless this rank holds both blocks.
    """
    received = torch.zeros_like(values, memory_format=torch.contiguous_format)
    sends, receives, arriving = [], [], []
    for place, block in enumerate(context.blocks_of_rank(context.rank)):
        if 0 <= block + step < context.blocks:
            rank, other_place = context.rank_of_block(block + step)
            if rank == context.rank:
                received[:, other_place] = values[:, place]
            else:
                sends.append((values[:, place], rank))
        if 0 <= block - step < context.blocks and (source := context.rank_of_block(block - step)[0]) != context.rank:
            arriving.append((place, torch.empty_like(received[:, place], memory_format=torch.contiguous_format)))
            receives.append((arriving[-1][1], source))
    counted.exchange(sends, receives, context.group, context.counter).wait()
    for place, value in arriving:
        received[:, place] = value
    return received


class _Halo(torch.autograd.Function):
    """`shift` by one block in forward; backward returns each gradient to the block before."""

    @staticmethod
    def forward(ctx, tails, context):
        ctx.context = context
        return context.recomputation.communicate_once(lambda: shift(tails, context, 1))

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, ctx.context, -1), None


def halo(x: torch.Tensor, width: int, context: ContextRanks, history: torch.Tensor | None = None) -> torch.Tensor:
    """The `width` inputs before each block of this rank: (batch * blocks of a rank, width, channels).

    Sends at most two messages of batch * width * channels elements, one to each neighbouring rank; backward sends their
    gradients in the opposite direction.

    Args:
        x: (batch * blocks of a rank, block length, channels), the input of a causal convolution of width + 1 taps.
        width: The number of inputs.
        history: (batch, width, channels), the inputs before the sequence; None: zeros. It gets no gradient.
    """
    tails = x[:, x.shape[1] - width :].unflatten(0, (-1, context.blocks_per_rank))
    before = _Halo.apply(tails, context) if torch.is_grad_enabled() else shift(tails, context, 1)
    if history is not None and context.rank == 0:
        before = torch.cat([history.detach().to(before.dtype).unsqueeze(1), before[:, 1:]], dim=1)
    return before.flatten(0, 1)


def check_block_length(tokens: int, width: int, context: ContextRanks) -> None:
    """ValueError unless blocks are at least as long as the halo, so that it comes from one block.

    tokens: The number of tokens of this rank. width: The width of the halo.
    """
    if tokens % context.blocks_per_rank:
        raise ValueError(f"zigzag order has two equal blocks on each rank, and {tokens} local tokens are odd")
    _check_length(tokens // context.blocks_per_rank, tokens * context.size, width, context.size)


def check_sequence_length(seq: int, ranks: int, width: int) -> None:
    """`check_block_length` for sequences of `seq` tokens that are padded to two equal blocks on each of `ranks` ranks."""
    _check_length(-(-seq // (2 * ranks)), seq, width, ranks)


def _check_length(length: int, seq: int, width: int, ranks: int) -> None:
    if length < width and ranks > 1:
        raise ValueError(
            f"{seq} tokens over {ranks} context ranks make blocks of {length}, "
            f"shorter than the convolution's halo of {width}"
        )
