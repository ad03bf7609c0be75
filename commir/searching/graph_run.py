"""Running the plans of a graph, operator by operator, on the ranks of a group."""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from commir.execution.devices import check_devices
from commir.execution.executor import run
from commir.execution.state import Count, RankState, check_counts, without_autocast
from commir.ir.checks import check_type, shown
from commir.lowering.blocks import check_tensor
from commir.lowering.plan import Plan
from sparsefusion.collectives.agreement import check_member, together
from sparsefusion.collectives.counted import Counter
from sparsefusion.collectives.wire_formats import at_least_fp32

from .operator_options import GraphNode

Tensor = torch.Tensor


class GraphRunner:
    """The operators of a graph with their plans (`GraphPlan.plans`), on the ranks of a group. Every rank makes one."""

    def __init__(self, operators: Sequence[GraphNode], plans: Mapping[str, Plan], group: ProcessGroup | None) -> None:
        check_member(group)
        self.operators, self.plans, self.group = operators, plans, group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())

    def __call__(
        self, given: Mapping[str, Mapping[str, Tensor]], count: Count | None = None, counter: Counter | None = None
    ) -> dict[str, Tensor]:
        """{operator: this rank's block of its output}.

        given: {operator: {input: this rank's block}} of parameters, and of inputs that come from the layer before. count,
        counter: as in `execute`; what `count` holds is that of the operator at work. Plans are not verified here, have no
        gradients, and ignore autocast. ValueError on every rank: a block is no dense tensor, has the wrong shape, is on
        another device than the first or requires a gradient while gradients are enabled, a block is of no operator or of no
        input of it, or an operator before it makes that input, count or counter is another object, the ranks' plans or
        blocks differ, an operator has no plan, an operator's plan takes an input in another layout than that in which its
        producer's plan leaves it, or the group has another number of ranks than the mesh; on a rank that is no member of the
        group: that it is none. Sends what the plans do.
        """
        together(lambda: self._check(given, count, counter), [self.group], lambda found: found)
        outputs, count = dict[str, Tensor](), count or Count()
        for operator in self.operators:
            plan, inputs = self.plans[operator.name], dict(given.get(operator.name, {}))
            for operand, (producer, _) in operator.inputs.items():
                if producer in outputs:
                    inputs[operand] = self._block(plan, operand, outputs[producer])
            try:
                plan.check(inputs, is_local=True)
            except ValueError as error:
                raise ValueError(f"{operator.name}: {error}") from None
            with torch.no_grad(), without_autocast(inputs):
                found = run(RankState(plan, self._rank, inputs, count), self.group, counter)
            outputs[operator.name] = found[plan.program.outputs[0].name]
        return outputs

    def _check(
        self, given: Mapping[str, Mapping[str, Tensor]], count: Count | None, counter: Counter | None
    ) -> dict[str, str]:
        """The values that must be equal on all ranks: plans, and the shapes, dtypes and devices of their blocks."""
        check_counts(count, counter)
        self._check_plans()
        self._check_edges()
        for name, plan in self.plans.items():
            if plan.mesh.ranks != self._ranks:
                raise ValueError(f"the group has {self._ranks} ranks, and the mesh of {name} {plan.mesh.ranks}")
        if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
            raise ValueError(f"blocks are {{operator: {{input: tensor}}}}, not {shown(given)}")
        self._check_givers(given)
        found = [(name, key, x) for name, each in given.items() for key, x in sorted(each.items())]
        for name, key, x in found:
            check_tensor(f"{name}: {key}", x)
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(f"{name}: {key} requires a gradient, which no graph's plan gives: use torch.no_grad()")
        check_devices({f"{name}: {key}": x for name, key, x in found}, self.group)
        plans = {f"plan of {name}": f"{plan.hash[:16]}, {plan.schedule}" for name, plan in self.plans.items()}
        return plans | {f"{name}: {key}": f"{tuple(x.shape)} {x.dtype} on {x.device.type}" for name, key, x in found}

    def _check_plans(self) -> None:
        """ValueError: the operators or plans are of another type, or an operator has no plan."""
        if not isinstance(self.operators, Sequence) or not isinstance(self.plans, Mapping):
            raise ValueError(
                f"GraphRunner takes a list of operators, and {{operator: plan}}, not {shown(self.operators)} and "
                f"{shown(self.plans)}"
            )
        for each in self.operators:
            check_type("GraphRunner", each, GraphNode)
            check_type(f"GraphRunner: {each.name}", self.plans.get(each.name), Plan)
        if unknown := [name for name in self.plans if name not in [each.name for each in self.operators]]:
            raise ValueError(f"GraphRunner: there is a plan of {shown(unknown[0])}, which is none of the operators")

    def _check_givers(self, given: Mapping[str, Mapping[str, Tensor]]) -> None:
        """ValueError: a block is of no operator, of no input of its operator, or of one that an operator before it makes."""
        if unknown := [name for name in given if name not in self.plans]:
            raise ValueError(f"there are blocks of {shown(unknown[0])}, which is none of the operators")
        before = set[str]()
        for each in self.operators:
            inputs = [operand.name for operand in self.plans[each.name].inputs()]
            for operand in given.get(each.name, {}):
                if operand not in inputs:
                    raise ValueError(f"{each.name} takes {', '.join(inputs)}, not {shown(operand)}")
                if operand in each.inputs and each.inputs[operand][0] in before:
                    raise ValueError(f"{each.name}: {operand} is given, but {each.inputs[operand][0]} makes it")
            before.add(each.name)

    def _check_edges(self) -> None:
        """ValueError: two plans have different meshes, or differ about the layout of what an edge connects."""
        for name, plan in self.plans.items():
            first = next(iter(self.plans))
            mesh = self.plans[first].mesh
            if plan.mesh.axes != mesh.axes:
                raise ValueError(
                    f"the plan of {name} is for {plan.mesh.in_words()}, and that of {first} for {mesh.in_words()}"
                )
        for each in self.operators:
            for operand, (producer, renamed) in each.inputs.items():
                if producer not in self.plans:  # of a part of a graph: the caller gives this input
                    continue
                made = self.plans[producer].program.outputs[0].name
                left = {m: renamed.get(axis, axis) for m, axis in self._layout(producer, made).items()}
                if left != (taken := self._layout(each.name, operand)):
                    raise ValueError(
                        f"{each.name} takes {operand} from {producer}: its plan takes {_in_words(taken)}, and that of "
                        f"{producer} leaves {_in_words(left)}; plans of one `search_graph` fit together"
                    )

    def _layout(self, name: str, operand: str) -> dict[str, str]:
        """{mesh axis of several ranks: the axis that they divide} of an operand at home, in an operator's plan."""
        plan = self.plans[name]
        return {m: axis for m, axis in plan.schedule.home(operand).items() if plan.mesh.size(m) > 1}

    def _block(self, plan: Plan, operand: str, made: Tensor) -> Tensor:
        """A producer's block in the shape and dtype of this operand's, whose axes may be others: (heads, dim) for cols."""
        taken = plan.program.operand(operand)
        block = made.reshape(plan.digits.local_shape(taken, plan.digits.home(taken)))
        return block.to(at_least_fp32(made.dtype)) if taken.is_wide else block


def _in_words(layout: Mapping[str, str]) -> str:
    """A layout, {mesh axis: the axis that its ranks divide}, for an error."""
    return ", ".join(f"{axis} on {mesh_axis}" for mesh_axis, axis in sorted(layout.items())) or "all of it on each rank"
