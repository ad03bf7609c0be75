"""Token orders and their kernel calls. Oracle: positions, compared for each pair of a query and a key."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention2d import Ring
from attention2d.compute.axis import ChunkLayout
from attention2d.layout import token_order as orders

shardings = st.tuples(st.sampled_from(orders.ORDERS), st.integers(1, 7), st.integers(1, 60))


def all_segments(order, ranks, seq):
    """Every rank's segments."""
    local = orders.local_length(order, seq, ranks)
    return [orders.segments(order, rank, ranks, local, seq) for rank in range(ranks)]


def tokens(segments, seq):
    """The position of every slot's token, -1 for padding, which begins after the first `valid` slots of a segment."""
    parts = [torch.arange(s.length) * s.stride + s.start for s in segments]
    return torch.cat(
        [torch.where(torch.arange(s.length) < s.valid, part, -1) for s, part in zip(segments, parts, strict=True)]
    )


@given(shardings)
def test_ranks_hold_every_token_once_and_equally_many_slots(sharding):
    order, ranks, seq = sharding
    parts = [tokens(segments, seq) for segments in all_segments(order, ranks, seq)]
    assert len({len(part) for part in parts}) == 1
    slots = torch.cat(parts)
    assert sorted(slots[slots >= 0].tolist()) == list(range(seq))
    blocks = 2 * ranks if order == "zigzag" else ranks
    assert ranks * len(parts[0]) - seq < blocks  # no more padding than needed


@given(shardings)
def test_shards_hold_the_tokens_at_their_positions(sharding):
    order, ranks, seq = sharding
    x = torch.arange(1, seq + 1).float().expand(2, seq).unsqueeze(-1) * torch.ones(3)
    parts = [orders.shard(x, 1, order, rank, ranks) for rank in range(ranks)]
    for part, segments in zip(parts, all_segments(order, ranks, seq), strict=True):
        positions = orders.positions(segments)
        assert torch.equal(part[1, :, 2], torch.where(positions < seq, positions + 1.0, 0.0))
    assert torch.equal(orders.unshard(parts, 1, order, seq), x)


@pytest.mark.parametrize("shape, dim", (((4, 2), 2), ((4, 2), -3), ((), 0)))
def test_sharding_a_dimension_that_does_not_exist_is_an_error(shape, dim):
    with pytest.raises(IndexError, match=re.escape(f"dim={dim} is not a dimension of a tensor of shape {shape}")):
        Ring().shard(torch.zeros(shape), dim)


def test_zigzag_is_megatrons_order():
    """Of 8 blocks, rank p of 4 holds blocks p and 7 - p, as in Megatron's `get_batch_on_this_cp_rank`."""
    parts = [orders.shard(torch.arange(16), 0, "zigzag", rank, 4).tolist() for rank in range(4)]
    assert parts == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@given(shardings, st.booleans(), st.data())
def test_kernel_calls_cover_every_visible_pair_once(sharding, causal, data):
    """For any chunks in a query buffer and any in a key buffer."""
    order, ranks, seq = sharding
    chunks = all_segments(order, ranks, seq)
    holders = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)
    layouts = [ChunkLayout([chunks[rank] for rank in data.draw(holders)]) for _ in range(2)]
    q, kv = (layout.segments for layout in layouts)
    seen = torch.zeros(layouts[0].slots, layouts[1].slots, dtype=torch.int64)  # how often each pair meets
    for call in orders.kernel_calls(q, kv, causal):
        tile = seen[call.q, call.kv]
        assert tile.numel()
        if call.causal:
            assert tile.shape[0] == tile.shape[1]
        tile += torch.ones_like(tile).tril() if call.causal else 1
    queries, keys = tokens(q, seq).unsqueeze(1), tokens(kv, seq)
    expected = (queries >= 0) & (keys >= 0) & ((keys <= queries) | (not causal))
    assert torch.equal(seen, expected.long())


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(1, 12))
def test_split_calls_cover_the_same_pairs(q, kv, queries, keys, causal, max_length):
    keys = queries if causal else keys
    call = orders.KernelCall(slice(q, q + queries), slice(kv, kv + keys), causal)
    seen = torch.zeros(2, q + queries, kv + keys, dtype=torch.int64)
    for part, calls in zip(seen, ([call], list(orders.split_calls([call], max_length))), strict=True):
        for each in calls:
            tile = part[each.q, each.kv]
            tile += torch.ones_like(tile).tril() if each.causal else 1
    assert torch.equal(*seen)
    assert all(0 < slots.stop - slots.start <= max_length for each in calls for slots in (each.q, each.kv))


@pytest.mark.parametrize(
    "q, kv, limit",  # the ranks whose queries and keys are attended, and how many calls that may take
    (
        (range(4), range(4), 1),  # the whole sequence
        ((2,), (2,), 1),
        ((3,), (1,), 1),
        ((1,), (3,), 1),
        ((2,), range(4), 4),  # all-gather
    ),
)
def test_zigzag_needs_few_kernel_calls(q, kv, limit):
    chunks = all_segments("zigzag", 4, 64)
    segments = [ChunkLayout([chunks[rank] for rank in ranks]).segments for ranks in (q, kv)]
    assert len(orders.kernel_calls(*segments, causal=True)) <= limit


def test_every_pair_of_ranks_has_the_same_work_in_zigzag():
    """A causal pair has half of the square of queries and keys; a rank with itself also has half of the diagonal."""
    chunks = all_segments("zigzag", 5, 80)
    for p in range(5):
        areas = []
        for r in range(5):
            pairs = [tokens(chunks[rank], 80) for rank in (p, r)]
            areas.append(int((pairs[1] <= pairs[0].unsqueeze(1)).sum()) - 8 * (p == r))
        assert areas == [128] * 5


@given(shardings, st.data())
def test_chunk_layouts_sort_segments_and_return_chunks(sharding, data):
    order, ranks, seq = sharding
    chunks = all_segments(order, ranks, seq)
    holders = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    layout = ChunkLayout([chunks[rank] for rank in holders])
    buffer = layout.new_buffer(torch.empty(len(tokens(chunks[0], seq)), 2))
    for index, rank in enumerate(holders):
        layout.write(index, torch.stack([orders.positions(chunks[rank])] * 2, 1).float(), buffer)
    assert torch.equal(buffer[:, 0], orders.positions(layout.segments).float())
    for index, rank in enumerate(holders):
        assert torch.equal(layout.read(index, buffer)[:, 1], orders.positions(chunks[rank]).float())
