"""Mixtures of experts: the routers, and the weighted sum of the outputs of the chosen experts. No token is dropped.

The routers are those of transformers' Qwen3.5, Granite, Jamba and Nemotron-3, with the same rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from commfabric.collectives.wire_formats import at_least_fp32

from .matrices import linear
from .quantized_matrices import QuantizedMatrix

SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = FORMS = "softmax", "softmax of the chosen", "sigmoid"  # in the order of experts.c
GROUP_SCORES = 2  # a group's score is the sum of its GROUP_SCORES largest scores


@dataclass(frozen=True)
class Router:
    """A router, which chooses `chosen` of `experts` experts for each token, and their weights.

    Attributes:
        chosen: The number of experts that a token chooses.
        form: The scores of the experts. SOFTMAX: the softmax of all logits. CHOSEN_SOFTMAX: the softmax of the largest
            logits. SIGMOID: the sigmoid of each logit, in at least fp32; a bias may be added for the choice, not for the
            weights, and only the best groups of experts are considered.
        renormalized: True if the weights are divided by their sum, for SOFTMAX and SIGMOID.
        scale: A constant that multiplies the weights, for SIGMOID.
        groups: The number of groups of experts, for SIGMOID.
        chosen_groups: The number of groups that a token considers.
    """

    experts: int
    chosen: int
    form: str = SOFTMAX
    renormalized: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    def reached(self, ranks: int) -> float:
        """The mean number of expert-parallel ranks that a token is sent to, if all choices are equally likely."""
        without_rank = math.comb(
            self.experts - self.experts // ranks, self.chosen
        )  # choices of other ranks' experts only
        return ranks * (1 - without_rank / math.comb(self.experts, self.chosen))

    def route(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights and the indices of the experts that each token chooses.

        Args:
            logits: (tokens, experts).
            bias: (experts,), for SIGMOID, or None.

        Returns:
            (the weights (tokens, chosen), in at least fp32 for SIGMOID, otherwise in the dtype of the logits; the indices
            (tokens, chosen) int64).
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
        index = self._choose(scores.detach() if bias is None else scores.detach() + bias.detach())
        values = scores.gather(-1, index)
        values = values / (values.sum(-1, keepdim=True) + 1e-20) if self.renormalized else values
        return values * self.scale, index

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts (tokens, chosen) with the largest scores (tokens, experts), within the best groups."""
        if self.groups > 1:
            grouped = scores.unflatten(-1, (self.groups, -1))  # (tokens, groups, experts of a group)
            best = _largest(grouped.topk(GROUP_SCORES, dim=-1)[0].sum(-1), self.chosen_groups)[1]
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        return _largest(scores, self.chosen)[1]


def _largest(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` along the last dimension. Of equal numbers, it returns the first ones, on every device."""
    values, index = numbers.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], index[..., :count]


def apply_experts_ref(
    x: Tensor, weights: Tensor, index: Tensor, experts: int, up: Tensor, down: Tensor,
    activated: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The plain form of `apply_experts`: a loop over the experts, differentiated by autograd."""
    ups, downs = (
        up.unflatten(0, (experts, -1)),
        down.unflatten(0, (experts, -1)),
    )  # (experts, rows, in), (experts, out, columns)
    y = torch.zeros(len(x), downs.shape[1], dtype=at_least_fp32(x.dtype), device=x.device)
    for expert in range(experts):
        token, choice = torch.where(index == expert)
        out = activated(x[token] @ ups[expert].T) @ downs[expert].T
        y = y.index_add(0, token, (out * weights[token, choice].unsqueeze(-1).to(out.dtype)).to(y.dtype))
    return y.to(x.dtype)


def apply_experts(
    x: Tensor, weights: Tensor, index: Tensor, experts: int, up: Tensor | QuantizedMatrix,
    down: Tensor | QuantizedMatrix, activated: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The weighted sum over each token's chosen experts e of down_e activated(up_e x): (tokens, out). Sends nothing.

    Args:
        x: (tokens, in).
        weights, index: (tokens, chosen), the results of `Router.route`. Indices >= `experts` are ignored.
        up: (experts * rows, in), the concatenated matrices of the experts.
        down: (experts * out, columns), the concatenated matrices of the experts.
        activated: A function that maps (n, rows) to (n, columns).
    """
    if torch.is_grad_enabled():
        return _Experts.apply(x, weights, index, experts, up, down, activated)
    return _forward(x, weights, _by_expert(index, experts), up, down, activated)


def _by_expert(index: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Sort the choices by expert and then by token: (their indices in the flattened index; the number for each expert)."""
    flat = index.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts)[:experts].tolist()


def _forward(
    x: Tensor, weights: Tensor, sorted_by_expert: tuple[Tensor, list[int]], up: Any, down: Any,
    activated: Callable[[Tensor], Tensor], inners: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The output. If `inners` is a list, up_e x of each expert with tokens is appended to it."""
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
        if inners is not None:
            inners.append(inner)
        output = linear(activated(inner), _rows(down, expert * out, out))
        del inner
        y.index_add_(0, tokens[part], output.mul_(scales[part].to(output.dtype)).to(y.dtype))
        del output
        first += count
    return y.to(x.dtype)


def _rows(matrix: Tensor | QuantizedMatrix, first: int, count: int) -> Tensor | QuantizedMatrix:
    part = slice(first, first + count)
    if isinstance(matrix, Tensor):
        return matrix[part]
    return type(matrix)(matrix.values[part], matrix.scales[part], matrix.dtype)


class _Experts(torch.autograd.Function):
    """`apply_experts` with gradients. Forward stores up_e x of every token and expert that it chose.

    Backward writes the gradient of each expert's matrices into its rows of one tensor. Autograd would add up one tensor of
    this size for each expert.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, index: Tensor, experts: int, up: Tensor, down: Tensor, activated: Any
    ) -> Tensor:
        order, counts = _by_expert(index, experts)
        inners: list[Tensor] = []
        y = _forward(x, weights, (order, counts), up, down, activated, inners)
        ctx.counts, ctx.activated = counts, activated
        ctx.save_for_backward(x, weights, order, up, down, *inners)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, up, down, *inners = ctx.saved_tensors
        counts, chosen = ctx.counts, weights.shape[-1]
        tokens, scales = order // chosen, weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        rows, out = len(up) // len(counts), len(down) // len(counts)
        wide = at_least_fp32(x.dtype)
        dx, d_scales = torch.zeros_like(x, dtype=wide), torch.zeros_like(scales, dtype=wide)
        d_up, d_down = torch.zeros_like(up), torch.zeros_like(down)
        first, saved = 0, iter(inners)
        for expert, count in enumerate(counts):
            if not count:
                continue
            part, up_rows = slice(first, first + count), slice(expert * rows, (expert + 1) * rows)
            down_rows, token = slice(expert * out, (expert + 1) * out), tokens[part]
            with torch.enable_grad():
                inner = next(saved).detach().requires_grad_()
                columns = ctx.activated(inner)
            d_output = dy[token]
            unscaled = d_output @ down[down_rows]
            d_scales[part] = (unscaled * columns.detach()).sum(-1, keepdim=True, dtype=d_scales.dtype)
            torch.mm((d_output * scales[part]).T, columns.detach(), out=d_down[down_rows])
            (d_inner,) = torch.autograd.grad(columns, inner, unscaled.mul_(scales[part]))
            torch.mm(d_inner.T, x[token], out=d_up[up_rows])
            dx.index_add_(0, token, (d_inner @ up[up_rows]).to(dx.dtype))
            first += count
        d_weights = torch.empty_like(d_scales).index_copy_(0, order, d_scales).view_as(weights).to(weights.dtype)
        return dx.to(x.dtype), d_weights, None, None, d_up, d_down, None
