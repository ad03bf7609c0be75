"""State passing and halos over context ranks. Oracles: the plain operators on one rank, autograd, bytes counted by hand."""

import pytest
import torch
import torch.distributed as dist

from commfabric.collectives.counted import Counter
from megatron_ssm.kernels.convolution import causal_conv
from megatron_ssm.parallel.blocks import ContextRanks, check_block_length, halo
from megatron_ssm.parallel.scans import ScanInputs, selective_scan_over_context, ssd_over_context
from scans import KINDS, SEQUENCES, error, inputs_of

ORDERS = ("zigzag", "contiguous")
several_ranks = pytest.mark.parametrize("world", (1, 2, 3, 4))


def in_blocks(context, whole):
    """This rank's blocks of (batch, seq, ...), as (batch * blocks of a rank, block length, ...)."""
    blocks = whole.unflatten(1, (context.blocks, -1))[:, list(context.blocks_of_rank(context.rank))]
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


@several_ranks
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seq_per_block", (3, 5))  # 3: the whole block is the next one's halo
def test_convolution_with_halos_equals_that_of_the_whole_sequence(ranks, world, order, seq_per_block):
    """Also the gradients of the inputs just before each seam, which receive a part from the next block."""
    seq = seq_per_block * world * (2 if order == "zigzag" and world > 1 else 1)
    whole = inputs_of("conv", seq=seq, channels=5)
    y, _ = causal_conv(**whole)
    weights = torch.randn(y.shape, dtype=torch.float64)
    names = ["x", "weight", "bias"]
    expected = torch.autograd.grad((y * weights).sum(), [whole[name] for name in names])

    def run(rank):
        context = ContextRanks(dist.group.WORLD if world > 1 else None, Counter(), order)
        inputs = inputs_of("conv", seq=seq, channels=5)
        x = in_blocks(context, inputs["x"])
        before = halo(x, 3, context, inputs["history"])
        out, _ = causal_conv(x, inputs["weight"], inputs["bias"], before)
        gradients = torch.autograd.grad((out * in_blocks(context, weights)).sum(), [inputs[name] for name in names])
        return in_blocks(context, y.detach()), out.detach(), gradients, context.counter.sent

    results = ranks(run, world)
    for expected_y, out, *_ in results:
        assert error(out, expected_y) < 1e-12
    for name, whole_gradient, parts in zip(names, expected, zip(*(r[2] for r in results), strict=True), strict=True):
        assert error(sum(parts), whole_gradient) < 1e-12, name
    message = 2 * 3 * 5 * 8  # batch, tokens, channels, bytes
    # Forward and backward together: one message between two neighbouring blocks on different ranks in each direction.
    at_ends = 2 if order == "zigzag" else 1
    sent = [at_ends * (2 if 0 < rank < world - 1 else 1) * message if world > 1 else 0 for rank in range(world)]
    assert [r[3] for r in results] == sent


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize("kind", ("selective", "ssd"))
def test_bytes_do_not_grow_with_the_sequence(ranks, world, kind):
    """(P-1)/P of 4 states and 2 sums of dt forward, and of 4 states backward, for sizes that divide over the ranks."""
    sizes = dict(channels=12) if kind == "selective" else dict(heads=12, groups=2, channels=3)
    state, sums = 2 * 4 * (12 if kind == "selective" else 36), 2 * 12  # batch * N * channels; batch * channels or heads

    def run(rank, seq):
        context = ContextRanks(dist.group.WORLD, Counter())
        y, _ = run_blocks(kind, inputs_of(kind, seq=seq, **sizes), context)
        forward = context.counter.sent
        y.sum().backward()
        return forward, context.counter.sent - forward

    for seq in (2 * world, 10 * world):
        for forward, backward in ranks(run, world, seq):
            assert forward == 8 * (world - 1) * (4 * state + 2 * sums) // world
            assert backward == 8 * (world - 1) * 4 * state // world


@pytest.mark.parametrize("world", (2, 4))
def test_blocks_that_are_too_short_or_uneven_are_refused(ranks, world):
    def run(rank):
        context = ContextRanks(dist.group.WORLD, Counter())
        with pytest.raises(ValueError, match=f"{4 * world} tokens over {world} context ranks make blocks of 2"):
            check_block_length(4, 3, context)
        with pytest.raises(ValueError, match="5 local tokens are odd"):
            check_block_length(5, 3, context)
        check_block_length(6, 3, context)
        with pytest.raises(ValueError, match="not in cyclic order"):
            ContextRanks(dist.group.WORLD, Counter(), "cyclic")

    ranks(run, world)
