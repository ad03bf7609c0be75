"""Megatron's own GPTModel with gated delta nets, as a Qwen3.5 or Qwen3-Next without experts: its configuration and names.

Every layer is Megatron's own: a gated delta net (`megatron.core.ssm.gated_delta_net`) or an attention with an output gate,
followed by an MLP. Every tensor-parallel rank holds the same heads and channels as in our `Model`. Between the two models,
weights differ in their names and in the order of their rows, but not in the rank that holds them. In Megatron-Core 0.16.1,
the rows are ordered as follows:

- in_proj of a gated delta net, on each rank: q, k, v, z, b (beta) and a (alpha). Its convolution: q, k and v.
- linear_qkv of an attention, for each key/value head: its queries, the gates of these queries, the key and the value.
- linear_fc1 of an MLP, on each rank: gate and up.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ssm.layers import families
from megatron_ssm.layers.attention import AttentionSpec
from megatron_ssm.layers.gated_delta import GatedDeltaSpec
from megatron_ssm.layers.mlp import MlpSpec
from megatron_ssm.spec.stack import Spec
from megatron_ssm.spec.stack import Stack as ModelStack

from .megatron_fields import check_key_value_heads

FAMILIES = ("qwen3_5_text", "qwen3_next")
VARIANT, IN_LAYERS = "gated_delta_net", "decoder.layers."
# Options of a TransformerConfig that have the same value in all these models
_OPTIONS: dict[str, Any] = dict(
    experimental_attention_variant=VARIANT, attention_output_gate=True, qk_layernorm=True, normalization="RMSNorm",
    layernorm_zero_centered_gamma=True, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
    num_moe_experts=None,
)  # fmt: skip

# {Megatron's name in a layer: our name}. In Transformer Engine's specs, norms are parts of linear layers.
_NAMES_IN_LAYERS = {
    "input_layernorm.weight": "norm.weight",
    "self_attention.in_proj.layer_norm_weight": "norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "norm.weight",
    "self_attention.A_log": "mixer.A_log",
    "self_attention.dt_bias": "mixer.dt_bias",
    "self_attention.out_norm.weight": "mixer.norm_weight",
    "self_attention.out_proj.weight": "mixer.out_proj.weight",
    "self_attention.q_layernorm.weight": "attention.q_norm",
    "self_attention.k_layernorm.weight": "attention.k_norm",
    "self_attention.linear_proj.weight": "attention.o_proj.weight",
    "pre_mlp_layernorm.weight": "mlp_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV = "self_attention.linear_qkv.weight"


def _spec(config: ModelStack, kind: type[Spec]) -> Any:
    """The specification of the class `kind`, which is the same in all layers that have one."""
    for _, spec in config.operators:
        if isinstance(spec, kind):
            return spec
    missing = "attention" if kind is AttentionSpec else "gated delta net"
    raise ValueError(f"a {config.family} model without a layer of {missing} lacks sizes that Megatron needs")


def _packed_rows(config: ModelStack) -> dict[str, dict[str, int]]:
    """{Megatron's name of a packed tensor in a layer: {our name of some rows: number of rows}}.

    The number is that of all ranks together, or for `_QKV` that of each key/value head.
    """
    delta, attention, mlp = _spec(config, GatedDeltaSpec), _spec(config, AttentionSpec), _spec(config, MlpSpec)
    rows, queries = delta.rows(1), attention.heads // attention.kv_heads * attention.head_dim
    head_rows = {"q": queries, "gate": queries, "k": attention.head_dim, "v": attention.head_dim}
    return {
        "self_attention.in_proj.weight": {
            f"mixer.{'gates' if part in 'ba' else 'in_proj.weight'}.{part}": rows[part] for part in "qkvzba"
        },
        "self_attention.conv1d.weight": {f"mixer.conv.weight.{part}": rows[part] for part in "qkv"},
        _QKV: {f"attention.qkv.weight.{part}": count for part, count in head_rows.items()},
        "mlp.linear_fc1.weight": {f"mlp.gate_up.weight.{part}": count for part, count in mlp.rows(1).items()},
    }


def in_our_names(theirs: str, tensor: torch.Tensor, config: ModelStack) -> dict[str, torch.Tensor]:
    """{our name: view} for a parameter, or its gradient, in a layer of Megatron's GPTModel on this rank.

    Queries, gates, keys and values of an attention have the shape (key/value heads of this rank, rows per head, hidden);
    other parameters have the shape that they have in our `Model`.

    Args:
        theirs: Megatron's name of the parameter.
        tensor: The parameter or its gradient.
    """
    index, _, name = theirs.removeprefix(IN_LAYERS).partition(".")
    rows = _packed_rows(config).get(name, {_NAMES_IN_LAYERS.get(name, name): len(tensor)})
    counts = list(rows.values())
    if name == _QKV:
        parts = tensor.unflatten(0, (-1, sum(counts))).split(counts, dim=1)  # (key/value heads, rows, hidden)
    else:
        ranks = sum(counts) // len(tensor)
        parts = tensor.split([count // ranks for count in counts])
    return {f"layers.{index}.{ours}": part for ours, part in zip(rows, parts, strict=True)}


def has_offset(name: str, config: ModelStack) -> bool:
    """Return True for the weight of a gated delta net's output norm. Megatron's norm adds 1 to it, and ours does not."""
    return config.family in FAMILIES and name.endswith(".mixer.norm_weight")


def gpt_options(config: ModelStack, tensor_ranks: int = 1) -> dict[str, Any]:
    """The arguments of a TransformerConfig for a GPTModel of a configuration; `rotary_options` are the model's own.

    Raises ValueError for a family that is not in FAMILIES.
    """
    if config.family not in FAMILIES:
        raise ValueError(f"Megatron has no GPTModel of family {config.family!r}: expected {' or '.join(FAMILIES)}")
    delta, attention, mlp = _spec(config, GatedDeltaSpec), _spec(config, AttentionSpec), _spec(config, MlpSpec)
    is_delta = [isinstance(layer[0].operators[0].spec, GatedDeltaSpec) for layer in config.layers]
    return _OPTIONS | dict(
        num_layers=config.num_layers, hidden_size=config.hidden_size, layernorm_epsilon=config.norm_eps,
        num_attention_heads=attention.heads, num_query_groups=attention.kv_heads, kv_channels=attention.head_dim,
        linear_attention_freq=list(map(int, is_delta)), linear_conv_kernel_dim=delta.conv_kernel,
        linear_num_key_heads=delta.key_heads, linear_key_head_dim=delta.key_dim,
        linear_num_value_heads=delta.value_heads, linear_value_head_dim=delta.value_dim,
        ffn_hidden_size=mlp.channels, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor_ranks,
    )  # fmt: skip


def rotary_options(config: ModelStack) -> dict[str, Any]:
    """The arguments of a GPTModel that describe the positions of this configuration."""
    attention = _spec(config, AttentionSpec)
    fraction = attention.rope_size / attention.head_dim
    return dict(position_embedding_type="rope", rotary_base=attention.rope_theta, rotary_percent=fraction)


def gpt_model(config: ModelStack, megatron_config: Any, **sizes: Any) -> nn.Module:
    """Megatron's GPTModel, built from its own layer specs. sizes: its further arguments, such as vocab_size.

    ModuleNotFoundError if Transformer Engine is not installed, ImportError if flash-linear-attention is not.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    if not hasattr(specs, "TESpecProvider"):
        raise ModuleNotFoundError(
            "Megatron's layer specs of gated delta nets need transformer_engine: it is not installed"
        )
    layers = specs.get_transformer_block_with_experimental_attention_variant_spec(megatron_config)
    return GPTModel(megatron_config, layers, **sizes, **rotary_options(config))


def is_gpt(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "experimental_attention_variant", None) == VARIANT


def gpt_config(model: Any, family: str, vocab_size: int) -> ModelStack:
    """Our configuration of a GPTModel with gated delta nets. vocab_size: without padding.

    ValueError if these models lack an option of the TransformerConfig, or the position embedding.
    """
    config = model.config
    for owner, options in (config, _OPTIONS), (model, dict(position_embedding_type="rope", rotary_scaling=False)):
        for name, value in options.items():
            if (actual := getattr(owner, name)) != value:
                raise ValueError(f"{name}={actual!r}: a {family} model has {name}={value!r}")
    check_key_value_heads(config)
    is_delta = [hasattr(layer.self_attention, "A_log") for layer in model.decoder.layers]
    rope = dict(rope_type="default", rope_theta=model.rotary_base, partial_rotary_factor=model.rotary_percent)
    fields: dict[str, Any] = dict(
        model_type=family, vocab_size=vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
        rms_norm_eps=config.layernorm_epsilon, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups, head_dim=config.kv_channels, rope_parameters=rope,
        layer_types=["linear_attention" if is_linear else "full_attention" for is_linear in is_delta],
        linear_conv_kernel_dim=config.linear_conv_kernel_dim, linear_num_key_heads=config.linear_num_key_heads,
        linear_key_head_dim=config.linear_key_head_dim, linear_num_value_heads=config.linear_num_value_heads,
        linear_value_head_dim=config.linear_value_head_dim, intermediate_size=config.ffn_hidden_size,
        tie_word_embeddings=bool(model.share_embeddings_and_output_weights),
    )  # fmt: skip
    return families.from_dict(fields | (dict(num_experts=0) if family == "qwen3_next" else {}))
