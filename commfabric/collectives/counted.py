"""Collectives that count the bytes that they send.

Every function takes a process group (None: one rank, nothing is sent) and a `Counter` (None: nothing is counted). Results
have no gradients, and inputs are not changed. With a group, results are new tensors; with group None they share the input's
memory. Unless stated otherwise, all ranks pass the same shape and dtype. A rank sends these bytes for an input of S bytes
among P ranks:

| collective | input of a rank | bytes sent |
|---|---|---|
| all_reduce | the tensor | 2 (P-1)/P S, as in a ring |
| all_gather | its part | (P-1) S |
| reduce_scatter | P parts | (P-1)/P S |
| all_to_all | P parts | (P-1)/P S |
| all_to_all_rows | rows for each rank | bytes of the rows for other ranks |
| exchange | the messages that it sends | S |
"""

from collections import Counter as CallCounts
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

STEP_BYTES = 32 * 1024  # messages of at least this size are sent to one rank after the other


@dataclass
class Counter:
    """Counts this rank's calls of collectives.

    Attributes:
        calls: The number of calls of each collective.
        nbytes: The bytes of their inputs.
        sent: The bytes that this rank has sent.
    """

    calls: CallCounts[str] = field(default_factory=CallCounts)
    nbytes: int = 0
    sent: int = 0

    def add(self, kind: str, nbytes: int, sent: int) -> None:
        """Count one call of the collective `kind`, the bytes of its input, and the bytes that it sends."""
        self.calls[kind] += 1
        self.nbytes += nbytes
        self.sent += sent

    def include(self, other: "Counter") -> None:
        """Add the counts of another counter."""
        self.calls.update(other.calls)
        self.nbytes += other.nbytes
        self.sent += other.sent

    def reset(self) -> None:
        self.calls.clear()
        self.nbytes = self.sent = 0


def _count(counter: Counter | None, kind: str, tensor: torch.Tensor, times: int, ranks: int) -> None:
    """Count a call that sends `times`/`ranks` of the tensor's bytes, rounded up: the share of a ring's busiest rank."""
    if counter is not None:
        counter.add(kind, tensor.nbytes, -(-times * tensor.nbytes // ranks))


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    counter: Counter | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Reduce `tensor` elementwise over `group`; every rank gets the same result, of the same shape and dtype."""
    if group is None:
        return tensor.detach()
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    return begin_all_reduce(total, group, counter, op).wait()[0]


def begin_all_reduce(
    total: torch.Tensor,
    group: dist.ProcessGroup,
    counter: Counter | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> "Exchange":
    """Start an `all_reduce` of a contiguous tensor, which is overwritten with the result; `wait()` returns [tensor].

    All ranks start their collectives in the same order.
    """
    _count(counter, "all_reduce", total, 2 * (group.size() - 1), group.size())
    return Exchange([dist.all_reduce(total, op=op, group=group, async_op=True)], (), [total])


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, counter: Counter | None = None
) -> torch.Tensor:
    """Every rank's `tensor`, in rank order, on every rank: shape (P, *tensor.shape)."""
    if group is None:
        return tensor.detach().unsqueeze(0)
    return begin_all_gather(tensor, group, counter).wait()[0]


def begin_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, counter: Counter | None = None) -> "Exchange":
    """Start an `all_gather`; `wait()` returns [result]. All ranks start their collectives in the same order."""
    tensor = tensor.detach().contiguous()
    _count(counter, "all_gather", tensor, group.size() - 1, 1)
    parts = tensor.new_empty(group.size(), *tensor.shape)  # (P, ...)
    if tensor.is_cuda:
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
        work = gather(parts, tensor, group=group, async_op=True)
    elif group.size() == 2 and _step_by_step(tensor):
        parts[group.rank()] = tensor
        other = 1 - group.rank()
        return Exchange(exchange([(tensor, other)], [(parts[other], other)], group).work, tensor, [parts])
    else:
        work = dist.all_gather(list(parts.unbind()), tensor, group=group, async_op=True)
    return Exchange([work], tensor, [parts])


def all_to_all(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, counter: Counter | None = None
) -> torch.Tensor:
    """Send row r of `tensor` (P, ...) to rank r. Returns (P, ...), row r from rank r."""
    if group is None:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    _count(counter, "all_to_all", tensor, group.size() - 1, group.size())
    received = torch.empty_like(tensor)
    if not _step_by_step(tensor[0]):
        dist.all_to_all_single(received, tensor, group=group)
        return received
    rank, ranks = group.rank(), group.size()
    received[rank] = tensor[rank]
    for step in range(1, ranks):
        _swap(tensor[(rank + step) % ranks], received[(rank - step) % ranks], step, group)
    return received


def begin_all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup, counter: Counter | None = None) -> "Exchange":
    """Start an `all_to_all`; `wait()` returns [result]. All ranks start their collectives in the same order."""
    tensor = tensor.detach().contiguous()
    _count(counter, "all_to_all", tensor, group.size() - 1, group.size())
    received = torch.empty_like(tensor)
    work = dist.all_to_all_single(received, tensor, group=group, async_op=True)
    return Exchange([work], tensor, [received])


def all_to_all_rows(
    tensor: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    counter: Counter | None = None,
) -> torch.Tensor:
    """Send sent[r] rows of `tensor` to each rank r, in rank order; numbers may be 0 and may differ across ranks.

    Returns (sum of received, ...): received[r] rows from each rank r, in rank order.
    """
    tensor = tensor.detach().contiguous()
    arrived = tensor.new_empty(sum(received), *tensor.shape[1:])
    if counter is not None:
        own = tensor[: sent[group.rank()]].nbytes
        counter.add("all_to_all_rows", tensor.nbytes, tensor.nbytes - own)
    dist.all_to_all_single(arrived, tensor, list(received), list(sent), group=group)
    return arrived


def _step_by_step(message: torch.Tensor) -> bool:
    """Return True if messages of this size are sent to one rank after the other.

    This uses the full bandwidth of a link; gloo's all-to-all, and its all-gather between two ranks, use 50 to 80 % of it.
    """
    return not message.is_cuda and message.nbytes >= STEP_BYTES


def _swap(out: torch.Tensor, into: torch.Tensor, step: int, group: dist.ProcessGroup) -> None:
    """Send `out` to rank + step while receiving `into` from rank - step, modulo the number of ranks."""
    rank, ranks = group.rank(), group.size()
    exchange([(out, (rank + step) % ranks)], [(into, (rank - step) % ranks)], group).wait()


def reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, counter: Counter | None = None
) -> torch.Tensor:
    """The sum (...) of row r of every rank's `tensor` (P, ...) on rank r.

    On CPUs it is an all-to-all, which is also the collective that is counted, and a sum in rank order: gloo's
    reduce-scatter is an all-reduce, which sends twice as much.
    """
    if group is None:
        return tensor[0].detach()
    if not tensor.is_cuda:
        return in_rank_order(all_to_all(tensor, group, counter))
    tensor = tensor.detach().contiguous()
    _count(counter, "reduce_scatter", tensor, group.size() - 1, group.size())
    total = torch.empty_like(tensor[0])
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    scatter(total, tensor, group=group)
    return total


def in_rank_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of `parts`, added in their order, so that it has the same bits on every rank. Returns a new tensor."""
    total, *others = parts
    total = total.clone()
    for part in others:
        total += part
    return total


class Exchange:
    """Messages in flight; `wait()` returns the received tensors."""

    def __init__(self, work: Sequence[dist.Work | None], sent: object, received: list[torch.Tensor]):
        self.work, self.received = work, received
        self._sent = sent  # the tensors, which must stay alive until they are sent

    def wait(self) -> list[torch.Tensor]:
        """Block until all messages are sent and received. Returns the received tensors, in the order of the request."""
        for work in self.work:
            if work is not None:  # torch returns None to a rank that is not in the group
                work.wait()
        self.work, self._sent = (), None
        return self.received


def exchange(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup | None = None,
    counter: Counter | None = None,
) -> Exchange:
    """Start sending and receiving, and return at once.

    The messages between two ranks are matched in the order in which they are listed, so both ranks list them in the same
    order. The order of exchanges and of other collectives of this module must be the same too, because some of them are
    exchanges.

    Args:
        sends: Pairs (tensor, destination rank in `group`).
        receives: Pairs (contiguous tensor to fill, source rank in `group`).
        group: The ranks; None for one rank, which has no messages.
        counter: Counts the bytes of `sends`.
    """
    operations: list[dist.P2POp] = []
    leaving: list[torch.Tensor] = []
    for buffer, peer in receives:
        operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
    for tensor, peer in sends:
        leaving.append(tensor.detach().contiguous())
        _count(counter, "exchange", leaving[-1], 1, 1)
        operations.append(dist.P2POp(dist.isend, leaving[-1], group=group, group_peer=peer))
    work = dist.batch_isend_irecv(operations) if operations else []
    return Exchange(work, leaving, [buffer for buffer, _ in receives])
