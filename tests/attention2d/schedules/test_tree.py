"""Decoding over keys that are sharded over ranks. Oracle: exact attention in float64 in one process."""

import pytest
import torch
import torch.distributed as dist

from attention2d import Tree
from attention2d.layout.token_order import ORDERS
from attention_problems import exact


def problem(queries, keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(keys)
    shapes = (2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_sharded_keys(world_size, order, ranks):
    """Numbers of keys that divide over the ranks and that do not, also fewer keys than ranks."""
    problems = [problem(queries, keys) for queries, keys in ((1, 24), (1, 23), (3, 7), (1, 1))]

    def run(rank):
        tree, found = Tree(None if world_size == 1 else dist.group.WORLD, order), []
        for q, k, v in problems:
            before = tree.counter.sent
            result = tree(q, tree.shard(k), tree.shard(v), seq=k.shape[1], return_lse=True)
            found.append((*result, tree.counter.sent - before, tree.volume(2, k.shape[1], 4, 2, 16, 8).forward))
        return found

    everyone = ranks(run, world_size)
    for index, inputs in enumerate(problems):
        expected = exact(*inputs, causal=False)
        for found in everyone:
            out, lse, sent, volume = found[index]
            assert (out - expected[0]).abs().max() <= 1e-13 and (lse - expected[1]).abs().max() <= 1e-13
            assert torch.equal(out, everyone[0][index][0]) and sent == volume * inputs[0].shape[1]


@pytest.mark.parametrize("world_size", [4])
def test_any_number_of_keys_on_each_rank(world_size, ranks):
    """As when a cache grows on one rank, and the others have fewer keys or none. bfloat16 results are rounded once."""
    q, k, v = problem(1, 30)
    bounds = [0, 19, 30] if world_size == 2 else [0, 0, 7, 30, 30]

    def run(rank):
        at = slice(bounds[rank], bounds[rank + 1])
        tree = Tree(dist.group.WORLD)
        low = [t.bfloat16() for t in (q, k[:, at], v[:, at])]
        return tree(q, k[:, at], v[:, at], causal=True, scale=0.2), tree(*low, scale=0.2)

    expected = exact(q, k, v, False, 0.2)[0]
    rounded = exact(*(t.bfloat16() for t in (q, k, v)), False, 0.2)[0]
    for out, low in ranks(run, world_size):
        assert (out - expected).abs().max() <= 1e-13
        assert low.dtype == torch.bfloat16 and (low - rounded).abs().max() <= 2**-8 * rounded.abs().max()


@pytest.mark.parametrize("world_size", [2])
def test_keys_that_are_stored_transposed(world_size, ranks):
    q, k, v = problem(1, 12)

    def run(rank):
        at = slice(rank * 4, 12 if rank == world_size - 1 else rank * 4 + 4)
        mine = (t[:, at].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for t in (k, v))
        return Tree(dist.group.WORLD)(q, *mine)

    for out in ranks(run, world_size):
        assert (out - exact(q, k, v, False)[0]).abs().max() <= 1e-13


@pytest.mark.parametrize("world_size", (1, 2))
def test_without_any_key(world_size, ranks):
    def run(rank):
        q, k, v = problem(1, 5)
        return Tree(None if world_size == 1 else dist.group.WORLD)(q, k[:, :0], v[:, :0], return_lse=True)

    for out, lse in ranks(run, world_size):
        assert not out.any() and torch.isneginf(lse).all()
