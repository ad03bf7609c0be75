"""Schedules on several NCCL ranks. Oracle: plain attention in float64 on the CPU. The tests need CUDA."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from attention2d import USP, AllGather, Attention2D, Ring, Ulysses
from attention_problems import Problem
from ranks import run_cuda_ranks

pytestmark = pytest.mark.cuda

SCHEDULES = {
    2: [Ring, AllGather, Ulysses, partial(Attention2D, rows=2, cols=1, overlap=True)],
    4: [
        Ring, AllGather, Ulysses, USP, partial(Attention2D, rows=2, cols=2, overlap=False),
        partial(Attention2D, rows=2, cols=2, overlap=True), partial(Attention2D, rows=1, cols=2, ulysses=2),
    ],
}  # fmt: skip


def largest_errors(rank, dtype, causal):
    """The largest of the relative errors of out, lse, dq, dk and dv, for each schedule, on this rank's tokens."""
    problem = Problem.of(150, 8, 4, causal, head_dim=32, dtype=dtype)
    problem.inputs, problem.answers = ([t.cuda() for t in each] for each in (problem.inputs, problem.answers))
    found = []
    for make in SCHEDULES[dist.get_world_size()]:
        schedule = make(dist.group.WORLD)
        is_token = schedule.positions(problem.seq) < problem.seq
        errors = []
        for ours, theirs in zip(problem.solve(schedule), problem.answers, strict=True):
            exact = schedule.shard(theirs)[:, is_token]
            errors.append(((ours[:, is_token] - exact).norm() / exact.norm()).item())
        found.append(max(errors))
    return found


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("world_size, causal", [(2, True), (4, False), (4, True)])
def test_schedules(world_size, causal, dtype, limit):
    for errors in run_cuda_ranks(largest_errors, world_size, dtype, causal):
        assert max(errors) <= limit, errors
