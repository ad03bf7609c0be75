"""The gated delta rule. Oracles: a loop over tokens in float64 with autograd, and transformers' chunked form."""

import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from affine_states import entering_states
from commfabric.collectives.counted import Counter
from hf import Float64
from megatron_ssm.kernels.gated_delta import CHUNK, gated_delta, gated_delta_ref
from megatron_ssm.kernels.kernels import LIBRARY
from megatron_ssm.parallel.blocks import ContextRanks
from megatron_ssm.parallel.channel_exchange import gated_delta_by_heads
from megatron_ssm.parallel.scans import gated_delta_over_context
from megatron_ssm.parallel.summaries import delta_summary
from scans import delta_inputs, error

EXACT = 1e-10
NAMES = ("q", "k", "v", "g", "beta", "state")
needs_kernels = pytest.mark.skipif(LIBRARY.functions is None, reason="there are no C kernels")


def everything(function, inputs):
    """{name: tensor}: the output, the final state, and the gradient of every input through both."""
    y, state = function(**inputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (y, state)]
    loss = sum((t * w).double().sum() for t, w in zip((y, state), weights, strict=True))
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    return dict(y=y.detach(), carried=state.detach(), **dict(zip(inputs, gradients, strict=True)))


@pytest.mark.parametrize("seq", (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1))
@pytest.mark.parametrize("values, max_beta", ((2, 2.0), (6, 1.0)))
def test_chunks_equal_the_loop(seq, values, max_beta):
    inputs = delta_inputs(seq=seq, values=values, max_beta=max_beta)
    ours, plain = everything(gated_delta, inputs), everything(gated_delta_ref, inputs)
    for name, tensor in plain.items():
        assert error(ours[name], tensor) <= EXACT, name


@torch.no_grad()
def test_the_loop_equals_transformers():
    inputs = delta_inputs()
    y, state = gated_delta_ref(**inputs)
    renamed = dict(query="q", key="k", value="v", g="g", beta="beta", initial_state="state")
    with Float64():
        theirs = torch_chunk_gated_delta_rule(
            **{name: inputs[ours] for name, ours in renamed.items()},
            use_qk_l2norm_in_kernel=True,
            output_final_state=True,
        )
    assert error(y, theirs[0]) <= EXACT and error(state, theirs[1]) <= EXACT


def wide(inputs):
    """The same in float64."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}


def relative(found, exact):
    """The largest error, relative to the largest number."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype, bound", ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)))
@pytest.mark.parametrize("size, width", ((8, 12), (16, 32), (128, 64)))
def test_precision(dtype, bound, size, width):
    """Gradients of both dtypes against the loop in float64, over a sequence whose beginning is still remembered."""
    inputs = delta_inputs(batch=1, seq=200, size=size, width=width, dtype=dtype)
    ours, exact = everything(gated_delta, inputs), everything(gated_delta_ref, wide(inputs))
    assert ours["y"].dtype == dtype and ours["carried"].dtype == torch.float32
    for name, tensor in exact.items():
        assert relative(ours[name], tensor) <= bound, name


@needs_kernels
@pytest.mark.parametrize("dtype, bound", ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)))
@pytest.mark.parametrize("seq", (1, 15, 16, 50, 4096))
@pytest.mark.parametrize("size, width", ((8, 12), (16, 16), (24, 48), (128, 32)))
@torch.no_grad()
def test_kernels(size, width, seq, dtype, bound):
    """With columns that fill registers and columns that do not; the state is written where it was."""
    inputs = delta_inputs(batch=2 if seq < 100 else 1, seq=seq, keys=1, values=3, size=size, width=width, dtype=dtype)
    inputs = {name: tensor.detach() for name, tensor in inputs.items()}
    exact_y, exact_state = gated_delta(**wide(inputs))
    before = inputs["state"].clone()
    y, state = gated_delta(**inputs)
    assert torch.equal(inputs["state"], before)
    assert y.dtype == dtype and relative(y, exact_y) <= bound and relative(state, exact_state) <= bound
    again, same = gated_delta(**inputs, overwrite=True)
    assert same is inputs["state"] and torch.equal(again, y) and torch.equal(same, state)
    if seq > 1:  # with gaps between tokens, and from zeros
        inputs["state"] = None
        apart = {
            n: t if t is None else torch.cat([t, t], -2)[..., : t.shape[-2], :] if t.ndim == 4 else t
            for n, t in inputs.items()
        }
        assert torch.equal(gated_delta(**apart)[0], gated_delta(**inputs)[0])


@needs_kernels
@pytest.mark.parametrize("width", (12, 32))
@torch.no_grad()
def test_one_by_one_is_a_call_for_each_token(width):
    inputs = {n: t.detach() for n, t in delta_inputs(seq=20, width=width, dtype=torch.float32).items()}
    y, state = gated_delta(**inputs, one_by_one=True)
    carried, outputs = inputs.pop("state"), []
    for t in range(20):
        out, carried = gated_delta(**{name: tensor[:, t : t + 1] for name, tensor in inputs.items()}, state=carried)
        outputs.append(out)
    assert torch.equal(torch.cat(outputs, 1), y) and torch.equal(carried, state)


# Context ranks


def in_blocks(context, whole):
    """This rank's blocks of (batch, seq, ...), as (batch * blocks of a rank, block length, ...)."""
    blocks = whole.unflatten(1, (context.blocks, -1))[:, list(context.blocks_of_rank(context.rank))]
    return context.to_blocks(blocks.flatten(1, 2))


@pytest.mark.parametrize("exchange", (False, True), ids=("states", "heads"))
@pytest.mark.parametrize("order", ("zigzag", "contiguous"))
@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_over_context_ranks(ranks, world, order, exchange):
    """Outputs, the final state and every gradient; six value heads and two key heads do not divide over four ranks."""
    seq = 5 * 2 * world
    inputs = delta_inputs(seq=seq)
    inputs["state"] = inputs["state"].detach() * (0 if exchange else 1)
    y, final = gated_delta_ref(**inputs)
    weights = torch.randn(y.shape, dtype=torch.float64)
    names = NAMES[:-1]
    expected = torch.autograd.grad((y * weights).sum(), [inputs[name] for name in names])

    def run(rank):
        context = ContextRanks(dist.group.WORLD if world > 1 else None, Counter(), order)
        own = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
        local = [in_blocks(context, own[name]) for name in names]
        if exchange:
            out, last = gated_delta_by_heads(*local, context), final.flatten(2)
        else:
            out, passed = gated_delta_over_context(*local, context, inputs["state"])
            last = passed.whole_final()
        gradients = torch.autograd.grad((out * in_blocks(context, weights)).sum(), [own[name] for name in names])
        return in_blocks(context, y.detach()), out.detach(), last, gradients

    results = ranks(run, world)
    for expected_y, out, last, _ in results:
        assert error(out, expected_y) < EXACT and error(last, final.flatten(2)) < EXACT
    for name, whole, parts in zip(names, expected, zip(*(r[3] for r in results), strict=True), strict=True):
        assert error(sum(parts), whole) < EXACT, name


@pytest.mark.parametrize("order, blocks", (("zigzag", 2), ("contiguous", 1)))
@pytest.mark.parametrize("world", (2, 4))
def test_bytes_do_not_grow_with_the_sequence(ranks, world, order, blocks):
    """(P-1)/P of two states and a map forward, and of two states backward, for each block of a rank."""
    sizes = dict(batch=2, keys=2, values=4, size=3, width=5)
    state, mapped = 2 * 4 * 3 * 5, 2 * 4 * 3 * 3

    def run(rank, seq):
        context = ContextRanks(dist.group.WORLD, Counter(), order)
        inputs = delta_inputs(seq=seq, **sizes)
        y, _ = gated_delta_over_context(*(in_blocks(context, inputs[name]) for name in NAMES[:-1]), context)
        forward = context.counter.sent
        y.sum().backward()
        return forward, context.counter.sent - forward

    for seq in (2 * world, 10 * world):
        for forward, backward in ranks(run, world, seq):
            assert forward == 8 * (world - 1) * blocks * (2 * state + mapped) // world
            assert backward == 8 * (world - 1) * blocks * 2 * state // world


@pytest.mark.parametrize("world, fewer", ((4, 2.6), (8, 5)))
def test_fewer_bytes_than_an_all_gather(ranks, world, fewer):
    """Of states and maps, in contiguous order and with K = V: 2P/3 times."""
    sizes = dict(batch=1, keys=8, values=8, size=4, width=4, seq=2 * world)

    def run(rank):
        ours, gathered = (ContextRanks(dist.group.WORLD, Counter(), "contiguous") for _ in range(2))
        inputs = delta_inputs(**sizes)
        q, k, v, g, beta = (in_blocks(ours, inputs[name]) for name in NAMES[:-1])
        gated_delta_over_context(q, k, v, g, beta, ours)
        state, transition = delta_summary(k, v, g, beta)
        entering_states(transition, state, gathered)
        return gathered.counter.sent / ours.counter.sent

    assert min(ranks(run, world)) >= fewer
