"""Each context rank computes some channels of all tokens. Oracle: the plain recurrences on one rank, and autograd."""

import pytest
import torch
import torch.distributed as dist

from commfabric.collectives.counted import Counter
from megatron_ssm.parallel.blocks import ContextRanks
from megatron_ssm.parallel.channel_exchange import selective_scan_by_channels, ssd_by_heads
from megatron_ssm.parallel.scans import ScanInputs
from scans import KINDS, SEQUENCES, error, inputs_of

# (kind, how many sets of inputs, their sizes): each head of a Mamba-1 mixer has inputs of its own.
CASES = {
    "selective": ("selective", 1, dict(channels=7)),
    "selective, 2 heads": ("selective", 2, dict(channels=3)),
    "selective, 4 heads": ("selective", 4, dict(channels=2)),
    "ssd": ("ssd", 1, dict(heads=6, groups=2, channels=3)),
    "ssd, 1 group": ("ssd", 1, dict(heads=5, groups=1)),
    "ssd, 4 groups": ("ssd", 1, dict(heads=8, groups=4)),
}


def own_blocks(context, whole):
    """This rank's blocks of (batch, seq, ...)."""
    return whole.unflatten(1, (context.blocks, -1))[:, list(context.blocks_of_rank(context.rank))].flatten(0, 1)


def inputs_of_case(case, seq):
    """[{argument: whole tensor}] of each head, without a state."""
    kind, count, sizes = CASES[case]
    heads = [inputs_of(kind, seq=seq, seed=seed, **sizes) for seed in range(count)]
    return [{name: tensor for name, tensor in head.items() if name != "state"} for head in heads]


@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize("order", ("zigzag", "contiguous"))
@pytest.mark.parametrize("case", CASES)
def test_scans_by_channels_equal_those_on_one_rank(ranks, world, order, case):
    kind, seq = CASES[case][0], 10 * world
    heads = inputs_of_case(case, seq)
    y = torch.cat([KINDS[kind][1](**head)[0] for head in heads], dim=2)
    weights = torch.randn(y.shape, dtype=torch.float64)
    expected = torch.autograd.grad((y * weights).sum(), [t for head in heads for t in head.values()])

    def run(rank):
        context = ContextRanks(dist.group.WORLD if world > 1 else None, Counter(), order)
        leaves = inputs_of_case(case, seq)
        own = [
            {name: own_blocks(context, t) if name in SEQUENCES[kind] else t for name, t in head.items()}
            for head in leaves
        ]
        if kind == "selective":
            out = selective_scan_by_channels([ScanInputs(**head) for head in own], context)
        else:
            out = ssd_by_heads(**own[0], context=context)
        loss = (out * own_blocks(context, weights)).sum()
        gradients = torch.autograd.grad(loss, [t for head in leaves for t in head.values()])
        return own_blocks(context, y.detach()), out.detach(), gradients

    results = ranks(run, world)
    for expected_y, local, _ in results:
        assert error(local, expected_y) < 1e-12
    names = [name for head in heads for name in head]
    for name, whole_gradient, parts in zip(names, expected, zip(*(r[2] for r in results), strict=True), strict=True):
        assert error(sum(parts), whole_gradient) < 1e-12, name
