"""A description, for the operators, of the tokens of one call of the model."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ssm.context.token_sharding import KeyValuePlacement, TokenSharding

EVERY_ROW = slice(None)

Rows = slice | torch.Tensor  # rows of a cache: consecutive ones, or (batch,) int64 indices


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of one call in their sequences; the same for all layers.

    new: (batch, seq) int64, the position of each token; padding is not counted, and has negative positions. longest: the
    most keys that a row has after the call. causal: whether a query sees only the keys up to its own position. mask:
    (batch or 1, 1, seq, keys) bool, True where a query may look; None: `causal` decides alone.
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

        starts: (batch,) int64 on the CPU, how many tokens each row has read; None: there is no cache. mask: (batch, seq, 1),
        0 at padding; None: no padding.
        """
        padding = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask == 0).sum((1, 2)).cpu()
        has_cache = starts is not None
        starts = torch.zeros(batch, dtype=torch.int64) if starts is None else starts
        longest = max((starts + seq - padding).tolist(), default=seq) if has_cache else seq
        new = (torch.arange(seq) + (starts - padding).unsqueeze(1)).to(device)
        if mask is None and (starts == starts[:1]).all() and (seq == 1 or not starts.any()):
            return cls(new, longest, seq > 1, None)
        keys = torch.arange(longest, device=device).expand(batch, -1) if has_cache else new
        seen = (keys.unsqueeze(1) <= new.clamp(min=0).unsqueeze(2)) & (keys >= 0).unsqueeze(1)  # padding sees token 0
        return cls(new, longest, False, seen.unsqueeze(1))

    @classmethod
    def of_sharded(
        cls, sharding: TokenSharding, starts: torch.Tensor | None, batch: int, device: torch.device
    ) -> "Positions":
        """The positions of this rank's tokens of a chunk that context ranks share; starts: as for `of`."""
        starts = torch.zeros(batch, dtype=torch.int64) if starts is None else starts
        new = sharding.positions + starts.unsqueeze(1)
        return cls(new.to(device), max(starts.tolist(), default=0) + sharding.length, True, None)

    @classmethod
    def of_one(cls, new: torch.Tensor, keys: int) -> "Positions":
        """The positions in a call with one token per row, at `new` (batch, 1), which sees itself and the keys before it.

        keys: at least as many as each row has. The host and the GPU exchange no values, so a CUDA graph can capture this.
        """
        seen = torch.arange(keys, device=new.device) <= new.unsqueeze(2)
        return cls(new, keys, False, seen.unsqueeze(1))


@dataclass(frozen=True)
class Call:
    """The tokens of one call of the model.

    mask: (batch, seq, 1), 0 at padding; None: there is no padding. decoding: whether the tokens continue sequences one by
    one (some operators clamp step sizes only in prompts). rows: the rows of the cache that are continued; consecutive ones
    are a slice, which needs no copy. positions: those of the tokens, in models with attention. begins: whether all rows are
    empty.

    sharding: how the tokens are sharded over context ranks (None: every rank has all of them). placement: in models with
    attention and with a cache that context ranks share, where the keys and values are kept. lengths: how many keys and
    values this rank then holds of each sequence, before the call.

    speculative: whether the tokens may be taken back; see `Cache.accept`. routing: what routers of experts report to, an
    `operators.routing.Routing`. same_tokens: whether ranks that divide the experts are known to have the same tokens, which
    then are not sent to each other.
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
