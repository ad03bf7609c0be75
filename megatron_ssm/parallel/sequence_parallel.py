"""Sequence parallelism: between the layers, each tensor-parallel rank has a share of the tokens instead of all of them.

This is Megatron's meaning of the term: inside a layer, every rank has all tokens and a part of the channels, unlike in
context parallelism. With l tokens on each of T ranks, rank t has tokens t*l to (t+1)*l - 1. Norms and residual sums are then
computed once for each token, and their stored activations take 1/T of the memory. A column-parallel layer begins with an
all-gather of the tokens, and a row-parallel layer ends with a reduce-scatter; together they send as much as one all-reduce.
Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.

| operator | forward | backward | use |
|---|---|---|---|
| `all_gathered_tokens` | all-gather | reduce-scatter, and the all-gather again | before a column-parallel layer |
| `reduce_scatter_tokens` | reduce-scatter | all-gather | after a row-parallel layer |
| `replicated` | identity | all-reduce | parameters that every rank has and uses for its own tokens |
| `divide_gradient` | identity | division by T | gathered tokens that all ranks use alike, in low-rank adapters |
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commfabric.collectives import counted
from commfabric.collectives.wire_formats import at_least_fp32

from .operators import copy_to_ranks, differentiable
from .ranks import Ranks


def _gather(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """(batch, l, n) of each rank -> (batch, T l, n), on every rank."""
    return ranks.all_gather(x).transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over the ranks of (batch, T l, n), added in at least fp32: (batch, l, n), this rank's tokens."""
    rows = x.detach().to(at_least_fp32(x.dtype)).unflatten(1, (ranks.size, -1)).transpose(0, 1)
    if ranks.memory is not None and x.is_cpu:
        # A copy, because a view would keep the tokens of all ranks in memory.
        return ranks.all_reduce_exact(rows.contiguous(), ranks.group)[ranks.rank].to(x.dtype, copy=True)
    return counted.reduce_scatter(rows, ranks.group, ranks.counter).to(x.dtype)


@contextmanager
def all_gathered_tokens(x: torch.Tensor, ranks: Ranks) -> Iterator[torch.Tensor]:
    """x (batch, l, n), this rank's tokens -> (batch, T l, n), all tokens, for use in the body of the `with` statement.

    In the body, autograd stores x instead of the gathered tensor, and backward gathers it again. All ranks must run the same
    body.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:  # autocast does not convert float64
        x = x.to(torch.get_autocast_dtype(x.device.type))  # otherwise autograd would save the converted copy
    whole, share = differentiable(x, lambda t: _gather(t, ranks), lambda grad: _reduce_scatter(grad, ranks)), x.detach()
    if ranks.recomputation.is_running:  # it stores nothing, and gathers again itself
        yield whole
        return
    stored = _StoredShare(whole, share, ranks)
    with torch.autograd.graph.saved_tensors_hooks(stored.pack, stored.unpack):
        yield whole


class _StoredShare:
    """Stores `share` where autograd would store `whole`, which backward gathers once."""

    def __init__(self, whole: torch.Tensor, share: torch.Tensor, ranks: Ranks):
        self.address, self.numel, self.share, self.ranks = whole.data_ptr(), whole.numel(), share, ranks
        self.uses = 0  # the number of times that backward reads it
        self.reads: list[torch.Tensor] = []  # gathered tensors for the remaining reads

    def pack(self, saved: torch.Tensor) -> torch.Tensor | torch.Size:
        """The object to store for a tensor: the shape if the tensor is `whole`, otherwise the tensor."""
        if saved.data_ptr() != self.address or saved.numel() != self.numel or not saved.is_contiguous():
            return saved
        self.uses += 1
        return saved.shape

    def unpack(self, saved: torch.Tensor | torch.Size) -> torch.Tensor:
        """The inverse of `pack`."""
        if isinstance(saved, torch.Tensor):
            return saved
        if not self.reads:
            self.reads = [_gather(self.share, self.ranks)] * self.uses
        return self.reads.pop().view(saved)


def reduce_scatter_tokens(x: torch.Tensor, ranks: Ranks, keep_for_recomputation: bool = False) -> torch.Tensor:
    """Sum x (batch, T l, n), which is partial, over the ranks: (batch, l, n), this rank's tokens of the sum.

    keep_for_recomputation: Store the result (see `recomputation`).
    """

    def exchange(x: torch.Tensor) -> torch.Tensor:
        if keep_for_recomputation:
            return ranks.recomputation.communicate_once(lambda: _reduce_scatter(x, ranks))
        return _reduce_scatter(x, ranks)

    return differentiable(x, exchange, lambda grad: _gather(grad, ranks))


def divide_gradient(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x, gathered tokens; backward divides the gradient by T.

    For operations on x that are the same on all T ranks: they compute equal gradients, which the reduce-scatter adds T
    times.
    """
    return differentiable(x, lambda t: t.view_as(t), lambda grad: grad / ranks.size)


def replicated(parameter: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
    """A parameter that every rank has and, with sequence parallelism, uses for its own tokens.

    Backward then sums its gradient over the ranks.
    """
    if ranks is None or not ranks.sequence_parallel:
        return parameter
    return copy_to_ranks(parameter, ranks.group, ranks.all_reduce_exact)
