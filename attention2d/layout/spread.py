"""A sequence spread over the ranks of a group: what schedules have in common."""

from contextlib import suppress

import torch

from sparsefusion.collectives.agreement import agree
from sparsefusion.collectives.counted import Counter, all_gather, all_gather_small

from . import token_order as orders
from .grid import size_of

REMEMBERED = 1024  # different calls on CUDA


class Spread:
    """The ranks of `group` (None: one rank) hold the tokens of a sequence in some order of `order.ORDERS`.

    counter: what this rank has sent, agreements left out.
    """

    def __init__(self, group, order: str):
        if order not in orders.ORDERS:
            raise ValueError(f"order={order!r} is none of {', '.join(orders.ORDERS)}")
        self.group, self.order, self.counter = group, order, Counter()
        self.rank, self.ranks = 0 if group is None else group.rank(), size_of(group)
        self._agreed = set()

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of `x`, whole along `dim`: as many on every rank, zeros behind the end of the sequence.

        Differentiable: the gradient of x is that of this rank's tokens. Nothing is sent.
        """
        return orders.shard(x, dim, self.order, self.rank, self.ranks)

    def unshard(self, local: torch.Tensor, dim: int = 1, seq: int | None = None) -> torch.Tensor:
        """What `shard` has divided, whole on every rank; seq: its length without padding. Gathers; no gradient.

        ValueError on every rank: shards of different shapes, or a seq that does not make such shards.
        """
        self._agree(local, lambda: (dim, tuple(local.shape), local.dtype, self._length(local.shape[dim], seq)))
        parts = all_gather(local, self.group, self.counter)
        return orders.unshard(parts.unbind(), dim, self.order, self._length(local.shape[dim], seq))

    def positions(self, seq: int) -> torch.Tensor:
        """(local_seq,) int64: where this rank's tokens stand in a sequence of `seq`; of padding: `seq` or more."""
        return orders.positions(self._held(self.rank, orders.local_length(self.order, seq, self.ranks), seq))

    def _held(self, rank: int, local: int, seq: int):
        return orders.segments(self.order, rank, self.ranks, local, seq)

    def _length(self, local: int, seq: int | None) -> int:
        """That of a sequence of which each rank has `local` slots. ValueError if `seq` is another's."""
        if local % orders.blocks(self.order, self.ranks):
            raise ValueError(f"zigzag order has two equal blocks on each rank, and {local} local tokens are odd")
        if seq is None:
            return local * self.ranks
        if seq < 1:
            raise ValueError(f"seq={seq} must be at least 1")
        needed = orders.local_length(self.order, seq, self.ranks)
        if needed != local:
            raise ValueError(
                f"seq={seq} in {self.order} order makes {needed} local tokens on each of {self.ranks} ranks, not {local}"
            )
        return seq

    def _agree(self, tensor: torch.Tensor, asked) -> None:
        """ValueError on every rank if one of them is asked something wrong, or something else than the others.

        On CUDA what was agreed upon once is not compared again: that would wait for the GPU.
        """
        key = None
        if tensor.is_cuda:
            with suppress(Exception):  # what is wrong is raised below, on every rank
                key = repr(asked())
            if key in self._agreed:
                return
        agree(lambda mine: all_gather_small(mine, self.group), tensor.device, asked, "ranks of the group")
        if tensor.is_cuda:
            if len(self._agreed) >= REMEMBERED:  # on all ranks alike
                self._agreed.clear()
            self._agreed.add(key)
