"""Decoding over keys and values that are spread over ranks: every rank attends to its own, and the results are merged."""

import torch

from attention2d.compute.tile import attend, merge, of_no_keys, tile_length
from attention2d.cost.volume import Volume
from attention2d.layout.checks import autocast, check_heads, check_options, check_tensors, refuse
from attention2d.layout.spread import Spread
from sparsefusion.collectives.counted import all_gather


class Tree(Spread):
    """Attention of a few queries, the same on every rank of `group`, to keys and values of which each rank has its own.

    There is no gradient. order: how `shard` divides the keys; those of any other division are attended to as well.
    """

    def __init__(self, group=None, order="zigzag"):
        super().__init__(group, order)

    def __repr__(self):
        return f"Tree(order={self.order!r})"

    def volume(self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Volume:
        """Bytes that each rank sends for one query of each sequence, whatever the number of keys: (P-1) (head_dim + 1) a.

        For each sequence and head; a: bytes of a number that is at least fp32.
        """
        check_heads(heads, kv_heads)
        return Volume((self.ranks - 1) * batch * heads * (head_dim + 1) * max(4, itemsize), 0)

    def __call__(self, q, k, v, causal=False, scale=None, seq=None, return_lse=False, **features):
        """softmax(scale q k^T) v over the keys of all ranks.

        q: (batch, queries, heads, head_dim), whole on every rank; k, v: (batch, this rank's keys, kv_heads, head_dim), as
        many as there are, also none. causal: refused for more than one query, whose own keys nobody knows. seq: how many
        tokens `shard` has divided: then padding is left out (None: there is none). Returns out like q, the same bits on
        every rank, and if asked for lse (batch, queries, heads); where there is no key at all, zeros and -inf.

        features: refused by name. Gathers `volume` and 16 bytes of agreement. ValueError on every rank as `Attention2D`'s.
        """
        q, k, v = autocast(q, k, v)
        self._agree(q, lambda: self._asked(q, k, v, causal, scale, seq, features))
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            out, lse = self._attend(q, k, v, scale, seq)
        return (out, lse) if return_lse else out

    def _attend(self, q, k, v, scale, seq):
        k, v = (t[:, : self._keys(k.shape[1], seq)].transpose(0, 1) for t in (k, v))
        q, scale = q.transpose(0, 1), q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = of_no_keys(q)
        for keys, values in zip(*(t.split(tile_length(t)) for t in (k, v)), strict=True) if len(k) else ():
            merge(out, lse, *attend(q, keys, values, False, scale))
        parts = all_gather(torch.cat([out, lse.unsqueeze(-1)], dim=-1), self.group, self.counter)
        out, lse = parts[0, ..., :-1].contiguous(), parts[0, ..., -1].contiguous()
        for part in parts[1:]:
            merge(out, lse, part[..., :-1], part[..., -1])
        return out.to(q.dtype).transpose(0, 1), lse.transpose(0, 1)

    def _asked(self, q, k, v, causal, scale, seq, features):
        refuse(**features)
        check_tensors(q, k, v, same_length=False)
        check_heads(q.shape[2], k.shape[2])
        check_options(causal, scale)
        if causal and q.shape[1] > 1:
            raise ValueError(
                f"causal=True with {q.shape[1]} queries: Tree knows no positions; decode one token at a time"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise ValueError("Tree has no gradient: call it under torch.no_grad()")
        self._keys(k.shape[1], seq)
        return repr(self), tuple(q.shape), k.shape[2], q.dtype, scale, seq

    def _keys(self, local: int, seq: int | None) -> int:
        """How many of this rank's keys are no padding."""
        return (
            local if seq is None else sum(part.valid for part in self._held(self.rank, local, self._length(local, seq)))
        )
