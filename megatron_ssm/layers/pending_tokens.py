"""Tokens that layers have read and that may be taken back: what advances the states by those that are kept.

A speculative call leaves conv and state of the cache as they are. `Cache.accept` then computes the states after the tokens
that are kept, by the recurrence alone, which takes little time beside the products with the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptTokens:
    """Which of the first `longest` tokens of a call to keep: mask (batch, longest) bool, True for the first ones of a row.

    None: all of them. last: (batch, K-1) int64, with a mask, the places of the then last inputs in `PendingTokens.window`.
    """

    longest: int
    mask: torch.Tensor | None
    last: torch.Tensor | None

    @classmethod
    def of(cls, counts: torch.Tensor, history: int, device: torch.device) -> "KeptTokens":
        """The first counts[i] tokens of row i. history: K-1."""
        longest = int(counts.max())
        if (counts == longest).all():
            return cls(longest, None, None)
        counts = counts.unsqueeze(1)
        mask, last = torch.arange(longest) < counts, torch.arange(history) + counts
        return cls(longest, mask.to(device), last.to(device))


@dataclass(frozen=True)
class PendingTokens:
    """Tokens that a layer has read, whose effect on its state is still open.

    window: (batch, K-1 + seq, channels), the K-1 inputs of the convolution before the tokens, and theirs. advance: a
    function of the tokens to keep and of the state before them, which it may overwrite; it returns the state after them.
    """

    window: torch.Tensor
    advance: Callable[[KeptTokens, torch.Tensor], torch.Tensor]
