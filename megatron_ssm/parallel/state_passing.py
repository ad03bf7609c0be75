"""Passing the state of a recurrence from block to block of a sequence that is split over context ranks.

A block of the recurrence s_t = exp(dt_t A) s_{t-1} + u_t maps its incoming state H_b to

    H_{b+1} = E_b H_b + S_b,    E_b = exp(A D_b),    D_b = the sum of dt over the block,

where S_b is its final state from zeros. So other blocks need only its *summary* (S_b, D_b); D_b has one element per channel
or head. Backward is the same in reverse: Lambda_b = E_b Lambda_{b+1} + G_b, where Lambda_b is the gradient of the incoming
state of block b, and G_b the part of it that comes from the outputs of block b.

The recurrences of Mamba are elementwise in the state. In that of a gated delta net, E_b is a matrix (K, K) of each head,
which is passed in place of D_b. In both, channels are independent. So each rank receives an equal share of the channels of
all blocks in one exchange, computes the recurrence over the blocks, and returns the results in another exchange. (If a head
has one decay or one matrix, "channel" means head here.) The size of the messages does not depend on the length of the
sequence. With P ranks in zigzag order and states of s elements, a rank sends 2 (P-1)/P times 2 s and the D_b or E_b in
forward, and 2 (P-1)/P times 2 s in backward; in contiguous order half of that.
"""

from dataclasses import dataclass

import torch

from commfabric.collectives import counted

from .blocks import ContextRanks


@dataclass(frozen=True)
class ChannelPartition:
    """A split of the `count` channels of a recurrence over the context ranks; rank r has those of `of_rank(r)`."""

    count: int
    context: ContextRanks

    def of_rank(self, rank: int) -> slice:
        """The channels of a rank. They are consecutive, and their numbers differ by at most one between ranks."""
        size = self.context.size
        return slice(self.count * rank // size, self.count * (rank + 1) // size)

    @property
    def own(self) -> slice:
        return self.of_rank(self.context.rank)

    def blocks_to_channels(self, values: torch.Tensor) -> torch.Tensor:
        """(batch, blocks of a rank, channels, n) of this rank's blocks -> (blocks of the sequence, batch, own channels, n).

        Sends every other rank its channels.
        """
        context, parts = self.context, {}
        own = self.own.stop - self.own.start
        for rank in range(context.size):
            parts[rank] = values.new_empty(values.shape[0], context.blocks_per_rank, own, values.shape[3])
        parts[context.rank] = values[:, :, self.own]
        self._exchange({rank: values[:, :, self.of_rank(rank)] for rank in parts}, parts)
        whole = values.new_empty(context.blocks, values.shape[0], own, values.shape[3])
        for rank, part in parts.items():
            for place, block in enumerate(context.blocks_of_rank(rank)):
                whole[block] = part[:, place]
        return whole

    def channels_to_blocks(self, whole: torch.Tensor) -> torch.Tensor:
        """The inverse of `blocks_to_channels`; sends every other rank the values of its blocks."""
        context, parts, leaving = self.context, {}, {}
        for rank in range(context.size):
            leaving[rank] = whole[list(context.blocks_of_rank(rank))].transpose(0, 1)
            channels = self.of_rank(rank).stop - self.of_rank(rank).start
            parts[rank] = whole.new_empty(whole.shape[1], context.blocks_per_rank, channels, whole.shape[3])
        parts[context.rank] = leaving[context.rank]
        self._exchange(leaving, parts)
        return torch.cat(list(parts.values()), dim=2)

    def gather_channels(self, values: torch.Tensor) -> torch.Tensor:
        """(batch, own channels, n) of each rank -> (batch, channels, n), on every rank."""
        context = self.context
        parts = {}
        for rank in range(context.size):
            channels = self.of_rank(rank).stop - self.of_rank(rank).start
            parts[rank] = values.new_empty(values.shape[0], channels, values.shape[2])
        parts[context.rank] = values
        self._exchange(dict.fromkeys(parts, values), parts)
        return torch.cat(list(parts.values()), dim=1)

    def _exchange(self, leaving: dict[int, torch.Tensor], arriving: dict[int, torch.Tensor]) -> None:
        """Send leaving[r] to every other rank r, and receive into arriving[r]."""
        context = self.context
        others = [(context.rank + step) % context.size for step in range(1, context.size)]
        sends = [(leaving[rank], rank) for rank in others if leaving[rank].numel()]
        receives = [(arriving[rank], rank) for rank in reversed(others) if arriving[rank].numel()]
        counted.exchange(sends, receives, context.group, context.counter).wait()


class Decays:
    """E_b = exp(A D_b) of each block, elementwise.

    dt_sums: (blocks, batch, own channels, 1), D_b of all blocks. rates: (own channels, n or 1), A.
    """

    def __init__(self, dt_sums: torch.Tensor, rates: torch.Tensor):
        self.dt_sums, self.rates = dt_sums, rates

    def apply(self, block: int, state: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """E_b state + added."""
        return torch.addcmul(added, torch.exp(self.dt_sums[block] * self.rates), state)

    apply_transposed = apply


class Matrices:
    """E_b of each block for states (K, V). maps: (blocks, batch, own heads, K, K)."""

    def __init__(self, maps: torch.Tensor):
        self.maps = maps

    def apply(self, block: int, state: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """E_b state + added."""
        return added + self._product(self.maps[block], state)

    def apply_transposed(self, block: int, state: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """E_b^T state + added."""
        return added + self._product(self.maps[block].mT, state)

    @staticmethod
    def _product(matrix: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        with torch.autocast(state.device.type, enabled=False):  # states are at least fp32
            return (matrix @ state.unflatten(-1, (matrix.shape[-1], -1))).flatten(-2)


@dataclass
class PassedStates:
    """The incoming states of this rank's blocks, and the data with which backward passes their gradients.

    Attributes:
        partition: The split of the channels.
        incoming: (batch, blocks of a rank, channels, n), the incoming states.
        final: (batch, own channels, n), the final state of the sequence.
        maps: E_b of all blocks for own channels.
    """

    partition: ChannelPartition
    incoming: torch.Tensor
    final: torch.Tensor
    maps: Decays | Matrices

    def whole_final(self) -> torch.Tensor:
        """The final state of the sequence on every rank, (batch, channels, n); all ranks call it together."""
        return self.partition.gather_channels(self.final)

    def adjoints(self, gradients: torch.Tensor) -> torch.Tensor:
        """Lambda_{b+1} of this rank's blocks from their G_b, both (batch, blocks of a rank, channels, n)."""
        whole = self.partition.blocks_to_channels(gradients)
        adjoint = torch.zeros_like(whole[0])
        leaving = torch.empty_like(whole)
        for block in reversed(range(len(whole))):
            leaving[block] = adjoint
            adjoint = self.maps.apply_transposed(block, adjoint, whole[block])
        return self.partition.channels_to_blocks(leaving)


def pass_states(
    states: torch.Tensor,
    dt_sums: torch.Tensor,
    rates: torch.Tensor,
    context: ContextRanks,
    initial: torch.Tensor | None = None,
) -> PassedStates:
    """The incoming states of this rank's blocks, from the summaries of all blocks. No gradient.

    Args:
        states: (batch, blocks of a rank, channels, n), S_b of this rank's blocks.
        dt_sums: (batch, blocks of a rank, channels), D_b of this rank's blocks.
        rates: (channels, n or 1), A, the same on all ranks.
        initial: (batch, channels, n), the incoming state of the sequence; None: zeros.
    """
    partition = ChannelPartition(states.shape[2], context)
    whole = partition.blocks_to_channels(torch.cat([states, dt_sums.unsqueeze(-1)], dim=-1))
    maps = Decays(whole[..., -1:].clone(), rates[partition.own])
    return _passed(partition, whole[..., :-1], maps, initial)


def pass_matrix_states(
    states: torch.Tensor, maps: torch.Tensor, context: ContextRanks, initial: torch.Tensor | None = None
) -> PassedStates:
    """`pass_states` with matrices E_b: maps (batch, blocks of a rank, heads, K, K), and n = K V."""
    partition, size = ChannelPartition(states.shape[2], context), states.shape[-1]
    whole = partition.blocks_to_channels(torch.cat([states, maps.flatten(-2)], dim=-1))
    matrices = Matrices(whole[..., size:].clone().unflatten(-1, maps.shape[-2:]))
    return _passed(partition, whole[..., :size], matrices, initial)


def _passed(
    partition: ChannelPartition, summaries: torch.Tensor, maps: Decays | Matrices, initial: torch.Tensor | None
) -> PassedStates:
    """The incoming states of blocks, from S_b and E_b of all blocks for own channels."""
    state = torch.zeros_like(summaries[0]) if initial is None else initial[:, partition.own]
    entering = torch.empty_like(summaries, memory_format=torch.contiguous_format)
    for block in range(len(summaries)):
        entering[block] = state
        state = maps.apply(block, state, summaries[block])
    return PassedStates(partition, partition.channels_to_blocks(entering), state, maps)
