"""Granite 4.0 H: Mamba-2 or attention in each layer, and then an MLP; transformers' GraniteMoeHybridForCausalLM."""

from typing import Any

from megatron_ssm.operators.mlp import ACTIVATIONS, MlpSpec
from megatron_ssm.stack.reader import Family, FieldReader
from megatron_ssm.stack.stack import Part, Stack

from .common import (
    ATTENTION,
    HYBRID,
    HYBRID_NAMES,
    IGNORED_OF_HYBRIDS,
    MAMBA,
    ROPE,
    attention_spec,
    channels,
    hybrid_mamba2,
    hybrid_stack,
    layer_count,
    layer_kinds,
    mixer_and_mlp,
    rope_theta,
)

MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
DEFAULTS: dict[str, Any] = HYBRID | ROPE | dict.fromkeys(MULTIPLIERS, 1.0) | dict(
    vocab_size=32000, layer_norm_epsilon=1e-6, shared_intermediate_size=1024, num_local_experts=8, layer_types=None,
    layers_block_type=None, position_embedding_type="none",
)  # fmt: skip
MLP_NAMES = dict(gate_up_proj="input_linear", down_proj="output_linear")


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    if fields["num_local_experts"]:
        raise ValueError(f"experts are not implemented: num_local_experts={fields['num_local_experts']} (only 0)")
    embedding, logits, residual, scale = (fields.number(name) for name in MULTIPLIERS)
    if not logits:
        raise ValueError("config.json: logits_scaling=0 divides the logits")
    rotated = fields.choice("position_embedding_type", ("none", "nope", "rope")) == "rope"
    attended = attention_spec(fields, scale=scale, rope_theta=rope_theta(fields) if rotated else 0.0)
    specs = {MAMBA: hybrid_mamba2(fields, channels(fields)), ATTENTION: attended}
    inner, activation = fields.positive("shared_intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)
    mlp = MlpSpec(fields.positive("hidden_size"), inner, activation, packed=True)
    kinds = layer_kinds(fields, fields["layer_types"] or fields["layers_block_type"] or [MAMBA] * layer_count(fields))
    layers, eps = [], fields.number("layer_norm_epsilon")
    for index, kind in enumerate(kinds):
        path = f"model.layers.{index}."
        name, hf = ("mixer", "mamba") if kind == MAMBA else ("attention", "self_attn")
        names = tuple((f"{ours}.", f"{path}shared_mlp.{theirs}.") for ours, theirs in MLP_NAMES.items())
        mixer, dense = Part(name, specs[kind], f"{path}{hf}."), Part("mlp", mlp, f"{path}shared_mlp.", names)
        layers.append(mixer_and_mlp(path, eps, (mixer,), dense, "post_attention_layernorm", residual))
    return hybrid_stack(fields, layers, embedding_scale=embedding, logits_scale=1 / logits)


GRANITE = Family(
    "granitemoehybrid", read, DEFAULTS, HYBRID_NAMES,
    ignored=IGNORED_OF_HYBRIDS
    | {"intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "init_method"},
)  # fmt: skip
