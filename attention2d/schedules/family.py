"""The family of attention schedules on a grid of ranks (docs/concepts/attention-on-a-grid.md).

`Attention2D(group, rows, cols, ulysses, order, overlap)` is the whole family. The known schedules on P ranks are members:

| schedule | ulysses | rows | cols | overlap |
|---|---|---|---|---|
| `Ring` | 1 | P | 1 | yes |
| `AllGather` | 1 | P | 1 | no |
| `Ulysses` | P | 1 | 1 | |
| `USP` | U | P/U | 1 | yes |
| 2-D grid (the paper Attention2D) | 1 | R | C | either |
| 3-D: heads first, then the grid | U | R | C | either |
"""

import math
from typing import Any
from zlib import crc32

import torch
from torch.distributed import ProcessGroup

from attention2d.compute.heads import gather_heads
from attention2d.compute.shard_attention import AttentionFunction, ShardAttention
from attention2d.cost.memory import PeakMemory, peak_memory
from attention2d.cost.volume import Volume, messages
from attention2d.layout import token_order as orders
from attention2d.layout.attention_arguments import (
    cast_for_autocast,
    check_causal,
    check_grid,
    check_heads,
    check_mask,
    check_scale,
    check_sizes,
    check_tensors,
    refuse_features,
)
from attention2d.layout.block_mask import BlockMask
from attention2d.layout.grid import Grid, group_size
from attention2d.layout.sharding import SequenceSharding

Tensor = torch.Tensor


class Attention2D(SequenceSharding):
    """Exact attention over a sequence whose queries, keys and values are sharded over the ranks of `group`.

    Args:
        group: any process group; None is one rank.
        rows, cols: the grid of cells. rows * cols * ulysses is the size of the group.
        ulysses: the number of consecutive ranks in a cell, which divide the heads.
        order: the tokens that a rank holds: "zigzag", "contiguous" or "cyclic" (`layout.token_order`).
        overlap: chunks travel while others are attended, instead of all being gathered first.
        transpose: the variant of the paper (section 3.2), which first sends keys and values to another cell. It sends more
            bytes for the same result, exists for comparison, and needs the cyclic order.

    Attributes:
        reason: why `choose` has chosen this schedule, as text.

    Raises:
        ValueError: the sizes do not fit.
    """

    def __init__(
        self, group: ProcessGroup | None = None, rows: int = 2, cols: int = 2, ulysses: int = 1, order: str = "zigzag",
        overlap: bool = False, transpose: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(group, order)
        check_grid(self.ranks, rows, cols, ulysses, order, transpose)
        self.grid = Grid(self.rank, ulysses, rows, cols)
        self.overlap, self.transpose, self.reason = bool(overlap), bool(transpose), "the caller named this schedule"

    def __repr__(self) -> str:
        sizes = f"rows={self.grid.rows}, cols={self.grid.cols}, ulysses={self.grid.ulysses}, order={self.order!r}"
        options = [f"{name}=True" for name in ("overlap", "transpose") if getattr(self, name)]
        return f"Attention2D({', '.join([sizes, *options])})"

    def volume(self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Volume:
        """The bytes that the busiest rank sends in `.forward` and in `.backward`, by the formula of `cost.volume.messages`.

        Args:
            batch, heads, kv_heads, head_dim: of the tensors that are passed to the schedule.
            seq: the length of the whole sequence.
            itemsize: bytes of an element of q, k and v. Statistics and gradients travel in at least fp32.

        Raises:
            ValueError: a size is below 1 or the heads do not divide.
        """
        return messages(self.grid, **self._local_shape(batch, seq, heads, kv_heads, head_dim, itemsize)).volume

    def memory(
        self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, on_cuda: bool = False
    ) -> PeakMemory:
        """The bytes that a rank needs besides q, k and v: the most in `.forward` and `.backward`, and `.saved` between them.

        Args:
            batch, seq, heads, kv_heads, head_dim, itemsize: as in `volume`.
            on_cuda: estimate it for flash attention (not measured).

        Raises:
            ValueError: as in `volume`.
        """
        shape = self._local_shape(batch, seq, heads, kv_heads, head_dim, itemsize)
        return peak_memory(self.grid, self.overlap, **shape, on_cuda=on_cuda)

    def _local_shape(
        self, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int
    ) -> dict[str, Any]:
        """The arguments that `messages` and `peak_memory` have in common, except the grid."""
        check_sizes(batch=batch, seq=seq, head_dim=head_dim, itemsize=itemsize)
        check_heads(heads, kv_heads, self.grid.ulysses)
        slots = orders.local_length(self.order, seq, self.ranks)
        is_transposed = self.transpose and self.grid.rows > 1 and self.grid.cols > 1
        shape = dict(slots=slots, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, itemsize=itemsize)
        return shape | dict(transpose=is_transposed)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, seq: int | None = None,
        return_lse: bool = False, mask: Tensor | None = None, **features: object,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """softmax(scale q k^T) v over the whole sequence, of which q, k and v are this rank's shards. Differentiable.

        All ranks call it together, and its backward together. Forward and backward send the bytes of `volume`. Forward also
        sends (ulysses - 1)/ulysses of lse if that is returned. In a schedule's first call the ranks compare their arguments.
        A difference in a later call gives wrong results, or an error of the backend. Gradients are summed in at least fp32
        and returned in the inputs' dtype. Under autocast q, k and v are cast as torch's own attention casts them.

        Args:
            q: (batch, local_seq, heads, head_dim), floating point.
            k, v: (batch, local_seq, kv_heads, head_dim) in q's dtype. Each key/value head serves heads/kv_heads consecutive
                query heads.
            causal: a query sees keys up to its own position.
            scale: of the scores (None: 1/sqrt(head_dim)).
            seq: the length of the sequence; required where shards are padded.
            return_lse: return lse too.
            mask: (batch or 1, query blocks, key blocks), bool, the same on every rank (None: nothing is hidden). True where
                the queries of a block see the keys of a block, as far as `causal` allows. The sequence is divided into this
                many blocks of equal length, of which the last may be shorter. (batch, 1, seq) hides padding; (1, b, b) is a
                block mask; (1, seq, seq) is any mask. Hidden blocks are not computed.
            features: other options of attention (sliding_window, softcap, ...), each refused by name unless it is None,
                False or 0.

        Returns:
            out, contiguous, with q's shape and dtype; with return_lse (out, lse). lse is the log-sum-exp of the scores,
                (batch, local_seq, heads), in at least fp32 and without gradient. In padding slots, and for queries that
                see no key, out is 0 and lse -inf.

        Raises:
            ValueError: an argument is wrong; in the first call on every rank, also if arguments differ.
        """
        q, k, v = cast_for_autocast(q, k, v)
        self._check(lambda: self._arguments(q, k, v, causal, scale, seq, return_lse, mask, features), q)
        scale, length = q.shape[-1] ** -0.5 if scale is None else scale, self._sequence_length(q.shape[1], seq)
        hidden = None if mask is None else BlockMask(mask.cpu(), length)
        attention = ShardAttention.of_schedule(self, q.shape[1], length, causal, scale, hidden)
        out, lse = AttentionFunction.apply(q, k, v, attention)
        out = out.transpose(0, 1).contiguous()  # (batch, slots, heads, head_dim)
        if not return_lse:
            return out
        return out, gather_heads(attention.cell, [lse])[0].transpose(0, 1)  # (batch, slots, heads)

    def _arguments(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, seq: int | None, return_lse: bool,
        mask: Tensor | None, features: dict[str, object],
    ) -> dict[str, object]:  # fmt: skip
        """The values that must be equal on all ranks. Raises ValueError if an argument is wrong."""
        refuse_features(**features)
        check_tensors(q, k, v)
        check_heads(q.shape[2], k.shape[2], self.grid.ulysses)
        check_causal(causal)
        check_scale(scale)
        length = self._sequence_length(q.shape[1], seq)
        check_mask(mask, len(q), length)
        has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        return {
            "schedule": self, "q": tuple(q.shape), "kv_heads": k.shape[2], "dtype": q.dtype, "causal": causal,
            "scale": scale, "seq": length, "return_lse": bool(return_lse), "requires_grad": has_gradient,
            "mask": None if mask is None else (tuple(mask.shape), crc32(mask.cpu().numpy().tobytes())),
        }  # fmt: skip


def named_grids(ranks: int) -> dict[str, tuple[int, int, int, bool]]:
    """{name: (rows, cols, ulysses, overlap)} of the schedules whose grid follows from the number of ranks alone.

    2d: the most square grid. usp and 3d, for an even number of ranks: two ranks of each cell divide the heads.
    """

    def square(cells: int) -> tuple[int, int]:
        rows = max(size for size in range(1, math.isqrt(cells) + 1) if cells % size == 0)
        return rows, cells // rows

    grids = {"ring": (ranks, 1, 1, True), "all-gather": (ranks, 1, 1, False), "ulysses": (1, 1, ranks, False)}
    grids["2d"] = (*square(ranks), 1, False)
    if ranks % 2 == 0:
        grids |= {"usp": (ranks // 2, 1, 2, True), "3d": (*square(ranks // 2), 2, False)}
    return grids


def _named(name: str, group: ProcessGroup | None, order: str) -> Attention2D:
    rows, cols, ulysses, overlap = named_grids(group_size(group))[name]
    return Attention2D(group, rows, cols, ulysses, order, overlap)


def Ring(group: ProcessGroup | None = None, order: str = "zigzag") -> Attention2D:
    """Ring attention (Liu et al., 2023): keys and values travel around all ranks while earlier ones are attended."""
    return _named("ring", group, order)


def AllGather(group: ProcessGroup | None = None, order: str = "zigzag") -> Attention2D:
    """The context parallelism of Llama 3 (Meta, 2024): every rank gathers all keys and values before it attends."""
    return _named("all-gather", group, order)


def Ulysses(group: ProcessGroup | None = None, order: str = "zigzag") -> Attention2D:
    """DeepSpeed-Ulysses (Jacobs et al., 2023): every rank attends all tokens with its share of the heads."""
    return _named("ulysses", group, order)


def USP(group: ProcessGroup | None = None, ulysses: int = 2, order: str = "zigzag") -> Attention2D:
    """USP (Fang and Zhao, 2024): a ring of cells, in each of which `ulysses` consecutive ranks divide the heads."""
    return Attention2D(group, max(1, group_size(group) // max(1, ulysses)), 1, ulysses, order, overlap=True)
