"""Schedules with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, schedule: Callable[..., Any], attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, seq: int | None = None,
    **features: object,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of a sequence that is sharded over the ranks of `schedule`.

    q: (batch, heads, local_seq, head_dim). k, v: (batch, kv_heads, local_seq, head_dim); kv_heads may be smaller than heads
    also with enable_gqa=False. seq: the length of the sequence; required where shards are padded. Returns (batch, heads,
    local_seq, head_dim). Sends what `schedule` sends. ValueError on every rank that names the option: for attn_mask, for
    dropout_p > 0, and for any other option of attention that has a value (sliding_window, softcap, s_aux, ...);
    for return_lse too, which the schedule itself has.
    """
    if features.pop("return_lse", False):
        raise ValueError("return_lse=True: attention() returns the output only; call the schedule itself")
    features |= dict(attn_mask=attn_mask, dropout_p=dropout_p)
    # Arguments of other shapes are passed on unchanged: the schedule refuses them on every rank.
    q, k, v = (t.transpose(1, 2) if isinstance(t, Tensor) and t.dim() == 4 else t for t in (q, k, v))
    return schedule(q, k, v, causal=is_causal, scale=scale, seq=seq, **features).transpose(1, 2)
