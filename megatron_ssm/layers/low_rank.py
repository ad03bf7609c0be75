"""LoRA: trained low-rank products that are added to linear layers, split over the tensor-parallel ranks like the layers.

y = x W^T + scale * (x A^T) B^T with A (rank, in) and B (out, rank). The product B A is split like W: one factor is split,
and every rank has all of the other.

| layer | A | B | all-reduce in backward |
|---|---|---|---|
| column-parallel: rows of W split | replicated | rows split | gradient of A |
| row-parallel: columns of W split | columns split | replicated | gradient of B |
| replicated | replicated | replicated | none |

The product is added before a row-parallel layer's all-reduce, and reads the input of a column-parallel layer after its
communication, so no activations are sent for it. As in PEFT, the factors are at least float32 over a bfloat16 model: the
product is computed in their dtype, and the sum is rounded once.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1.
"""

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megatron_ssm.kernels.matrices import linear
from megatron_ssm.parallel.layers import Packed, Product
from megatron_ssm.parallel.operators import copy_to_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import replicated
from megatron_ssm.parallel.tracked import TrackedModule


class PartsProduct:
    """The low-rank products of linear layers that are merged into one, concatenated; zeros for layers without a product.

    x (..., columns) -> (..., rows of all layers on this rank). parts: {name of a layer: this rank's rows}.
    """

    def __init__(self, adapters: "Adapters", parts: Mapping[str, int]):
        self.adapters, self.parts = adapters, dict(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        adapters = self.adapters
        products = [
            adapters[name](x) if name in adapters else x.new_zeros(*x.shape[:-1], rows)
            for name, rows in self.parts.items()
        ]
        return torch.cat(products, dim=-1)

    @property
    def products_by_first_column(self) -> list[tuple[int, "LowRank"]]:
        """(first row, product) of each layer with a product."""
        starts = list(itertools.accumulate(self.parts.values(), initial=0))
        named = zip(starts, self.parts, strict=False)
        return [(start, self.adapters[name]) for start, name in named if name in self.adapters]  # type: ignore[misc]


class LowRank(TrackedModule):
    """scale * (x A^T) B^T: x (..., this rank's inputs) -> (..., this rank's rows), a summand if the layer's output is one.

    x is converted to the dtype of the factors, which is also that of the result.

    Forward sends nothing. Backward all-reduces the gradient of A (split=0) or of B (split=1).

    Args:
        split: The dimension of W that is split (0: rows, 1: columns, None: neither).
        rank: The rank of the product.
        inputs: This rank's columns of A.
        rows: This rank's rows of B for each field of the layer.
        scale: The constant that multiplies the product.
        shared, pieces: See `Packed`.
    """

    def __init__(
        self,
        split: int | None,
        rank: int,
        inputs: int,
        rows: Mapping[str, int],
        scale: float,
        ranks: Ranks,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        shared: Iterable[str] = (),
        pieces: int = 1,
    ):
        super().__init__()
        self.split, self.scale, self.ranks, self.rows = split, scale, ranks, sum(rows.values())
        self.down = nn.Parameter(torch.empty(rank, inputs, dtype=dtype, device=device))
        self.up = Packed(rows, (rank,), ranks, dtype, device, shared, pieces)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., this rank's inputs) -> (..., this rank's rows of all fields)."""
        low = linear(x.to(self.down.dtype), self._whole(self.down, is_split=self.split == 1))
        return self.scale * linear(low, self._whole(self.up(), is_split=self.split == 0))

    def _whole(self, parameter: torch.Tensor, is_split: bool) -> torch.Tensor:
        """The parameter. Backward sums its gradient over the ranks if they all hold it and use it for their own parts."""
        if is_split:
            return parameter
        if self.split is None:
            return replicated(parameter, self.ranks)
        return copy_to_ranks(parameter, self.ranks.group, self.ranks.all_reduce_exact)

    @torch.no_grad()
    def product(self) -> torch.Tensor:
        """scale * B A, (this rank's rows, this rank's inputs): this rank's part of the update of W."""
        return self.scale * self.up() @ self.down


class Adapters(nn.ModuleDict):
    """{the operator's name of a linear layer, such as "in_proj": its `LowRank`}."""


def adapter_of(adapters: Adapters | None, name: str) -> Product | None:
    return adapters[name] if adapters is not None and name in adapters else None


def adapter_of_parts(adapters: Adapters | None, parts: Mapping[str, int]) -> PartsProduct | None:
    """A `PartsProduct`, or None if no part has a product. parts: {name: this rank's rows}."""
    if adapters is None or not any(name in adapters for name in parts):
        return None
    return PartsProduct(adapters, parts)
