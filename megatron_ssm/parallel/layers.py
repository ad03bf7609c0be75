"""The tensor-parallel layers: packed parameters, column- and row-parallel linear layers, norms and the vocabulary.

`Ranks` says which ranks share a model and how they add up their parts. The sums themselves, with their gradients, are the
communication operators of `operators.py`, where *whole* and *partial* are explained.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from megatron_ssm.native import kernels
from megatron_ssm.ops.matrices import linear, rows_at
from sparsefusion.collectives.wire_formats import at_least_fp32

from .operators import copy_to_ranks, reduce_from_ranks
from .ranks import Ranks
from .sequence_parallel import all_gathered_tokens, reduce_scatter_tokens, replicated
from .tracked import TrackedModule

Device = torch.device | str | None
Product = Callable[[torch.Tensor], torch.Tensor]  # this rank's part of a product with x, such as a `LowRank`


def apply_layer(layer: nn.Module, x: torch.Tensor, adapter: Product | None) -> torch.Tensor:
    """The output of a column- or row-parallel layer, with its adapter. A layer of the caller's own takes x alone."""
    return layer(x) if adapter is None else layer(x, adapter)


def bias_of(layer: nn.Module) -> torch.Tensor | None:
    """The bias of a row-parallel layer, which is added after the sum. A layer of the caller's own adds its own."""
    return layer.bias if isinstance(layer, RowParallelLinear) else None


def with_adapter(y: torch.Tensor, adapter: Product | None, x: torch.Tensor) -> torch.Tensor:
    """y + adapter(x), or y if there is no adapter."""
    return y if adapter is None else y + adapter(x)


class _Pack(torch.autograd.Function):
    """The packed tensor of some fields. Backward splits its gradient into the fields', and sums those that ranks share."""

    @staticmethod
    def forward(ctx, whole, split_gradient, *fields):
        ctx.split_gradient = split_gradient
        ctx.save_for_backward(*fields)  # only so that autograd raises an error if one is changed before backward
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return None, None, *ctx.split_gradient(grad)


class Packed(TrackedModule):
    """Fields that are parameters of their own, because they are split differently, but are used as one tensor.

    sizes: this rank's rows of each field; all fields have the same trailing shape. The parameters lie side by side in the
    memory of one tensor, so that reading them as one tensor needs no copy.

    shared: the names of consecutive fields that are the same on several ranks. They have `pieces` different pieces, and
    each piece is on ranks.size / pieces consecutive ranks, whose gradients are summed in backward: by one all-reduce over
    all ranks, of a tensor that has a place for each piece.
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
        """The fields, in their order."""
        return [field for field in self._parameters.values() if field is not None]

    def forward(self) -> torch.Tensor:
        """(sum of rows, *trailing): the rows of all fields, in their order."""
        fields, whole = self.fields, self._packed()
        if whole is None:
            whole = torch.cat([field.detach() for field in fields])
        if not torch.is_grad_enabled():
            return whole
        return _Pack.apply(whole, self._split_gradient, *fields)

    def _split_gradient(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of each field, from that of the packed tensor."""
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
        """Whether the parameters still are the rows of one tensor (optimizers and `.to()` may have moved them)."""
        return self._packed() is not None

    def _packed(self) -> torch.Tensor | None:
        """The tensor of all rows, if the parameters still are its rows."""
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
        """`.to()`, `.bfloat16()`, ...: they move each parameter to memory of its own."""
        super()._apply(fn, recurse)
        if hasattr(self.fields[0], "packed"):  # else `fully_shard` has replaced them
            self._pack()
        return self

    def __setstate__(self, state: dict) -> None:
        """After a deep copy, whose parameters have memory of their own."""
        super().__setstate__(state)
        self._pack()

    def _pack(self) -> None:
        """Move the parameters into one tensor again."""
        fields = self.fields
        whole = torch.cat([field.data for field in fields])
        for field, rows in zip(fields, self._rows(whole), strict=True):
            field.data = rows
        self._keep(whole)

    def _rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each field, in the memory of `whole`.

        Each has a `torch.UntypedStorage` of its own: safetensors and accelerate drop or refuse tensors of a state_dict that
        share one.
        """
        rows = whole.split(list(self.sizes.values()))
        return [part if part.is_meta else torch.from_dlpack(part) for part in rows]

    def _keep(self, whole: torch.Tensor) -> None:
        """Make `whole` an attribute of the first field, so that it is freed where `fully_shard` replaces the fields."""
        self.fields[0].packed = whole  # type: ignore[attr-defined]


class ColumnParallelLinear(TrackedModule):
    """y = x W^T + b with the rows of W and b split over the ranks.

    x (..., in), whole -> y (..., sum of this rank's rows). Sends nothing: the gradient of x is partial, and whoever gives
    the layer its input sums it (`operators.copy_to_ranks`).

    rows: this rank's number of rows of each field (z, x, B, C, dt). shared, pieces: see `Packed`.
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

    Sends nothing: a unit sums y over the ranks, with that of others (`operators.operator.sum_of`). Every rank has all of the
    bias, which is added once, after the sum.
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
    """Whether calling a module does more than its class defines: it has hooks, or methods of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or has_own_methods(module)


def has_own_methods(module: nn.Module) -> bool:
    """Whether attributes of a module replace methods of its class, such as `forward`."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


def has_plain_tensors(module: nn.Module) -> bool:
    """Whether a module has tensors that are neither parameters nor buffers, whose replacement would not be noticed."""
    return any(isinstance(value, torch.Tensor) for value in vars(module).values())


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a module does exactly what the class `kind` defines, so that no hook can have kept its output."""
    return type(module) is kind and not is_altered(module) and not _has_any_global_hook()


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in at least fp32."""
    return F.rms_norm(x.to(at_least_fp32(x.dtype)), x.shape[-1:], eps=eps)


def weighted(normed: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """normed * (offset + weight) in the weight's dtype; normed: in at least fp32.

    It is rounded before the product with a weight, as transformers' Llama does, and after that with an offset and a weight.
    """
    if not offset:
        return weight * normed.to(weight.dtype)
    return (normed * (offset + weight.to(normed.dtype))).to(weight.dtype)


class RMSNorm(TrackedModule):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in at least fp32; whole on every rank.

    ranks: those that have other tokens if they are `sequence_parallel`; backward then all-reduces the weight's gradient.
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
    """The ids [start, stop) of this rank: ceil(vocab_size / ranks) for each rank; the last ranks have fewer, or none."""
    width = -(-vocab_size // ranks.size)
    return min(ranks.rank * width, vocab_size), min((ranks.rank + 1) * width, vocab_size)


class VocabularyParallel(TrackedModule):
    """The embedding or the language-model head, with the vocabulary split over the ranks (one object is both if tied).

    start, stop: this rank's ids, [start, stop). width: the number of this rank's logits, ceil(vocab_size / ranks), the same
    on all ranks.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: Device = None,
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
        if self.start == self.stop:  # the sum is 0, and keeps the weight in the autograd graph
            part = self.weight.new_zeros(*ids.shape, self.weight.shape[1]) + self.weight.sum()
        else:
            part = rows_at(self.weight, (ids - self.start).where(is_local, 0)) * is_local.unsqueeze(-1)
        if self.ranks.sequence_parallel:
            return reduce_scatter_tokens(part, self.ranks)
        return reduce_from_ranks(part, self.ranks.group, self.ranks.all_reduce_exact)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden), whole -> (..., width) in at least fp32: the logits of this rank's ids, and -inf after them.

        Forward sends nothing; backward all-reduces x's gradient. With sequence parallelism, x is this rank's share of the
        tokens, and the logits are those of all tokens.
        """
        x = x.to(self.weight.dtype)
        if self.ranks.sequence_parallel:
            with all_gathered_tokens(x, self.ranks) as whole:
                local = linear(whole, self.weight)
        else:
            local = linear(copy_to_ranks(x, self.ranks.group, self.ranks.all_reduce_exact), self.weight)
        local = local.to(at_least_fp32(local.dtype))
        missing = self.width - local.shape[-1]
        return F.pad(local, (0, missing), value=float("-inf")) if missing else local


class ReplicatedLinear(TrackedModule):
    """y = x W^T + b, which every rank computes alike and then uses for its own channels. It is never quantized.

    The gradients of W and b are summed over the ranks, one all-reduce each; whoever gives the layer its input sums x's.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        bias: bool,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: Device = None,
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
    """One matrix of each expert, (experts, ..., out, in), or one QuantizedMatrix (experts * out, in) of all of them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, device: Device = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def matrix(self) -> Any:
        """All matrices as one, (experts * out, in)."""
        return self.weight.flatten(0, -2) if isinstance(self.weight, torch.Tensor) else self.weight


# Layers whose `weight` may be a QuantizedMatrix.
QUANTIZABLE = (ColumnParallelLinear, RowParallelLinear, VocabularyParallel, ExpertMatrices)
