"""Tiles and schedules on a GPU, with NCCL. Oracle: plain operations in float64, and exact attention on the CPU."""

import pytest
import torch
import torch.distributed as dist

from attention2d import AllGather, Attention2D, Ring, Ulysses
from attention2d.compute.tile import attend, attend_backward, attend_backward_ref, attend_ref
from attention_problems import Problem

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("head_dim", (64, 128, 80, 12))
@pytest.mark.parametrize("heads, kv_heads", ((4, 4), (8, 2), (6, 1)))
@pytest.mark.parametrize("queries, keys, causal", ((200, 77, False), (130, 130, True), (1, 64, False)))
def test_tiles(queries, keys, causal, heads, kv_heads, head_dim, dtype):
    """Slices of larger tensors with two sequences. Backward gets statistics as if there were more keys."""
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    q, k, v, dout = (torch.randn(n + 5, 2, h, head_dim, device="cuda").to(dtype)[5:] for n, h in shapes)
    scale = head_dim**-0.5
    exact = attend_ref(*(t.double() for t in (q, k, v)), causal, scale)
    limit = 1e-5 if dtype is torch.float32 else 2e-2 if dtype is torch.bfloat16 else 3e-3
    for ours, theirs in zip(attend(q, k, v, causal, scale), exact, strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).abs().max() <= limit
    lse, delta = exact[1] + 0.5, (dout * exact[0]).sum(-1) * 0.6  # as if there were more keys
    exact_inputs = [t.double() for t in (dout, delta, q, k, v, lse)]
    ours = attend_backward(dout, delta.float(), q, k, v, lse.float(), causal, scale)
    for mine, theirs in zip(ours, attend_backward_ref(*exact_inputs, causal, scale), strict=True):
        assert (mine - theirs).norm() <= limit * theirs.norm()


@pytest.mark.parametrize("make", (Ring, AllGather, Ulysses, lambda group: Attention2D(group, 1, 1, overlap=True)))
def test_schedules_on_one_gpu(make, tmp_path):
    """With an NCCL group of one rank, and without a group."""
    problem = Problem.of(64, 4, 2, True, head_dim=32, dtype=torch.bfloat16)
    problem.inputs, problem.answers = ([t.cuda() for t in each] for each in (problem.inputs, problem.answers))
    dist.init_process_group("nccl", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        for group in (None, dist.group.WORLD):
            found = problem.solve(make(group))
            for ours, theirs in zip(found, problem.answers, strict=True):
                assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    finally:
        dist.destroy_process_group()
