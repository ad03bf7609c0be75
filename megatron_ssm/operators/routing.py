"""The reports of routers of experts in training: losses that let them use all experts, and how often each was chosen.

Sources: Megatron-Core 0.16, `transformer/moe/moe_utils.py` and `router.py`; transformers' `load_balancing_loss_func`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ssm.ops.experts import SIGMOID, Router
from megatron_ssm.parallel.ranks import Ranks
from sparsefusion.collectives import counted as collectives
from sparsefusion.collectives.wire_formats import at_least_fp32


@dataclass(frozen=True)
class RouterLosses:
    """The losses that are added to the model's, times `balance` and `z`; 0: not at all.

    form: of the load-balancing loss. With f_e, the share of the choices that expert e got, and P_e, its mean score, aux_loss
    is the sum over layers of E sum_e f_e P_e over the tokens of a micro-batch on all context ranks (Megatron's definition);
    seq_aux_loss is its mean over sequences, each by itself; pooled_aux_loss takes f and P over all layers together, and
    multiplies by the number of chosen experts (transformers' definition). The z loss is the sum over layers of the mean of
    logsumexp(logits)^2.
    """

    form: str = "aux_loss"
    balance: float = 0.0
    z: float = 0.0


@dataclass
class Routing:
    """The reports of routers in calls of `Model.loss`.

    losses: to add. loads: {operator: how many tokens of this rank chose each of its experts, int64}, since it was emptied.
    values: {"load_balancing_loss" or "z_loss": this rank's share of the mean over replicas, since it was emptied}.
    """

    losses: RouterLosses = field(default_factory=RouterLosses)
    loads: dict[Any, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    _valid: Tensor | None = None
    _terms: dict[str, list[Any]] = field(default_factory=dict)

    def begin(self, valid: Tensor) -> None:
        """A call of the model begins. valid: (seq,), which of this rank's tokens of a row are no padding; later ones are."""
        self._valid, self._terms = valid, {name: [] for name in ("balance", "z")}

    def report(self, operator: Any, router: Router, logits: Tensor, index: Tensor) -> None:
        """A router has chosen the experts `index` (tokens, chosen) by logits (batch, seq, experts).

        Adds its losses. Sends one all-reduce of the choices over the context ranks, if there is a load-balancing loss.
        """
        if not torch.is_grad_enabled():
            return
        batch, seq = logits.shape[:2]
        assert self._valid is not None, "a call of `Model.loss` has begun"
        valid = F.pad(self._valid, (0, seq - len(self._valid))).expand(batch, seq)
        recomputation, losses = operator.ranks.recomputation, self.losses
        is_first = not recomputation.is_repeating
        if is_first:
            chosen = torch.bincount(index.view(batch, seq, -1)[valid].flatten(), minlength=router.experts)
            self.loads[operator] = self.loads.get(operator, 0) + chosen
        wide = logits.to(at_least_fp32(logits.dtype))
        if losses.balance:
            scores = wide.softmax(-1)
            if router.form == SIGMOID:
                scores = wide.sigmoid()
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            best = scores.detach().topk(router.chosen, dim=-1)[1]
            choices = torch.zeros_like(scores.detach()).scatter_(-1, best, 1.0).mul_(valid.unsqueeze(-1)).sum(1)
            choices = recomputation.communicate_once(lambda: _summed(choices, operator))
            means = (scores * valid.unsqueeze(-1)).sum(1)
            if is_first:
                self._terms["balance"].append((choices, means, router))
        if losses.z:
            count = recomputation.communicate_once(lambda: _summed(valid.sum().to(wide.dtype), operator))
            term = (wide.logsumexp(-1).square() * valid).sum() / count
            if is_first:
                self._terms["z"].append(term)

    def added_to(self, loss: Tensor, ranks: Ranks, replicas: int) -> Tensor:
        """The loss, whose gradients are also those of the routers' losses.

        The gradients of all replicas and context ranks add up to those of the mean over replicas. Those of tensor-parallel
        ranks, each of which has all tokens, add up in backward, so that each has its share of them.
        """
        total = loss.new_zeros(())
        for name, weight, value in self._of_call():
            value = value / replicas
            self.values[name] = self.values.get(name, 0) + value.detach()
            total = total + weight * value.to(total.dtype)
        return _WithGradientOf.apply(loss, total / ranks.size) if total.requires_grad else loss

    def _of_call(self) -> list[tuple[str, float, Tensor]]:
        """(name, coefficient, this rank's share) of each loss of the call."""
        found, losses = [], self.losses
        if terms := self._terms.get("balance"):
            found.append(("load_balancing_loss", losses.balance, _FORMS[losses.form](terms)))
        if terms := self._terms.get("z"):
            found.append(("z_loss", losses.z, torch.stack(terms).sum()))
        return found

    def take(self, group: ProcessGroup | None, micro_batches: int) -> tuple[dict[str, float], dict[Any, Tensor]]:
        """(values, as the mean over micro-batches; loads) of all ranks of `group`, and forget them.

        group: the ranks that have other tokens; they call it together. Sends one all-reduce of the loads, and one of the
        values.
        """
        loads, values = self.loads, self.values
        self.loads, self.values = {}, {}
        if group is not None and loads:
            flat = torch.cat([*loads.values()])
            torch.distributed.all_reduce(flat, group=group)
            loads = dict(zip(loads, flat.split([len(each) for each in loads.values()]), strict=True))
        if group is not None and values:
            stacked = torch.stack([*values.values()])
            torch.distributed.all_reduce(stacked, group=group)
            values = dict(zip(values, stacked, strict=True))
        return {name: value.item() / micro_batches for name, value in values.items()}, loads

    @staticmethod
    @torch.no_grad()
    def correct(loads: dict[Any, Tensor], rate: float) -> None:
        """Raise by `rate` the bias with which experts are chosen that got fewer tokens than the mean, and lower the others.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing" (2024), as Megatron does it: once for each step.
        """
        for operator, load in loads.items():
            if operator.correction is not None:
                load = load.to(operator.correction.dtype)
                operator.correction += rate * (load.mean() - load).sign()


def _summed(tensor: Tensor, operator: Any) -> Tensor:
    """The sum over the ranks that share sequences."""
    context = operator.context
    return tensor if context is None else collectives.all_reduce(tensor, context.group, context.counter)


def _balance(choices: Tensor, means: Tensor, router: Router) -> Tensor:
    """E sum_e f_e P_e of sums over tokens (..., experts)."""
    count = choices.sum(-1) / router.chosen
    return (choices * means).sum(-1) * router.experts / (router.chosen * count.square())


def _of_micro_batch(terms: list[tuple[Tensor, Tensor, Router]]) -> Tensor:
    return torch.stack([_balance(choices.sum(0), means.sum(0), router) for choices, means, router in terms]).sum()


def _of_sequences(terms: list[tuple[Tensor, Tensor, Router]]) -> Tensor:
    return torch.stack([_balance(choices, means, router).mean() for choices, means, router in terms]).sum()


def _pooled(terms: list[Any]) -> Tensor:
    choices, means = (sum(each[part].sum(0) for each in terms) for part in (0, 1))
    router = terms[0][2]
    return router.chosen * _balance(choices, means, router)


_FORMS: dict[str, Callable[[list], Tensor]] = {
    "aux_loss": _of_micro_batch, "seq_aux_loss": _of_sequences, "pooled_aux_loss": _pooled,
}  # fmt: skip


class _WithGradientOf(torch.autograd.Function):
    """The first argument; backward gives its gradient to both."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
