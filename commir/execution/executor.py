"""`execute`: a plan on the ranks of a torch process group."""

from collections.abc import Callable, Mapping

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import together
from commfabric.collectives.counted import Counter, exchange
from commir.lowering.plan import Plan, check_plan
from commir.programs.attention_programs import is_self_attention

from .attention_grids import attend, grid_of
from .rank_steps import take_steps
from .state import Count, Messages, RankState, without_autocast

Tensor = torch.Tensor


def execute(
    plan: Plan, local_inputs: Mapping[str, Tensor], group: ProcessGroup | None = None, count: Count | None = None,
    counter: Counter | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Run a plan on the ranks of `group`, all of which call this: {output: this rank's block at home}.

    Sends `plan.bytes_per_rank` bytes in messages between pairs of ranks, which travel while tiles are computed. Before that,
    the ranks compare plans, devices, dtypes, and which inputs need gradients. With NCCL this happens on the GPU that the
    rank has selected, so each rank selects its own first (`torch.cuda.set_device`). Autocast has no effect.

    attention2d computes the plans of its family, differentiably: `out` has a gradient and `lse` has none, so that whatever a
    loss computes from lse is missing in the gradients of q, k and v. For several sequences, attention2d copies q, k, v and
    out, and so holds more than `plan.memory`. Other plans have no gradient, and are refused if gradients are enabled and an
    input requires one (`differentiable` gives attention one).

    Args:
        plan: the same on every rank.
        local_inputs: {input: this rank's block at home}, as `plan.shard(inputs, rank)` returns them.
        group: as many ranks as the mesh has (None: one rank).
        count: counts what this rank sends and holds. The plan's own steps are then taken, not those of attention2d. All
            ranks have a count, or none has.
        counter: counts messages as `commfabric.collectives` does.

    Raises:
        ValueError: on every rank, if an input of one rank is missing or has the wrong shape or dtype; if plans, devices or
            the inputs that need gradients differ; if the group has another number of ranks than the mesh; or if a gradient
            is asked for that there is none of. Also on a rank that is no member of the group.
    """
    grid = grid_of(plan.schedule) if count is None and isinstance(plan, Plan) else None

    def check() -> None:
        """ValueError if an input requires a gradient that this call does not give."""
        needing = [name for name, x in local_inputs.items() if x.requires_grad]
        if torch.is_grad_enabled() and needing and grid is None:
            has_gradient = is_self_attention(plan.program)
            how = "use commir.differentiable, or" if has_gradient else "only `programs.attention` has a gradient; use"
            raise ValueError(
                f"input {needing[0]} requires a gradient, and {plan.schedule} is executed step by step, without gradients: "
                f"{how} torch.no_grad()"
            )

    compare(plan, local_inputs, group, check, count="not given" if count is None else "given")
    with without_autocast(local_inputs):
        if grid is not None:
            return attend(plan, grid, local_inputs, group, counter)
        with torch.no_grad():
            return run(RankState(plan, 0 if group is None else group.rank(), local_inputs, count), group, counter)


def compare(
    plan: Plan, local_inputs: Mapping[str, Tensor], group: ProcessGroup | None,
    check: Callable[[], None] = lambda: None, **others: object,
) -> None:  # fmt: skip
    """Raise ValueError on every rank of `group` unless all call with the same plan and with inputs that fit it.

    Args:
        check: raises a ValueError about this rank's arguments.
        others: further values that must be equal on all ranks.
    """

    def arguments() -> dict[str, object]:
        """Check this rank's arguments, and return those that must be equal on all ranks."""
        check_plan(plan)
        ranks = 1 if group is None else group.size()
        if ranks != plan.mesh.ranks:
            given = "no group is given, which means 1 rank" if group is None else f"the group has {ranks} ranks"
            raise ValueError(f"{given}, and the mesh of the plan has {plan.mesh.ranks}: {plan.mesh!r}")
        plan.check(local_inputs, is_local=True)
        check()
        is_enabled = torch.is_grad_enabled()  # ranks without a gradient would not take part in the backward pass
        inputs = sorted(local_inputs.items())
        return {
            "plan": f"{plan.hash[:16]}, {plan.schedule}",
            **others,
            **{name: f"{x.dtype} on {x.device.type}" for name, x in inputs},
            **{f"{name}.requires_grad": is_enabled and x.requires_grad for name, x in inputs},
        }

    together(arguments, [group], lambda checked: checked)


def run(state: RankState, group: ProcessGroup | None, counter: Counter | None = None) -> dict[str, Tensor]:
    """Take all steps of a rank, with messages over `group`. Afterwards its count holds as much as before."""
    steps, answer = take_steps(state), None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            state.count.held = state.held_before
            return end.value
        if isinstance(request, Messages):
            answer = exchange(request.sends, request.receives, group, counter)
        else:
            answer = None
            request.wait()
        del request  # with the tensors of its messages, which the rank may not need any more
