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
    """`scaled_dot_product_attention` of a sequence that is sharded over the ranks of `schedule`. Sends what that sends.

    Args:
        q: (batch, heads, local_seq, head_dim).
        k, v: (batch, kv_heads, local_seq, head_dim); kv_heads may be smaller than heads also with enable_gqa=False.
        schedule: an `Attention2D`, or another schedule.
        attn_mask, dropout_p: refused unless None and 0.
        is_causal: a query sees keys up to its own position.
        scale: of the scores (None: 1/sqrt(head_dim)).
        enable_gqa: has no effect.
        seq: the length of the sequence; required where shards are padded.
        features: other options of attention (sliding_window, softcap, s_aux, ...), each refused by name if it has a value.

    Returns:
        (batch, heads, local_seq, head_dim).

    Raises:
        ValueError: on every rank, naming the option that is not supported.
    """
    if features.pop("return_lse", False):
        raise ValueError("return_lse=True: attention() returns the output only; call the schedule itself")
    features |= dict(attn_mask=attn_mask, dropout_p=dropout_p)
    # (batch, seq, heads, head_dim). Other shapes are passed on, because the schedule refuses them on every rank.
    q, k, v = (t.transpose(1, 2) if isinstance(t, Tensor) and t.dim() == 4 else t for t in (q, k, v))
    return schedule(q, k, v, causal=is_causal, scale=scale, seq=seq, **features).transpose(1, 2)
