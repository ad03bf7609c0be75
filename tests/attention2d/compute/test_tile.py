"""Attention of one tile. Oracle: torch's own attention in float64, and its gradients by autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attention2d.compute.tile import attend, attend_backward, attend_backward_ref, attend_ref, merge, output_substitute

HEADS = ((4, 4), (4, 2), (6, 1))


def inputs(queries, keys, heads, kv_heads, head_dim=16, batch=2, dtype=torch.float64, seed=0):
    """q, k, v and dout, sequence first."""
    generator = torch.Generator().manual_seed(seed)

    def random(length, count):
        return torch.randn(length, batch, count, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    return random(queries, heads), random(keys, kv_heads), random(keys, kv_heads), random(queries, heads)


def torch_attention(q, k, v, causal, scale):
    """Attention and log-sum-exp by torch in float64."""
    q, k, v = (t.permute(1, 2, 0, 3).double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return out.permute(2, 0, 1, 3), scores.logsumexp(-1).permute(2, 0, 1)


def error(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("dtype, tolerance", ((torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-5)))
@pytest.mark.parametrize("head_dim", (16, 64, 80, 7))
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize(
    "queries, keys, causal", ((5, 9, False), (9, 9, True), (1, 1, True), (1, 7, False), (70, 70, True))
)
def test_forward(queries, keys, causal, heads, kv_heads, head_dim, dtype, tolerance):
    """16-bit inputs are converted to float32 before the computation, so only the inputs are rounded."""
    q, k, v, _ = inputs(queries, keys, heads, kv_heads, head_dim, dtype=dtype)
    expected = torch_attention(q, k, v, causal, 0.3)
    for form in (attend, attend_ref):
        found = form(q, k, v, causal, 0.3)
        assert all(t.dtype == torch.promote_types(dtype, torch.float32) for t in found)
        assert max(map(error, found, expected)) <= tolerance * 10


@pytest.mark.parametrize("dtype, tolerance", ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)))
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("split", (4, 11, 15))
def test_gradients_of_tiles_add_up(split, heads, kv_heads, dtype, tolerance):
    """The keys are split into two tiles, each of which gets the log-sum-exp and delta over all keys."""
    q, k, v, dout = inputs(12, 16, heads, kv_heads, dtype=dtype)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = torch_attention(*leaves, False, 0.3)
    expected = torch.autograd.grad(out, leaves, dout.double())
    wide = torch.promote_types(dtype, torch.float32)
    delta, lse = (dout.double() * out).sum(-1).detach().to(wide), lse.detach().to(wide)
    for form in (attend_backward, attend_backward_ref):
        tiles = [form(dout, delta, q, k[at], v[at], lse, False, 0.3) for at in (slice(split), slice(split, None))]
        found = [tiles[0][0] + tiles[1][0], *(torch.cat(parts) for parts in list(zip(*tiles, strict=True))[1:])]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == wide and error(ours, theirs) <= tolerance


def test_gradients_of_a_causal_tile():
    q, k, v, dout = inputs(9, 9, 4, 2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = torch_attention(*leaves, True, 0.25)
    expected = torch.autograd.grad(out, leaves, dout)
    delta = (dout * out).sum(-1).detach()
    for form in (attend_backward, attend_backward_ref):
        found = form(dout, delta, *(t.detach() for t in leaves), lse.detach(), True, 0.25)
        assert max(map(error, found, expected)) <= 1e-14 * 10


@settings(deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_merged_tiles_are_exact(seed, sizes):
    """For any division of the keys. Merging the result over no keys changes nothing."""
    q, k, v, _ = inputs(5, sum(sizes), 4, 2, seed=seed)
    expected = torch_attention(q, k, v, False, 0.3)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    at = 0
    for size in sizes:
        merge(out, lse, *attend(q, k[at : at + size], v[at : at + size], False, 0.3))
        merge(out, lse, torch.zeros_like(q), torch.full_like(lse, -torch.inf))
        at += size
    assert max(map(error, (out, lse), expected)) <= 1e-13


def test_the_last_dimension_may_have_any_stride():
    """As in a cache that stores keys transposed. Without a copy, the CPU's kernel would read wrong elements."""
    q, k, v, dout = inputs(6, 6, 4, 2, dtype=torch.float32)
    expected = attend(q, k, v, True, 0.3)
    delta = (dout * expected[0]).sum(-1)
    gradients = attend_backward(dout, delta, q, k, v, expected[1], True, 0.3)
    q, k, v, dout = (t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v, dout))
    assert all(map(torch.equal, attend(q, k, v, True, 0.3), expected))
    assert max(map(error, attend_backward(dout, delta, q, k, v, expected[1], True, 0.3), gradients)) <= 1e-5


def test_merging_two_empty_results_is_empty():
    out, lse = torch.zeros(3, 2, 1, 4), torch.full((3, 2, 1), -torch.inf)
    merge(out, lse, out.clone(), lse.clone())
    assert torch.equal(out, torch.zeros_like(out)) and torch.isneginf(lse).all()


def test_large_scores_do_not_overflow():
    """Two tiles whose scores are of the order of 10,000 are merged."""
    q, k, v, _ = inputs(4, 6, 2, 2, dtype=torch.float32)
    expected = torch_attention(q * 50, k * 50, v, False, 1.0)
    out, lse = attend(q * 50, k[:3] * 50, v[:3], False, 1.0)
    out, lse = out.clone(), lse.clone()
    merge(out, lse, *attend(q * 50, k[3:] * 50, v[3:], False, 1.0))
    assert error(out, expected[0]) <= 1e-4 and error(lse, expected[1]) <= 1e-2


def test_output_substitute():
    """Its product with dout, summed over head_dim, is delta, and its norm is at most the output's."""
    _, _, out, dout = inputs(8, 8, 4, 4)
    dout[3] = 0
    delta = (dout * out).sum(-1)
    ours = output_substitute(dout, delta)
    assert error((dout * ours).sum(-1), delta) <= 1e-14
    assert (ours.norm(dim=-1) <= out.norm(dim=-1) * (1 + 1e-12)).all()
