"""Masks of attention by blocks of queries and keys: which tiles of a kernel call are computed, and with which mask."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .token_order import KernelCall, Segment, positions, split_calls

MASKED_LENGTH = 256  # the most queries and keys of a tile that is computed with a mask

Tensor = torch.Tensor


@dataclass(frozen=True)
class BlockMask:
    """A mask of a sequence of `seq` tokens.

    Attributes:
        blocks: (batch or 1, query blocks, key blocks), bool, on the CPU. True where the queries of a block see the keys of a
            block. Each dimension divides the sequence into blocks of equal length; the last may be shorter.
    """

    blocks: Tensor
    seq: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch or 1, queries, keys): True where the query at a position sees the key at a position."""
        rows, cols = (self._block(positions, dim) for positions, dim in ((queries, 1), (keys, 2)))
        return self.blocks[:, rows][:, :, cols]

    def tiles(
        self, calls: Iterable[KernelCall], q: Sequence[Segment], kv: Sequence[Segment]
    ) -> Iterator[tuple[KernelCall, Tensor | None]]:
        """Divide kernel calls into tiles (call, visible), without those in which no query sees a key.

        `visible`, (batch or 1, queries, keys), includes the causal mask of its call; None: the mask hides nothing.

        Args:
            calls: The calls that `token_order.kernel_calls` returns for these segments.
            q, kv: The segments of the query buffer and of the key buffer.
        """
        queries, keys = positions(q), positions(kv)
        for call in calls:
            yield from self._divide(call, queries, keys)

    def _divide(self, call: KernelCall, queries: Tensor, keys: Tensor) -> Iterator[tuple[KernelCall, Tensor | None]]:
        """`tiles` of one call. queries, keys: the positions of the slots of the buffers."""
        rows, cols = queries[call.q], keys[call.kv]
        met = self.blocks[:, self._block(rows, 1).unique()][:, :, self._block(cols, 2).unique()]
        if not met.any():
            return
        longest = max(len(rows), len(cols))
        if met.all():
            yield call, None
        elif longest <= MASKED_LENGTH:
            visible = self.visible(rows, cols)
            yield KernelCall(call.q, call.kv, False), visible.tril() if call.causal else visible
        else:
            for part in split_calls([call], -(-longest // 2)):
                yield from self._divide(part, queries, keys)

    def _block(self, tokens: Tensor, dim: int) -> Tensor:
        """The number of the block, along dimension `dim` of `blocks`, that holds each token, given by its position."""
        return tokens // -(-self.seq // self.blocks.shape[dim])
