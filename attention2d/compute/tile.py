"""One tile of attention: some queries against some keys and values, to be merged with others (attention2d.md A.4).

Tensors here have the sequence first: q (queries, batch, heads, head_dim); k, v (keys, batch, kv_heads, head_dim), each
serving heads / kv_heads neighbouring query heads; lse and delta (queries, batch, heads). What comes out is at least fp32.

Backward recomputes the tile's probabilities from the log-sum-exp over *all* keys, and needs of the output only
delta = rowsum(dout * out), which the kernels take the sum of themselves: they are given delta/|dout|^2 dout for the
output, whose sum with dout is the same, so that no output need travel (attention2d.md 0.4).
"""

import math

import torch

from sparsefusion.collectives.wire_formats import at_least_fp32

aten = torch.ops.aten
# Numbers of a tile's queries, on the CPU and on CUDA, and how many queries it has at least; scores in plain mathematics.
NUMBERS, CUDA_NUMBERS, LEAST, SCORES = 2**20, 2**26, 128, 2**22


def tile_length(q) -> int:
    """How many queries, and keys, a tile should have at most, for it to need little memory besides its results."""
    seq, batch, heads, head_dim = q.shape
    if q.is_cuda and not _flash_takes(q):
        return max(1, math.isqrt(SCORES // (batch * heads)))
    return most_slots(batch * heads * head_dim, q.is_cuda)


def most_slots(row: int, on_cuda: bool) -> int:
    """The same of queries with `row` numbers each, by one of torch's kernels."""
    return max(LEAST, (CUDA_NUMBERS if on_cuda else NUMBERS) // row)


def attend(q, k, v, causal: bool, scale: float):
    """softmax(scale q k^T) v and the log of each softmax's denominator, of at least one query and one key.

    causal: as many keys as queries, and each query sees those up to its own. Returns (out, lse).
    """
    if q.is_cuda:
        return _attend_cuda(q, k, v, causal, scale) if _flash_takes(q) else attend_ref(q, k, v, causal, scale)
    q, k, v = (_heads_first(t.to(at_least_fp32(t.dtype))) for t in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return _sequence_first(out), lse.permute(2, 0, 1)


def attend_backward(dout, delta, q, k, v, lse, causal: bool, scale: float):
    """Gradients (dq, dk, dv) of one tile; dout (queries, batch, heads, head_dim), delta and lse of all keys."""
    if q.is_cuda and not _flash_takes(q):
        return attend_backward_ref(dout, delta, q, k, v, lse, causal, scale)
    if not q.is_cuda:
        dout, q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (dout, q, k, v))
    tensors = [_heads_first(t) for t in (dout, q, k, v, stand_in(dout, delta))]
    lse = lse.permute(1, 2, 0)
    if q.is_cuda:
        gradients = _cuda_backward(*tensors, lse.contiguous(), causal, scale)
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, lse, 0.0, causal, scale=scale)
    return tuple(_sequence_first(t).to(at_least_fp32(t.dtype)) for t in gradients)


def stand_in(dout, delta):
    """A tensor whose product with `dout`, summed over head_dim, is `delta`; no longer than the output was."""
    wide = dout.to(delta.dtype)
    largest = wide.abs().amax(-1)
    ones = wide / largest.where(largest > 0, 1).unsqueeze(-1)  # the largest is 1: its square is neither 0 nor inf
    factor = torch.where(largest > 0, delta / largest / ones.square().sum(-1), 0)
    return ones.mul_(factor.unsqueeze(-1)).to(dout.dtype)


def of_no_keys(q):
    """(out, lse) to merge others into."""
    out = q.new_zeros(q.shape, dtype=at_least_fp32(q.dtype))
    return out, out.new_full(q.shape[:-1], -torch.inf)


def merge(out, lse, more, more_lse) -> None:
    """Add to (out, lse) of some keys, in place, the (more, more_lse) of others; -inf: of none yet."""
    total = torch.logaddexp(lse, more_lse)
    least = total.clamp(min=torch.finfo(total.dtype).min)  # -inf - -inf is no number
    out.mul_((lse - least).exp().unsqueeze(-1))
    out.addcmul_(more, (more_lse - least).exp().unsqueeze(-1))
    lse.copy_(total)


def attend_ref(q, k, v, causal: bool, scale: float):
    """`attend` in plain mathematics."""
    q, k, v = _all_heads(q, k, v)
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,kbhd->qbhd", (scores - lse.unsqueeze(-1)).exp(), v)
    return out, lse.permute(2, 0, 1)


def attend_backward_ref(dout, delta, q, k, v, lse, causal: bool, scale: float):
    """`attend_backward` in plain mathematics: P = exp(s - lse), dS = P (dout v^T - delta)."""
    kv_heads, dout = k.shape[2], dout.to(at_least_fp32(dout.dtype))
    q, k, v = _all_heads(q, k, v)
    probabilities = (_scores(q, k, causal, scale) - lse.permute(1, 2, 0).unsqueeze(-1)).exp()
    dv = torch.einsum("bhqk,qbhd->kbhd", probabilities, dout)
    dscores = torch.einsum("qbhd,kbhd->bhqk", dout, v) - delta.permute(1, 2, 0).unsqueeze(-1)
    dscores = probabilities * dscores * scale
    dq = torch.einsum("bhqk,kbhd->qbhd", dscores, k)
    dk = torch.einsum("bhqk,qbhd->kbhd", dscores, q)
    return dq, *(t.unflatten(2, (kv_heads, -1)).sum(3) for t in (dk, dv))


def _all_heads(q, k, v):
    """In at least fp32, with keys and values repeated for each query head."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (q, k, v))
    return q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)


def _scores(q, k, causal, scale):
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _heads_first(t):
    """(seq, batch, heads, dim) as torch's kernels have it: (batch, heads, seq, dim), a view of numbers side by side.

    They take any strides but the last: the CPU's reads other numbers then.
    """
    return (t if t.stride(-1) == 1 else t.contiguous()).permute(1, 2, 0, 3)


def _sequence_first(t):
    return t.permute(2, 0, 1, 3)


# CUDA: torch's flash attention


def _flash_takes(q) -> bool:
    """Whether torch's flash attention has a kernel for it; the rest is computed in plain mathematics, in small tiles."""
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attend_cuda(q, k, v, causal, scale):
    q, k, v = map(_heads_first, (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return _sequence_first(out).to(at_least_fp32(out.dtype)), lse.permute(2, 0, 1)


def _cuda_backward(dout, q, k, v, out, lse, causal, scale):
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout, scale=scale
    )
