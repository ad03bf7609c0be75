"""Tokens that layers have read and that may be taken back: what advances the states by those that are kept.

A speculative call leaves conv and state of the cache as they are. `Cache.accept` then computes the states after the tokens
that are kept, by the recurrence alone, which takes little time beside the products with the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .cache import Cache


@dataclass(frozen=True)
class KeptTokens:
    """The first counts[i] >= 1 tokens of row i are kept, of a call with rows of the cache.

    longest: the most of a row. mask: (batch, longest) bool, True for the tokens that are kept; None if all rows keep as
    many. last: (batch, K-1) int64, with a mask, the places of the then last inputs in `PendingTokens.window`.
    """

    counts: Sequence[int]
    longest: int
    mask: torch.Tensor | None = None
    last: torch.Tensor | None = None

    @classmethod
    def of(cls, counts: Sequence[int], history: int, device: torch.device) -> "KeptTokens":
        """history: K-1."""
        longest = max(counts)
        if min(counts) == longest:
            return cls(counts, longest)
        column = torch.tensor(counts).unsqueeze(1)
        mask, last = torch.arange(longest) < column, torch.arange(history) + column
        return cls(counts, longest, mask.to(device), last.to(device))


class Pending(Protocol):
    """What a layer, or consecutive layers, have read without advancing their caches."""

    def check(self, cache: "Cache") -> None:
        """RuntimeError unless `advance_cache` is possible."""

    def advance_cache(self, cache: "Cache", layer: int, kept: KeptTokens) -> None:
        """Advance conv and state of cache.rows by the tokens that are kept. layer: the index of the first layer."""


@dataclass(frozen=True)
class PendingTokens:
    """What one layer has read.

    window: (batch, K-1 + seq, channels), the K-1 inputs of the convolution before the tokens, and theirs. advance: a
    function of the tokens to keep and of the state before them, which it may overwrite; it returns the state after them.
    """

    window: torch.Tensor
    advance: Callable[[KeptTokens, torch.Tensor], torch.Tensor]

    def check(self, cache: "Cache") -> None:
        """See `Pending`: it is always possible."""

    def advance_cache(self, cache: "Cache", layer: int, kept: KeptTokens) -> None:
        """See `Pending`."""
        window, held, rows = self.window, cache.layers[layer], cache.rows
        if kept.last is None:
            conv = window[:, kept.longest : kept.longest + held.conv.shape[1]]
        else:
            conv = window.gather(1, kept.last.unsqueeze(-1).expand(-1, -1, window.shape[2]))
        held.update(conv, self.advance(kept, held.state[rows]), rows)
