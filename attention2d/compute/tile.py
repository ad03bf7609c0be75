"""Attention of one tile: some queries against some keys and values, to be merged with other tiles.

Tensors have the sequence first: q is (queries, batch, heads, head_dim); k and v are (keys, batch, kv_heads, head_dim), where
each key/value head serves heads / kv_heads consecutive query heads; lse and delta are (queries, batch, heads). Results are
in at least fp32.

Backward recomputes the tile's probabilities from the log-sum-exp over *all* keys, as FlashAttention does. Of the output it
needs only delta, the sum of dout * out over head_dim. The kernels take `out` and compute delta themselves, so the paper's
backward (Attention2D, section 3.2) gathers the outputs too. Here the kernels are given delta / |dout|^2 * dout in place of
`out`: the sum of its product with dout is delta as well, and ranks exchange delta, which is head_dim times smaller.
"""

import math

import torch

from commfabric.collectives.wire_formats import at_least_fp32

aten = torch.ops.aten
Tensor = torch.Tensor

CPU_ELEMENTS, CUDA_ELEMENTS = 2**20, 2**26  # the most elements of a tile's queries, for fused kernels
MIN_LENGTH = 128  # queries that a tile may always have, however many elements these are
SCORES = 2**22  # the most elements of a tile's score matrix, in plain torch operations on CUDA


def tile_length(q: Tensor) -> int:
    """The number of queries, and of keys, that a tile may have so that it needs little memory besides its results."""
    seq, batch, heads, head_dim = q.shape
    if q.is_cuda and not _has_flash_kernel(q):
        return max(1, math.isqrt(SCORES // (batch * heads)))
    return kernel_tile_length(batch * heads * head_dim, q.is_cuda)


def kernel_tile_length(row_elements: int, on_cuda: bool) -> int:
    """`tile_length` for torch's fused kernels. row_elements: batch * heads * head_dim, the elements of one query slot."""
    return max(MIN_LENGTH, (CUDA_ELEMENTS if on_cuda else CPU_ELEMENTS) // row_elements)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse): softmax(scale q k^T) v, and the log of each softmax's denominator, in at least fp32.

    There must be at least one query and one key. causal: query i sees keys 0 to i, and there are as many keys as queries.
    visible: (batch or 1, queries, keys), True where a query sees a key, without `causal`. A query that sees no key has an
    out of 0 and an lse of -inf.
    """
    if q.is_cuda:
        if visible is None and _has_flash_kernel(q):
            return _attend_cuda(q, k, v, causal, scale)
        return attend_ref(q, k, v, causal, scale, visible)
    q, k, v = (_heads_first(t.to(at_least_fp32(t.dtype))) for t in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_bias(q, visible), scale=scale
    )
    lse = lse.permute(2, 0, 1)  # (queries, batch, heads)
    if visible is not None:  # the kernel returns 0 for a query that sees no key
        lse = lse.masked_fill(~visible.any(-1).T.unsqueeze(-1), -torch.inf)
    return _sequence_first(out), lse


def attend_backward(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, causal: bool, scale: float,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of one tile, in at least fp32.

    dout: the gradient of out, (queries, batch, heads, head_dim). delta, lse: over all keys, not only those of the tile.
    visible: as in `attend`.
    """
    if q.is_cuda and (visible is not None or not _has_flash_kernel(q)):
        return attend_backward_ref(dout, delta, q, k, v, lse, causal, scale, visible)
    if not q.is_cuda:
        dout, q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (dout, q, k, v))
    heads_first = tuple(_heads_first(t) for t in (dout, q, k, v, output_substitute(dout, delta)))
    lse = _finite(lse).permute(1, 2, 0)  # (batch, heads, queries)
    if q.is_cuda:
        gradients = _cuda_backward(heads_first, lse.contiguous(), causal, scale)
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, lse, 0.0, causal, attn_mask=_bias(q, visible), scale=scale
        )
    dq, dk, dv = (_sequence_first(t).to(at_least_fp32(t.dtype)) for t in gradients)
    return dq, dk, dv


def output_substitute(dout: Tensor, delta: Tensor) -> Tensor:
    """delta / |dout|^2 * dout: its product with `dout`, summed over head_dim, is `delta`. Zero where dout is zero.

    Its norm is at most that of the output (by Cauchy-Schwarz), so it does not overflow.
    """
    wide = dout.to(delta.dtype)
    largest = wide.abs().amax(-1)
    normalized = wide / largest.where(largest > 0, 1).unsqueeze(-1)  # at most 1: squares neither vanish nor overflow
    factor = torch.where(largest > 0, delta / largest / normalized.square().sum(-1), 0)
    return normalized.mul_(factor.unsqueeze(-1)).to(dout.dtype)


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries `q` before any key is attended, to `merge` results into: 0 and -inf in at least fp32."""
    out = q.new_zeros(q.shape, dtype=at_least_fp32(q.dtype))
    return out, out.new_full(q.shape[:-1], -torch.inf)


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge a result over other keys into (out, lse), in place. An lse of -inf means that no key has been attended."""
    total = torch.logaddexp(lse, other_lse)
    finite = _finite(total)
    out.mul_((lse - finite).exp().unsqueeze(-1))
    out.addcmul_(other_out, (other_lse - finite).exp().unsqueeze(-1))
    lse.copy_(total)


def attend_ref(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` in plain torch operations."""
    q, k, v = _all_heads(q, k, v)
    scores = _scores(q, k, causal, scale, visible)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,kbhd->qbhd", (scores - _finite(lse).unsqueeze(-1)).exp(), v)
    return out, lse.permute(2, 0, 1)  # (queries, batch, heads)


def attend_backward_ref(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, causal: bool, scale: float,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attend_backward` in plain torch operations: P = exp(s - lse), dS = P (dout v^T - delta)."""
    kv_heads, dout = k.shape[2], dout.to(at_least_fp32(dout.dtype))
    q, k, v = _all_heads(q, k, v)
    # (batch, heads, queries, keys)
    probabilities = (_scores(q, k, causal, scale, visible) - _finite(lse).permute(1, 2, 0).unsqueeze(-1)).exp()
    dv = torch.einsum("bhqk,qbhd->kbhd", probabilities, dout)
    dscores = torch.einsum("qbhd,kbhd->bhqk", dout, v) - delta.permute(1, 2, 0).unsqueeze(-1)
    dscores = probabilities * dscores * scale
    dq = torch.einsum("bhqk,kbhd->qbhd", dscores, k)
    dk = torch.einsum("bhqk,qbhd->kbhd", dscores, q)
    return dq, *(t.unflatten(2, (kv_heads, -1)).sum(3) for t in (dk, dv))  # (keys, batch, kv_heads, head_dim)


def _all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in at least fp32, with each key/value head repeated for the query heads that it serves."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.to(at_least_fp32(t.dtype)) for t in (q, k, v))
    return q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, visible: Tensor | None) -> Tensor:
    """(batch, heads, queries, keys): scale q k^T, -inf where a query does not see a key."""
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if visible is None else scores.masked_fill(~visible.unsqueeze(1), -torch.inf)


def _bias(q: Tensor, visible: Tensor | None) -> Tensor | None:
    """(batch or 1, 1, queries, keys) for the CPU's kernel: 0 where a query sees a key, elsewhere -inf."""
    if visible is None:
        return None
    return q.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf).unsqueeze(1)


def _finite(lse: Tensor) -> Tensor:
    """lse with the lowest finite number for -inf, because -inf - -inf would be NaN."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _heads_first(t: Tensor) -> Tensor:
    """(seq, batch, heads, dim) -> (batch, heads, seq, dim), torch's layout; a view if the last dimension has stride 1.

    If it has another stride, the tensor is copied: the CPU's kernel would read wrong elements. Other strides are arbitrary.
    """
    return (t if t.stride(-1) == 1 else t.contiguous()).permute(1, 2, 0, 3)


def _sequence_first(t: Tensor) -> Tensor:
    """(batch, heads, seq, dim) -> (seq, batch, heads, dim), a view."""
    return t.permute(2, 0, 1, 3)


# CUDA: torch's flash attention


def _has_flash_kernel(q: Tensor) -> bool:
    """Return True if torch's flash attention supports this dtype, head size and GPU; otherwise plain operations are used."""
    is_supported = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return is_supported and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = map(_heads_first, (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return _sequence_first(out).to(at_least_fp32(out.dtype)), lse.permute(2, 0, 1)


def _cuda_backward(
    heads_first: tuple[Tensor, ...], lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` by flash attention. heads_first: dout, q, k, v and the substitute for the output."""
    dout, q, k, v, out = heads_first
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout, scale=scale
    )
