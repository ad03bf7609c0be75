"""Problems for the tests of attention2d, with exact answers to compare each rank's results with."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


def exact(q, k, v, causal, scale=None):
    """(out, lse) of full sequences (batch, seq, heads, head_dim), in plain float64 operations."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v).transpose(1, 2), lse.transpose(1, 2)


@dataclass
class Problem:
    """q, k, v and dout of a full sequence, and the answers: out, lse, dq, dk and dv in float64."""

    inputs: list
    causal: bool
    scale: float | None
    answers: list

    @classmethod
    def of(cls, seq, heads, kv_heads, causal, batch=2, head_dim=16, dtype=torch.float64, scale=None, seed=0):
        """Random inputs, rounded to `dtype`."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(batch, seq, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        leaves = [t.double().clone().requires_grad_() for t in inputs[:3]]
        out, lse = exact(*leaves, causal, scale)
        gradients = torch.autograd.grad(out, leaves, inputs[3].double())
        return cls(inputs, causal, scale, [out.detach(), lse.detach(), *gradients])

    @property
    def seq(self):
        """The length of the sequence."""
        return self.inputs[0].shape[1]

    def solve(self, schedule, backward=True):
        """[out, lse, dq, dk, dv] of this rank's shards, computed by `schedule`; without backward, [out, lse]."""
        q, k, v, dout = (schedule.shard(t) for t in self.inputs)
        leaves = [t.requires_grad_(backward) for t in (q, k, v)]
        out, lse = schedule(*leaves, causal=self.causal, scale=self.scale, seq=self.seq, return_lse=True)
        if not backward:
            return [out, lse]
        out.backward(dout)
        return [out.detach(), lse, *(t.grad for t in leaves)]

    def errors(self, schedule, results):
        """The largest absolute error of each result on this rank. Asserts that padding holds 0, and -inf in lse."""
        is_token = schedule.positions(self.seq) < self.seq
        largest = []
        for index, (ours, theirs) in enumerate(zip(results, self.answers, strict=False)):
            difference = (ours[:, is_token].double() - schedule.shard(theirs)[:, is_token]).abs().nan_to_num(torch.inf)
            largest.append(difference.max().item() if difference.numel() else 0.0)
            padding = torch.full_like(ours[:, ~is_token], -torch.inf if index == 1 else 0.0)
            assert torch.equal(ours[:, ~is_token], padding)
        return largest


def sub_group(count):
    """This rank's group, one of `count` disjoint groups of consecutive ranks; only its members create it."""
    size = dist.get_world_size() // count
    first = dist.get_rank() // size * size
    return dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
