"""Decoding over sharded keys and values: every rank attends its own keys, and all ranks merge the results.

Tree attention (Shyam et al., 2024) does this with an all-reduce along a tree. Here an all-gather of the partial results, and
a merge in rank order, give the same bits on every rank.
"""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from attention2d.compute.tile import attend, empty_result, merge, tile_length
from attention2d.cost.volume import Volume
from attention2d.layout.attention_arguments import (
    cast_for_autocast,
    check_heads,
    check_scale,
    check_sizes,
    check_tensors,
    refuse_features,
)
from attention2d.layout.sharding import SequenceSharding
from commfabric.collectives.counted import all_gather, all_to_all

Tensor = torch.Tensor


class Tree(SequenceSharding):
    """Attention of a few queries, the same on every rank of `group`, to keys and values of which each rank holds a part.

    `attend_own` does the same for queries of which each rank has its own, as when a long prompt is continued. It has no
    gradient.

    Args:
        group: the ranks (None: one rank).
        order: how `shard` divides keys and values. Any other division gives the same result, because the order of keys does
            not matter to a query that sees all of them.
    """

    def __init__(self, group: ProcessGroup | None = None, order: str = "zigzag") -> None:
        super().__init__(group, order)

    def __repr__(self) -> str:
        return f"Tree(order={self.order!r})"

    def volume(self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Volume:
        """The bytes that each of P ranks sends for one query of each sequence: (P - 1) batch heads (head_dim + 1) a.

        a = max(4, itemsize) is the bytes of an element of a partial result. The number of keys, `seq`, does not matter.

        Raises:
            ValueError: a size is below 1 or kv_heads does not divide heads.
        """
        check_sizes(batch=batch, seq=seq, head_dim=head_dim, itemsize=itemsize)
        check_heads(heads, kv_heads)
        return Volume((self.ranks - 1) * batch * heads * (head_dim + 1) * max(4, itemsize), 0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, seq: int | None = None,
        return_lse: bool = False, lengths: Sequence[int] | None = None, **features: object,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """softmax(scale q k^T) v over the keys of all ranks.

        Sends the bytes of `volume` for each query by an all-gather.

        Args:
            q: (batch, queries, heads, head_dim), the same on every rank.
            k, v: (batch, local keys, kv_heads, head_dim). The number of local keys may differ between ranks and may be 0.
            causal: refused for more than one query, because the positions of the keys are not known.
            scale: of the scores (None: 1/sqrt(head_dim)).
            seq: the number of tokens that `shard` has divided, so that padding is left out (None: there is no padding).
            return_lse: return lse too.
            lengths: the number of this rank's first local keys that count in each sequence (None: all).
            features: as in `Attention2D`.

        Returns:
            out, with q's shape and dtype, and the same bits on every rank; with return_lse (out, lse). lse is (batch,
                queries, heads), in at least fp32. If no rank has a key, out is 0 and lse -inf.

        Raises:
            ValueError: as in `Attention2D`.
        """
        q, k, v = cast_for_autocast(q, k, v)
        self._check(lambda: self._arguments(q, k, v, causal, scale, seq, lengths, features), q)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            count = self._count_keys(k.shape[1], seq)
            part = _attend_local(q, k[:, :count], v[:, :count], scale, lengths)
            out, lse = _merged(all_gather(part, self.group, self.counter), q.dtype)
        return (out, lse) if return_lse else out

    def attend_own(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries and the keys of all ranks; every rank has queries of its own, equally many.

        Sends the queries to all ranks, and each rank's partial result for the queries of another rank to that rank:
        (P - 1) batch queries heads (head_dim itemsize + (head_dim + 1) a) bytes.

        Args:
            q: (batch, queries, heads, head_dim).
            k, v, scale, lengths: as in a call.
        """
        q, k, v = cast_for_autocast(q, k, v)
        self._check(lambda: self._arguments(q, k, v, False, scale, None, lengths, {}), q)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            queries = all_gather(q, self.group, self.counter)
            # (ranks, batch, queries, heads, head_dim + 1): this rank's partial results for the queries of each rank
            parts = torch.stack([_attend_local(query, k, v, scale, lengths) for query in queries])
            return _merged(all_to_all(parts, self.group, self.counter), q.dtype)

    def _arguments(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, seq: int | None,
        lengths: Sequence[int] | None, features: dict[str, object],
    ) -> dict[str, object]:  # fmt: skip
        """The values that must be equal on all ranks. Raises ValueError if an argument is wrong."""
        refuse_features(**features)
        check_tensors(q, k, v, same_length=False)
        check_heads(q.shape[2], k.shape[2])
        check_scale(scale)
        if causal and q.shape[1] > 1:
            raise ValueError(
                f"causal=True with {q.shape[1]} queries: Tree does not know positions; decode one token at a time"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise ValueError("Tree has no gradient: call it under torch.no_grad()")
        self._count_keys(k.shape[1], seq)
        if lengths is not None and (len(lengths) != len(k) or not all(0 <= n <= k.shape[1] for n in lengths)):
            raise ValueError(
                f"lengths={list(lengths)}: expected {len(k)} numbers from 0 to {k.shape[1]}, the local keys"
            )
        return {
            "schedule": self, "q": tuple(q.shape), "kv_heads": k.shape[2], "dtype": q.dtype, "scale": scale, "seq": seq,
        }  # fmt: skip

    def _count_keys(self, local: int, seq: int | None) -> int:
        """The number of this rank's `local` keys that are not padding."""
        if seq is None:
            return local
        return sum(segment.valid for segment in self._segments(local, self._sequence_length(local, seq)))


def _attend_local(q: Tensor, k: Tensor, v: Tensor, scale: float | None, lengths: Sequence[int] | None) -> Tensor:
    """The result of attending this rank's keys: [out | lse], (batch, queries, heads, head_dim + 1), in at least fp32."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # (queries or keys, batch, heads, head_dim)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = empty_result(q)
    rows = [(slice(None), len(k))]
    if lengths is not None and len(set(lengths)) == 1:
        rows = [(slice(None), lengths[0])]
    elif lengths is not None:
        rows = [(slice(row, row + 1), count) for row, count in enumerate(lengths)]
    for row, count in rows:
        keys, values = (t[:count, row] for t in (k, v))
        tiles = zip(*(t.split(tile_length(t)) for t in (keys, values)), strict=True) if count else ()
        for tile_keys, tile_values in tiles:
            merge(out[:, row], lse[:, row], *attend(q[:, row], tile_keys, tile_values, False, scale))
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1).transpose(0, 1)


def _merged(parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) from the results of all ranks, (ranks, *that of `_attend_local`), merged in rank order."""
    out, lse = parts[0, ..., :-1].contiguous(), parts[0, ..., -1].contiguous()
    for part in parts[1:]:
        merge(out, lse, part[..., :-1], part[..., -1])
    return out.to(dtype), lse
