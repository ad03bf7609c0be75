"""Each context rank computes some channels of all tokens. Oracle: the plain recurrences on one rank, and autograd."""

import pytest
import torch
import torch.distributed as dist

from megatron_ssm.context.blocks import ContextRanks
from megatron_ssm.context.channel_exchange import selective_scan_by_channels, ssd_by_heads
from scans import KINDS, SEQUENCES, error, inputs_of
from sparsefusion.collectives.counted import Counter

SIZES = {
    "selective": dict(channels=7),
    "ssd": dict(heads=6, groups=2, channels=3),
    "ssd-1-group": dict(heads=5, groups=1),
}


def own_tokens(context, whole):
    """This rank's tokens of (batch, seq, ...)."""
    return whole.unflatten(1, (context.blocks, -1))[:, list(context.blocks_of_rank(context.rank))].flatten(1, 2)


@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize("order", ("zigzag", "contiguous"))
@pytest.mark.parametrize("case", SIZES)
def test_scans_by_channels_equal_those_on_one_rank(ranks, world, order, case):
    kind, seq = case.partition("-")[0], 10 * world
    function, names = (
        (selective_scan_by_channels, ("z", "state")) if kind == "selective" else (ssd_by_heads, ("state",))
    )

    def without(inputs):
        return {name: tensor for name, tensor in inputs.items() if name not in names}

    whole = without(inputs_of(kind, seq=seq, **SIZES[case]))
    y, _ = KINDS[kind][1](**whole)
    weights = torch.randn(y.shape, dtype=torch.float64)
    expected = torch.autograd.grad((y * weights).sum(), list(whole.values()))

    def run(rank):
        context = ContextRanks(dist.group.WORLD if world > 1 else None, Counter(), order)
        inputs = without(inputs_of(kind, seq=seq, **SIZES[case]))
        local = {name: own_tokens(context, t) if name in SEQUENCES[kind] else t for name, t in inputs.items()}
        out = function(**local, context=context)
        loss = (out * own_tokens(context, weights)).sum()
        return own_tokens(context, y.detach()), out.detach(), torch.autograd.grad(loss, list(inputs.values()))

    results = ranks(run, world)
    for expected_y, local, _ in results:
        assert error(local, expected_y) < 1e-12
    for name, whole_gradient, parts in zip(whole, expected, zip(*(r[2] for r in results), strict=True), strict=True):
        assert error(sum(parts), whole_gradient) < 1e-12, name
