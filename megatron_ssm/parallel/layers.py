"""Tensor parallelism in three communication operators and the layers around them.

`ranks.Ranks` says which ranks share a model and how they add their parts. An activation is either *whole* (the same on every
rank) or *partial* (each rank holds a summand). The operators lead from one to the other:

| operator | forward | backward | stands |
|---|---|---|---|
| `copy_to_ranks` (Megatron's f) | identity | all-reduce | before a column-parallel layer |
| `reduce_from_ranks` (Megatron's g) | all-reduce | identity | after a row-parallel layer: every rank uses the sum whole |
| `sum_over_ranks` | all-reduce | all-reduce | where each rank uses the sum for its own channels only (x_proj, norms) |

The third is the one that state-space models add: the sum is whole, but what each rank does with it is not, so its
gradient arrives in parts.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.native import kernels
from megatron_ssm.ops.matrices import linear, rows_at
from sparsefusion.collectives.wire_formats import at_least_fp32

from .ranks import Ranks

PIECE = 2**23  # numbers


class _CopyToRanks(torch.autograd.Function):
    """f: identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx, x, group, reduce):
        ctx.group, ctx.reduce = group, reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduce(grad, ctx.group), None, None


class _ReduceFromRanks(torch.autograd.Function):
    """g: all-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, group, reduce):
        return reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _ReduceBeside(torch.autograd.Function):
    """g of two tensors in one call: all-reduces in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, column, ranks):
        return ranks.reduce_beside(x, column, ranks.group)

    @staticmethod
    def backward(ctx, grad, column_grad):
        return grad, column_grad, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group, reduce):
        ctx.group, ctx.reduce = group, reduce
        return reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduce(grad, ctx.group), None, None


class _GatherLast(torch.autograd.Function):
    """Concatenate every rank's equally wide last dimension; backward takes this rank's slice of the whole gradient."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.width, ctx.rank = x.shape[-1], ranks.rank
        return torch.cat(ranks.gather(x).unbind(), dim=-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(-1, ctx.rank * ctx.width, ctx.width), None


def copy_to_ranks(x, group, reduce):
    """x, whole, about to be used by every rank for its own part; backward all-reduces the gradient (x's bytes)."""
    return x if group is None or not torch.is_grad_enabled() else _CopyToRanks.apply(x, group, reduce)


def reduce_from_ranks(x, group, reduce):
    """The sum of every rank's partial x, whole (one all-reduce of x's bytes); backward sends nothing.

    Without gradients, one of more than PIECE numbers takes x's place in memory, by an all-reduce for each PIECE of them:
    what an all-reduce works in, a copy or more, would otherwise be most of what a long prompt needs.
    """
    if group is None:
        return x
    if torch.is_grad_enabled():
        return _ReduceFromRanks.apply(x, group, reduce)
    return in_pieces(lambda part: reduce(part, group), x)


def in_pieces(function, x, *beside):
    """A function of x (tokens..., n) and what is beside it, (tokens..., m) each.

    Without gradients, an x of more than PIECE numbers is overwritten by it, each PIECE of its tokens in turn.
    """
    if torch.is_grad_enabled() or x.numel() <= PIECE:
        return function(x, *beside)
    x, width = x.contiguous(), x.shape[-1]
    tokens = [t.view(-1, t.shape[-1]).split(max(1, PIECE // width)) for t in (x, *beside)]
    for piece in zip(*tokens, strict=True):
        piece[0].copy_(function(*piece))
    return x


def reduce_beside(x, column, ranks):
    """The sums of partial x (..., n), in the model's format, and exactly of column (..., 1); backward sends nothing.

    One all-reduce in fp32, and where the column rides in x's messages; else two (`sparsefusion.reduction.quantized`).
    """
    if ranks.group is None:
        return x, column
    if torch.is_grad_enabled():
        return _ReduceBeside.apply(x, column, ranks)
    return ranks.reduce_beside(x, column, ranks.group)


def sum_over_ranks(x, group, reduce):
    """The sum of every rank's partial x, which each rank then uses for its own channels: both directions all-reduce."""
    if group is None:
        return x
    return _SumOverRanks.apply(x, group, reduce) if torch.is_grad_enabled() else reduce(x, group)


def gather_last(x, ranks: Ranks):
    """(..., width) on each rank -> (..., width * ranks.size) on every rank; backward sends nothing."""
    return x if ranks.group is None else _GatherLast.apply(x, ranks)


class _Pack(torch.autograd.Function):
    """Fields as the tensor they are rows of; backward cuts its gradient up, `share` adding up what several ranks hold."""

    @staticmethod
    def forward(ctx, whole, share, *fields):
        ctx.share = share
        ctx.save_for_backward(*fields)  # only so that autograd refuses if one is changed before backward
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return None, None, *ctx.share(grad)


class Packed(nn.Module):
    """Fields that are separate parameters, because they are split differently, but are used as one tensor.

    sizes: this rank's rows of each field; all fields share the trailing shape. The parameters are views of one storage,
    so reading them as one costs nothing. shared: neighbouring fields of which there are only `slots` different pieces,
    each held by size/slots neighbouring ranks: their gradient is summed over those ranks in backward, by one all-reduce
    over all ranks in which each piece has its slot.
    """

    def __init__(self, sizes: dict, trailing, ranks: Ranks, dtype=None, device=None, shared=(), slots=1):
        super().__init__()
        self.sizes, self.ranks, self.shared, self.slots = dict(sizes), ranks, tuple(shared), slots
        self._storage = torch.empty(sum(sizes.values()), *trailing, dtype=dtype, device=device)
        for name, rows in zip(sizes, self._storage.split(list(sizes.values())), strict=True):
            self.register_parameter(name, nn.Parameter(rows))

    def forward(self) -> torch.Tensor:
        """(sum of rows, *trailing): the fields one below the other."""
        fields = self._parameters.values()
        whole = self._storage if self.is_packed else torch.cat([field.detach() for field in fields])
        if not torch.is_grad_enabled():
            return whole
        return _Pack.apply(whole, self._share, *fields)

    def _share(self, grad) -> list[torch.Tensor]:
        """The gradient of each field, from that of the packed tensor."""
        grads = dict(zip(self.sizes, grad.split(list(self.sizes.values())), strict=True))
        if self.shared:
            mine = torch.cat([grads[name] for name in self.shared])
            slots = mine.new_zeros(self.slots, *mine.shape)
            slot = self.ranks.slot(self.slots)
            slots[slot] = mine
            total = self.ranks.exact(slots, self.ranks.group)[slot]
            rows = [self.sizes[name] for name in self.shared]
            grads.update(zip(self.shared, total.split(rows), strict=True))
        return list(grads.values())

    @property
    def is_packed(self) -> bool:
        """Whether the parameters still are the storage's rows (optimizers and `.to()` may have moved them)."""
        address = self._storage.data_ptr()
        for field in self._parameters.values():
            if field.data_ptr() != address:
                return False
            address += field.numel() * field.element_size()
        return self._storage.dtype == field.dtype

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._pack()
        return self

    def __setstate__(self, state):  # a deep copy's
        super().__setstate__(state)
        self._pack()

    def _pack(self):
        """Move the parameters into one storage again."""
        fields = list(self.parameters(recurse=False))
        self._storage = torch.cat([p.data for p in fields])
        for field, rows in zip(fields, self._storage.split(list(self.sizes.values())), strict=True):
            field.data = rows


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W's rows split: x (..., in) whole -> y (..., sum of this rank's rows). Backward: one all-reduce.

    `rows` maps each field (z, x, B, C, dt) to this rank's number of rows; see `Packed` for `shared` and `slots`.
    """

    def __init__(self, in_features, rows: dict, bias, ranks: Ranks, dtype=None, device=None, shared=(), slots=1):
        super().__init__()
        self.ranks = ranks
        self.weight = Packed(rows, (in_features,), ranks, dtype, device, shared, slots)
        self.bias = Packed(rows, (), ranks, dtype, device, shared, slots) if bias else None

    def forward(self, x):
        """(..., in_features) -> (..., this rank's rows of all fields)."""
        x = copy_to_ranks(x, self.ranks.group, self.ranks.exact)
        return linear(x, self.weight(), self.bias() if self.bias is not None else None)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W's columns split: x (..., this rank's columns) -> y (..., out) whole, by one all-reduce.

    The bias is whole on every rank and added once, after the sum.
    """

    def __init__(self, in_features, out_features, bias, ranks: Ranks, dtype=None, device=None):
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x):
        """(..., in_features on this rank) -> (..., out_features), the same on every rank."""
        return self.whole(linear(x, self.weight))

    def whole(self, part):
        """The sum of every rank's part of the product, and the bias."""
        y = reduce_from_ranks(part, self.ranks.group, self.ranks.reduce)
        return y if self.bias is None else y + self.bias


def is_altered(module) -> bool:
    """Whether calling a module does more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_plain(module, kind) -> bool:
    """Whether calling a module does what the class `kind` says and no more: then nobody else holds what it gave."""
    return type(module) is kind and not is_altered(module) and not _has_any_global_hook()


def rms_norm(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last dimension, in at least fp32."""
    return F.rms_norm(x.to(at_least_fp32(x.dtype)), x.shape[-1:], eps=eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in at least fp32; whole on every rank."""

    def __init__(self, size, eps, dtype=None, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x):
        """(..., size) -> the same shape in the weight's dtype."""
        if not torch.is_grad_enabled() and kernels.takes_norm(x, self.weight):
            return kernels.rms_norm(x, self.weight, self.eps)
        return self.weight * rms_norm(x, self.eps).to(self.weight.dtype)


def vocabulary_range(vocab_size: int, ranks: Ranks) -> tuple[int, int]:
    """The ids [start, stop) of this rank: ceil(vocab/ranks) each, the last ranks fewer or none."""
    width = -(-vocab_size // ranks.size)
    return min(ranks.rank * width, vocab_size), min((ranks.rank + 1) * width, vocab_size)


class VocabularyParallel(nn.Module):
    """The embedding, or the language-model head, with its vocabulary split over the ranks (tied: one object is both)."""

    def __init__(self, vocab_size, hidden_size, ranks: Ranks, dtype=None, device=None):
        super().__init__()
        self.ranks = ranks
        self.start, self.stop = vocabulary_range(vocab_size, ranks)
        self.width = -(-vocab_size // ranks.size)  # of every rank's logits
        self.weight = nn.Parameter(torch.empty(self.stop - self.start, hidden_size, dtype=dtype, device=device))

    def embed(self, ids):
        """ids (batch, seq) -> (batch, seq, hidden) on every rank: local lookup, zeros elsewhere, one exact all-reduce."""
        if self.ranks.group is None:
            return rows_at(self.weight, ids)
        mine = (ids >= self.start) & (ids < self.stop)
        if self.start == self.stop:
            part = self.weight.new_zeros(*ids.shape, self.weight.shape[1]) + self.weight.sum()  # 0, but on the graph
        else:
            part = rows_at(self.weight, (ids - self.start).where(mine, 0)) * mine.unsqueeze(-1)
        return reduce_from_ranks(part, self.ranks.group, self.ranks.exact)

    def logits(self, x):
        """x (..., hidden) whole -> (..., ceil(vocab/ranks)) at least fp32: this rank's ids, -inf where it has fewer."""
        x = copy_to_ranks(x.to(self.weight.dtype), self.ranks.group, self.ranks.exact)
        local = linear(x, self.weight)
        local = local.to(at_least_fp32(local.dtype))
        missing = self.width - local.shape[-1]
        return F.pad(local, (0, missing), value=float("-inf")) if missing else local


QUANTIZABLE = (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallel,
)  # layers whose `weight` may be an Int8Weight
