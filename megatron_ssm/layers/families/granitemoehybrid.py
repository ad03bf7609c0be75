"""Granite 4.0 H: Mamba-2 or attention in each layer, then an MLP, with or without routed experts.

transformers' GraniteMoeHybridForCausalLM.
"""

from typing import Any

from megatron_ssm.kernels.experts import CHOSEN_SOFTMAX
from megatron_ssm.layers.experts import ExpertsSpec
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
    layer_kinds,
    mixer_and_mlp,
    rope_theta,
    router,
)

MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
DEFAULTS: dict[str, Any] = HYBRID | ROPE | dict.fromkeys(MULTIPLIERS, 1.0) | dict(
    vocab_size=32000, layer_norm_epsilon=1e-6, shared_intermediate_size=1024, num_local_experts=8, layer_types=None,
    num_experts_per_tok=2, intermediate_size=11008,
    layers_block_type=None, position_embedding_type="none",
)  # fmt: skip
MLP_NAMES = dict(gate_up_proj="input_linear", down_proj="output_linear")
EXPERT_NAMES = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    embedding, logits, residual, multiplier = (fields.number(name) for name in MULTIPLIERS)
    scale = None if "attention_multiplier" in fields.nulls else multiplier
    if not logits:
        raise ValueError("config.json: logits_scaling must not be 0")
    rotated = fields.choice("position_embedding_type", ("none", "nope", "rope")) == "rope"
    attention = attention_spec(fields, scale=scale, rope_theta=rope_theta(fields) if rotated else 0.0)
    specs = {MAMBA: hybrid_mamba2(fields, channels(fields)), ATTENTION: attention}
    inner, activation = fields.positive("shared_intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)
    hidden, experts = fields.positive("hidden_size"), None
    mlp = MlpSpec(hidden, inner, activation, packed=True)
    if fields["num_local_experts"]:
        routing, width = router(fields, "num_local_experts", form=CHOSEN_SOFTMAX), fields.positive("intermediate_size")
        experts = ExpertsSpec(hidden, routing, width, activation, router_name="router.layer", merged=True)
    kinds = layer_kinds(fields, fields["layer_types"] or fields["layers_block_type"] or [MAMBA] * layer_count(fields))
    layers, eps = [], fields.number("layer_norm_epsilon")
    for index, kind in enumerate(kinds):
        path = f"model.layers.{index}."
        name, hf = ("mixer", "mamba") if kind == MAMBA else ("attention", "self_attn")
        names = tuple((f"{ours}.", f"{path}shared_mlp.{theirs}.") for ours, theirs in MLP_NAMES.items())
        mixer, mlps = Part(name, specs[kind], f"{path}{hf}."), [Part("mlp", mlp, f"{path}shared_mlp.", names)]
        if experts is not None:
            hf = f"{path}block_sparse_moe."
            names = tuple((usual, hf + theirs) for usual, theirs in EXPERT_NAMES.items())
            mlps.append(Part("experts", experts, hf, names))
        layers.append(mixer_and_mlp(path, eps, (mixer,), tuple(mlps), "post_attention_layernorm", residual))
    return hybrid_stack(fields, layers, embedding_scale=embedding, logits_scale=1 / logits)


GRANITE = Family(
    "granitemoehybrid", read, DEFAULTS, HYBRID_NAMES,
    supported={"normalization_function": ("rmsnorm",)},
    ignored=HYBRID_IGNORED | {"output_router_logits", "router_aux_loss_coef", "init_method"},
    architecture="GraniteMoeHybridForCausalLM",
)  # fmt: skip
