"""Decoding over keys and values sharded over ranks: every rank attends its own keys, and the results are merged."""

import torch
from torch.distributed import ProcessGroup

from attention2d.compute.tile import attend, empty_result, merge, tile_length
from attention2d.cost.volume import Volume
from attention2d.layout.checks import (
    cast_for_autocast,
    check_heads,
    check_mask_and_scale,
    check_tensors,
    refuse_features,
)
from attention2d.layout.sharding import SequenceSharding
from sparsefusion.collectives.counted import all_gather

Tensor = torch.Tensor


class Tree(SequenceSharding):
    """Attention of a few queries, equal on every rank of `group`, to keys and values of which each rank holds its own.

    It has no gradient. order: how `shard` divides keys and values; other divisions are attended correctly too, because the
    order of keys does not matter to a query that sees all of them.
    """

    def __init__(self, group: ProcessGroup | None = None, order: str = "zigzag"):
        super().__init__(group, order)

    def __repr__(self):
        return f"Tree(order={self.order!r})"

    def volume(self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Volume:
        """Bytes that each rank sends for one query of each sequence: (P-1) (head_dim + 1) a for each head.

        a: bytes of an element in at least fp32. The number of keys does not matter.
        """
        check_heads(heads, kv_heads)
        return Volume((self.ranks - 1) * batch * heads * (head_dim + 1) * max(4, itemsize), 0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, seq: int | None = None,
        return_lse: bool = False, **features: object,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """softmax(scale q k^T) v over the keys of all ranks.

        q: (batch, queries, heads, head_dim), the same on every rank. k, v: (batch, local keys, kv_heads, head_dim); the
        number of local keys may differ between ranks and may be 0. causal: refused for more than one query, because the
        positions of the keys are not known. scale: None is 1/sqrt(head_dim). seq: the number of tokens that `shard` has
        divided, so that padding is left out (None: there is no padding). features: see `Attention2D`.

        Returns out like q, with the same bits on every rank, and with return_lse also lse (batch, queries, heads) in at
        least fp32. Where there is no key on any rank they are 0 and -inf. All-gathers `volume` bytes and, to compare the
        arguments, 16 bytes. ValueError on every rank if an argument is wrong on one of them or differs between
        them.
        """
        q, k, v = cast_for_autocast(q, k, v)
        self._compare_ranks(lambda: self._arguments(q, k, v, causal, scale, seq, features), q, k, v)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            out, lse = self._attend(q, k, v, scale, seq)
        return (out, lse) if return_lse else out

    def _attend(self, q, k, v, scale, seq):
        """Attend this rank's keys, gather every rank's result, and merge them in rank order."""
        k, v = (t[:, : self._count_keys(k.shape[1], seq)].transpose(0, 1) for t in (k, v))
        q, scale = q.transpose(0, 1), q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = empty_result(q)
        for keys, values in zip(*(t.split(tile_length(t)) for t in (k, v)), strict=True) if len(k) else ():
            merge(out, lse, *attend(q, keys, values, False, scale))
        parts = all_gather(torch.cat([out, lse.unsqueeze(-1)], dim=-1), self.group, self.counter)
        out, lse = parts[0, ..., :-1].contiguous(), parts[0, ..., -1].contiguous()
        for part in parts[1:]:
            merge(out, lse, part[..., :-1], part[..., -1])
        return out.to(q.dtype).transpose(0, 1), lse.transpose(0, 1)

    def _arguments(self, q, k, v, causal, scale, seq, features):
        """What must be equal on all ranks; ValueError for what does not fit."""
        refuse_features(**features)
        check_tensors(q, k, v, same_length=False)
        check_heads(q.shape[2], k.shape[2])
        check_mask_and_scale(causal, scale)
        if causal and q.shape[1] > 1:
            raise ValueError(
                f"causal=True with {q.shape[1]} queries: Tree knows no positions; decode one token at a time"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise ValueError("Tree has no gradient: call it under torch.no_grad()")
        self._count_keys(k.shape[1], seq)
        return repr(self), tuple(q.shape), k.shape[2], q.dtype, scale, seq

    def _count_keys(self, local: int, seq: int | None) -> int:
        """How many of this rank's `local` keys are not padding."""
        if seq is None:
            return local
        return sum(segment.valid for segment in self._segments(local, self._sequence_length(local, seq)))
