"""Copies are counted. Oracle: the storages of registers, of messages and of all that was counted, while a rank has them."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from commfabric.collectives.counted import exchange
from commir import Mesh, Schedule, interpret, programs
from commir.execution.rank_steps import take_steps
from commir.execution.state import Count, Messages, RankState
from commir.lowering.accounting import AHEAD
from commir.scheduling.placements import Placement, place
from loop_programs import cases, mesh_of, plans, random_inputs

CASES = [
    (programs.attention, (1, 8, 8, 32, 8), ["heads", "q", "kv", Placement("q", True), Placement("kv", True)]),
    (programs.attention, (4, 8, 4, 32, 8), ["heads", "kv", "batch", Placement("kv", True)]),
    (programs.decode_attention, (2, 8, 8, 32, 8), ["kv"]),
    (programs.matmul_reduce_scatter, (16, 16, 32), ["inner", "cols", Placement("rows", True)]),
    (programs.selective_scan, (4, 32, 8, 2, 4), ["seq", "heads", "batch"]),
    (programs.gated_delta, (4, 32, 8, 2, 4), ["seq", "heads", "batch"]),
]


def inputs_of(program):
    """Random inputs in the program's dtype, or in fp32 where they are kept in at least that."""
    wide = {each.name for each in program.inputs if each.is_wide}
    dtype = getattr(torch, program.dtype)
    return {name: x.float() if name in wide else x.to(dtype) for name, x in random_inputs(program).items()}


class Recorded(Count):
    """A count that can tell what of all that was counted is still there."""

    def __init__(self):
        super().__init__()
        self.refs = []

    def hold(self, *tensors):
        super().hold(*tensors)
        self.refs += map(weakref.ref, tensors)


def most_uncounted(plan, inputs, group):
    """The tensors of a rank when it begins a message, with steps as in `run`.

    (the most bytes that it holds and has not counted, its counted peak, the most tensors of messages that are still held)
    """
    state = RankState(plan, group.rank(), inputs, Recorded())
    steps, answer, sent, most, tensors = take_steps(state), None, [], 0, 0
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            return most, state.count.peak, tensors
        if isinstance(request, Messages):
            sent = [ref for ref in sent if ref() is not None]  # whoever still holds what was sent or received
            sent += [weakref.ref(x) for x, _ in (*request.sends, *request.receives)]
            tensors = max(tensors, len(sent))
            noted = [ref() for ref in (*sent, *state.count.refs)]
            held = [x for x in (*inputs.values(), *state.registers.values(), *noted) if x is not None]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
            most = max(most, sum(storages.values()) - state.count.held)
            del held, noted
            answer = exchange(request.sends, request.receives, group)
        else:
            request.wait()
            answer = None
        del request


@pytest.mark.parametrize("make, sizes, placements", CASES, ids=lambda each: getattr(each, "__name__", None))
@pytest.mark.parametrize("world", [2, 4])
def test_whatever_is_held_is_counted(ranks, world, make, sizes, placements):
    """Inputs that are not contiguous are copied once, and not once for each rank that they are sent to."""
    chosen = [
        place(Schedule(make(*sizes, dtype=dtype), Mesh(g=world)), g=each).lower()
        for dtype in ("float32", "bfloat16")
        for each in placements
    ]

    def run(rank, is_view):
        found = []
        for plan in chosen:
            local = {name: x.clone() for name, x in plan.shard(inputs_of(plan.program), rank).items()}
            if is_view:
                local = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in local.items()}
            copied = sum(x.nbytes for x in local.values() if not x.is_contiguous())
            uncounted, peak, _ = most_uncounted(plan, local, dist.group.WORLD)
            found.append((uncounted <= 0, plan.memory <= peak <= plan.memory + copied, str(plan.schedule)))
        return found

    for is_view in (False, True):
        for found in ranks(run, world, is_view):
            assert all(is_counted and is_predicted for is_counted, is_predicted, _ in found), found


@pytest.mark.parametrize("world", [4])
def test_messages_are_freed_when_they_have_arrived(ranks, world):
    """Of a reduce-scatter, AHEAD tensors that are sent and AHEAD that are received are held at a time."""
    program = programs.matmul_reduce_scatter(2 * world, 8, 2 * world, "bfloat16")
    plan = place(Schedule(program, Mesh(g=world)), g="inner").lower()

    def run(rank):
        return most_uncounted(plan, plan.shard(inputs_of(program), rank), dist.group.WORLD)[2]

    assert ranks(run, world) == [2 * AHEAD] * world


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_rounded_copies_are_predicted(sizes, number):
    """Of partial results, which are accumulated in fp32 and sent in bf16."""
    program = replace(cases(mesh_of(*sizes).ranks)[number].program, dtype="bfloat16")
    for plan in plans(program, mesh_of(*sizes))[::3]:
        counts = []
        interpret(plan, inputs_of(program), counts)
        assert {(count.sent, count.peak) for count in counts} == {(plan.bytes_per_rank, plan.memory)}, plan.schedule
