"""Passing the state of a recurrence from block to block of a sequence that is spread over context ranks.

A block of the recurrence s_t = exp(dt_t A) s_{t-1} + u_t maps its incoming state H_b to

    H_{b+1} = E_b H_b + S_b,    E_b = exp(A D_b),    D_b = the sum of dt over the block,

where S_b is its final state from zeros. So its *summary* (S_b, D_b) is all that other blocks need of it; D_b has one number
per channel or head. Backward is the same in reverse: Lambda_b = E_b Lambda_{b+1} + G_b, where Lambda_b is the
gradient of the state that enters block b, and G_b the part of it that comes from the outputs of block b.

Both recurrences are elementwise in the state. So each rank takes an equal share of the *units* (channels of Mamba-1, heads
of Mamba-2) of all blocks, in one exchange, computes the recurrence over the blocks, and returns the results, in another one.
What a rank sends does not depend on the length of the sequence: with P ranks, (P-1)/P of four states forward and backward.
"""

from dataclasses import dataclass

import torch

from sparsefusion.collectives import counted

from .blocks import ContextRanks


@dataclass(frozen=True)
class Units:
    """The division of a recurrence's units over the context ranks: `count` units, rank r has those of `share(r)`."""

    count: int
    context: ContextRanks

    def share(self, rank: int) -> slice:
        """The units of a rank: consecutive ones, and as many as others have, or one more or less."""
        size = self.context.size
        return slice(self.count * rank // size, self.count * (rank + 1) // size)

    @property
    def own(self) -> slice:
        """The units of this rank."""
        return self.share(self.context.rank)

    def gather_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """(batch, blocks of a rank, units, n) of this rank's blocks -> (blocks of the sequence, batch, own units, n).

        Sends every other rank its units.
        """
        context, parts = self.context, {}
        own = self.own.stop - self.own.start
        for rank in range(context.size):
            parts[rank] = values.new_empty(values.shape[0], context.blocks_per_rank, own, values.shape[3])
        parts[context.rank] = values[:, :, self.own]
        self._swap({rank: values[:, :, self.share(rank)] for rank in parts}, parts)
        whole = values.new_empty(context.blocks, values.shape[0], own, values.shape[3])
        for rank, part in parts.items():
            for place, block in enumerate(context.held_by(rank)):
                whole[block] = part[:, place]
        return whole

    def return_blocks(self, whole: torch.Tensor) -> torch.Tensor:
        """The inverse of `gather_blocks`; sends every other rank the values of its blocks."""
        context, parts, leaving = self.context, {}, {}
        for rank in range(context.size):
            leaving[rank] = whole[list(context.held_by(rank))].transpose(0, 1)
            units = self.share(rank).stop - self.share(rank).start
            parts[rank] = whole.new_empty(whole.shape[1], context.blocks_per_rank, units, whole.shape[3])
        parts[context.rank] = leaving[context.rank]
        self._swap(leaving, parts)
        return torch.cat(list(parts.values()), dim=2)

    def gather_units(self, values: torch.Tensor) -> torch.Tensor:
        """(batch, own units, n) of each rank -> (batch, units, n), on every rank."""
        context = self.context
        parts = {}
        for rank in range(context.size):
            units = self.share(rank).stop - self.share(rank).start
            parts[rank] = values.new_empty(values.shape[0], units, values.shape[2])
        parts[context.rank] = values
        self._swap(dict.fromkeys(parts, values), parts)
        return torch.cat(list(parts.values()), dim=1)

    def _swap(self, leaving: dict[int, torch.Tensor], arriving: dict[int, torch.Tensor]) -> None:
        """Send leaving[r] to every other rank r, and fill arriving[r] with what comes from it."""
        context = self.context
        others = [(context.rank + step) % context.size for step in range(1, context.size)]
        sends = [(leaving[rank], rank) for rank in others if leaving[rank].numel()]
        receives = [(arriving[rank], rank) for rank in reversed(others) if arriving[rank].numel()]
        counted.exchange(sends, receives, context.group, context.counter).wait()


@dataclass
class PassedStates:
    """The states that enter this rank's blocks, and what backward needs to pass their gradients.

    incoming: (batch, blocks of a rank, units, n). final: (batch, own units, n), of the whole sequence. dt_sums: D_b of all
    blocks for own units, (blocks, batch, own units, 1). rates: A of own units, (own units, n or 1).
    """

    units: Units
    incoming: torch.Tensor
    final: torch.Tensor
    dt_sums: torch.Tensor
    rates: torch.Tensor

    def whole_final(self) -> torch.Tensor:
        """The final state of the sequence on every rank, (batch, units, n); all ranks call it together."""
        return self.units.gather_units(self.final)

    def adjoints(self, gradients: torch.Tensor) -> torch.Tensor:
        """Lambda_{b+1} for each of this rank's blocks from their G_b, both (batch, blocks of a rank, units, n)."""
        whole = self.units.gather_blocks(gradients)
        adjoint = torch.zeros_like(whole[0])
        leaving = torch.empty_like(whole)
        for block in reversed(range(len(whole))):
            leaving[block] = adjoint
            adjoint = torch.addcmul(whole[block], torch.exp(self.dt_sums[block] * self.rates), adjoint)
        return self.units.return_blocks(leaving)


def pass_states(
    states: torch.Tensor,
    dt_sums: torch.Tensor,
    rates: torch.Tensor,
    context: ContextRanks,
    initial: torch.Tensor | None = None,
) -> PassedStates:
    """The states that enter this rank's blocks, from the summaries of all blocks. No gradient.

    states: (batch, blocks of a rank, units, n), S_b of this rank's blocks. dt_sums: (batch, blocks of a rank, units), their
    D_b. rates: A, (units, n or 1), the same on all ranks. initial: (batch, units, n), the state that enters the sequence
    (None: zeros).
    """
    units = Units(states.shape[2], context)
    packed = torch.cat([states, dt_sums.unsqueeze(-1)], dim=-1)
    whole = units.gather_blocks(packed)
    summaries, sums, rates = whole[..., :-1], whole[..., -1:].clone(), rates[units.own]
    state = torch.zeros_like(summaries[0]) if initial is None else initial[:, units.own]
    entering = torch.empty_like(summaries, memory_format=torch.contiguous_format)
    for block in range(len(summaries)):
        entering[block] = state
        state = torch.addcmul(summaries[block], torch.exp(sums[block] * rates), state)
    return PassedStates(units, units.return_blocks(entering), state, sums, rates)
