"""`fastest`: time the best few plans of a search on the ranks that will run them."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import ProcessGroup

from commir.execution.executor import execute
from commir.lowering.plan import Plan, check_plan
from sparsefusion.collectives.agreement import together
from sparsefusion.fabric.measurement import repetitions, timed

from .tile_times import random_inputs


def fastest(
    plans: Sequence[Plan], group: ProcessGroup | None = None, repeated: int = 5, device: torch.device | str = "cpu"
) -> list[Plan]:
    """Sort plans of one program by their measured time, the fastest first; each has its time as its reason.

    The time of a plan is the median over `repeated` runs of the slowest rank's. The plans take turns, with random inputs of
    the program's dtype. Every rank calls it, and gets the same order. Sends `repeated` + 1 times what the plans send.

    Args:
        plans: the same on every rank.
        group: the ranks of the mesh (None: one rank).
        repeated: the number of runs of each plan.
        device: of the inputs.

    Raises:
        ValueError: on every rank, if there are no plans, the ranks' arguments differ, or as in `execute`.
    """

    def arguments() -> dict[str, object]:
        """Check this rank's arguments, and return those that must be equal on all ranks."""
        if not plans:
            raise ValueError("there are no plans to time")
        for plan in plans:
            check_plan(plan)
        numbered = {f"plan {number}": f"{plan.hash[:16]}, {plan.schedule}" for number, plan in enumerate(plans)}
        return {"repeated": repeated, "device": torch.device(device).type, **numbered}

    together(arguments, [group], lambda found: found)
    calls = []
    for plan in plans:
        shapes = {
            operand.name: plan.digits.local_shape(operand, plan.digits.home(operand)) for operand in plan.inputs()
        }
        calls.append(timed(partial(execute, plan, random_inputs(plan.program, shapes, device), group), device))
    if group is None:
        seconds = [statistics.median(call() for _ in range(repeated)) for call in calls]
    else:
        seconds = repetitions(calls, group, device, repeated).median(0).values.tolist()
    order = sorted(range(len(plans)), key=seconds.__getitem__)
    return [
        replace(plans[n], reason=f"measured: {seconds[n]:.3g} s, number {place}") for place, n in enumerate(order, 1)
    ]
