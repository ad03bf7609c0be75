"""Expert parallelism: each token goes once to every rank with experts that it chose, and their weighted sum comes back.

Source: Lepikhin et al., "GShard" (2020), section 3; each rank holds whole experts, and no token is dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from commfabric.collectives import counted
from commfabric.collectives.wire_formats import at_least_fp32

from .ranks import Ranks

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, weights, index) of some tokens -> the weighted sum of theirs


def dispatched(x: Tensor, weights: Tensor, index: Tensor, held: int, ranks: Ranks, experts: Experts) -> Tensor:
    """The weighted sum of what all ranks' experts make of this rank's tokens: (tokens, out).

    x: (tokens, in). weights, index: (tokens, chosen), of `Router.route`. The ranks may have different numbers of tokens, or
    none. held: how many experts each rank holds; rank r has those from r * held on. experts: this rank's; it gets tokens of
    all ranks, and an index from 0 to held - 1, or `held` for an expert of another rank.

    Sends how many tokens each rank gets (8 bytes to each); then, for each token and each other rank with experts that it
    chose, one row of x, `chosen` weights, and as many indices of 4 bytes, in their dtypes; and each of these ranks returns
    one row of the result. Backward sends the gradients the other way, without indices: as many bytes for x, the weights and
    the result. When activations are recomputed, nothing is sent again.
    """
    owner = index // held
    reached = torch.zeros(len(x), ranks.size, dtype=torch.bool, device=x.device).scatter_(1, owner, True)
    rank, token = reached.T.nonzero(as_tuple=True)
    sent = reached.sum(0)
    received = ranks.recomputation.communicate_once(lambda: counted.all_to_all(sent, ranks.group, ranks.counter))
    there, back = sent.tolist(), received.tolist()
    rank = rank.unsqueeze(1)
    own = (index[token] - rank * held).where(owner[token] == rank, held).to(torch.int32)
    arrived = _Exchange.apply(ranks, there, back, x.index_select(0, token), weights.index_select(0, token), own)
    rows, scales, own = arrived
    (sums,) = _Exchange.apply(ranks, back, there, experts(rows, scales, own.long()))
    wide = at_least_fp32(x.dtype)
    return (
        torch.zeros(len(x), sums.shape[1], dtype=wide, device=x.device).index_add(0, token, sums.to(wide)).to(x.dtype)
    )


class _Exchange(torch.autograd.Function):
    """Rows of tensors to other ranks, in one message for each; the gradients of those in floating point come back."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sent: list[int], received: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        arrived = ranks.recomputation.communicate_once(lambda: _exchange(ranks, sent, received, tensors))
        ctx.mark_non_differentiable(*(each for each in arrived if not each.is_floating_point()))
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        floating = [each for each in gradients if each.is_floating_point()]
        returned = _exchange(ctx.ranks, ctx.received, ctx.sent, floating)
        return None, None, None, *returned, *([None] * (len(gradients) - len(floating)))


def _exchange(ranks: Ranks, sent: list[int], received: list[int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rows of tensors (rows, n) of any dtypes, side by side as bytes; see `counted.all_to_all_rows`."""
    assert ranks.group is not None, "one rank holds all experts"
    rows = [_packed(each).view(torch.uint8) for each in tensors]
    arrived = counted.all_to_all_rows(torch.cat(rows, dim=1), sent, received, ranks.group, ranks.counter)
    parts = arrived.split([each.shape[1] for each in rows], dim=1)
    return tuple(_packed(part).view(each.dtype) for part, each in zip(parts, tensors, strict=True))


def _packed(tensor: Tensor) -> Tensor:
    """A copy without gaps. (`contiguous` would keep any stride of a single row or column, which `view` refuses.)"""
    return tensor.clone(memory_format=torch.contiguous_format)
