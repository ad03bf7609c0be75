"""Attention by plans, with gradients. Oracle: autograd through float64 attention; attention2d's formula for the bytes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import attention2d
from attention_problems import Problem
from commfabric.collectives.counted import Counter
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


def plan_of(mesh, placement, seq, dtype="float64"):
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "world, rows, cols, ulysses", [(2, 2, 1, 1), (4, 2, 2, 1), (4, 1, 2, 2), (6, 3, 2, 1), (8, 2, 2, 2)]
)
@pytest.mark.parametrize(
    "causal, order, scale", [(True, "zigzag", None), (False, "contiguous", None), (True, "contiguous", 0.5)]
)
def test_plans_of_the_family_run_on_attention2d(ranks, world, rows, cols, ulysses, overlap, causal, order, scale):
    """With the results of the steps taken one by one, the bytes that the plan predicts, and the gradients."""
    placements = dict(cols=Placement("kv", overlap), rows=Placement("q", overlap), heads="heads")
    sizes = {name: size for name, size in dict(cols=cols, rows=rows, heads=ulysses).items() if size > 1}
    program = programs.attention(2, 4, 2, 12 * world, 8, causal, dtype="float64", order=order, scale=scale)
    plan = place(Schedule(program, Mesh(**sizes)), **{name: placements[name] for name in sizes}).lower()
    assert grid_of(plan.schedule) == (rows, cols, ulysses, overlap)
    problem = Problem.of(12 * world, 4, 2, causal, 2, 8, scale=scale)
    inputs = dict(zip("qkv", problem.inputs, strict=False))
    back = backward_plan(plan)
    whole = {"dout": problem.inputs[3], "out": problem.answers[0], "lse": problem.answers[1]}

    def run(rank):
        local, dout = plan.shard(inputs, rank), back.shard(inputs | whole, rank)["dout"]
        for leaf in local.values():
            leaf.requires_grad_()
        counter = Counter()
        outputs = execute(plan, local, dist.group.WORLD, counter=counter)
        with torch.no_grad():
            steps = execute(plan, local, dist.group.WORLD, Count())
        assert counter.sent == plan.bytes_per_rank
        gradients = torch.autograd.grad(outputs["out"], list(local.values()), dout)
        found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        return {name: x.detach() for name, x in outputs.items()}, steps, found

    outputs, steps, gradients = (list(each) for each in zip(*ranks(run, world), strict=True))
    answers = dict(zip(("out", "lse", "dq", "dk", "dv"), problem.answers, strict=True))
    for found in (plan.unshard(outputs), plan.unshard(steps), back.unshard(gradients)):
        assert all((x - answers[name]).abs().max() <= 1e-14 for name, x in found.items()), found
    for one, other in zip(outputs, steps, strict=True):
        assert all((one[name] - other[name]).abs().max() <= 1e-15 for name in one)


@pytest.mark.parametrize("world", [2])
def test_inputs_that_require_gradients_are_refused_by_other_plans(ranks, world):
    """Also if only one rank's does, and if a plan of attention2d's family is to be counted."""
    plan = plan_of(dict(x=2, y=world // 2), dict(x="kv", y=RING_KV if world > 2 else "q"), 24)
    inputs = dict(zip("qkv", Problem.of(24, 4, 2, True, 2, 8).inputs, strict=False))

    def run(rank):
        local = plan.shard(inputs, rank)
        local["k"].requires_grad_(rank == 1)
        with pytest.raises(
            ValueError, match="input k requires a gradient, .* use commir.differentiable, or torch.no_grad"
        ):
            execute(plan, local, dist.group.WORLD, Count())
        with torch.no_grad():
            return execute(plan, local, dist.group.WORLD, Count())["out"].requires_grad

    assert ranks(run, world) == [False] * world


@pytest.mark.parametrize("world", [2])
def test_only_attention_has_a_gradient(ranks, world):
    """Both ways to ask for one say so, with a group, too."""
    program = programs.weighted_sum(8, 8, dtype="float64")
    plan = place(Schedule(program, Mesh(x=world)), x="rows").lower()

    def run(rank):
        local = {name: x.requires_grad_() for name, x in plan.shard(random_inputs(program), rank).items()}
        with pytest.raises(ValueError, match="only `programs.attention` has a gradient; use torch.no_grad"):
            execute(plan, local, dist.group.WORLD)
        with pytest.raises(ValueError, match="weighted_sum has no backward program; only `programs.attention` has"):
            differentiable(plan, dist.group.WORLD)(*3 * [local["a"]])
        with pytest.raises(ValueError, match=f"no group is given, which means 1 rank, and the mesh .* has {world}"):
            execute(plan, local)

    ranks(run, world)


def test_other_plans_do_not_run_on_attention2d():
    mixed = plan_of(dict(x=2, y=2), dict(x="kv", y=RING_KV), 48)
    rows_first = plan_of(dict(x=2, y=2), dict(x="q", y="kv"), 48)
    double_ring = plan_of(dict(x=2, y=2), dict(x=RING_KV, y=RING_KV), 48)  # sends less along x than a ring of all ranks
    ring = place(Schedule(programs.attention(2, 4, 2, 48, 8), Mesh(x=2)), x=RING_KV)
    assert grid_of(ring) == (2, 1, 1, True)
    assert grid_of(mixed.schedule) is grid_of(rows_first.schedule) is grid_of(double_ring.schedule) is None
    assert grid_of(in_chunks(ring, "heads", 2)) is None


def with_other_homes(world):
    """Attention whose out is whole on every rank, and attention whose keys and values are kept along heads."""
    program = programs.attention(1, 4, 4, 16 * world, 8, dtype="float64")
    (q, k, v), (out, lse) = program.inputs, program.outputs
    by_heads = (q, replace(k, home="heads"), replace(v, home="heads"))
    return [replace(program, outputs=(replace(out, home=None), lse)), replace(program, inputs=by_heads)]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("world", [2])
def test_attention_with_other_homes_does_not_run_on_attention2d(ranks, world, number):
    """attention2d keeps every operand along the sequence. The backward program does too."""
    plan = place(Schedule(with_other_homes(world)[number], Mesh(g=world)), g="q").lower()
    inputs = random_inputs(plan.program)
    parts = ranks(lambda rank: execute(plan, plan.shard(inputs, rank), dist.group.WORLD), world)
    assert_close(plan.unshard(parts), interpret(plan, inputs))
    with pytest.raises(ValueError, match="only `programs.attention` has, .* with its operands at its homes"):
        backward_plan(plan)


def test_decoding_does_not_run_on_attention2d():
    """Its queries are whole on every rank."""
    program = programs.decode_attention(1, 4, 2, 16, 8)
    for mesh in (Mesh(g=1), Mesh(g=2)):
        assert all(grid_of(plan.schedule) is None for plan in search(program, mesh))
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


@pytest.mark.parametrize("world, placement", [(2, "heads"), (2, RING_KV), (4, RING_Q)])
def test_gradients_in_bf16(ranks, world, placement):
    """As near to the exact ones as roundings of bf16 allow."""
    problem = Problem.of(12 * world, 4, 2, causal=True, batch=2, head_dim=8)
    plan = plan_of(dict(x=world), dict(x=placement), 12 * world, "bfloat16")

    def run(rank):
        inputs = {name: x.bfloat16() for name, x in zip("qkv", problem.inputs, strict=False)}
        leaves = [x.clone().requires_grad_() for x in plan.shard(inputs, rank).values()]
        dout = plan.shard(inputs | {"q": problem.inputs[3].bfloat16()}, rank)["q"]
        out = differentiable(plan, dist.group.WORLD)(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves, dout)

    results = ranks(run, world)
    parts = {"q": [out for out, _ in results]}
    found = [plan.unshard([{"q": out} for out in parts["q"]])["q"]]
    for index, name in enumerate("qkv"):
        found.append(plan.unshard([{name: gradients[index]} for _, gradients in results])[name])
    for x, expected in zip(found, (problem.answers[0], *problem.answers[2:]), strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", ["q", "heads"])
def test_the_output_is_kept_once(placement, dtype):
    """Also where it is rounded."""
    plan = plan_of(dict(x=1), dict(x=placement), 8, str(dtype).removeprefix("torch."))
    leaves = [x.to(dtype).requires_grad_() for x in random_inputs(plan.program).values()]
    out = differentiable(plan)(*leaves)
    assert out.data_ptr() in [x.data_ptr() for x in out.grad_fn.saved_tensors]
    assert all(x.dtype == dtype for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_limit_of_memory_does_not_cover_the_backward_pass(kv_heads):
    """It may hold more than twice as much, as that of a ring does."""
    program, mesh = programs.attention(1, 8, kv_heads, 1024, 64), Mesh(gpu=2)
    ring = place(Schedule(program, mesh), gpu=Placement("q", True)).lower()
    found = search(program, mesh, memory=ring.memory)
    assert all(plan.memory <= ring.memory for plan in found) and ring.schedule in [plan.schedule for plan in found]
    assert backward_plan(ring).memory > 2 * ring.memory
