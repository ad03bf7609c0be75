"""Zamba2: Mamba-2 mixers, and shared transformer blocks with low-rank adapters per invocation; Zamba2ForCausalLM."""

import math
from typing import Any

from megatron_ssm.spec.fields import divides
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Stack

from .common import MIXER, ROPE, channels, mamba2_spec, rope_theta
from .zamba import (
    NAMES,
    PATTERN,
    PLAIN,
    SHARED_BLOCK,
    hybrid_layers,
    new_hybrid_config,
    shared_block,
    shared_block_stack,
)

DEFAULTS: dict[str, Any] = MIXER | SHARED_BLOCK | ROPE | dict(
    hidden_size=2560, state_size=64, num_hidden_layers=54, num_heads=8, n_groups=1, head_dim=None,
    feed_forward_size=None, num_attention_heads=32, num_key_value_heads=None, num_mem_blocks=1,
    use_shared_attention_adapter=False, adapter_rank=128, use_mem_rope=False, use_long_context=False,
    hybrid_layer_ids=None,
)  # fmt: skip
GATED_NORM_EPS = 1e-5
DEFAULT_KINDS = (
    [PLAIN] + ([PLAIN] * 5 + ["hybrid"]) * 7 + [PLAIN] * 4 + ["hybrid"] + [PLAIN] * 3 + ["hybrid"] + [PLAIN] * 2
)


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    inner, heads = channels(fields), fields.positive("num_heads")
    divides(inner, heads, "channels", "mamba heads")
    if "n_mamba_heads" not in fields.raw and fields["head_dim"] not in (None, inner // heads):
        raise ValueError(
            f"config.json has an old layout of Zamba2, mamba_headdim={fields['head_dim']!r} without n_mamba_heads, which "
            "transformers does not read either"
        )
    fields.check_derived("head_dim", inner // heads, "mamba_expand * hidden_size / n_mamba_heads")
    limit = (fields.number("time_step_min"), math.inf)
    mixer = mamba2_spec(fields, heads, inner // heads, dt_limit=limit, norm_eps=GATED_NORM_EPS)
    hybrid = hybrid_layers(fields, DEFAULT_KINDS)
    fields.check_derived("hybrid_layer_ids", list(hybrid), "the hybrid layers of layers_block_type")
    if not hybrid:
        return shared_block_stack(fields, mixer, hybrid, None, 1, "shared_transformer")
    bias, theta = fields.boolean("use_bias"), rope_theta(fields) if fields.boolean("use_mem_rope") else 0.0
    if theta and fields.boolean("use_long_context"):  # Zyphra's code scales the base; transformers warns and does not
        raise ValueError(f"{fields.family.name} with use_long_context=True is not implemented (only False)")
    block, hidden = shared_block(fields, bias, packed=True, rope_theta=theta), fields["hidden_size"]
    attended = block.attended
    adapted = fields.boolean("use_shared_attention_adapter")
    query, key = attended.heads * attended.head_dim, attended.kv_heads * attended.head_dim
    if adapted and not query == key == 2 * hidden:
        raise ValueError(
            f"use_shared_attention_adapter needs queries and keys of 2 * hidden_size = {2 * hidden} channels, not "
            f"{attended.heads} heads and {attended.kv_heads} key/value heads of {attended.head_dim}"
        )
    if theta and attended.head_dim % 2:
        raise ValueError(f"rotary embeddings need heads of even size, not {attended.head_dim}")
    adapters: dict[str, Any] = dict(adapter_rank=fields.positive("adapter_rank"), attention_adapters=adapted)
    return shared_block_stack(
        fields, mixer, hybrid, block, fields.positive("num_mem_blocks"), "shared_transformer", **adapters
    )


def new_config(options: Any) -> dict:
    """See `Family.from_options`."""
    sizes = dict(mamba_ngroups=options.mamba_num_groups, num_mem_blocks=options.shared_blocks, use_mem_rope=True)
    return new_hybrid_config(options, 1) | sizes | dict(adapter_rank=options.adapter_rank)


ZAMBA2 = Family(
    "zamba2", read, DEFAULTS,
    NAMES | dict(use_bias="add_bias_linear", n_groups="mamba_ngroups", head_dim="mamba_headdim"),
    from_options=new_config, shares_blocks=True, pattern=PATTERN, architecture="Zamba2ForCausalLM",
)  # fmt: skip
