"""Routed experts: each token is sent to a few of many MLPs. A shared expert is another MLP in the same unit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from commfabric.collectives.wire_formats import at_least_fp32
from megatron_ssm.kernels.experts import SIGMOID, Router, apply_experts
from megatron_ssm.parallel.dispatch import dispatched
from megatron_ssm.parallel.layers import ExpertMatrices, ReplicatedLinear
from megatron_ssm.parallel.operators import reduce_from_ranks
from megatron_ssm.spec.fields import Field, divides
from megatron_ssm.spec.sizes import Sizes, Workload
from megatron_ssm.spec.stack import Spec

from .call import Call
from .mlp import ACTIVATIONS
from .operator import Lowered, Operator, Partial, Place
from .state import State
from .tape_builder import Buffer, Builder


@dataclass(frozen=True)
class ExpertsSpec(Spec):
    """The sizes of routed experts: down(activation(gate(x)) * up(x)), or down(activation(up(x))) if they are not gated.

    Attributes:
        hidden_size: The size of the input and the output.
        channels: The inner dimension of an expert.
        activation: A name of `mlp.ACTIVATIONS`.
        gated: True if there is a gate projection.
        latent: The size of the inputs and outputs of the experts, if two projections shared by all experts surround them; 0:
            the hidden size, without such projections.
        latent_bias: True if these projections have biases.
        router_name: The name of the router in checkpoint files.
        merged: True if checkpoint files store the matrices of all experts in one tensor.
        granule: Each rank has a multiple of this many channels; the last ranks may have fewer than others. 1: all ranks have
            equally many.
    """

    hidden_size: int
    router: Router
    channels: int
    activation: str = "silu"
    gated: bool = True
    latent: int = 0
    latent_bias: bool = False
    router_name: str = "gate"
    merged: bool = False
    granule: int = 1

    @property
    def experts(self) -> int:
        return self.router.experts

    @property
    def size(self) -> int:
        """The size of the input and the output of an expert."""
        return self.latent or self.hidden_size

    def fields(self) -> Iterator[Field]:
        """Every rank has the router and the projections around the experts.

        Tensor-parallel ranks split each expert by channel, and expert-parallel ranks divide the experts.
        """
        experts, inner, hidden = self.router.experts, self.channels, self.hidden_size
        is_wide = self.router.form == SIGMOID
        yield Field("router.weight", f"{self.router_name}.weight", (experts, hidden), fp32=is_wide, adaptable=False)
        if is_wide:
            hf = f"{self.router_name}.e_score_correction_bias"
            yield Field("correction", hf, (experts,), fp32=True, init="bias")
        for name, sizes in self.projections().items():
            yield Field(f"{name}.weight", f"{name}_latent_proj.weight", sizes, adaptable=False)
            if self.latent_bias:
                yield Field(f"{name}.bias", f"{name}_latent_proj.bias", sizes[:1], init="bias")
        parts, whole = ["gate_proj", "up_proj"], "gate_up_proj"
        if not self.gated:
            parts, whole = ["up_proj"], "up_proj"
        common: dict[str, Any] = dict(
            split=2, units=inner if self.granule == 1 else None, granule=self.granule, by_expert=True,
            written_apart=not self.merged, used=self.router.chosen / experts,
        )  # fmt: skip
        names = tuple(f"experts.{{}}.{part}.weight" for part in parts)
        yield Field(
            "up.weight", f"experts.{whole}", (experts, len(parts), inner, self.size), merged=True, apart=names, **common
        )
        down = ("experts.{}.down_proj.weight",)
        yield Field(
            "down.weight", "experts.down_proj", (experts, self.size, inner), apart=down, init="out_proj", **common
        )

    def in_granules(self, granule: int, ranks: int) -> "ExpertsSpec":
        """The same, split in multiples of `granule` channels, if each rank gets one and equal parts are none."""
        count, rest = divmod(self.channels, granule)
        is_possible = not rest and (ranks - 1) * -(-count // ranks) < count
        return replace(self, granule=granule) if is_possible and count % ranks else self

    def projections(self) -> dict[str, tuple[int, int]]:
        hidden = self.hidden_size
        return {"fc1": (self.latent, hidden), "fc2": (hidden, self.latent)} if self.latent else {}

    def check_ranks(self, size: int) -> None:
        if self.granule == 1:
            divides(self.channels, size, "channels of an expert")

    def build(self, place: Place) -> "Experts":
        return Experts(self, place)

    def sizes(self, work: Workload) -> Sizes:
        """See `Spec`. In the worst case, all tokens choose the same experts. One expert is computed at a time.

        A prompt needs the sum, the router's logits, the choices, and the input, activations and output of one expert.
        Training stores the projections of every chosen expert, the scores of all experts, and the choices. If
        expert-parallel ranks have different tokens, every rank computes as many chosen experts, and stores the rows that
        it receives instead of its tokens.
        """
        chosen, s, wide, experts = self.router.chosen, work.itemsize, work.wide_itemsize, self.router.experts
        inner, size, latent = -(-self.channels // work.ranks), self.size, self.latent
        rows = inner * (2 if self.gated else 1)
        choices = chosen * (24 + 2 * s)  # indices, their order and tokens; weights, also sorted
        common = s * (size + experts) + choices + wide * size
        one_expert = s * max(size + rows, rows + 2 * inner, rows + inner + size)
        if wide > s:  # the output of an expert is converted before it is added
            one_expert = max(one_expert, (s + wide) * size)
        weight = wide if self.router.form == SIGMOID else s
        stored: float = 2 * latent + experts + chosen * (rows + 6) + 1
        gradients: float = 2 * size + 7 * inner + 4 * chosen
        kept = reached = 0.0
        if work.expert_ranks > 1:  # received rows and their sums; the gradients of both, or the exchange of one
            reached, busiest = self.router.reached(work.expert_ranks), max(1, work.expert_ranks * chosen / experts)
            stored += reached * (2 * size + 3 * chosen + 2) - 2 * chosen
            kept = reached * (2 * size + 2 * chosen)
            busiest_expert = busiest * (size + 7 * inner)
            gradients = reached * (2 * size + 4 * chosen) + max(2 * reached * size, busiest_expert)
        replicated = [experts * self.hidden_size, *(a * b for a, b in self.projections().values())]
        return Sizes(
            stages={
                "router": s * (size + experts) + 3 * wide * experts,
                "experts": common + one_expert,
                "output": s * (size + experts) + choices + (wide + s) * size + s * self.hidden_size * bool(latent),
            },
            projected=s * (size + experts),
            stored=stored,
            kept=kept,
            gradients=self.hidden_size * work.share + gradients,
            weight_gradients=experts // work.expert_ranks * (rows + inner) * size,
            parameters=tuple(replicated) if work.ranks > 1 else (),
            summed=size if work.expert_ranks > 1 else 0,
            reached=reached,
            dispatched=s * size + chosen * (weight + 4),
            dispatched_gradients=s * size + chosen * weight,
            returned=s * size,
        )


class Experts(Operator):
    """The router, the routed experts, and the weighted sum of their outputs.

    Backward sends one all-reduce for the weight of the router, for the weight of each projection around the experts, and
    for the bias of the first projection: every tensor-parallel rank has all of these, and their gradients are sums over
    the ranks.

    Expert-parallel ranks (`Place.experts`) with the same tokens (`Call.same_tokens`) also send one all-reduce in forward,
    of the output of `apply_experts` in the model's wire format. With different tokens, forward and backward send the
    messages of `parallel.dispatch.dispatched`.
    """

    correction: nn.Parameter | None
    fc1: ReplicatedLinear
    fc2: ReplicatedLinear

    def __init__(self, spec: ExpertsSpec, place: Place):
        super().__init__(place)
        self.spec, self.activation, self.experts = spec, ACTIVATIONS[spec.activation], place.experts
        ranks, where, experts = place.ranks, place.where, spec.router.experts
        is_wide = spec.router.form == SIGMOID
        dtype = at_least_fp32(place.dtype) if is_wide else place.dtype
        self.router = ReplicatedLinear((experts, spec.hidden_size), False, ranks, dtype, place.device)
        bias = nn.Parameter(torch.empty(experts, dtype=dtype, device=place.device), requires_grad=False)
        self.register_parameter("correction", bias if is_wide else None)
        for name, shape in spec.projections().items():
            self.add_module(name, ReplicatedLinear(shape, spec.latent_bias, ranks, **where))
        shapes = {field.name: field.local_shape(*place.part) for field in spec.fields()}
        self.up = ExpertMatrices(shapes["up.weight"], **where)
        self.down = ExpertMatrices(shapes["down.weight"], **where)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operator`: the input of the experts (batch, seq, size), and the router's logits (batch, seq, experts)."""
        logits = self.router(x)
        return self.fc1(x) if self.spec.latent else x, logits

    def mix(self, projected: tuple[torch.Tensor, torch.Tensor], call: Call, state: State | None = None) -> Partial:
        x, logits = projected
        weights, index = self.spec.router.route(logits.flatten(0, -2), self.correction)
        if call.routing is not None:
            call.routing.report(self, self.spec.router, logits, index)
        out = self._apply_experts(x.flatten(0, -2), weights, index, call.same_tokens).view_as(x)
        if not self.spec.latent:
            return Partial(out)
        return Partial(self.fc2.of_partial(out), bias=self.fc2.bias)

    def _apply_experts(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, same: bool) -> torch.Tensor:
        """The weighted sum over the chosen experts on all expert-parallel ranks, (tokens, size).

        Args:
            x: (tokens, size).
            weights, index: (tokens, chosen).
            same: True if all expert-parallel ranks have the same tokens.
        """
        ranks = self.experts
        if ranks.group is None:
            return self._apply_local_experts(x, weights, index)
        count = self.spec.experts // ranks.size
        if not same:
            return dispatched(x, weights, index, count, ranks, self._apply_local_experts)
        local = index - ranks.rank * count
        out = self._apply_local_experts(x, weights, local.where((local >= 0) & (local < count), count))
        return reduce_from_ranks(out, ranks.group, ranks.all_reduce_in_format)

    def _apply_local_experts(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`apply_experts` with this rank's experts. index: (tokens, chosen), relative to this rank's first expert."""
        count = self.spec.experts // self.experts.size
        return apply_experts(x, weights, index, count, self.up.matrix(), self.down.matrix(), self.activated)

    def lower(self, tape: Builder, x: Buffer) -> Lowered:
        spec, is_wide = self.spec, self.router.weight.dtype is not tape.dtype
        converted = tape.converted(x, self.router.weight.dtype) if is_wide else x
        logits = tape.matmul(converted, self.router.weight)
        ranks, count = self.experts, spec.experts // self.experts.size
        routes = tape.route(logits, spec.router, self.correction, ranks.rank * count)
        tape.release(logits, *([converted] if is_wide else []))
        inputs = tape.matmul(x, self.fc1.weight, self.fc1.bias) if spec.latent else x
        up, down = self.up.matrix(), self.down.matrix()
        out = tape.experts(inputs, routes, count, spec.router.chosen, up, down, spec.activation, spec.gated)
        if ranks.size > 1:
            tape.sum(ranks, out)
        tape.release(routes)
        if not spec.latent:
            return Lowered(out)
        y = tape.matmul(out, self.fc2.weight)
        tape.release(inputs, out)
        return Lowered(y, bias=self.fc2.bias)

    def activated(self, inner: torch.Tensor) -> torch.Tensor:
        """(tokens, this rank's rows of an expert) -> the input of its down projection."""
        if not self.spec.gated:
            return self.activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.activation(gate) * up
