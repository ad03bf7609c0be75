"""Mixtures of experts: which experts a token chooses, and what the chosen ones make of it. No token is dropped.

The routers are those of transformers' Qwen3.5, Granite, Jamba and Nemotron-3, and round as these do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsefusion.collectives.wire_formats import at_least_fp32

from .matrices import linear
from .quantized_matrices import QuantizedMatrix

SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = FORMS = "softmax", "softmax of the chosen", "sigmoid"  # in the order of experts.c
GROUP_SCORES = 2  # the largest scores of a group, whose sum is the group's


@dataclass(frozen=True)
class Router:
    """A router, by which tokens choose and weight `chosen` of `experts` experts.

    form: SOFTMAX over all experts, of which the largest are chosen; CHOSEN_SOFTMAX, over the largest logits; or SIGMOID of
    each logit, in at least fp32, of which the largest are chosen after a bias was added for the choice alone, in the
    `chosen_groups` best of `groups` groups. renormalized: whether the weights are divided by their sum. scale: multiplies
    them.
    """

    experts: int
    chosen: int
    form: str = SOFTMAX
    renormalized: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    def reached(self, ranks: int) -> float:
        """The mean number of the ranks that divide the experts to which a token goes; all choices are equally likely."""
        elsewhere = math.comb(
            self.experts - self.experts // ranks, self.chosen
        )  # choices without the experts of a rank
        return ranks * (1 - elsewhere / math.comb(self.experts, self.chosen))

    def route(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits (tokens, experts) -> (weights, in at least fp32 for SIGMOID, else like logits; experts int64), both
        (tokens, chosen). bias: (experts), of SIGMOID.
        """
        wide = logits.to(at_least_fp32(logits.dtype))
        if self.form == CHOSEN_SOFTMAX:
            values, index = _largest(wide, self.chosen)
            return values.softmax(-1).to(logits.dtype), index
        if self.form == SOFTMAX:
            values, index = _largest(wide.softmax(-1), self.chosen)
            values = values / values.sum(-1, keepdim=True) if self.renormalized else values
            return values.to(logits.dtype), index
        scores = wide.sigmoid()
        index = self._best(scores.detach() if bias is None else scores.detach() + bias.detach())
        values = scores.gather(-1, index)
        values = values / (values.sum(-1, keepdim=True) + 1e-20) if self.renormalized else values
        return values * self.scale, index

    def _best(self, scores: Tensor) -> Tensor:
        """The experts (tokens, chosen) with the largest scores (tokens, experts), within the best groups."""
        if self.groups > 1:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = _largest(grouped.topk(GROUP_SCORES, dim=-1)[0].sum(-1), self.chosen_groups)[1]
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        return _largest(scores, self.chosen)[1]


def _largest(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` along the last dimension which, of equal numbers, takes the first ones on every device."""
    values, index = numbers.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], index[..., :count]


def apply_experts_ref(
    x: Tensor, weights: Tensor, index: Tensor, experts: int, up: Tensor, down: Tensor,
    activated: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The plain form of `apply_experts`: a loop over the experts, differentiated by autograd."""
    ups, downs = up.unflatten(0, (experts, -1)), down.unflatten(0, (experts, -1))
    y = torch.zeros(len(x), downs.shape[1], dtype=at_least_fp32(x.dtype), device=x.device)
    for expert in range(experts):
        token, place = torch.where(index == expert)
        out = activated(x[token] @ ups[expert].T) @ downs[expert].T
        y = y.index_add(0, token, (out * weights[token, place].unsqueeze(-1).to(out.dtype)).to(y.dtype))
    return y.to(x.dtype)


def apply_experts(
    x: Tensor, weights: Tensor, index: Tensor, experts: int, up: Tensor | QuantizedMatrix,
    down: Tensor | QuantizedMatrix, activated: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The weighted sum of what the experts chosen by each token make of it: down_e activated(up_e x).

    x: (tokens, in). weights, index: (tokens, chosen), of `Router.route`; an index of at least `experts` is left out. up:
    (experts * rows, in), and down: (experts * out, columns), the matrices of one expert below those of another; activated()
    maps rows to columns. Sends nothing.
    """
    if torch.is_grad_enabled():
        return _Experts.apply(x, weights, index, experts, up, down, activated)
    return _forward(x, weights, _by_expert(index, experts), up, down, activated)


def _by_expert(index: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """(places in the flattened index, sorted by expert and then by token; how many there are of each expert)."""
    flat = index.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts)[:experts].tolist()


def _forward(
    x: Tensor, weights: Tensor, sorted_by_expert: tuple[Tensor, list[int]], up: Any, down: Any,
    activated: Callable[[Tensor], Tensor], kept: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The output. kept: receives up_e x of each expert that has tokens."""
    order, counts = sorted_by_expert
    tokens, scales = order // weights.shape[-1], weights.flatten()[order].unsqueeze(-1)
    rows, out = up.shape[0] // len(counts), down.shape[0] // len(counts)
    y = torch.zeros(len(x), out, dtype=at_least_fp32(x.dtype), device=x.device)
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        part = slice(first, first + count)
        inner = linear(x[tokens[part]], _rows(up, expert * rows, rows))
        if kept is not None:
            kept.append(inner)
        each = linear(activated(inner), _rows(down, expert * out, out))
        del inner
        y.index_add_(0, tokens[part], each.mul_(scales[part].to(each.dtype)).to(y.dtype))
        del each
        first += count
    return y.to(x.dtype)


def _rows(matrix: Tensor | QuantizedMatrix, first: int, count: int) -> Tensor | QuantizedMatrix:
    part = slice(first, first + count)
    if isinstance(matrix, Tensor):
        return matrix[part]
    return type(matrix)(matrix.values[part], matrix.scales[part], matrix.dtype)


class _Experts(torch.autograd.Function):
    """`apply_experts`. Backward writes the gradient of each expert's matrices into its rows of one tensor.

    autograd would add up a tensor of all experts for each of them. Of every chosen expert and token, up_e x is stored.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, index: Tensor, experts: int, up: Tensor, down: Tensor, activated: Any
    ) -> Tensor:
        order, counts = _by_expert(index, experts)
        kept: list[Tensor] = []
        y = _forward(x, weights, (order, counts), up, down, activated, kept)
        ctx.counts, ctx.activated = counts, activated
        ctx.save_for_backward(x, weights, order, up, down, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, up, down, *kept = ctx.saved_tensors
        counts, chosen = ctx.counts, weights.shape[-1]
        tokens, scales = order // chosen, weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        rows, out = len(up) // len(counts), len(down) // len(counts)
        wide = at_least_fp32(x.dtype)
        dx, d_scales = torch.zeros_like(x, dtype=wide), torch.zeros_like(scales, dtype=wide)
        d_up, d_down = torch.zeros_like(up), torch.zeros_like(down)
        first, inners = 0, iter(kept)
        for expert, count in enumerate(counts):
            if not count:
                continue
            part, of_up = slice(first, first + count), slice(expert * rows, (expert + 1) * rows)
            of_down, token = slice(expert * out, (expert + 1) * out), tokens[part]
            with torch.enable_grad():
                inner = next(inners).detach().requires_grad_()
                columns = ctx.activated(inner)
            of_y = dy[token]
            unscaled = of_y @ down[of_down]
            d_scales[part] = (unscaled * columns.detach()).sum(-1, keepdim=True, dtype=d_scales.dtype)
            torch.mm((of_y * scales[part]).T, columns.detach(), out=d_down[of_down])
            (d_inner,) = torch.autograd.grad(columns, inner, unscaled.mul_(scales[part]))
            torch.mm(d_inner.T, x[token], out=d_up[of_up])
            dx.index_add_(0, token, (d_inner @ up[of_up]).to(dx.dtype))
            first += count
        d_weights = torch.empty_like(d_scales).index_copy_(0, order, d_scales).view_as(weights).to(weights.dtype)
        return dx.to(x.dtype), d_weights, None, None, d_up, d_down, None
