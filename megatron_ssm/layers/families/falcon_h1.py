"""Falcon-H1: Mamba-2 and attention in parallel in each layer, then an MLP; transformers' FalconH1ForCausalLM."""

import math
from dataclasses import replace
from typing import Any

from megatron_ssm.layers.mamba2 import GATE_FIRST, NO_NORM, NORM_FIRST
from megatron_ssm.layers.mlp import ACTIVATIONS, MlpSpec
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Part, Stack

from .common import (
    HYBRID,
    HYBRID_IGNORED,
    HYBRID_NAMES,
    ROPE,
    attention_spec,
    channels,
    hybrid_mamba2,
    hybrid_stack,
    layer_count,
    mixer_and_mlp,
    rope_theta,
)

MULTIPLIERS = """embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier
    ssm_in_multiplier ssm_out_multiplier""".split()
DEFAULTS: dict[str, Any] = HYBRID | ROPE | dict.fromkeys(MULTIPLIERS, 1.0) | dict(
    vocab_size=128000, intermediate_size=14336, num_key_value_heads=8, mamba_d_ssm=1024, mamba_rms_norm=False,
    mamba_norm_before_gate=True, projectors_bias=False, mlp_bias=False, mlp_multipliers=(1.0, 1.0),
    ssm_multipliers=(1.0,) * 5,
)  # fmt: skip


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    scale = {name: fields.number(name) for name in MULTIPLIERS}
    gate_scale, down_scale = constants(fields, "mlp_multipliers", 2)
    inner = channels(fields) if "mamba_d_ssm" in fields.nulls else fields.positive("mamba_d_ssm")
    norm = NORM_FIRST if fields.boolean("mamba_norm_before_gate") else GATE_FIRST
    mixer = hybrid_mamba2(
        fields, inner, norm=norm if fields.boolean("mamba_rms_norm") else NO_NORM,
        scales=constants(fields, "ssm_multipliers", 5), out_bias=fields.boolean("projectors_bias"),
    )  # fmt: skip
    attention = attention_spec(fields, rope_theta=rope_theta(fields))
    # q (key_multiplier * k)^T is computed as a scale, so that the cache holds unscaled keys
    attention = replace(attention, scale=scale["key_multiplier"] / math.sqrt(attention.head_dim))
    mlp = MlpSpec(
        fields.positive("hidden_size"), fields.positive("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS),
        bias=fields.boolean("mlp_bias"), gate_scale=gate_scale,
    )  # fmt: skip
    layers, eps = [], fields.number("layer_norm_epsilon")
    for path in (f"model.layers.{index}." for index in range(layer_count(fields))):
        parts = []
        for name, spec, hf, kind in (
            ("mixer", mixer, "mamba", "ssm"),
            ("attention", attention, "self_attn", "attention"),
        ):
            scales: Any = dict(input_scale=scale[f"{kind}_in_multiplier"], output_scale=scale[f"{kind}_out_multiplier"])
            parts.append(Part(name, spec, f"{path}{hf}.", **scales))
        dense = Part("mlp", mlp, path + "feed_forward.", output_scale=down_scale)
        layers.append(mixer_and_mlp(path, eps, tuple(parts), (dense,)))
    return hybrid_stack(
        fields, layers, final_norm="model.final_layernorm.weight", embedding_scale=scale["embedding_multiplier"],
        logits_scale=scale["lm_head_multiplier"],
    )  # fmt: skip


def constants(fields: FieldReader, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers."""
    values = fields[name]
    if not isinstance(values, list | tuple) or len(values) != count or not all(type(v) in (int, float) for v in values):
        raise ValueError(f"config.json: {name}={values!r} must be {count} numbers")
    return tuple(map(float, values))


FALCON_H1 = Family(
    "falcon_h1", read, DEFAULTS, HYBRID_NAMES, ignored=HYBRID_IGNORED | {"mamba_use_mlp", "mlp_expansion_factor"},
    unsupported_by_peft=("out_proj",), architecture="FalconH1ForCausalLM",
)  # fmt: skip
