"""Mamba-2: transformers' Mamba2ForCausalLM, and state-spaces' models after conversion."""

import math
from typing import Any

from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Stack

from .common import MIXER, backbone_stack, channels, mamba2_spec
from .mamba import COMMON

DEFAULTS: dict[str, Any] = MIXER | dict(
    vocab_size=32768, hidden_size=4096, state_size=128, num_hidden_layers=64, tie_word_embeddings=False,
    intermediate_size=None, residual_in_fp32=True, num_heads=128, head_dim=64, n_groups=8,
    time_step_limit=(0.0, math.inf),
)  # fmt: skip


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    inner, heads, head_dim = channels(fields), fields.positive("num_heads"), fields["head_dim"]
    fields.check_derived("intermediate_size", inner, "expand * hidden_size")
    if heads * fields.positive("head_dim") != inner:
        raise ValueError(
            f"{heads} heads of {head_dim} are {heads * head_dim} channels, not expand * hidden_size = {inner}"
        )
    limit, eps = fields.limits("time_step_limit"), fields.number("layer_norm_epsilon")
    conv_bias = fields.boolean("use_conv_bias")
    return backbone_stack(
        fields, mamba2_spec(fields, heads, head_dim, dt_limit=limit, norm_eps=eps, conv_bias=conv_bias)
    )


def new_config(options: Any) -> dict:
    """See `Family.from_options`."""
    return dict(
        state_size=options.mamba_state_dim, head_dim=options.mamba_head_dim,
        num_heads=2 * options.hidden_size // options.mamba_head_dim, n_groups=options.mamba_num_groups,
    )  # fmt: skip


MAMBA2 = Family("mamba2", read, DEFAULTS, from_options=new_config, architecture="Mamba2ForCausalLM", **COMMON)
