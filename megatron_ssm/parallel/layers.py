"""The tensor-parallel layers: packed parameters, column- and row-parallel linear layers, norms and the vocabulary.

`Ranks` are the ranks that share a model. The sums over ranks, with their gradients, are the communication operators of
`operators.py`, which also defines *whole* and *partial*.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels import kernels
from megatron_ssm.kernels.matrices import linear, rows_at

from .operators import copy_to_ranks, reduce_from_ranks
from .ranks import Ranks
from .sequence_parallel import all_gathered_tokens, reduce_scatter_tokens, replicated
from .tracked import TrackedModule

Device = torch.device | str | None
Product = Callable[[torch.Tensor], torch.Tensor]  # this rank's part of a product with x, such as a `LowRank`


def apply_layer(layer: nn.Module, x: torch.Tensor, adapter: Product | None) -> torch.Tensor:
    return layer(x) if adapter is None else layer(x, adapter)


def bias_of(layer: nn.Module) -> torch.Tensor | None:
    """The bias of a row-parallel layer, which is added after the sum; None for another class of layer."""
    return layer.bias if isinstance(layer, RowParallelLinear) else None


def with_adapter(y: torch.Tensor, adapter: Product | None, x: torch.Tensor) -> torch.Tensor:
    """y + adapter(x), added in the wider dtype and rounded once to that of y; or y if there is no adapter."""
    return y if adapter is None else (y + adapter(x)).to(y.dtype)


class _Pack(torch.autograd.Function):
    """The packed tensor of some fields. Backward splits its gradient, and sums the parts of shared fields over the ranks."""

    @staticmethod
    def forward(ctx, whole, split_gradient, *fields):
        ctx.split_gradient = split_gradient
        ctx.save_for_backward(*fields)  # so that autograd raises an error if a field is changed before backward
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return None, None, *ctx.split_gradient(grad)


class Packed(TrackedModule):
    """Fields that are separate parameters, because they are split differently, but are used as one tensor.

    The parameters are consecutive in the memory of one tensor, so reading all of them as one tensor needs no copy.

    Args:
        sizes: {field: this rank's rows}.
        trailing: The other dimensions, the same for all fields.
        dtype, device: Those of the parameters.
        shared: The names of consecutive fields that several ranks hold. Backward sums their gradients, by one all-reduce
            over all ranks of a tensor with a slot for each piece.
        pieces: The number of different pieces of shared fields. ranks.size / pieces consecutive ranks hold each piece.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        trailing: tuple[int, ...],
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: Device = None,
        shared: Iterable[str] = (),
        pieces: int = 1,
    ):
        super().__init__()
        self.sizes, self.ranks, self.shared, self.pieces = dict(sizes), ranks, tuple(shared), pieces
        whole = torch.empty(sum(sizes.values()), *trailing, dtype=dtype, device=device)
        for name, rows in zip(sizes, self._rows(whole), strict=True):
            self.register_parameter(name, nn.Parameter(rows))
        self._keep(whole)

    @property
    def fields(self) -> list[nn.Parameter]:
        return [field for field in self._parameters.values() if field is not None]

    def forward(self) -> torch.Tensor:
        """(sum of rows, *trailing): the rows of all fields in order."""
        fields, whole = self.fields, self._packed()
        if whole is None:
            whole = torch.cat([field.detach() for field in fields])
        if not torch.is_grad_enabled():
            return whole
        return _Pack.apply(whole, self._split_gradient, *fields)

    def _split_gradient(self, grad: torch.Tensor) -> list[torch.Tensor]:
        grads = dict(zip(self.sizes, grad.split(list(self.sizes.values())), strict=True))
        if self.shared:
            own = torch.cat([grads[name] for name in self.shared])
            pieces, index = own.new_zeros(self.pieces, *own.shape), self.ranks.piece_index(self.pieces)
            pieces[index] = own
            total = self.ranks.all_reduce_exact(pieces, self.ranks.group)[index]
            rows = [self.sizes[name] for name in self.shared]
            grads.update(zip(self.shared, total.split(rows), strict=True))
        return list(grads.values())

    @property
    def is_packed(self) -> bool:
        """True if the parameters are still rows of one tensor (optimizers and `.to()` may have moved them)."""
        return self._packed() is not None

    def _packed(self) -> torch.Tensor | None:
        """The tensor of all rows, if the parameters are still its rows; or None."""
        fields = self.fields
        whole = getattr(fields[0], "packed", None)
        if whole is None or whole.dtype != fields[-1].dtype:
            return None
        address = whole.data_ptr()
        for field in fields:
            if field.data_ptr() != address:
                return None
            address += field.numel() * field.element_size()
        return whole

    def _apply(self, fn: Callable, recurse: bool = True) -> "Packed":
        """Pack the parameters again after `.to()`, `.bfloat16()` and similar, which move each one to its own memory."""
        super()._apply(fn, recurse)
        if hasattr(self.fields[0], "packed"):  # otherwise `fully_shard` has replaced the parameters
            self._pack()
        return self

    def __setstate__(self, state: dict) -> None:
        """Pack the parameters again after a deep copy, in which each one has its own memory unless it is shared."""
        super().__setstate__(state)
        if not self.is_packed:
            self._pack()

    def _pack(self) -> None:
        fields = self.fields
        whole = torch.cat([field.data for field in fields])
        for field, rows in zip(fields, self._rows(whole), strict=True):
            field.data = rows
        self._keep(whole)

    def _rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each field, in the memory of `whole`.

        Each has its own `torch.UntypedStorage`, because safetensors and accelerate drop or reject tensors of a state_dict
        with a common one.
        """
        rows = whole.split(list(self.sizes.values()))
        return [part if part.is_meta else torch.from_dlpack(part) for part in rows]

    def _keep(self, whole: torch.Tensor) -> None:
        """Make `whole` an attribute of the first field, so that it is freed if `fully_shard` replaces the fields."""
        self.fields[0].packed = whole  # type: ignore[attr-defined]


class ColumnParallelLinear(TrackedModule):
    """y = x W^T + b with the rows of W and b split over the ranks.

    x (..., in), whole -> y (..., sum of this rank's rows). Sends nothing: the gradient of x is partial, and the code that
    computes x sums it (`operators.copy_to_ranks`).

    Args:
        in_features: The size of the input.
        rows: {field (z, x, B, C, dt): this rank's rows}.
        bias: True for a layer with a bias.
        dtype, device: Those of the parameters.
        shared, pieces: See `Packed`.
    """

    def __init__(
        self,
        in_features: int,
        rows: Mapping[str, int],
        bias: bool,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: Device = None,
        shared: Iterable[str] = (),
        pieces: int = 1,
    ):
        super().__init__()
        self.ranks = ranks
        self.weight = Packed(rows, (in_features,), ranks, dtype, device, shared, pieces)
        self.bias = Packed(rows, (), ranks, dtype, device, shared, pieces) if bias else None

    def forward(self, x: torch.Tensor, adapter: Product | None = None) -> torch.Tensor:
        """(..., in_features) -> (..., this rank's rows of all fields), plus adapter(x)."""
        return with_adapter(linear(x, self.weight(), self.bias() if self.bias is not None else None), adapter, x)


class RowParallelLinear(TrackedModule):
    """y = x W^T with the columns of W split over the ranks: x (..., this rank's columns) -> y (..., out), partial.

    Sends nothing: a unit sums the outputs of its operators over the ranks (`layers.operator.sum_of`). Every rank has the
    whole bias, which is added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ):
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: torch.Tensor, adapter: Product | None = None) -> torch.Tensor:
        """(..., this rank's in_features) -> (..., out_features), partial, without the bias; plus adapter(x)."""
        return with_adapter(linear(x, self.weight), adapter, x)


def is_altered(module: nn.Module) -> bool:
    """Return True if a module has hooks or replaced methods, so that a call does more than its class defines."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a call does exactly what the class `kind` defines, so that no hook can have stored its output."""
    return type(module) is kind and not is_altered(module) and not _has_any_global_hook()


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.to(at_least_fp32(x.dtype)), x.shape[-1:], eps=eps)


def weighted(normed: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """normed * (offset + weight) in the weight's dtype. normed: in at least fp32.

    Without an offset, `normed` is rounded before the product, as in transformers' Llama; with one, the product is rounded.
    """
    if not offset:
        return weight * normed.to(weight.dtype)
    return (normed * (offset + weight.to(normed.dtype))).to(weight.dtype)


class RMSNorm(TrackedModule):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in at least fp32; the same on every rank.

    With sequence parallelism, the tokens of `ranks` differ, and backward all-reduces the weight's gradient.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype | None = None, device: Device = None, ranks: Ranks | None = None,
        offset: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.eps, self.ranks, self.offset = eps, ranks, offset
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> the same shape in the weight's dtype."""
        if not torch.is_grad_enabled() and kernels.supports_rms_norm(x, self.weight):
            return kernels.rms_norm(x, self.weight, self.eps, self.offset)
        return weighted(rms_norm(x, self.eps), replicated(self.weight, self.ranks), self.offset)


def vocabulary_range(vocab_size: int, ranks: Ranks) -> tuple[int, int]:
    """The ids [start, stop) of this rank: ceil(vocab_size / ranks), fewer or none on the last ranks."""
    width = -(-vocab_size // ranks.size)
    return min(ranks.rank * width, vocab_size), min((ranks.rank + 1) * width, vocab_size)


class VocabularyParallel(TrackedModule):
    """The embedding or the language-model head, with the vocabulary split over the ranks (one object is both if tied).

    Attributes:
        start, stop: This rank's ids are [start, stop).
        width: The number of logits on each rank, ceil(vocab_size / ranks).
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, ranks: Ranks, dtype: torch.dtype | None = None, device: Device = None
    ):
        super().__init__()
        self.ranks = ranks
        self.start, self.stop = vocabulary_range(vocab_size, ranks)
        self.width = -(-vocab_size // ranks.size)
        self.weight = nn.Parameter(torch.empty(self.stop - self.start, hidden_size, dtype=dtype, device=device))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (batch, seq) int64 -> (batch, seq, hidden), the same on every rank.

        Each rank looks up its own ids and has zeros for the others; one exact all-reduce. Backward sends nothing. With
        sequence parallelism, each rank gets its share of the tokens.
        """
        if self.ranks.group is None:
            return rows_at(self.weight, ids)
        is_local = (ids >= self.start) & (ids < self.stop)
        if self.start == self.stop:  # the sum of an empty weight is 0, and keeps it in the autograd graph
            part = self.weight.new_zeros(*ids.shape, self.weight.shape[1]) + self.weight.sum()
        else:
            part = rows_at(self.weight, (ids - self.start).where(is_local, 0)) * is_local.unsqueeze(-1)
        if self.ranks.sequence_parallel:
            return reduce_scatter_tokens(part, self.ranks)
        return reduce_from_ranks(part, self.ranks.group, self.ranks.all_reduce_exact)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden), whole -> (..., width) in at least fp32: the logits of this rank's ids, padded with -inf.

        Forward sends nothing; backward all-reduces the gradient of x. With sequence parallelism, x has this rank's share of
        the tokens, and the result has the logits of all tokens.
        """
        x = x.to(self.weight.dtype)
        if self.ranks.sequence_parallel:
            with all_gathered_tokens(x, self.ranks) as whole:
                local = linear(whole, self.weight)
        else:
            local = linear(copy_to_ranks(x, self.ranks.group, self.ranks.all_reduce_exact), self.weight)
        local = local.to(at_least_fp32(local.dtype))
        padding = self.width - local.shape[-1]
        return F.pad(local, (0, padding), value=float("-inf")) if padding else local


class ReplicatedLinear(TrackedModule):
    """y = x W^T + b, computed on every rank, which then uses it for its own channels. It is never quantized.

    Backward sums the gradients of W and b over the ranks, one all-reduce each; the code that computes x sums its gradient.
    """

    def __init__(
        self, shape: tuple[int, int], bias: bool, ranks: Ranks, dtype: torch.dtype | None = None, device: Device = None
    ):
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the dtype of the weight."""
        bias = None if self.bias is None else copy_to_ranks(self.bias, self.ranks.group, self.ranks.all_reduce_exact)
        return linear(x.to(self.weight.dtype), self._copied(), bias)

    def of_partial(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in), partial -> (..., out), partial, without the bias."""
        return linear(x, self._copied())

    def _copied(self) -> torch.Tensor:
        return copy_to_ranks(self.weight, self.ranks.group, self.ranks.all_reduce_exact)


class ExpertMatrices(TrackedModule):
    """The matrices of all experts, (experts, ..., out, in), or one QuantizedMatrix (experts * out, in)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, device: Device = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def matrix(self) -> Any:
        """All matrices as one, (experts * out, in)."""
        return self.weight.flatten(0, -2) if isinstance(self.weight, torch.Tensor) else self.weight


# Layers whose `weight` may be a QuantizedMatrix.
QUANTIZABLE = (ColumnParallelLinear, RowParallelLinear, VocabularyParallel, ExpertMatrices)
