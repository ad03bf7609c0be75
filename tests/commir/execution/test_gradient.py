"""Attention by plans, with gradients. Oracle: autograd through float64 attention; attention2d's formula for the bytes."""

import pytest
import torch
import torch.distributed as dist

import attention2d
from attention_problems import Problem
from commir import Mesh, Schedule, differentiable, execute, interpret, programs, search, verify
from commir.execution.attention_grids import grid_of
from commir.execution.gradient import backward_plan
from commir.execution.state import Count
from commir.scheduling.placements import Placement, in_chunks, place
from loop_programs import assert_close, random_inputs

RING_KV, RING_Q = Placement("q", True), Placement("kv", True)  # keys travel; queries travel
LAYOUTS = [  # world, mesh, placement
    (2, dict(x=2), dict(x="heads")),
    (4, dict(x=2, y=2), dict(x="kv", y="q")),
    (4, dict(x=2, y=2), dict(x=RING_Q, y=RING_KV)),
    (4, dict(x=2, y=2), dict(x=RING_KV, y="heads")),
    (4, dict(x=2, y=2), dict(x=RING_KV, y=RING_KV)),
    (4, dict(x=2, y=2), dict(x="batch", y=RING_Q)),
    (6, dict(x=3, y=2), dict(x=RING_KV, y="kv")),
]


def plan_of(mesh, placement, seq, dtype="float64", lse_at_home=True):
    program = programs.attention(2, 4, 2, seq, 8, dtype=dtype)
    schedule = place(Schedule(program, Mesh(**mesh)), **placement)
    return schedule.lower()


@pytest.mark.parametrize("world, mesh, placement", LAYOUTS)
def test_gradients_are_exact(ranks, world, mesh, placement):
    """Also where another operation uses the result, and bytes are those of the two plans."""
    problem = Problem.of(12 * world, 4, 2, causal=True, batch=2, head_dim=8)
    plan = plan_of(mesh, placement, 12 * world)
    verify(backward_plan(plan))

    def run(rank):
        names = ("q", "k", "v")
        local = plan.shard(dict(zip(names, problem.inputs, strict=False)), rank)
        leaves = [local[name].clone().requires_grad_() for name in names]
        dout = plan.shard({"q": problem.inputs[3], "k": problem.inputs[1], "v": problem.inputs[2]}, rank)["q"]
        count = Count()
        out = differentiable(plan, dist.group.WORLD, count)(*leaves)
        sent_forward = count.sent
        gradients = torch.autograd.grad((2 * out * dout).sum() / 2, leaves)
        return out.detach(), gradients, (sent_forward, count.sent - sent_forward)

    results = ranks(run, world)
    found = {"q": [out for out, _, _ in results]} | {
        name: [gradients[index] for _, gradients, _ in results] for index, name in enumerate(("dq", "dk", "dv"))
    }
    whole = plan.unshard([{"q": out} for out in found["q"]])["q"]
    assert_close({"out": whole}, {"out": problem.answers[0]})
    for name, expected in zip(("dq", "dk", "dv"), problem.answers[2:], strict=True):
        operand = name[1]
        gradient = plan.unshard([{operand: part} for part in found[name]])[operand]
        assert_close({name: gradient}, {name: expected}, 1e-12)
    assert {sent for _, _, sent in results} == {(plan.bytes_per_rank, backward_plan(plan).bytes_per_rank)}


GRIDS = [(1, 2, 1), (2, 2, 1), (2, 1, 2), (2, 3, 1), (2, 2, 2), (4, 1, 1), (1, 1, 4), (4, 2, 2), (3, 3, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows, cols, ulysses", GRIDS)
def test_bytes_are_those_of_attention2d_in_both_directions(rows, cols, ulysses, overlap, dtype):
    seq, itemsize = 2 * rows * cols * ulysses * 3, {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]
    mesh = Mesh(cols=cols, rows=rows, heads=ulysses)
    chosen = dict(cols=Placement("kv", overlap and cols > 1), rows=Placement("q", overlap and rows > 1), heads="heads")
    program = programs.attention(2, 12, 4, seq, 8, dtype=dtype)
    plan = place(Schedule(program, mesh), **chosen).shard("lse", "heads", "heads").lower()
    formula = attention2d.cost.volume.messages(
        attention2d.layout.grid.Grid(0, ulysses, rows, cols), seq // mesh.ranks, 2, 12, 4, 8, itemsize
    ).volume
    assert (plan.bytes_per_rank, backward_plan(plan).bytes_per_rank) == (formula.forward, formula.backward)


@pytest.mark.parametrize("world, rows, cols", [(2, 2, 1), (4, 2, 2)])
def test_plans_of_the_family_run_on_attention2d(ranks, world, rows, cols):
    """With the bits of the steps taken one by one, and a gradient."""
    plan = plan_of(dict(cols=cols, rows=rows), dict(cols="kv", rows="q"), 12 * world)
    assert grid_of(plan) == (rows, cols, 1, False)
    inputs = dict(zip("qkv", Problem.of(12 * world, 4, 2, True, 2, 8).inputs, strict=False))

    def run(rank):
        local = plan.shard(inputs, rank)
        local["q"].requires_grad_()
        outputs, steps = execute(plan, local, dist.group.WORLD), execute(plan, local, dist.group.WORLD, Count())
        (gradient,) = torch.autograd.grad(outputs["out"].sum(), [local["q"]])
        return (outputs["out"] - steps["out"]).abs().max().item(), gradient.isfinite().all()

    for error, is_finite in ranks(run, world):
        assert error <= 1e-15 and is_finite


def test_other_plans_do_not_run_on_attention2d():
    mixed = plan_of(dict(x=2, y=2), dict(x="kv", y=RING_KV), 48)
    rows_first = plan_of(dict(x=2, y=2), dict(x="q", y="kv"), 48)
    double_ring = plan_of(dict(x=2, y=2), dict(x=RING_KV, y=RING_KV), 48)  # sends less along x than a ring of all ranks
    ring = place(Schedule(programs.attention(2, 4, 2, 48, 8), Mesh(x=2)), x=RING_KV)
    assert grid_of(ring.lower()) == (2, 1, 1, True)
    assert grid_of(mixed) is grid_of(rows_first) is grid_of(double_ring) is None
    assert grid_of(in_chunks(ring, "heads", 2).lower()) is None


def test_decoding_does_not_run_on_attention2d():
    """Its queries are whole on every rank."""
    program = programs.decode_attention(1, 4, 2, 16, 8)
    for mesh in (Mesh(g=1), Mesh(g=2)):
        assert all(grid_of(plan) is None for plan in search(program, mesh))
    (alone, *_), inputs = search(program, Mesh(g=1)), random_inputs(program)
    assert_close(execute(alone, inputs), interpret(alone, inputs))


def test_only_attention_has_a_backward_program():
    plan = place(Schedule(programs.weighted_sum(4, 4), Mesh(x=2)), x="rows").lower()
    with pytest.raises(ValueError, match="weighted_sum has no backward program; only `programs.attention` has"):
        backward_plan(plan)


def test_homes_that_have_no_backward():
    schedule = place(Schedule(programs.attention(2, 4, 2, 16, 8), Mesh(x=2)), x="heads")
    with pytest.raises(ValueError, match=r"keeps q, k, v and out along the sequence, not as \('k', 'x', 'heads'\)"):
        backward_plan(schedule.shard("k", "heads", "x").lower())
