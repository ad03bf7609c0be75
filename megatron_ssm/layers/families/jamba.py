"""Jamba: Mamba or attention in each layer, then an MLP or experts; transformers' JambaForCausalLM."""

from typing import Any

from megatron_ssm.layers.experts import ExpertsSpec
from megatron_ssm.layers.mamba1 import Mamba1Spec
from megatron_ssm.layers.mlp import ACTIVATIONS, MlpSpec
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Part, Stack

from .common import (
    HYBRID_IGNORED,
    HYBRID_NAMES,
    MIXER,
    NORMAL,
    attention_spec,
    channels,
    dt_rank,
    hybrid_stack,
    layer_count,
    mixer_and_mlp,
    router,
)

DEFAULTS: dict[str, Any] = MIXER | dict(
    vocab_size=65536, tie_word_embeddings=False, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=None, hidden_act="silu", layer_norm_epsilon=1e-6,
    state_size=16, num_experts=16, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8,
    attn_layer_offset=4, initializer_range=0.02,
)  # fmt: skip


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    count, eps = layer_count(fields), fields.number("layer_norm_epsilon")
    every, first = fields.positive("expert_layer_period"), fields.integer("expert_layer_offset")
    hidden, activation = fields.positive("hidden_size"), fields.choice("hidden_act", ACTIVATIONS)
    mixer = Mamba1Spec(
        hidden_size=hidden, channels=channels(fields), state_size=fields.positive("state_size"),
        conv_kernel=fields.positive("conv_kernel"), dt_rank=dt_rank(fields), bias=fields.boolean("use_bias"),
        conv_bias=fields.boolean("use_conv_bias"), inner_norm_eps=eps, inner_norm_weights=True,
    )  # fmt: skip
    attention, inner = attention_spec(fields), fields.positive("intermediate_size")
    mlp, experts = MlpSpec(hidden, inner, activation), None
    if fields.positive("num_experts") > 1:
        experts = ExpertsSpec(
            hidden, router(fields, "num_experts", renormalized=False), inner, activation, router_name="router"
        )
    period, offset = fields.positive("attn_layer_period"), fields.integer("attn_layer_offset")
    if not 0 <= offset < period:
        raise ValueError(
            f"config.json: attn_layer_offset={offset} must be at least 0 and below attn_layer_period={period}"
        )
    layers = []
    for index in range(count):
        path = f"model.layers.{index}."
        part = Part("mixer", mixer, f"{path}mamba.")
        if index % period == offset:
            part = Part("attention", attention, f"{path}self_attn.")
        second = Part("mlp", mlp, f"{path}feed_forward.")
        if experts is not None and index % every == first:
            second = Part("experts", experts, f"{path}feed_forward.")
        layers.append(mixer_and_mlp(path, eps, (part,), (second,)))
    draws = NORMAL | dict(dt_bias="bias")
    return hybrid_stack(fields, layers, final_norm="model.final_layernorm.weight", draws=draws)


JAMBA = Family(
    "jamba", read, DEFAULTS, HYBRID_NAMES | dict(time_step_rank="mamba_dt_rank"),
    ignored=HYBRID_IGNORED
    | {"output_router_logits", "router_aux_loss_coef", "calc_logits_for_entire_prompt", "n_ctx"},
    supported={"mamba_inner_layernorms": (True,)}, architecture="JambaForCausalLM",
)  # fmt: skip
