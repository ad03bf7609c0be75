"""`fastest`: time the best few plans of a search on the ranks that will run them."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import together
from commfabric.fabric.measurement import repetitions, timed
from commir.execution.executor import execute
from commir.lowering.plan import Plan, check_plan

from .tile_times import random_inputs


def fastest(
    plans: Sequence[Plan], group: ProcessGroup | None = None, repeated: int = 5, device: torch.device | str = "cpu",
    kernels: Sequence[str] = (),
) -> list[Plan]:  # fmt: skip
    """Sort plans of one program by their measured time, the fastest first; each has its time as its reason.

    The time of a plan is the median over `repeated` runs of the slowest rank's. The plans take turns, with random inputs of
    the program's dtype. Every rank calls it, and gets the same order. Sends `repeated` + 1 times what the plans send.

    Args:
        plans: the same on every rank.
        group: the ranks of the mesh (None: one rank).
        repeated: the number of runs of each plan.
        device: of the inputs.
        kernels: time each plan with each of these kernels of its tile (`LoopNest.patch`), for instance "library" and
            "compiled"; by default with its own.

    Raises:
        ValueError: on every rank, if there are no plans, a program has no such kernel, the ranks' arguments differ, or as in
            `execute`.
    """
    chosen: list[Plan] = []

    def arguments() -> dict[str, object]:
        """Check this rank's arguments, and return those that must be equal on all ranks."""
        if not plans:
            raise ValueError("there are no plans to time")
        for plan in plans:
            check_plan(plan)
            nests = [plan.schedule.patch(name) for name in kernels] or [plan.schedule]
            chosen.extend(replace(plan, schedule=nest) for nest in nests)
        numbered = {f"plan {number}": f"{plan.hash[:16]}, {plan.schedule}" for number, plan in enumerate(chosen)}
        return {"repeated": repeated, "device": torch.device(device).type, **numbered}

    together(arguments, [group], lambda checked: checked)
    calls = []
    for plan in chosen:
        shapes = {x.name: plan.digits.local_shape(x, plan.digits.home(x)) for x in plan.inputs()}
        calls.append(timed(partial(execute, plan, random_inputs(plan.program, shapes, device), group), device))
    if group is None:
        seconds = [statistics.median(call() for _ in range(repeated)) for call in calls]
    else:
        seconds = repetitions(calls, group, device, repeated).median(0).values.tolist()
    order = sorted(range(len(chosen)), key=seconds.__getitem__)
    reasons = [f"measured: {seconds[n]:.3g} s, number {place}" for place, n in enumerate(order, 1)]
    if kernels:
        reasons = [f"{reason}, kernel {chosen[n].schedule.kernel}" for reason, n in zip(reasons, order, strict=True)]
    return [replace(chosen[n], reason=reason) for n, reason in zip(order, reasons, strict=True)]
