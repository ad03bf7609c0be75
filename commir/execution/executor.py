"""`execute`: a plan on the ranks of a torch process group."""

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from commir.lowering.plan import Plan
from sparsefusion.collectives.agreement import agree
from sparsefusion.collectives.counted import Counter, all_gather_small, exchange

from .machine import take_steps
from .state import Count, Messages, RankState

Tensor = torch.Tensor


def execute(
    plan: Plan, local_inputs: Mapping[str, Tensor], group: ProcessGroup | None = None, count: Count | None = None,
    counter: Counter | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The outputs of a plan on the ranks of `group`: {output: this rank's block at home}. Every rank calls it.

    local_inputs: {input: this rank's block at home}, as `plan.shard(inputs, rank)` gives them. Messages travel between pairs
    of ranks while others are computed. Before that, 16 bytes of each rank are gathered to compare plans, shapes and dtypes.
    count: counts what this rank sends and holds. counter: counts its messages as `sparsefusion.collectives` does.
    ValueError on every rank: an input is missing or has the wrong shape on one rank, the ranks' plans differ, or the group
    has another number of ranks than the mesh. Sends `plan.bytes_per_rank` bytes at most; has no gradient.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())

    def arguments() -> object:
        if ranks != plan.mesh.ranks:
            raise ValueError(f"the group has {ranks} ranks, and the mesh of the plan {plan.mesh.ranks}: {plan.mesh!r}")
        plan.check(local_inputs, is_local=True)
        return str(plan.schedule), plan.hash, [(name, str(x.dtype)) for name, x in sorted(local_inputs.items())]

    device = next((x.device for x in local_inputs.values()), torch.device("cpu"))
    agree(lambda mine: all_gather_small(mine, group), device, arguments, "ranks of the group")
    run, answer = take_steps(RankState(plan, rank, local_inputs, count)), None
    with torch.no_grad():
        while True:
            try:
                request = run.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Messages):
                answer = exchange(request.sends, request.receives, group, counter)
            else:
                answer = request.wait()
