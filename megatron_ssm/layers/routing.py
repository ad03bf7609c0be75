"""Reports of the routers of experts in training: auxiliary losses, and the number of tokens of each expert.

Sources: Megatron-Core 0.16, `transformer/moe/moe_utils.py` and `router.py`; transformers' `load_balancing_loss_func`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from commfabric.collectives import counted as collectives
from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels.experts import SIGMOID, Router
from megatron_ssm.parallel.ranks import Ranks


@dataclass(frozen=True)
class RouterLosses:
    """The auxiliary losses of routers: coefficients, and the form of the load-balancing loss.

    With f_e the fraction of the choices that select expert e, and P_e its mean score, the forms are

    - aux_loss: the sum over layers of E sum_e f_e P_e over the tokens of a micro-batch on all context ranks (Megatron),
    - seq_aux_loss: the mean of aux_loss over sequences, each computed alone (Megatron),
    - pooled_aux_loss: with f and P over all layers together, times the number of chosen experts (transformers).

    Attributes:
        form: The form of the load-balancing loss.
        balance: The coefficient of the load-balancing loss; 0 disables it.
        z: The coefficient of the z-loss, the sum over layers of the mean of logsumexp(logits)^2; 0 disables it.
    """

    form: str = "aux_loss"
    balance: float = 0.0
    z: float = 0.0


@dataclass
class Routing:
    """The reports of routers in calls of `Model.loss`, since `take` last emptied them.

    Attributes:
        losses: The auxiliary losses to add.
        loads: {operator: the number of tokens of this rank that chose each of its experts, int64}.
        values: {"load_balancing_loss" or "z_loss": this rank's share of the mean over replicas}.
    """

    losses: RouterLosses = field(default_factory=RouterLosses)
    loads: dict[Any, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    _valid: Tensor | None = None
    _terms: dict[str, list[Any]] = field(default_factory=dict)

    def begin(self, valid: Tensor) -> None:
        """Begin a call of the model. valid: (seq,) bool, False at padding; tokens after it are padding as well."""
        self._valid, self._terms = valid, {name: [] for name in ("balance", "z")}

    def report(self, operator: Any, router: Router, logits: Tensor, index: Tensor) -> None:
        """Record that a router chose the experts `index` (tokens, chosen) by logits (batch, seq, experts).

        Adds its losses. Sends one all-reduce of the choices over the context ranks if there is a load-balancing loss.
        """
        if not torch.is_grad_enabled():
            return
        batch, seq = logits.shape[:2]
        assert self._valid is not None
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
            best = scores.detach().topk(router.chosen, dim=-1)[1]  # (batch, seq, chosen)
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
        """The loss of the model. Its backward pass also gives routers the gradients of the auxiliary losses.

        The sum of the gradients over replicas and context ranks is the gradient of the mean over replicas. Every
        tensor-parallel rank has all tokens, so each gets an equal share, and backward adds them up.
        """
        total = loss.new_zeros(())
        for name, weight, value in self._of_call():
            value = value / replicas
            self.values[name] = self.values.get(name, 0) + value.detach()
            total = total + weight * value.to(total.dtype)
        return _WithGradientOf.apply(loss, total / ranks.size) if total.requires_grad else loss

    def _of_call(self) -> list[tuple[str, float, Tensor]]:
        """(name, coefficient, this rank's share) of each loss of the call."""
        entries, losses = [], self.losses
        if terms := self._terms.get("balance"):
            entries.append(("load_balancing_loss", losses.balance, _FORMS[losses.form](terms)))
        if terms := self._terms.get("z"):
            entries.append(("z_loss", losses.z, torch.stack(terms).sum()))
        return entries

    def take(self, group: ProcessGroup | None, micro_batches: int) -> tuple[dict[str, float], dict[Any, Tensor]]:
        """(values, averaged over micro-batches; loads), summed over the ranks of `group`; then forget them.

        group: The ranks with different tokens, which all call this. Sends one all-reduce of the loads and one of the values.
        """
        loads, values = self.loads, self.values
        self.loads, self.values = {}, {}
        if group is not None and loads:
            flat = torch.cat([*loads.values()])
            torch.distributed.all_reduce(flat, group=group)
            loads = dict(zip(loads, flat.split([len(load) for load in loads.values()]), strict=True))
        if group is not None and values:
            stacked = torch.stack([*values.values()])
            torch.distributed.all_reduce(stacked, group=group)
            values = dict(zip(values, stacked, strict=True))
        return {name: value.item() / micro_batches for name, value in values.items()}, loads

    @staticmethod
    @torch.no_grad()
    def correct(loads: dict[Any, Tensor], rate: float) -> None:
        """Raise the selection bias of experts with fewer tokens than the mean by `rate`, and lower that of the others.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing" (2024); like Megatron, once per step.
        """
        for operator, load in loads.items():
            if operator.correction is not None:
                load = load.to(operator.correction.dtype)
                operator.correction += rate * (load.mean() - load).sign()


def _summed(tensor: Tensor, operator: Any) -> Tensor:
    context = operator.context
    return tensor if context is None else collectives.all_reduce(tensor, context.group, context.counter)


def _balance(choices: Tensor, means: Tensor, router: Router) -> Tensor:
    """E sum_e f_e P_e from sums over tokens (..., experts) of choices and of scores."""
    count = choices.sum(-1) / router.chosen
    return (choices * means).sum(-1) * router.experts / (router.chosen * count.square())


def _of_micro_batch(terms: list[tuple[Tensor, Tensor, Router]]) -> Tensor:
    return torch.stack([_balance(choices.sum(0), means.sum(0), router) for choices, means, router in terms]).sum()


def _of_sequences(terms: list[tuple[Tensor, Tensor, Router]]) -> Tensor:
    return torch.stack([_balance(choices, means, router).mean() for choices, means, router in terms]).sum()


def _pooled(terms: list[Any]) -> Tensor:
    choices, means = (sum(term[part].sum(0) for term in terms) for part in (0, 1))
    router = terms[0][2]
    return router.chosen * _balance(choices, means, router)


_FORMS: dict[str, Callable[[list], Tensor]] = {
    "aux_loss": _of_micro_batch, "seq_aux_loss": _of_sequences, "pooled_aux_loss": _pooled,
}  # fmt: skip


class _WithGradientOf(torch.autograd.Function):
    """The first argument; backward passes its gradient to both."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
