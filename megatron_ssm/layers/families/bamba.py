"""Bamba: Mamba-2 or attention in each layer, followed by an MLP; transformers' BambaForCausalLM."""

from dataclasses import replace
from typing import Any

from megatron_ssm.layers.mlp import ACTIVATIONS, MlpSpec
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Part, Stack

from .common import (
    ATTENTION,
    HYBRID,
    HYBRID_IGNORED,
    HYBRID_NAMES,
    MAMBA,
    ROPE,
    attention_spec,
    channels,
    hybrid_mamba2,
    hybrid_stack,
    layer_count,
    mixer_and_mlp,
    rope_size,
    rope_theta,
)

DEFAULTS: dict[str, Any] = HYBRID | ROPE | dict(
    vocab_size=128000, intermediate_size=14336, num_key_value_heads=8, attn_layer_indices=None, mlp_bias=False
)  # fmt: skip
ROTATED = 0.5  # the fraction of each head that is rotated


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    attention = attention_spec(fields)
    size = rope_size(fields, attention.head_dim, ROTATED)
    specs = {
        MAMBA: hybrid_mamba2(fields, channels(fields)),
        ATTENTION: replace(attention, rope_theta=rope_theta(fields), rope_size=size),
    }
    inner, activation = fields.positive("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)
    mlp = MlpSpec(fields.positive("hidden_size"), inner, activation, bias=fields.boolean("mlp_bias"))
    attention_layers = fields["attn_layer_indices"] or []
    if not isinstance(attention_layers, list):
        raise ValueError(f"config.json: attn_layer_indices={attention_layers!r} must be a list of layers")
    layers, eps = [], fields.number("layer_norm_epsilon")
    for index in range(layer_count(fields)):
        path, kind = f"model.layers.{index}.", ATTENTION if index in attention_layers else MAMBA
        name, hf = ("mixer", "mamba") if kind == MAMBA else ("attention", "self_attn")
        mixer = Part(name, specs[kind], f"{path}{hf}.")
        layers.append(mixer_and_mlp(path, eps, (mixer,), (Part("mlp", mlp, f"{path}feed_forward."),)))
    return hybrid_stack(fields, layers, final_norm="model.final_layernorm.weight")


BAMBA = Family(
    "bamba", read, DEFAULTS, HYBRID_NAMES,
    ignored=HYBRID_IGNORED | {"partial_rotary_factor", "z_loss_coefficient", "attn_rotary_emb"},
    architecture="BambaForCausalLM",
)  # fmt: skip
