"""Monoids: how partial results combine. Each is associative, commutative, and has a neutral element.

A partial result is a tuple of tensors, one for each output of a `Result`, in at least fp32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attention2d.compute.tile import merge

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Monoid:
    """An operation that combines partial results.

    Attributes:
        neutral: the value with which each output begins.
        combine: combine(total, part) combines `part` into `total`, in place; both may be views.
        travels_directly: send a partial result to its owner in one message, so that it is rounded once. Otherwise it travels
            from rank to rank, and each adds its own part.
    """

    name: str
    neutral: tuple[float, ...]
    combine: Callable[[Tensors, Tensors], None]
    travels_directly: bool = False

    def values(self, count: int) -> tuple[float, ...]:
        """The neutral element of each of `count` outputs."""
        return self.neutral * count if len(self.neutral) == 1 else self.neutral


def _add(total: Tensors, part: Tensors) -> None:
    for x, y in zip(total, part, strict=True):
        x += y


def _maximum(total: Tensors, part: Tensors) -> None:
    for x, y in zip(total, part, strict=True):
        torch.maximum(x, y.to(x.dtype), out=x)


def _merge_softmax(total: Tensors, part: Tensors) -> None:
    """Merge (out, lse): weighted means over disjoint sets of keys, and the log of the sum of their weights."""
    merge(*total, *part)


MONOIDS = {
    monoid.name: monoid
    for monoid in (
        Monoid("sum", (0.0,), _add),
        Monoid("max", (float("-inf"),), _maximum, travels_directly=True),
        Monoid("softmax", (0.0, float("-inf")), _merge_softmax, travels_directly=True),
    )
}
