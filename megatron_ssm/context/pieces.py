"""The tokens of one call of a model, when context ranks share them: which of them are real, and where each rank keeps them.

A call reads a piece of each sequence: all of it, or what follows an earlier piece. A piece is divided over the context ranks
as a sequence of its own, padded at its end. The keys and values of a token stay on the rank that computed them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsefusion.collectives import counted
from sparsefusion.collectives.wire_formats import at_least_fp32

from .blocks import ContextRanks


@dataclass(frozen=True)
class Piece:
    """The division of a piece of `length` tokens: each rank has `slots` positions; those of `length` or more are padding.

    All sequences of the batch have pieces of this length.
    """

    length: int
    slots: int
    context: ContextRanks

    @cached_property
    def positions(self) -> torch.Tensor:
        """(slots,) int64 on the CPU: this rank's positions in the piece; those of padding are `length` or more."""
        return self._positions_on(self.context.rank)

    def _positions_on(self, rank: int) -> torch.Tensor:
        block = self.slots // self.context.blocks_per_rank
        return torch.cat([torch.arange(block) + number * block for number in self.context.held_by(rank)])

    @property
    def is_padded(self) -> bool:
        """Whether any rank has padding."""
        return self.slots * self.context.size > self.length

    @property
    def real(self) -> torch.Tensor:
        """(slots,) bool on the CPU: which of this rank's slots hold tokens of the sequence."""
        return self.positions < self.length

    def counts(self) -> torch.Tensor:
        """(ranks,) int64: how many tokens of the sequence each rank holds."""
        return torch.stack([(self._positions_on(rank) < self.length).sum() for rank in range(self.context.size)])

    def mask_padding(self, step_sizes: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """step_sizes (batch, slots, ...), with `value` in the padding; with 0, padding does not change the state."""
        if not self.is_padded:
            return step_sizes
        padding = ~self.real.to(step_sizes.device).view(-1, *[1] * (step_sizes.ndim - 2))
        return step_sizes.masked_fill(padding, value)

    def last(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """x (batch, slots, n) at the last `count` tokens, or at all if there are fewer, on every rank: (batch, count, n).

        No gradient. One all-reduce, in which every token comes from the rank that holds it.
        """
        count = min(count, self.length)
        where = self.positions - (self.length - count)
        is_wanted = (where >= 0) & (where < count)
        last = x.new_zeros(x.shape[0], count, *x.shape[2:], dtype=at_least_fp32(x.dtype))
        last[:, where[is_wanted].to(x.device)] = x.detach()[:, is_wanted.to(x.device)].to(last.dtype)
        return counted.all_reduce(last, self.context.group, self.context.counter).to(x.dtype)


@dataclass(frozen=True)
class Places:
    """Where the keys and values of a call's tokens are kept.

    local: (batch, tokens of this rank) int64, on the CPU: the index of each among the keys that this rank holds of its
    sequence, and -1 for a token that it does not keep. added: (ranks, batch) int64: how many each rank keeps.
    """

    local: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of_piece(cls, piece: Piece, held: torch.Tensor) -> "Places":
        """Places for a piece: a rank keeps all tokens that it computes. held: (ranks, batch), how many it held before."""
        real = piece.real
        index = real.cumsum(0) - 1 + held[piece.context.rank].unsqueeze(1)
        added = piece.counts().unsqueeze(1).expand_as(held)
        return cls(index.where(real, -1), added)

    @classmethod
    def of_whole(cls, tokens: int, held: torch.Tensor, rank: int) -> "Places":
        """Places for `tokens` tokens per sequence that every rank computes: each goes to the rank that holds the fewest."""
        after, owners = held.clone(), []
        for _ in range(tokens):
            owners.append(after.argmin(0))  # the first of several
            after[owners[-1], torch.arange(held.shape[1])] += 1
        own = torch.stack(owners, 1) == rank
        index = own.cumsum(1) - 1 + held[rank].unsqueeze(1)
        return cls(index.where(own, -1), after - held)
