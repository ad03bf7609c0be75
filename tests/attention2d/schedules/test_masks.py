"""Masks of padding and of blocks, on every schedule. Oracle: torch's scaled_dot_product_attention in float64."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chosen import full

from attention2d import USP, AllGather, Attention2D, CoreAttention, Ring, Ulysses, attention
from attention2d.compute import tile
from attention2d.compute.tile import attend, attend_backward, attend_backward_ref, attend_ref
from attention2d.layout import block_mask

FORWARD, GRADIENTS = 1e-13, 1e-12  # the largest absolute errors in float64
BATCH, HEADS, KV_HEADS = 2, 8, 4


def padding(seq):
    """(batch, 1, seq): the second sequence ends early, and the first begins late."""
    keys = torch.ones(BATCH, 1, seq, dtype=torch.bool)
    keys[1, :, seq // 3 :] = False
    keys[0, :, : seq // 5] = False
    return keys


def one_empty_sequence(seq):
    """(batch, 1, seq): no query of the first sequence sees a key."""
    return torch.tensor([False, True])[:, None, None].expand(BATCH, 1, seq).contiguous()


def blocks(seq, batch=1):
    """As in BigBird: a block sees the first block, its neighbours and a random one; the last block sees nothing."""
    count = -(-seq // max(1, seq // 9))
    near = (torch.arange(count)[:, None] - torch.arange(count)).abs() <= 1
    random = torch.rand(batch, count, count, generator=torch.Generator().manual_seed(seq)) < 0.2
    mask = near | random
    mask[:, :, 0], mask[:, -1] = True, False
    return mask


def documents(seq):
    """(1, seq, seq): a token sees those of its own document."""
    document = torch.arange(seq) * 3 // seq
    return (document[:, None] == document)[None]


def by_blocks_of_keys(seq):
    """Single queries, and keys by blocks."""
    return torch.rand(BATCH, seq, 2, generator=torch.Generator().manual_seed(seq)) < 0.5


MASKS = (padding, one_empty_sequence, blocks, partial(blocks, batch=BATCH), documents, by_blocks_of_keys)


def schedules(group):
    """Every schedule and token order that fits the group."""
    ranks = group.size()
    made = [Ring(group), AllGather(group), Ring(group, "contiguous"), AllGather(group, "cyclic")]
    made += [Ulysses(group)] if KV_HEADS % ranks == 0 else []
    made += [USP(group, 2), Attention2D(group, 1, ranks // 2, 2, overlap=True)] if ranks % 2 == 0 else []
    sides = [rows for rows in range(2, ranks) if ranks % rows == 0] or [1]
    for rows, overlap, (order, transpose) in itertools.product(
        sides, (False, True), (("zigzag", False), ("contiguous", False), ("cyclic", False), ("cyclic", True))
    ):
        made.append(Attention2D(group, rows, ranks // rows, 1, order, overlap, transpose))
    return made


def answers(inputs, mask, causal, seq):
    """[out, dq, dk, dv] of the whole sequence by torch."""
    rows, cols = (torch.arange(seq) // -(-seq // count) for count in mask.shape[1:])
    whole = mask[:, rows][:, :, cols]
    whole = whole.tril() if causal else whole
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=whole.unsqueeze(1), enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def errors(rank, seq, cases):
    """The largest error of out, and of dq, dk and dv, over all schedules and `cases` of (mask, causal)."""
    generator, worst = torch.Generator().manual_seed(seq), [0.0, 0.0]
    counts = HEADS, KV_HEADS, KV_HEADS, HEADS
    inputs = [torch.randn(BATCH, seq, count, 8, generator=generator, dtype=torch.float64) for count in counts]
    for mask, causal in cases:
        expected = answers(inputs, mask, causal, seq)
        for schedule in schedules(dist.group.WORLD):
            parts = [schedule.shard(t) for t in inputs]
            leaves = [t.requires_grad_() for t in parts[:3]]
            out = schedule(*leaves, causal=causal, seq=seq, mask=mask)
            out.backward(parts[3])
            volume = schedule.volume(BATCH, seq, HEADS, KV_HEADS, 8, 8)
            assert schedule.counter.sent == volume.forward + volume.backward or schedule.transpose  # masks are not sent
            found = [out.detach(), *(t.grad for t in leaves)]
            difference = [
                (a - schedule.shard(b)).abs().nan_to_num(torch.inf).max().item()
                for a, b in zip(found, expected, strict=True)
            ]
            assert max(difference) < 1e-3, (schedule, mask.shape, causal, difference)
            worst = [max(worst[0], difference[0]), max(worst[1], *difference[1:])]
    return worst


def check(found):
    assert max(each[0] for each in found) <= FORWARD and max(each[1] for each in found) <= GRADIENTS


@pytest.mark.parametrize(
    "world_size, seq, masks",
    ((1, 20, MASKS), (2, 37, MASKS), (4, 38, MASKS[1::2]), full(4, 70, MASKS), full(9, 75, MASKS)),
)
@pytest.mark.parametrize("causal", (False, True))
def test_all_schedules(world_size, seq, masks, causal, ranks, monkeypatch):
    """In tiles of at most 8 queries and keys where the mask hides some, and of at most 24 elsewhere."""
    monkeypatch.setattr(block_mask, "MASKED_LENGTH", 8)
    monkeypatch.setattr(tile, "MIN_LENGTH", 24)
    monkeypatch.setattr(tile, "CPU_ELEMENTS", 1)
    cases = [(mask(seq), causal) for mask in masks]
    check(ranks(errors, world_size, seq, cases, timeout=300))


def test_hidden_blocks_are_not_computed(monkeypatch):
    """Of a block-diagonal mask, only the tiles of the diagonal are computed, without a mask."""
    seq, count = 64, 4
    computed = []
    original = tile.attend

    def counted(q, k, v, causal, scale, visible):
        computed.append((len(q), len(k), visible))
        return original(q, k, v, causal, scale, visible)

    monkeypatch.setattr("attention2d.compute.passes.attend", counted)
    monkeypatch.setattr(block_mask, "MASKED_LENGTH", 1)
    q = torch.ones(1, seq, 1, 8)
    Attention2D(None, 1, 1)(q, q, q, mask=torch.eye(count, dtype=torch.bool)[None])
    assert computed == [(seq // count, seq // count, None)] * count


@pytest.mark.parametrize("dtype, tolerance", ((torch.float64, 1e-13), (torch.float32, 2e-5)))
def test_the_kernel_agrees_with_its_plain_form(dtype, tolerance):
    """Also for a query that sees no key of the tile, and one that sees no key at all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(7, 2, n, 8, generator=generator, dtype=dtype) for n in (4, 2, 2, 4))
    visible = torch.rand(2, 7, 7, generator=generator) < 0.5
    visible[:, 3] = visible[0, 4] = False
    for mask in (visible, visible[:1]):
        out, lse = attend_ref(q, k, v, False, 0.3, mask)
        assert torch.isneginf(lse[3]).all() and not out[3].any()
        for ours, theirs in zip(attend(q, k, v, False, 0.3, mask), (out, lse), strict=True):
            assert (ours - theirs).nan_to_num(0).abs().max() <= tolerance
            assert torch.equal(ours.isneginf(), theirs.isneginf())
        tile_inputs = dout, (dout * out).sum(-1), q, k, v, lse, False, 0.3, mask
        for ours, theirs in zip(attend_backward(*tile_inputs), attend_backward_ref(*tile_inputs), strict=True):
            assert (ours - theirs).abs().max() <= tolerance


def bert(attention):
    """A BERT of transformers with two layers, in float64."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).double().eval()


@pytest.mark.parametrize("world_size", [4])
def test_bert_with_padding(world_size, ranks):
    """transformers' BertModel with a padded batch: hidden states of tokens and gradients are those of one rank."""
    from transformers import AttentionInterface, AttentionMaskInterface

    seq, generator = 29, torch.Generator().manual_seed(0)
    ids, weights = (
        torch.randint(50, (BATCH, seq), generator=generator),
        torch.randn(BATCH, seq, 32, generator=generator),
    )
    is_token = torch.arange(seq) < torch.tensor([[seq], [17]])
    weights = weights.double() * is_token.unsqueeze(-1)
    model = bert("sdpa")
    states = model(ids, attention_mask=is_token.long()).last_hidden_state
    (states * weights).sum().backward()
    expected = states.detach(), [p.grad for p in model.parameters()]

    def run(rank):
        schedule = Attention2D(dist.group.WORLD, 2, 2)

        def attend(module, query, key, value, attention_mask, scaling=None, **_):
            mask = is_token[:, None, :]
            out = attention(query, key, value, schedule, scale=scaling, seq=seq, mask=mask)
            return out.transpose(1, 2), None

        AttentionInterface.register("sharded", attend)
        AttentionMaskInterface.register("sharded", lambda *_, **__: None)
        ours, positions = bert("sharded"), schedule.positions(seq)
        found = ours(schedule.shard(ids), position_ids=positions.clamp(max=seq)[None]).last_hidden_state
        (found * schedule.shard(weights)).sum().backward()
        gradients = [p.grad for p in ours.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient)
        counted = schedule.shard(is_token)
        return found.detach()[counted], expected[0][:, positions.clamp(max=seq - 1)][counted], gradients

    for found, states, gradients in ranks(run, world_size):
        assert (found - states).abs().max() <= 1e-11
        for ours, theirs in zip(gradients, expected[1], strict=True):
            assert (ours - theirs).abs().max() <= 1e-11


@pytest.mark.parametrize("world_size", [2])
def test_masks_must_be_equal_on_all_ranks(world_size, ranks):
    def run(rank):
        q = torch.ones(1, 4, 1, 8)
        with pytest.raises(ValueError, match="arguments differ across ranks"):
            Ring(dist.group.WORLD)(q, q, q, mask=torch.ones(1, 1, 8 - 4 * rank, dtype=torch.bool))

    ranks(run, world_size)


@pytest.mark.parametrize("kind, rows", (("padding", 1), ("padding_causal", 1), ("arbitrary", 12)))
def test_megatron_masks(kind, rows):
    """Megatron's masks are True where a key is hidden."""
    seq, generator = 12, torch.Generator().manual_seed(0)
    config = SimpleNamespace(
        num_attention_heads=HEADS, num_query_groups=KV_HEADS, kv_channels=8, attention_dropout=0.0, window_size=None,
        context_parallel_size=1,
    )  # fmt: skip
    q, k, v = (torch.randn(seq, 2, n, 8, generator=generator, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS))
    hidden = torch.rand(2, 1, rows, seq, generator=generator) < 0.3
    seen = ~hidden.expand(2, 1, seq, seq)
    seen = seen.tril() if kind == "padding_causal" else seen
    heads_first = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
    core = CoreAttention(config, 1, SimpleNamespace(name=kind), "self", softmax_scale=None)
    ours = core(q, k, v, attention_mask=hidden)
    assert (ours - expected.permute(2, 0, 1, 3).flatten(2)).abs().max() <= FORWARD
