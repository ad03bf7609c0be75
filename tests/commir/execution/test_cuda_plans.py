"""Plans on several NCCL ranks. Oracles: the programs' own (see loop_programs), and attention2d. The tests need CUDA."""

import pytest
import torch
import torch.distributed as dist

from attention_problems import Problem
from commir import Mesh, differentiable, execute, fastest, programs, search
from commir.execution.state import Count
from loop_programs import assert_close, cases, mesh_of, plans
from ranks import run_cuda_ranks

pytestmark = pytest.mark.cuda


def run_plans(rank, chosen, inputs):
    """[(outputs, bytes sent, peak memory)] of each plan, on this rank."""
    found, inputs = [], {name: x.cuda() for name, x in inputs.items()}
    for plan in chosen:
        count = Count()
        outputs = execute(plan, plan.shard(inputs, rank), dist.group.WORLD, count)
        found.append(({name: x.cpu() for name, x in outputs.items()}, count.sent, count.peak))
    return found


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_every_program(world, number):
    case = cases(world)[number]
    chosen = plans(case.program, mesh_of(*([2, 2] if world == 4 else [2])))[:40]
    results = run_cuda_ranks(run_plans, world, chosen, case.inputs)
    for index, plan in enumerate(chosen):
        assert_close(plan.unshard([result[index][0] for result in results]), case.expected, 1e-12)
        assert {result[index][1:] for result in results} == {(plan.bytes_per_rank, plan.memory)}


def searched(rank, dtype, problem):
    """For each plan of a search, by the generic executor and by attention2d: [(plan, out, dq, dk and dv at home)]."""
    ranks, name = dist.get_world_size(), str(dtype).split(".")[1]
    q, k, v, dout = (x.to(dtype).cuda() for x in problem.inputs)
    program = programs.attention(q.shape[0], q.shape[2], k.shape[2], q.shape[1], q.shape[3], dtype=name)
    found = []
    for mesh in (Mesh(x=ranks), Mesh(x=2, y=ranks // 2)):
        for plan in search(program, mesh)[:5]:
            for count in (None, Count()):
                local = plan.shard(dict(q=q, k=k, v=v), rank)
                leaves = [x.requires_grad_() for x in local.values()]
                out = differentiable(plan, dist.group.WORLD, count)(*leaves)
                gradients = torch.autograd.grad(out, leaves, plan.shard(dict(q=dout, k=k, v=v), rank)["q"])
                found.append((plan, [x.cpu() for x in (out.detach(), *gradients)]))
    return found


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("world", [2, 4])
def test_attention_that_a_search_finds(world, dtype, limit):
    problem = Problem.of(32 * world, 8, 4, causal=True, batch=2, head_dim=64, dtype=dtype)
    for parts in zip(*run_cuda_ranks(searched, world, dtype, problem), strict=True):
        plan = parts[0][0]
        for index, (name, expected) in enumerate(zip("qqkv", (problem.answers[0], *problem.answers[2:]), strict=True)):
            whole = plan.unshard([{name: tensors[index]} for _, tensors in parts])[name]
            assert (whole - expected).norm() <= limit * expected.norm(), (index, plan.schedule)


def wrong_inputs(rank, plan):
    """The errors on this rank of calls in which the second rank's inputs are missing, or on the CPU."""
    world, errors = dist.group.WORLD, []
    for wrong in (lambda local: None, lambda local: {}, lambda local: {name: x.cpu() for name, x in local.items()}):
        local = {each.name: torch.ones(plan.digits.local_shape(each, plan.digits.home(each)), device="cuda")
                 for each in plan.inputs()}  # fmt: skip
        with pytest.raises(ValueError) as error:
            execute(plan, wrong(local) if rank == 1 else local, world)
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_wrong_inputs_on_one_rank_are_an_error_on_all(world):
    """No rank waits for another that compares on the CPU."""
    plan = search(programs.attention(1, 4, 4, 8 * world, 8), mesh_of(world))[0]
    for missing, empty, on_cpu in run_cuda_ranks(wrong_inputs, world, plan):
        assert "inputs are {name: tensor}, not None" in missing and "attention takes q, k, v, not nothing" in empty
        assert "q is on cpu, and ranks cannot exchange its tensors by nccl" in on_cpu


def timed(rank, program):
    """The plan that this rank finds to be the fastest, by its hash."""
    return fastest(search(program, Mesh(x=dist.get_world_size()), top=3), dist.group.WORLD, device="cuda")[0].hash


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_on_the_fastest(world):
    program = programs.attention(1, 8, 4, 64 * world, 64, dtype="bfloat16")
    assert len(set(run_cuda_ranks(timed, world, program))) == 1
