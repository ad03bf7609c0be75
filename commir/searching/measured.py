"""`fastest`: the best few plans of a search, timed on the ranks that will run them."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import ProcessGroup

from commir.execution.devices import device_type
from commir.execution.executor import execute
from commir.ir.checks import check_sizes, check_type
from commir.lowering.plan import Plan
from sparsefusion.collectives.agreement import together
from sparsefusion.fabric.measurement import repetitions, timed

from .tile_times import random_inputs


def fastest(
    plans: Sequence[Plan], group: ProcessGroup | None = None, repeated: int = 5, device: torch.device | str = "cpu"
) -> list[Plan]:
    """Plans of one program by their measured time, the fastest first; each says its time as its reason.

    Every rank of `group` calls it with the same plans, and gets the same order: the time of a plan is the median over
    `repeated` runs of the slowest rank's. The plans take turns, with random inputs of the program's dtype on `device`.
    ValueError on every rank: there are no plans or repetitions, the ranks' plans, repetitions or devices differ, or as in
    `execute`. Sends `repeated` + 1 times what the plans send.
    """

    def arguments() -> dict[str, object]:
        """Check this rank's arguments; what must be equal on all ranks."""
        check_type("fastest", plans, Sequence)
        for plan in plans:
            check_type("fastest", plan, Plan)
        if not plans:
            raise ValueError("fastest: there are no plans to time")
        check_sizes("fastest: ", repeated=repeated)
        numbered = {f"plan {number}": f"{plan.hash[:16]}, {plan.schedule}" for number, plan in enumerate(plans)}
        return {"repeated": repeated, "device": device_type(device), **numbered}

    together(arguments, [group], lambda found: found)
    calls = []
    for plan in plans:
        shapes = {each.name: plan.digits.local_shape(each, plan.digits.home(each)) for each in plan.inputs()}
        calls.append(timed(partial(execute, plan, random_inputs(plan.program, shapes, device), group), device))
    if group is None:
        seconds = [statistics.median(call() for _ in range(repeated)) for call in calls]
    else:
        seconds = repetitions(calls, group, device, repeated).median(0).values.tolist()
    order = sorted(range(len(plans)), key=seconds.__getitem__)
    return [
        replace(plans[n], reason=f"measured: {seconds[n]:.3g} s, number {place}") for place, n in enumerate(order, 1)
    ]
