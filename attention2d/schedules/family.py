"""Attention over sequences that are spread over ranks: one family of schedules (attention2d.md A.8a).

`Attention2D(group, rows, cols, ulysses, order, overlap)` is the family; those that it competes with are points of it:

| schedule | ulysses | rows | cols | overlap |
|---|---|---|---|---|
| `Ring` | 1 | P | 1 | yes |
| `AllGather` | 1 | P | 1 | no |
| `Ulysses` | P | 1 | 1 | |
| `USP` | U | P/U | 1 | yes |
| Attention2D of the paper | 1 | R | C | either |
| heads first, then the grid ("3-D") | U | R | C | either |
"""

import torch

from attention2d.compute.heads import join_heads
from attention2d.compute.task import Attend, Task
from attention2d.cost.memory import Memory, memory
from attention2d.cost.volume import Volume, messages
from attention2d.layout import token_order as orders
from attention2d.layout.checks import autocast, check_grid, check_heads, check_options, check_tensors, refuse
from attention2d.layout.grid import Grid, size_of
from attention2d.layout.spread import Spread


class Attention2D(Spread):
    """Exact attention whose queries, keys and values are spread over the ranks of `group` (None: one rank).

    rows x cols: the grid of cells, each of `ulysses` neighbouring ranks that share the heads; the product of the three is
    the size of the group, which may be any group. order: which tokens a rank holds (`order`). overlap: chunks travel while
    others are used, instead of all at once before. transpose: keys and values first go to the cells where the paper wants
    them, which only costs bytes; for comparison, and of the cyclic order alone. reason: `choose`'s. ValueError if sizes do
    not fit.
    """

    def __init__(self, group=None, rows=2, cols=2, ulysses=1, order="zigzag", overlap=False, transpose=False):
        super().__init__(group, order)
        check_grid(self.ranks, rows, cols, ulysses, order, transpose)
        self.grid = Grid(self.rank, ulysses, rows, cols)
        self.overlap, self.transpose, self.reason = bool(overlap), bool(transpose), "it was asked for"

    def __repr__(self):
        point = f"rows={self.grid.rows}, cols={self.grid.cols}, ulysses={self.grid.ulysses}, order={self.order!r}"
        options = [f"{name}=True" for name in ("overlap", "transpose") if getattr(self, name)]
        return f"Attention2D({', '.join([point, *options])})"

    def volume(self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Volume:
        """Bytes that the busiest rank sends in `.forward` and `.backward` (`messages`; attention2d.md A.7).

        itemsize: bytes of a number of q, k and v; statistics and gradients travel in at least fp32.
        """
        return messages(self.grid, *self._tensors(batch, seq, heads, kv_heads, head_dim, itemsize)).volume

    def memory(
        self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, on_cuda=False
    ) -> Memory:
        """Bytes that a rank holds beside q, k and v, at most: in `.forward`, `.saved` for backward, in `.backward`.

        on_cuda: as flash attention there is expected to take them; not measured.
        """
        shape = self._tensors(batch, seq, heads, kv_heads, head_dim, itemsize)
        return memory(self.grid, self.overlap, *shape, on_cuda)

    def _tensors(self, batch, seq, heads, kv_heads, head_dim, itemsize):
        """As `messages` and `memory` take them."""
        check_heads(heads, kv_heads, self.grid.ulysses)
        slots = orders.local_length(self.order, seq, self.ranks)
        moved = self.transpose and self.grid.rows > 1 and self.grid.cols > 1
        return slots, batch, heads, kv_heads, head_dim, itemsize, moved

    def __call__(self, q, k, v, causal=False, scale=None, seq=None, return_lse=False, **features):
        """softmax(scale q k^T) v over the whole sequence, of which each tensor is this rank's shard.

        q: (batch, local_seq, heads, head_dim); k, v: (batch, local_seq, kv_heads, head_dim), each serving heads/kv_heads
        neighbouring query heads. causal: a query sees the keys up to its own position. scale: None is 1/sqrt(head_dim).
        seq: the length of the sequence, where shards are padded. features: what else attention may have (sliding_window,
        softcap, ...): refused by name if asked for. Returns out like q, contiguous, and if asked for lse (batch, local_seq,
        heads), at least fp32, which has no gradient; padding has zeros and -inf. Under autocast q, k and v are cast as
        torch's attention does.

        Sends what `volume` says, with return_lse and ulysses > 1 (ulysses - 1)/ulysses of lse too, and gathers 16 bytes by
        which all see that they were called alike (on CUDA the first time only: it would wait for the GPU). Backward sends
        what `volume` says; gradients are summed in at least fp32 and have the inputs' dtype. All ranks call it together,
        and its backward. ValueError on every rank: one of them is given what does not fit, or something else than others.
        """
        q, k, v = autocast(q, k, v)
        self._agree(q, lambda: self._asked(q, k, v, causal, scale, seq, return_lse, features))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        task = Task.of(self, q.shape[1], self._length(q.shape[1], seq), causal, scale)
        out, lse = Attend.apply(q, k, v, task)
        out = out.transpose(0, 1).contiguous()
        if not return_lse:
            return out
        return out, join_heads(task.mates, [lse])[0].transpose(0, 1)

    def _asked(self, q, k, v, causal, scale, seq, return_lse, features):
        """What all ranks are to be asked alike. ValueError: what does not fit."""
        refuse(**features)
        check_tensors(q, k, v)
        check_heads(q.shape[2], k.shape[2], self.grid.ulysses)
        check_options(causal, scale)
        length = self._length(q.shape[1], seq)
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        return repr(self), tuple(q.shape), k.shape[2], q.dtype, causal, scale, length, bool(return_lse), gradients


def Ring(group=None, order="zigzag") -> Attention2D:
    """Keys and values go around all ranks, a step ahead of their use (Liu et al., 2023)."""
    return Attention2D(group, size_of(group), 1, order=order, overlap=True)


def AllGather(group=None, order="zigzag") -> Attention2D:
    """Every rank fetches all keys and values (as Llama 3 was trained)."""
    return Attention2D(group, size_of(group), 1, order=order)


def Ulysses(group=None, order="zigzag") -> Attention2D:
    """Every rank fetches all tokens of its share of the heads (Jacobs et al., 2023)."""
    return Attention2D(group, 1, 1, size_of(group), order)


def USP(group=None, ulysses=2, order="zigzag") -> Attention2D:
    """Neighbours share heads, and keys and values go around (Fang and Zhao, 2024)."""
    return Attention2D(group, max(1, size_of(group) // max(1, ulysses)), 1, ulysses, order, overlap=True)
