"""A sequence sharded over the ranks of a process group: the base class of all attention schedules."""

import operator
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import together
from commfabric.collectives.counted import Counter, all_gather

from . import token_order as orders
from .grid import group_size


class SequenceSharding:
    """The ranks of `group` (None: one rank) hold the tokens of a sequence in one of `token_order.ORDERS`.

    Attributes:
        counter: counts the bytes that this rank sends, except those that compare the ranks' arguments.
    """

    def __init__(self, group: ProcessGroup | None, order: str) -> None:
        if order not in orders.ORDERS:
            raise ValueError(f"unknown order {order!r}: expected {', '.join(orders.ORDERS)}")
        self.group, self.order, self.counter = group, order, Counter()
        self.ranks = group_size(group)
        self.rank = 0 if group is None else group.rank()
        self._is_compared = False

    def __deepcopy__(self, memo: dict) -> "SequenceSharding":
        return self  # process groups are handles

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of `x`, which has the full sequence along `dim` on every rank. Sends nothing.

        All shards are equally long; slots beyond the end of the sequence are zero. Differentiable: the gradient with respect
        to x is non-zero only at this rank's tokens.

        Args:
            x: the whole tensor.
            dim: the dimension of the sequence.

        Raises:
            IndexError: x has no dimension `dim`.
        """
        return orders.shard(x, dim, self.order, self.rank, self.ranks)

    def unshard(self, local: torch.Tensor, dim: int = 1, seq: int | None = None) -> torch.Tensor:
        """The full sequence along `dim`, on every rank, from each rank's shard: the inverse of `shard`. It has no gradient.

        All-gathers the shards.

        Args:
            local: this rank's shard.
            dim: the dimension of the sequence.
            seq: the length of the sequence without padding (None: there is no padding).

        Raises:
            ValueError: a sequence of `seq` tokens has shards of another length.
        """
        length = self._sequence_length(local.shape[dim], seq)
        parts = all_gather(local, self.group, self.counter)
        return orders.unshard(parts.unbind(), dim, self.order, length)

    def positions(self, seq: int) -> torch.Tensor:
        """The positions of this rank's tokens in a sequence of `seq` tokens: (local_seq,) int64, on the CPU.

        Padding slots have positions of `seq` or more.
        """
        return orders.positions(self._segments(orders.local_length(self.order, seq, self.ranks), seq))

    def _segments(self, local: int, seq: int) -> tuple[orders.Segment, ...]:
        return orders.segments(self.order, self.rank, self.ranks, local, seq)

    def _sequence_length(self, local: int, seq: int | None) -> int:
        """`seq`, or if that is None, the length of an unpadded sequence with `local` slots on each rank.

        Raises ValueError if a sequence of `seq` tokens has another number of slots.
        """
        if local % orders.blocks_per_rank(self.order, self.ranks):
            raise ValueError(f"zigzag order has two equal blocks on each rank, and {local} local tokens are odd")
        if seq is None:
            return local * self.ranks
        # A float is a TypeError here, on every rank. Later it would be a slice's bound, and only on ranks with padding.
        seq = operator.index(seq)
        if seq < 1:
            raise ValueError(f"seq={seq}: expected at least 1")
        needed = orders.local_length(self.order, seq, self.ranks)
        if needed != local:
            raise ValueError(
                f"seq={seq} in {self.order} order makes {needed} local tokens on each of {self.ranks} ranks, not {local}"
            )
        return seq

    def _check(self, arguments: Callable[[], dict[str, object]], q: torch.Tensor) -> None:
        """Check the arguments of a call; in the first call, all ranks compare what `arguments()` returns."""
        if self._is_compared:
            arguments()
        else:
            device = q.device if isinstance(q, torch.Tensor) else None
            together(arguments, [self.group], lambda checked: checked, device)
            self._is_compared = True
