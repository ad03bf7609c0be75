"""LoRA: trained low-rank products beside linear layers, split over the tensor-parallel ranks as the layers are.

y = x W^T + scale * (x A^T) B^T with A (rank, in) and B (out, rank). B x A is split like W: one of them is split, and every
rank has all of the other.

| the layer | A | B | who sums what |
|---|---|---|---|
| column-parallel: rows of W split | whole | rows split | backward: the gradient of A, over the ranks |
| row-parallel: columns of W split | columns split | whole | backward: the gradient of B, over the ranks |
| whole on every rank | whole | whole | nobody |

The product is added before the layer's own all-reduce, or takes its input after it, so activations are never sent for it.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1.
"""

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megatron_ssm.ops.matrices import linear
from megatron_ssm.parallel.layers import Packed, Product
from megatron_ssm.parallel.operators import copy_to_ranks
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.sequence_parallel import replicated
from megatron_ssm.parallel.tracked import TrackedModule


class PartsProduct:
    """The products beside linear layers that we compute as one, side by side; zeros for those that have none.

    parts: {name: this rank's rows}. x (..., columns) -> (..., rows of all parts on this rank).
    """

    def __init__(self, adapters: "Adapters", parts: Mapping[str, int]):
        self.adapters, self.parts = adapters, dict(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        adapters = self.adapters
        made = [
            adapters[name](x) if name in adapters else x.new_zeros(*x.shape[:-1], rows)
            for name, rows in self.parts.items()
        ]
        return torch.cat(made, dim=-1)

    @property
    def by_column(self) -> list[tuple[int, "LowRank"]]:
        """(first row, product) of those that there are."""
        starts = list(itertools.accumulate(self.parts.values(), initial=0))
        named = zip(starts, self.parts, strict=False)
        return [(start, self.adapters[name]) for start, name in named if name in self.adapters]  # type: ignore[misc]


class LowRank(TrackedModule):
    """scale * (x A^T) B^T: x (..., this rank's inputs) -> (..., this rank's rows), partial where the layer's output is.

    split: the dimension of W that is split (0: rows, 1: columns, None: neither). rank: of the product. inputs: this rank's
    columns of A. rows: this rank's rows of B, for each field of the layer. shared, pieces: see `Packed`.

    Forward sends nothing. Backward all-reduces the gradient of A (split 0) or of B (split 1).
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
        low = linear(x, self._whole(self.down, is_split=self.split == 1))
        return self.scale * linear(low, self._whole(self.up(), is_split=self.split == 0))

    def _whole(self, parameter: torch.Tensor, is_split: bool) -> torch.Tensor:
        """A parameter whose gradient is summed over the ranks, if every rank has all of it and uses it for its own part."""
        if is_split:
            return parameter
        if self.split is None:
            return replicated(parameter, self.ranks)
        return copy_to_ranks(parameter, self.ranks.group, self.ranks.all_reduce_exact)

    @torch.no_grad()
    def product(self) -> torch.Tensor:
        """scale * B A: this rank's part of what is added to W, (this rank's rows, this rank's inputs)."""
        return self.scale * self.up() @ self.down


class Adapters(nn.ModuleDict):
    """{what the operator calls a linear layer, such as in_proj: its `LowRank`}."""


def adapter_of(adapters: Adapters | None, name: str) -> Product | None:
    """The low-rank product beside one linear layer; None if it has none."""
    return adapters[name] if adapters is not None and name in adapters else None


def adapter_of_parts(adapters: Adapters | None, parts: Mapping[str, int]) -> PartsProduct | None:
    """See `PartsProduct`; None if no part has a product. parts: {name: this rank's rows}."""
    if adapters is None or not any(name in adapters for name in parts):
        return None
    return PartsProduct(adapters, parts)
