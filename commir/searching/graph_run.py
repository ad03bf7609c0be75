"""Run the plans of a graph, operator by operator, on the ranks of a group."""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import check_member, together
from commfabric.collectives.counted import Counter
from commfabric.collectives.wire_formats import at_least_fp32
from commir.execution.executor import run
from commir.execution.state import Count, RankState, without_autocast
from commir.lowering.plan import Plan

from .operator_options import GraphNode

Tensor = torch.Tensor


class GraphRunner:
    """The operators of a graph with their plans, on the ranks of a group. Every rank makes one.

    Args:
        operators: the graph, or a part of it.
        plans: {operator: plan}, as `GraphPlan.plans` returns them.
        group: the ranks of the mesh (None: one rank).
    """

    def __init__(self, operators: Sequence[GraphNode], plans: Mapping[str, Plan], group: ProcessGroup | None) -> None:
        check_member(group)
        self.operators, self.plans, self.group = operators, plans, group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())

    def __call__(
        self, given: Mapping[str, Mapping[str, Tensor]], count: Count | None = None, counter: Counter | None = None
    ) -> dict[str, Tensor]:
        """Run the operators in their order: {operator: this rank's block of its output}.

        Plans are not verified here, have no gradients, and ignore autocast. Sends what the plans do.

        Args:
            given: {operator: {input: this rank's block}} of parameters, and of inputs that come from the layer before.
            count, counter: as in `execute`; `count` holds the bytes of the operator at work.

        Raises:
            ValueError: on every rank, if a block has the wrong shape or requires a gradient while gradients are enabled; if
                an input is missing or unknown; if the ranks' plans or blocks differ; if an operator has no plan; if its plan
                takes an input in another layout than that in which its producer's plan leaves it; or if the group has
                another number of ranks than the mesh.
        """
        together(lambda: self._check(given), [self.group], lambda checked: checked)
        outputs, count = dict[str, Tensor](), count or Count()
        for operator in self.operators:
            plan, inputs = self.plans[operator.name], dict(given.get(operator.name, {}))
            for operand, (producer, _) in operator.inputs.items():
                if producer in outputs:  # the producer's axes may be others: (heads, dim) for cols
                    taken = plan.program.operand(operand)
                    block = outputs[producer].reshape(plan.digits.local_shape(taken, plan.digits.home(taken)))
                    inputs[operand] = block.to(at_least_fp32(block.dtype)) if taken.is_wide else block
            try:
                plan.check(inputs, is_local=True)
            except ValueError as error:
                raise ValueError(f"{operator.name}: {error}") from None
            with torch.no_grad(), without_autocast(inputs):
                results = run(RankState(plan, self._rank, inputs, count), self.group, counter)
            outputs[operator.name] = results[plan.program.outputs[0].name]
        return outputs

    def _check(self, given: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
        """Check the blocks of a call, and return what must be equal on all ranks: plans, shapes, dtypes and devices."""
        for name in (*given, *(operator.name for operator in self.operators)):
            if name not in self.plans:
                raise ValueError(f"no plan for operator {name!r}: there are plans for {', '.join(self.plans)}")
        self._check_edges()
        for name, plan in self.plans.items():
            if plan.mesh.ranks != self._ranks:
                raise ValueError(f"the group has {self._ranks} ranks, and the mesh of {name} {plan.mesh.ranks}")
        blocks = [(name, key, x) for name, each in given.items() for key, x in sorted(each.items())]
        for name, key, x in blocks:
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(f"{name}: {key} requires a gradient, which no graph's plan gives: use torch.no_grad()")
        plans = {f"plan of {name}": f"{plan.hash[:16]}, {plan.schedule}" for name, plan in self.plans.items()}
        return plans | {f"{name}: {key}": f"{tuple(x.shape)} {x.dtype} on {x.device.type}" for name, key, x in blocks}

    def _check_edges(self) -> None:
        """Raise ValueError if two plans have different meshes, or differ about the layout of an edge."""
        for name, plan in self.plans.items():
            first = next(iter(self.plans))
            mesh = self.plans[first].mesh
            if plan.mesh.axes != mesh.axes:
                meshes = plan.mesh.in_words(), mesh.in_words()
                raise ValueError(f"the plan of {name} is for {meshes[0]}, and that of {first} for {meshes[1]}")
        for operator in self.operators:
            for operand, (producer, renamed) in operator.inputs.items():
                if producer not in self.plans:  # of a part of a graph: the caller gives this input
                    continue
                made = self.plans[producer].program.outputs[0].name
                left = {m: renamed.get(axis, axis) for m, axis in self._layout(producer, made).items()}
                if left != (taken := self._layout(operator.name, operand)):
                    raise ValueError(
                        f"{operator.name} takes {operand} from {producer}: its plan takes {_in_words(taken)}, and that of "
                        f"{producer} leaves {_in_words(left)}; plans of one `search_graph` fit together"
                    )

    def _layout(self, name: str, operand: str) -> dict[str, str]:
        """{mesh axis of several ranks: the axis that they divide} of an operand at home, in an operator's plan."""
        plan = self.plans[name]
        return {m: axis for m, axis in plan.schedule.home(operand).items() if plan.mesh.size(m) > 1}


def _in_words(layout: Mapping[str, str]) -> str:
    """A layout, {mesh axis: the axis that its ranks divide}, in words."""
    return ", ".join(f"{axis} on {mesh_axis}" for mesh_axis, axis in sorted(layout.items())) or "all of it on each rank"
