"""Qwen3.5 and 3.6, and Qwen3-Next: a gated delta net or gated attention in each layer, then an MLP or experts.

transformers' Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM and Qwen3NextForCausalLM. Of multimodal checkpoints, only the
language model is loaded.
"""

from dataclasses import replace
from typing import Any

from megatron_ssm.layers.experts import ExpertsSpec
from megatron_ssm.layers.gated_delta import BY_KEY_HEAD, GatedDeltaSpec
from megatron_ssm.layers.mlp import MlpSpec
from megatron_ssm.spec.reader import Family, FieldReader, Nested
from megatron_ssm.spec.stack import DraftHead, Part, Spec, Stack, Unit

from .common import (
    ATTENTION,
    DELTA,
    DELTA_NAMES,
    MAMBA,
    ROPE,
    attention_spec,
    delta_spec,
    hybrid_stack,
    layer_count,
    layer_kinds,
    mixer_and_mlp,
    rope_size,
    rope_theta,
    router,
)

DEFAULTS: dict[str, Any] = DELTA | ROPE | dict(
    vocab_size=248320, hidden_size=4096, num_hidden_layers=32, intermediate_size=12288, num_attention_heads=16,
    num_key_value_heads=4, head_dim=256, key_heads=16, value_heads=32, key_dim=128, value_dim=128, layer_types=None,
    full_attention_interval=4, partial_rotary_factor=0.25, draft_layers=None, num_mtp_layers=None,
    draft_embeddings=None,
)  # fmt: skip
MOE_DEFAULTS: dict[str, Any] = dict(
    hidden_size=2048, num_hidden_layers=40, num_key_value_heads=2, num_experts=256, num_experts_per_tok=8,
    moe_intermediate_size=512, shared_expert_intermediate_size=512,
)  # fmt: skip
NEXT_DEFAULTS: dict[str, Any] = MOE_DEFAULTS | dict(
    vocab_size=151936, num_hidden_layers=48, intermediate_size=5632, num_experts=512, num_experts_per_tok=10,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=None,
)  # fmt: skip
NAMES = DELTA_NAMES | dict(
    draft_layers="mtp_num_hidden_layers", draft_embeddings="mtp_use_dedicated_embeddings"
)  # fmt: skip
SKIPPED = (("mtp.", "the draft head"),)
VISION = (("model.visual.", "the vision tower"), ("visual.", "the vision tower"))


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    attention = attention_spec(fields, qk_norm_eps=fields.number("layer_norm_epsilon"), norm_offset=1.0, gated=True)
    part = 1.0 if "partial_rotary_factor" in fields.nulls else fields.number("partial_rotary_factor")
    size = rope_size(fields, attention.head_dim, part)
    delta = delta_spec(fields)
    specs: dict[str, tuple[str, str, Spec]] = {
        MAMBA: ("mixer", "linear_attn", _by_key_head(delta) if "norm_topk_prob" in fields else delta),
        ATTENTION: ("attention", "self_attn", replace(attention, rope_theta=rope_theta(fields), rope_size=size)),
    }
    eps, kinds = fields.number("layer_norm_epsilon"), _kinds(fields)

    def layer(path: str, kind: str, has_experts: bool) -> tuple[Unit, ...]:
        name, hf, spec = specs[kind]
        mlps = _experts(fields, f"{path}mlp.") if has_experts else (_mlp(fields, f"{path}mlp."),)
        mixers = (Part(name, spec, f"{path}{hf}."),)
        return mixer_and_mlp(path, eps, mixers, mlps, "post_attention_layernorm", offset=1.0)

    has_experts = _layers_with_experts(fields, len(kinds))
    layers = [layer(f"model.layers.{index}.", kind, has_experts[index]) for index, kind in enumerate(kinds)]
    draft, count = None, "num_mtp_layers" if fields["draft_layers"] is None else "draft_layers"
    has_own = fields["draft_embeddings"] is not None and fields.boolean("draft_embeddings")
    if fields[count] is not None and fields.integer(count) == 1 and not has_own and ATTENTION in kinds:
        draft = DraftHead(layer("mtp.layers.0.", ATTENTION, any(has_experts)), "mtp.", eps, 1.0)
    stack = hybrid_stack(fields, layers, norm_offset=1.0, skipped=SKIPPED + VISION, draft_head=draft)
    return replace(stack, aliases=(("model.", ("model.language_model.",)), *stack.aliases))


def _mlp(fields: FieldReader, path: str) -> Part:
    """A dense MLP."""
    return Part("mlp", MlpSpec(fields.positive("hidden_size"), fields.positive("intermediate_size")), path)


def _experts(fields: FieldReader, path: str) -> tuple[Part, Part]:
    """The routed experts and the shared expert."""
    hidden = fields.positive("hidden_size")
    renormalized = "norm_topk_prob" not in fields or fields.boolean("norm_topk_prob")
    routed = ExpertsSpec(
        hidden, router(fields, "num_experts", renormalized=renormalized), fields.positive("moe_intermediate_size"),
        merged="norm_topk_prob" not in fields,
    )  # fmt: skip
    shared = MlpSpec(hidden, fields.positive("shared_expert_intermediate_size"), scored=True)
    names = (("score.", f"{path}shared_expert_gate."),)
    return Part("experts", routed, path), Part("shared", shared, f"{path}shared_expert.", names)


def _layers_with_experts(fields: FieldReader, count: int) -> list[bool]:
    """Return True for each layer with experts."""
    if "num_experts" not in fields or not fields["num_experts"]:
        return [False] * count
    if "decoder_sparse_step" not in fields:
        return [True] * count
    dense, step = fields["mlp_only_layers"] or [], fields.positive("decoder_sparse_step")
    if not isinstance(dense, list):
        raise ValueError(f"config.json: mlp_only_layers={dense!r} must be a list of layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


def _by_key_head(spec: GatedDeltaSpec) -> GatedDeltaSpec:
    return replace(spec, files=BY_KEY_HEAD)


def _kinds(fields: FieldReader) -> list[str]:
    """The kind of each layer."""
    if fields["layer_types"] is not None:
        return layer_kinds(fields, fields["layer_types"])
    interval = fields.positive("full_attention_interval")
    return [MAMBA if (index + 1) % interval else ATTENTION for index in range(layer_count(fields))]


SUPPORTED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"), "output_gate_type": ("silu", "swish"), "attn_output_gate": (True,)
}  # fmt: skip
IGNORED = frozenset(
    """mamba_ssm_dtype mlp_only_layers decoder_sparse_step
    moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok norm_topk_prob output_router_logits
    router_aux_loss_coef mtp_layer_types language_model_only use_sliding_window""".split()
)
DENSE, MOE, NEXT = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"
QWEN3_5_TEXT = Family("qwen3_5_text", read, DEFAULTS, NAMES, SUPPORTED, IGNORED, architecture=DENSE)
QWEN3_5 = replace(QWEN3_5_TEXT, name="qwen3_5", nested=Nested("text_config", "qwen3_5_text"))
QWEN3_5_MOE_TEXT = replace(QWEN3_5_TEXT, name="qwen3_5_moe_text", defaults=DEFAULTS | MOE_DEFAULTS, architecture=MOE)
QWEN3_5_MOE = replace(QWEN3_5_MOE_TEXT, name="qwen3_5_moe", nested=Nested("text_config", "qwen3_5_moe_text"))
QWEN3_NEXT = replace(QWEN3_5_TEXT, name="qwen3_next", defaults=DEFAULTS | NEXT_DEFAULTS, architecture=NEXT)
