"""Schedules in the place of `torch.nn.functional.scaled_dot_product_attention`."""


def attention(
    q,
    k,
    v,
    schedule,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    seq=None,
    **features,
):
    """`scaled_dot_product_attention` of a sequence that is spread over the ranks of `schedule`.

    q: (batch, heads, local_seq, head_dim); k, v: (batch, kv_heads, local_seq, head_dim), fewer heads with or without
    enable_gqa. seq: the whole length, where shards are padded. Returns (batch, heads, local_seq, head_dim). What is sent is
    the schedule's. attn_mask, dropout_p > 0 and whatever else has a value (sliding_window, softcap, s_aux, ...) is refused
    by name, with a ValueError on every rank.
    """
    features |= dict(attn_mask=attn_mask, dropout_p=dropout_p)
    q, k, v = (t.transpose(1, 2) if t.dim() == 4 else t for t in (q, k, v))  # others are refused, on every rank
    return schedule(q, k, v, causal=is_causal, scale=scale, seq=seq, **features).transpose(1, 2)
