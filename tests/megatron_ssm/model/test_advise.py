"""The predicted cost of decoding. Oracle: what the ranks of a model count, and the weights they use, while decoding."""

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from cases import MARKED, oracle
from megatron_ssm import families
from megatron_ssm.kernels.experts import Router
from megatron_ssm.model.advise import all_reduces
from megatron_ssm.model.memory import Memory, experts_read

__all__ = ["oracle"]
LENGTH = 4


@torch.no_grad()
def measure_token(rank, directory, dtype):
    """Of one token: all-reduces, their bytes, bytes of the weights used, bytes of the state and of keys and values."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = megatron_ssm.load(directory, group, dtype=dtype, shared_memory=False)
    read = []
    for block in model.shared:
        block.register_forward_hook(lambda block, *_: read.extend(p.nbytes for p in block.parameters()))
    cache = model.new_cache(1, LENGTH)
    model.local_logits(torch.tensor([[1, 2, 3]]), cache=cache)
    model.counter.reset()
    read.clear()
    model.local_logits(torch.tensor([[4]]), cache=cache)
    looked_up = () if model.config.tie_embeddings else ("embeddings.",)
    others = {name: p for name, p in model.named_parameters() if not name.startswith(("shared.", *looked_up))}
    read += [p.nbytes - int((1 - p.field.used) * p.nbytes) for p in others.values()]  # of experts those that it chooses
    state = sum(sum(t.nbytes for t in layer.fixed.values()) for layer in cache.states.values())
    return dict(model.counter.calls), model.counter.nbytes, sum(read), state, cache.nbytes - state


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MARKED)
def test_a_decoded_token(name, world_size, dtype, oracle, ranks):
    config = families.read(oracle(name).directory)
    memory, reductions = Memory(config, world_size, dtype.itemsize), list(all_reduces(config, world_size))
    calls, nbytes, read, state, keys_and_values = ranks(measure_token, world_size, oracle(name).directory, dtype)[0]
    assert (memory.weights_read_per_token, memory.moved_per_token(LENGTH)) == (read, 2 * state + keys_and_values)
    if world_size > 1:
        assert {"all_reduce": sum(count for _, count in reductions)} == calls
        assert sum(size * count for size, count in reductions) == nbytes


@pytest.mark.parametrize(
    "experts, chosen, ranks, tokens, expected",
    [
        (8, 3, 1, 1, 3),  # without other ranks
        (8, 1, 4, 1, 1),  # one rank reads the only one
        (8, 8, 4, 1, 2),  # every rank reads all of its own
        (4, 2, 2, 1, 4 / 3),  # both are of one rank in a third of all choices
        (8, 2, 2, 100, 4),  # many tokens choose all
    ],
)
def test_experts_that_the_busiest_rank_reads(experts, chosen, ranks, tokens, expected):
    assert experts_read(experts, chosen, ranks, tokens) == pytest.approx(expected, rel=0.03)


def test_the_ranks_to_which_a_token_goes():
    """By hand: of 28 pairs of experts, 15 are without the two of a rank."""
    assert Router(8, 2).reached(4) == pytest.approx(4 * 13 / 28)
    assert Router(8, 8).reached(2) == 2 and Router(8, 1).reached(4) == pytest.approx(1)


def test_ranks_that_cannot_split_the_model(oracle):
    config = families.read(oracle("mamba").directory)
    with pytest.raises(ValueError, match="64 channels do not divide over 3"):
        Memory(config, 3)
