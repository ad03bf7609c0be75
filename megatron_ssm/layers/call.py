"""A description, for the operators, of the tokens of one call of the model."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ssm.parallel.token_sharding import KeyValuePlacement, TokenSharding

EVERY_ROW = slice(None)

Rows = slice | torch.Tensor  # rows of a cache: consecutive ones, or (batch,) int64 indices


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of one call in their sequences; the same for all layers.

    Attributes:
        new: (batch, seq) int64, the position of each token. Padding is not counted, and has negative positions.
        longest: The largest number of keys of a row after the call.
        causal: True if a query attends only to the keys up to its own position.
        mask: (batch or 1, 1, seq, keys) bool, True where a query may attend. None: only `causal` limits it.
    """

    new: torch.Tensor
    longest: int
    causal: bool
    mask: torch.Tensor | None

    @classmethod
    def of(
        cls, starts: torch.Tensor | None, batch: int, seq: int, mask: torch.Tensor | None, device: torch.device
    ) -> "Positions":
        """The positions in a call with `seq` new tokens per row.

        Args:
            starts: (batch,) int64 on the CPU, the number of tokens that each row has read; None without a cache.
            batch, seq: The shape of the new tokens.
            mask: (batch, seq, 1), 0 at padding; None without padding.
            device: The device of the result.
        """
        padding = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask == 0).sum((1, 2)).cpu()
        has_cache = starts is not None
        starts = torch.zeros(batch, dtype=torch.int64) if starts is None else starts
        longest = max((starts + seq - padding).tolist(), default=seq) if has_cache else seq
        new = (torch.arange(seq) + (starts - padding).unsqueeze(1)).to(device)
        if mask is None and (starts == starts[:1]).all() and (seq == 1 or not starts.any()):
            return cls(new, longest, seq > 1, None)
        keys = torch.arange(longest, device=device).expand(batch, -1) if has_cache else new
        seen = (keys.unsqueeze(1) <= new.clamp(min=0).unsqueeze(2)) & (keys >= 0).unsqueeze(
            1
        )  # padding attends to token 0
        return cls(new, longest, False, seen.unsqueeze(1))

    @classmethod
    def of_sharded(
        cls, sharding: TokenSharding, starts: torch.Tensor | None, batch: int, device: torch.device
    ) -> "Positions":
        """The positions of this rank's tokens of a chunk that is split over context ranks. starts: as for `of`."""
        starts = torch.zeros(batch, dtype=torch.int64) if starts is None else starts
        new = sharding.positions + starts.unsqueeze(1)
        return cls(new.to(device), max(starts.tolist(), default=0) + sharding.length, True, None)

    @classmethod
    def of_one(cls, new: torch.Tensor, keys: int) -> "Positions":
        """The positions in a call with one token per row, at `new` (batch, 1). The token attends to all keys up to its own.

        keys: An upper bound of the keys of a row. Host and GPU exchange no values, so a CUDA graph can capture this.
        """
        seen = torch.arange(keys, device=new.device) <= new.unsqueeze(2)
        return cls(new, keys, False, seen.unsqueeze(1))


@dataclass(frozen=True)
class Call:
    """The tokens of one call of the model.

    Attributes:
        mask: (batch, seq, 1), 0 at padding; None without padding.
        decoding: True if the tokens continue sequences one by one. Some operators clamp step sizes only in prompts.
        rows: The rows of the cache that are continued. Consecutive rows are a slice, which needs no copy.
        positions: The positions of the tokens, in models with attention.
        begins: True if all rows are empty.
        sharding: The split of the tokens over context ranks; None if every rank has all of them.
        placement: The context ranks that store the new keys and values, in models with attention and a split cache.
        lengths: The number of keys and values that this rank holds of each sequence before the call, with `placement`.
        speculative: True if tokens may be rejected; see `Cache.accept`.
        routing: The `layers.routing.Routing` to which routers of experts report; or None.
        same_tokens: True if all expert-parallel ranks have the same tokens, so that they need not exchange tokens.
    """

    mask: torch.Tensor | None = None
    decoding: bool = False
    rows: Rows = field(default_factory=lambda: EVERY_ROW)
    positions: Positions | None = None
    begins: bool = False
    sharding: TokenSharding | None = None
    placement: KeyValuePlacement | None = None
    lengths: list[int] | None = None
    speculative: bool = False
    routing: Any = None
    same_tokens: bool = False
