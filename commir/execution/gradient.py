"""`differentiable`: attention by a plan, with a gradient by the plan of the backward program with the same placement."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from commfabric.collectives.counted import Counter
from commir.lowering.lower import Schedule
from commir.lowering.plan import Plan, check_plan
from commir.programs.attention_programs import SAVED, is_self_attention, self_attention_like
from commir.scheduling.placements import in_chunks, is_placed, place, placements_of

from .executor import compare, run
from .state import Count, RankState, without_autocast

Tensor = torch.Tensor


def backward_plan(plan: Plan) -> Plan:
    """The plan of the gradients of an attention plan that `place` made, on the same mesh.

    q, k, v, out and lse are at home where the forward plan has scattered them, so that they are not sent again.

    Raises:
        ValueError: the plan is not one of attention, has chunks of queries, was not made by `place` (and `in_chunks`), or
            keeps q, k, v or out elsewhere than the program does.
    """
    program, chosen = plan.program, placements_of(plan.schedule)
    if not is_self_attention(program):
        raise ValueError(
            f"{program.name} has no backward program; only `programs.attention` has, with as many queries as keys, and "
            "with its operands at its homes"
        )
    if moved := [str(home) for home in plan.schedule.homes if home[0] != "lse"]:
        raise ValueError(f"the backward pass keeps q, k, v and out along the sequence, not as {', '.join(moved)}")
    if not is_placed(replace(plan.schedule, homes=())):
        raise ValueError(f"{plan.schedule}: only schedules that `place` and `in_chunks` make have a backward plan")
    backward = self_attention_like(program, backward=True)
    schedule = place(Schedule(backward, plan.mesh), **{name: chosen.get(name, "q") for name in plan.mesh.names})
    for name, placement in chosen.items():
        if placement.axis in ("batch", "heads"):
            for operand in SAVED:
                schedule = schedule.shard(operand, placement.axis, name)
    if plan.schedule.chunked is not None:
        axis = plan.schedule.digit(plan.schedule.chunked).axis
        if any(axis not in operand.axes for operand in backward.outputs):
            raise ValueError(
                f"chunks of {axis} have no backward plan, as some gradients are sums over {axis}; chunks of "
                "batch or heads have one"
            )
        schedule = in_chunks(schedule, axis, plan.schedule.chunks)
    return schedule.lower()


def differentiable(
    plan: Plan, group: ProcessGroup | None = None, count: Count | None = None, counter: Counter | None = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function (q, k, v) -> out of this rank's blocks at home, by a plan of attention, with gradients.

    All ranks of the group call it together, and its backward together, which sends `backward_plan(plan).bytes_per_rank`
    bytes. A rank then holds `backward_plan(plan).memory` bytes, which may be more than twice `plan.memory`.

    Args:
        plan: the same on every rank.
        group, count, counter: as in `execute`.

    Raises:
        ValueError: as in `backward_plan`, and as in `execute` when the function is called.
    """
    check_plan(plan)
    backward = backward_plan(plan)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute out of this rank's blocks of q, k and v. Raises ValueError on every rank if those of one do not fit."""
        compare(plan, {"q": q, "k": k, "v": v}, group)
        return _Attention.apply(q, k, v, _Pair(plan, backward, group, count, counter))

    return attend


@dataclass(frozen=True)
class _Pair:
    """The plans of a forward and a backward pass, with the group and the counters of both."""

    forward: Plan
    backward: Plan
    group: ProcessGroup | None
    count: Count | None
    counter: Counter | None

    def state(self, plan: Plan, inputs: dict[str, Tensor]) -> RankState:
        return RankState(plan, 0 if self.group is None else self.group.rank(), inputs, self.count)


class _Attention(torch.autograd.Function):
    """(q, k, v, pair) -> out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pair: _Pair) -> Tensor:
        inputs = {"q": q, "k": k, "v": v}
        state = pair.state(pair.forward, inputs)
        state.saved = {}
        with without_autocast(inputs):
            out = run(state, pair.group, pair.counter)["out"]
        ctx.save_for_backward(*(state.saved[name] for name in SAVED))
        ctx.pair = pair
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs = dict(zip(SAVED, ctx.saved_tensors, strict=True)) | {"dout": dout.contiguous()}
        with without_autocast(inputs):
            outputs = run(ctx.pair.state(ctx.pair.backward, inputs), ctx.pair.group, ctx.pair.counter)
        return outputs["dq"], outputs["dk"], outputs["dv"], None
