"""The copies that are sent are counted. Oracle: the storages of a rank's registers and of its messages under way."""

import pytest
import torch
import torch.distributed as dist

from commir import Mesh, Schedule, programs
from commir.execution.rank_steps import take_steps
from commir.execution.state import Messages, RankState
from commir.scheduling.placements import Placement, place
from loop_programs import random_inputs
from sparsefusion.collectives.counted import exchange

CASES = [
    (programs.attention, (1, 8, 8, 32, 8), ["heads", "q", "kv", Placement("q", True), Placement("kv", True)]),
    (programs.attention, (4, 8, 4, 32, 8), ["heads", "kv", "batch", Placement("kv", True)]),
    (programs.decode_attention, (2, 8, 8, 32, 8), ["kv"]),
    (programs.matmul_reduce_scatter, (16, 16, 32), ["inner", "cols", Placement("rows", True)]),
    (programs.selective_scan, (4, 32, 8, 2, 4), ["seq", "heads", "batch"]),
]


def inputs_of(program):
    """Random inputs in the program's dtype, or in fp32 where they are kept in at least that."""
    wide = {each.name for each in program.inputs if each.is_wide}
    dtype = getattr(torch, program.dtype)
    return {name: x.float() if name in wide else x.to(dtype) for name, x in random_inputs(program).items()}


def most_uncounted(plan, inputs, group):
    """(the most bytes that this rank holds and has not counted, at the beginning of any message; its peak)."""
    state = RankState(plan, group.rank(), inputs)
    steps, answer, under_way, most = take_steps(state), None, {}, 0
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            return most, state.count.peak
        if isinstance(request, Messages):
            answer = exchange(request.sends, request.receives, group)
            under_way[answer] = [x for x, _ in (*request.sends, *request.receives)]
            held = [*inputs.values(), *state.registers.values(), *(x for each in under_way.values() for x in each)]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
            most = max(most, sum(storages.values()) - state.count.held)
        else:
            answer = request.wait()
            del under_way[request]


@pytest.mark.parametrize("make, sizes, placements", CASES, ids=lambda each: getattr(each, "__name__", None))
@pytest.mark.parametrize("world", [2, 4])
def test_whatever_is_held_is_counted(ranks, world, make, sizes, placements):
    """Inputs that are not contiguous are copied once, and not once for each rank that they are sent to."""
    plans = [
        place(Schedule(make(*sizes, dtype=dtype), Mesh(g=world)), g=each).lower()
        for dtype in ("float32", "bfloat16")
        for each in placements
    ]

    def run(rank, is_view):
        found = []
        for plan in plans:
            local = {name: x.clone() for name, x in plan.shard(inputs_of(plan.program), rank).items()}
            if is_view:
                local = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in local.items()}
            copied = sum(x.nbytes for x in local.values() if not x.is_contiguous())
            uncounted, peak = most_uncounted(plan, local, dist.group.WORLD)
            found.append((uncounted <= 0, plan.memory <= peak <= plan.memory + copied, str(plan.schedule)))
        return found

    for is_view in (False, True):
        for found in ranks(run, world, is_view):
            assert all(is_counted and is_predicted for is_counted, is_predicted, _ in found), found
