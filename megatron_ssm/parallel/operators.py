"""The communication operators of tensor parallelism: sums and gathers over the ranks, with their gradients.

An activation is *whole* (the same on every rank) or *partial* (each rank holds a summand). The operators convert one
into the other:

| operator | forward | backward | use |
|---|---|---|---|
| `copy_to_ranks` (Megatron's f) | identity | all-reduce | before a column-parallel layer |
| `reduce_from_ranks` (Megatron's g) | all-reduce | identity | after a row-parallel layer: all ranks use the sum alike |
| `sum_over_ranks` | all-reduce | all-reduce | if each rank uses the sum for its own channels (x_proj, norms) |

State-space models need the third one. The sum is whole, but each rank uses it for its own channels, so the gradient of the
sum is partial and must be summed as well.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .ranks import Ranks

# (tensor, group) -> the sum of the ranks' tensors, such as `Ranks.all_reduce_exact`
Reduction = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

PIECE_NUMEL = 2**23  # without gradients, the number of elements that are reduced at once


class _Exchange(torch.autograd.Function):
    """A linear exchange between ranks in forward, and its transpose in backward."""

    @staticmethod
    def forward(ctx, x, exchange, transpose):
        ctx.transpose = transpose
        return exchange(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.transpose(grad), None, None


class _CopyToRanks(torch.autograd.Function):
    """f: identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx, x, group, reduction):
        ctx.group, ctx.reduction = group, reduction
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduction(grad, ctx.group), None, None


class _ReduceFromRanks(torch.autograd.Function):
    """g: all-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, group, reduction):
        return reduction(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _ReduceBeside(torch.autograd.Function):
    """g of two tensors in one call: all-reduces in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, column, ranks):
        return ranks.recomputation.communicate_once(lambda: ranks.reduce_beside(x, column, ranks.group))

    @staticmethod
    def backward(ctx, grad, column_grad):
        return grad, column_grad, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group, reduction):
        ctx.group, ctx.reduction = group, reduction
        return reduction(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduction(grad, ctx.group), None, None


class _GatherLast(torch.autograd.Function):
    """Concatenation of all ranks' last dimensions, which have equal sizes; backward takes this rank's slice."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.width, ctx.rank = x.shape[-1], ranks.rank
        return torch.cat(ranks.all_gather(x).unbind(), dim=-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(-1, ctx.rank * ctx.width, ctx.width), None


def differentiable(
    x: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor], transpose: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """exchange(x), which is linear in x and may communicate; the gradient of x is transpose(gradient of the result)."""
    return _Exchange.apply(x, exchange, transpose)


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup | None, reduction: Reduction) -> torch.Tensor:
    """x (any shape), whole, for uses that differ by rank. Sends nothing; backward all-reduces the gradient of x."""
    return x if group is None or not torch.is_grad_enabled() else _CopyToRanks.apply(x, group, reduction)


def reduce_from_ranks(x: torch.Tensor, group: dist.ProcessGroup | None, reduction: Reduction) -> torch.Tensor:
    """The sum over the ranks of x (any shape), partial; whole. One all-reduce; backward sends nothing.

    Without gradients, the sum overwrites an x of more than PIECE_NUMEL elements, with one all-reduce per PIECE_NUMEL
    elements. An all-reduce needs at least one copy of its input, which would otherwise be most of the memory of reading a
    long prompt.
    """
    if group is None:
        return x
    if torch.is_grad_enabled():
        return _ReduceFromRanks.apply(x, group, reduction)
    return in_pieces(lambda part: reduction(part, group), x)


def in_pieces(function: Callable[..., torch.Tensor], x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
    """function(x, *beside) for a function that maps each token independently: x (tokens..., n), beside (tokens..., m) each.

    Without gradients, the result overwrites an x of more than PIECE_NUMEL elements, PIECE_NUMEL elements at a time. The
    pieces depend only on the shape of x, so they are the same on all ranks.
    """
    if torch.is_grad_enabled() or x.numel() <= PIECE_NUMEL:
        return function(x, *beside)
    x, width = x.contiguous(), x.shape[-1]
    tokens = [t.view(-1, t.shape[-1]).split(max(1, PIECE_NUMEL // width)) for t in (x, *beside)]
    for piece in zip(*tokens, strict=True):
        piece[0].copy_(function(*piece))
    return x


def reduce_beside(x: torch.Tensor, column: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of x (..., n) in the model's format and of column (..., 1), exact; both partial. Backward sends nothing.

    Sends one all-reduce if the column is part of the messages of x (see `commfabric.reduction.quantized`). Sends two
    if the format is a user's function, or has 16 bits and the backend sums it.
    """
    if ranks.group is None:
        return x, column
    if torch.is_grad_enabled():
        return _ReduceBeside.apply(x, column, ranks)
    return ranks.reduce_beside(x, column, ranks.group)


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup | None, reduction: Reduction) -> torch.Tensor:
    """The sum over the ranks of x (any shape), partial, for uses that differ by rank.

    Sends one all-reduce in forward and one in backward.
    """
    if group is None:
        return x
    return _SumOverRanks.apply(x, group, reduction) if torch.is_grad_enabled() else reduction(x, group)


def gather_last(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The concatenation of every rank's x (..., width): (..., width * ranks.size) on every rank.

    One all-gather. Backward sends nothing, because all ranks use the result alike.
    """
    return x if ranks.group is None else _GatherLast.apply(x, ranks)
