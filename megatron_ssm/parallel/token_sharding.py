"""The split of the tokens of one call, and of their keys and values, over context ranks.

A call reads a chunk of each sequence: all of it, or the continuation of an earlier chunk. A chunk is split like a sequence,
with padding at its end. The keys and values of a token stay on the rank that computed them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from commfabric.collectives import counted
from commfabric.collectives.wire_formats import at_least_fp32

from .blocks import ContextRanks


@dataclass(frozen=True)
class TokenSharding:
    """A chunk of `length` tokens of each sequence, split over the context ranks.

    Each rank has `local_length` positions. Positions of `length` or more are padding.
    """

    length: int
    local_length: int
    context: ContextRanks

    @cached_property
    def positions(self) -> torch.Tensor:
        """(local_length,) int64 on the CPU: this rank's positions in the chunk."""
        return self._positions_on(self.context.rank)

    def _positions_on(self, rank: int) -> torch.Tensor:
        block = self.local_length // self.context.blocks_per_rank
        return torch.cat([torch.arange(block) + number * block for number in self.context.blocks_of_rank(rank)])

    @property
    def is_token(self) -> torch.Tensor:
        """(local_length,) bool on the CPU: True at this rank's positions that are not padding."""
        return self.positions < self.length

    def counts(self) -> torch.Tensor:
        """(ranks,) int64: the number of tokens, without padding, on each rank."""
        return torch.stack([(self._positions_on(rank) < self.length).sum() for rank in range(self.context.size)])

    def mask_padding(self, step_sizes: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """step_sizes (batch, local_length, ...) with `value` at padding; 0 makes padding leave the state unchanged."""
        if self.local_length * self.context.size == self.length:  # no rank has padding
            return step_sizes
        padding = ~self.is_token.to(step_sizes.device).view(-1, *[1] * (step_sizes.ndim - 2))
        return step_sizes.masked_fill(padding, value)

    def gather_last(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """x (batch, local_length, n) at the last `count` tokens, or at all if there are fewer: (batch, count, n).

        The same on all ranks; no gradient. One all-reduce, in which only the rank that holds a token is not zero there.
        """
        count = min(count, self.length)
        where = self.positions - (self.length - count)
        is_wanted = (where >= 0) & (where < count)
        last = x.new_zeros(x.shape[0], count, *x.shape[2:], dtype=at_least_fp32(x.dtype))
        last[:, where[is_wanted].to(x.device)] = x.detach()[:, is_wanted.to(x.device)].to(last.dtype)
        return counted.all_reduce(last, self.context.group, self.context.counter).to(x.dtype)


@dataclass(frozen=True)
class KeyValuePlacement:
    """The ranks that store the keys and values of a call's tokens.

    Attributes:
        local_indices: (batch, tokens of this rank) int64 on the CPU: the index of each token among this rank's keys of its
            sequence, or -1 for a token that another rank stores.
        new_per_rank: (ranks, batch) int64, the same on all context ranks: the number of new keys on each of them.
    """

    local_indices: torch.Tensor
    new_per_rank: torch.Tensor

    @classmethod
    def of_sharded(cls, sharding: TokenSharding, kv_lengths: torch.Tensor) -> "KeyValuePlacement":
        """The placement of split tokens: a rank stores all tokens that it computes.

        kv_lengths: (ranks, batch), the number of keys on each rank before the call.
        """
        is_token = sharding.is_token
        index = is_token.cumsum(0) - 1 + kv_lengths[sharding.context.rank].unsqueeze(1)
        added = sharding.counts().unsqueeze(1).expand_as(kv_lengths)
        return cls(index.where(is_token, -1), added)

    @classmethod
    def of_replicated(cls, tokens: int, kv_lengths: torch.Tensor, rank: int) -> "KeyValuePlacement":
        """The placement of `tokens` replicated tokens per sequence: each is stored on the rank with the fewest keys."""
        after, owners = kv_lengths.clone(), []
        for _ in range(tokens):
            owners.append(after.argmin(0))  # the first such rank
            after[owners[-1], torch.arange(kv_lengths.shape[1])] += 1
        own = torch.stack(owners, 1) == rank
        index = own.cumsum(1) - 1 + kv_lengths[rank].unsqueeze(1)
        return cls(index.where(own, -1), after - kv_lengths)
