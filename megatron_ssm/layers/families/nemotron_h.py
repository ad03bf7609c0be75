"""Nemotron-H and Nemotron-3: Mamba-2, attention, an MLP or experts in each layer; transformers' NemotronHForCausalLM."""

import math
from dataclasses import replace
from typing import Any

from megatron_ssm.kernels.experts import GROUP_SCORES, SIGMOID, Router
from megatron_ssm.layers.experts import ExpertsSpec
from megatron_ssm.layers.mlp import ACTIVATIONS, MlpSpec
from megatron_ssm.spec.fields import divides
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Norm, Part, Spec, Stack, Unit

from .common import (
    ATTENTION,
    BACKBONE,
    HYBRID_IGNORED,
    KINDS,
    MAMBA,
    MIXER,
    NORMAL,
    attention_spec,
    layer_kinds,
    mamba2_spec,
    router,
    stack_of,
)

DEFAULTS: dict[str, Any] = MIXER | dict(
    vocab_size=131072, hidden_size=4096, num_hidden_layers=None, layers_block_type=None, layer_types=None,
    hybrid_override_pattern=None, tie_word_embeddings=False, num_attention_heads=32, num_key_value_heads=8, head_dim=None,
    attention_head_dim=128,  # the old name of head_dim
    intermediate_size=21504, mlp_hidden_act="relu2", mlp_bias=False, state_size=128, num_heads=128, mamba_head_dim=64,
    n_groups=8, n_routed_experts=8, moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688,
    moe_latent_size=None, num_experts_per_tok=2, routed_scaling_factor=1.0, n_group=1, topk_group=1, norm_topk_prob=True,
    n_shared_experts=1, initializer_range=0.02, rescale_prenorm_residual=True,
)  # fmt: skip
OLD_NAMES = dict(
    mamba_n_groups="n_groups", mamba_d_conv="conv_kernel", mamba_dt_min="time_step_min", mamba_dt_max="time_step_max",
    mamba_dt_init_floor="time_step_floor", mamba_conv_bias="use_conv_bias",
)  # fmt: skip
MLP, EXPERTS = "mlp", "moe"
DEFAULT_KINDS = [MAMBA, EXPERTS, ATTENTION, MLP]
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # of Megatron's --hybrid-override-pattern


def pattern_kinds(pattern: object, source: str) -> list[str]:
    """The kind of each layer of a pattern such as "M-M*-". source: the name of the pattern in errors."""
    if not isinstance(pattern, str) or not pattern or any(letter not in LETTERS for letter in pattern):
        raise ValueError(
            f"{source} {pattern!r} must consist of the letters M (Mamba-2), * (attention), - (MLP) and E (experts)"
        )
    return [LETTERS[letter] for letter in pattern]


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    renamed = {new: fields.raw[old] for old, new in OLD_NAMES.items() if old in fields.raw}
    fields = FieldReader(fields.family, {**fields.raw, **renamed})
    names = fields["layers_block_type"] or fields["layer_types"] or DEFAULT_KINDS
    if names is DEFAULT_KINDS and fields["hybrid_override_pattern"] is not None:
        names = pattern_kinds(fields["hybrid_override_pattern"], "config.json: hybrid_override_pattern")
    kinds = layer_kinds(fields, names, KINDS | {MLP: MLP, EXPERTS: EXPERTS})
    heads, hidden = fields.positive("num_heads"), fields.positive("hidden_size")
    head_dim = "attention_head_dim" if fields["head_dim"] is None else "head_dim"
    eps, limit = fields.number("layer_norm_epsilon"), (fields.number("time_step_min"), math.inf)
    divides(heads, fields.positive("n_groups"), "heads", "groups")
    activation = fields.choice("mlp_hidden_act", ACTIVATIONS)
    mlp = MlpSpec(hidden, fields.positive("intermediate_size"), activation, False, fields.boolean("mlp_bias"))
    specs: dict[str, Spec] = {
        MAMBA: mamba2_spec(
            fields, heads, fields.positive("mamba_head_dim"), dt_limit=limit, norm_eps=eps,
            conv_bias=fields.boolean("use_conv_bias"),
        ),
        ATTENTION: replace(attention_spec(fields), head_dim=fields.positive(head_dim)),
        MLP: mlp,
    }  # fmt: skip
    shared = None
    if EXPERTS in kinds:
        specs[EXPERTS] = _experts(fields, activation)
        shared = replace(mlp, channels=fields.positive("moe_shared_expert_intermediate_size"))
    layers = []
    for index, kind in enumerate(kinds):
        path = f"backbone.layers.{index}."
        parts = [Part("mixer", specs[kind], f"{path}mixer.")]
        if kind == EXPERTS and shared is not None:
            parts.append(Part("shared", shared, f"{path}mixer.shared_experts."))
        layers.append((Unit(tuple(parts), Norm("norm", f"{path}norm.weight", eps)),))
    draws = NORMAL | (dict(mixer_out_proj="mixer_out_proj") if fields.boolean("rescale_prenorm_residual") else {})
    return stack_of(
        fields, layers, draws=draws, draws_std=fields.number("initializer_range"), aliases=(("backbone.", ("model.",)),),
        modules="model.", skipped=(("mtp.", "the draft head"),),
        tie_embeddings=False,  # whatever tie_word_embeddings is, as in transformers
        **BACKBONE,
    )  # fmt: skip


def _experts(fields: FieldReader, activation: str) -> ExpertsSpec:
    """The routed experts."""
    routing, groups = _router(fields), fields.positive("n_group")
    divides(routing.experts, groups, "experts", "groups")
    group_size, chosen = routing.experts // groups, routing.chosen_groups
    if chosen > groups:
        raise ValueError(f"topk_group={chosen} is more than n_group={groups}")
    if groups > 1 and group_size < GROUP_SCORES:
        raise ValueError(f"n_group={groups} groups of {routing.experts} experts have fewer than {GROUP_SCORES} each")
    if routing.chosen > group_size * chosen:
        raise ValueError(
            f"num_experts_per_tok={routing.chosen} is more than the {group_size * chosen} experts of topk_group={chosen} "
            "groups"
        )
    latent = 0 if fields["moe_latent_size"] is None else fields.positive("moe_latent_size")
    return ExpertsSpec(
        fields.positive("hidden_size"), routing, fields.positive("moe_intermediate_size"), activation, False, latent,
        fields.boolean("mlp_bias"),
    )  # fmt: skip


def _router(fields: FieldReader) -> Router:
    return router(
        fields, "n_routed_experts", form=SIGMOID, renormalized=fields.boolean("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"), groups=fields.positive("n_group"),
        chosen_groups=fields.positive("topk_group"),
    )  # fmt: skip


def new_config(options: Any) -> dict:
    """See `Family.from_options`."""
    pattern = options.hybrid_override_pattern or ("M-" * options.num_layers)[: options.num_layers]
    kinds = pattern_kinds(pattern, "--hybrid-override-pattern")
    for size, name in (2 * options.hidden_size, "mamba_head_dim"), (options.hidden_size, "num_attention_heads"):
        divides(size, getattr(options, name), "channels", f"--{name.replace('_', '-')}")
    width = options.ffn_hidden_size or 4 * options.hidden_size
    expert_width = options.moe_ffn_hidden_size or width
    experts: dict[str, Any] = {}
    if EXPERTS in kinds:
        _check_choices(options)
        experts = dict(
            n_routed_experts=options.num_experts, num_experts_per_tok=options.moe_router_topk,
            moe_intermediate_size=expert_width,
            moe_shared_expert_intermediate_size=options.moe_shared_expert_intermediate_size or expert_width,
            moe_latent_size=options.moe_latent_size or None, n_group=options.moe_router_num_groups,
            topk_group=options.moe_router_group_topk, routed_scaling_factor=options.moe_router_topk_scaling_factor,
        )  # fmt: skip
    return experts | dict(
        layers_block_type=kinds, num_hidden_layers=len(kinds), tie_word_embeddings=False,
        ssm_state_size=options.mamba_state_dim, mamba_head_dim=options.mamba_head_dim, n_groups=options.mamba_num_groups,
        mamba_num_heads=2 * options.hidden_size // options.mamba_head_dim,
        num_attention_heads=options.num_attention_heads, head_dim=options.hidden_size // options.num_attention_heads,
        num_key_value_heads=options.num_query_groups or options.num_attention_heads,
        intermediate_size=width,
    )  # fmt: skip


def _check_choices(options: Any) -> None:
    """ValueError if tokens choose more experts, or groups of them, than there are."""
    for chosen, count in dict(moe_router_topk="num_experts", moe_router_group_topk="moe_router_num_groups").items():
        if getattr(options, chosen) > getattr(options, count):
            first, second = (f"--{name.replace('_', '-')} {getattr(options, name)}" for name in (chosen, count))
            raise ValueError(f"{first} is more than {second}")


NEMOTRON_H = Family(
    "nemotron_h", read, DEFAULTS,
    dict(state_size="ssm_state_size", num_heads="mamba_num_heads"),
    supported={
        "mamba_hidden_act": ("silu", "swish"), "attention_bias": (False,), "mamba_proj_bias": (False,),
        "residual_in_fp32": (False,), "sliding_window": (None,),
    },
    ignored=HYBRID_IGNORED | OLD_NAMES.keys() | frozenset(
        """time_step_limit mamba_dt_limit mamba_expand hidden_dropout norm_eps rms_norm_eps
        moe_shared_expert_overlap num_nextn_predict_layers mtp_layers_block_type output_router_logits use_mamba_kernels
        mtp_hybrid_override_pattern rope_theta partial_rotary_factor""".split()
    ),
    pattern={letter: kind for letter, kind in LETTERS.items() if kind != EXPERTS}, from_options=new_config,
    made_from_pattern=True, unsupported_by_peft=("out_proj",), architecture="NemotronHForCausalLM",
)  # fmt: skip
