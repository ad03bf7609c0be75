"""State passing over context ranks. Oracle: the plain recurrences and the plain convolution on one rank, and autograd."""

import pytest
import torch
import torch.distributed as dist

from megatron_ssm.context.blocks import ContextRanks, halo
from megatron_ssm.context.scans import ScanInputs, selective_scan_over_context, ssd_over_context
from megatron_ssm.ops.convolution import causal_conv
from scans import KINDS, SEQUENCES, error, inputs_of
from sparsefusion.collectives.counted import Counter

ORDERS = ("zigzag", "contiguous")
several_ranks = pytest.mark.parametrize("world", (1, 2, 3, 4))


def in_blocks(context, whole):
    """This rank's blocks of (batch, seq, ...), as (batch * blocks of a rank, block length, ...)."""
    blocks = whole.unflatten(1, (context.blocks, -1))[:, list(context.held_by(context.rank))]
    return context.to_blocks(blocks.flatten(1, 2))


def run_blocks(kind, inputs, context):
    """y and the final state of this rank's blocks of whole inputs, differentiable with respect to these."""
    local = {name: in_blocks(context, t) if name in SEQUENCES[kind] else t for name, t in inputs.items()}
    initial = local.pop("state")
    if kind == "selective":
        return selective_scan_over_context([ScanInputs(**local)], context, initial.detach())
    return ssd_over_context(**local, context=context, initial=initial.detach())


@several_ranks
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ("selective", "ssd"))
def test_scans_over_context_ranks_equal_those_on_one_rank(ranks, world, order, kind):
    """Outputs, the final state and every gradient, at sizes that do not divide over the ranks."""
    seq, sizes = 5 * 2 * world, dict(channels=7) if kind == "selective" else dict(heads=6, groups=2, channels=3)
    weights = torch.randn(2, seq, *((7,) if kind == "selective" else (6, 3)), dtype=torch.float64)
    whole = inputs_of(kind, seq=seq, **sizes)
    y, final = KINDS[kind][1](**whole)
    names = [name for name in whole if name != "state"]
    expected = torch.autograd.grad((y * weights).sum(), [whole[name] for name in names])

    def run(rank):
        context = ContextRanks(dist.group.WORLD if world > 1 else None, Counter(), order)
        inputs = inputs_of(kind, seq=seq, **sizes)
        local, passed = run_blocks(kind, inputs, context)
        loss = (local * in_blocks(context, weights)).sum()
        gradients = torch.autograd.grad(loss, [inputs[name] for name in names])
        return in_blocks(context, y.detach()), local.detach(), passed.whole_final(), gradients

    results = ranks(run, world)
    for expected_y, local, last, _ in results:
        assert error(local, expected_y) < 1e-12
        assert error(last, final.transpose(1, 2) if kind == "selective" else final.flatten(2)) < 1e-12
    for name, whole_gradient, parts in zip(names, expected, zip(*(r[3] for r in results), strict=True), strict=True):
        assert error(sum(parts), whole_gradient) < 1e-12, name
