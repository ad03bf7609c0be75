"""Conversion between Megatron's TransformerConfig and Hugging Face's config.json. Imports nothing from Megatron."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from commfabric.foundation.command_line import did_you_mean
from megatron_ssm.layers import families
from megatron_ssm.layers.families import FAMILIES
from megatron_ssm.layers.mlp import ACTIVATIONS, MlpSpec, squared_relu
from megatron_ssm.spec.fields import divides
from megatron_ssm.spec.reader import Family
from megatron_ssm.spec.stack import Stack, Unit

# Symbols of layers in Megatron's patterns. ATTENTION also stands for a layer with a shared block.
MAMBA, ATTENTION, MLP = "M", "*", "-"
# Fields of config.json that a TransformerConfig lacks, under our names.
_OPTIONS = """expand intermediate_size conv_kernel use_conv_bias use_bias mixer_rms_eps tie_word_embeddings
    time_step_rank time_step_limit time_step_min time_step_max time_step_floor
    attention_head_dim num_mem_blocks adapter_rank use_shared_attention_adapter
    use_mem_rope rope_parameters rope_scaling rope_theta""".split()


def check_hf_fields(family: str, hf_fields: Iterable[str]) -> None:
    """Raise ValueError, with a suggestion, if a family is unknown or a name is not a field of its config.json."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}{did_you_mean(family, FAMILIES)}")
    if FAMILIES[family].pattern is None:
        raise ValueError(f"{family} has no layer spec for Megatron (its Family has no pattern)")
    for name in FAMILIES[family].unknown_fields(list(hf_fields)):
        similar = did_you_mean(name, sorted(FAMILIES[family].known))
        raise ValueError(f"{name} of the layer spec is not a field of {family}'s config.json{similar}")


def config_of_layers(
    config: Any, family: str, hf_fields: Mapping[str, Any], pattern: Iterable[str] = (MAMBA,), **further_fields: Any
) -> Stack:
    """The stack of `family` with the sizes of a TransformerConfig and the layers of a pattern.

    Args:
        config: The TransformerConfig.
        hf_fields: Fields of Hugging Face's config.json that a TransformerConfig lacks (chunk sizes, adapters, ...).
        pattern: The symbols M, * and - of the layers.
        further_fields: Further fields of config.json, which are not checked.

    Raises:
        ValueError: A size is not supported, or `hf_fields` has an unknown field or contradicts the TransformerConfig.
    """
    check_hf_fields(family, hf_fields)
    fields = _fields_of(config, FAMILIES[family], hf_fields) | further_fields
    names = FAMILIES[family].pattern or {}
    kinds = [names.get(symbol, names[MAMBA]) for symbol in pattern]
    fields |= {"model_type": family, "num_hidden_layers": len(kinds)}
    fields |= {"layers_block_type": kinds} if "layers_block_type" in FAMILIES[family].known else {}
    for name, value in hf_fields.items():
        if name in fields and fields[name] != value and value is not None:
            raise ValueError(f"{name}={value!r} of the layer spec is {fields[name]!r} in Megatron's configuration")
    return families.from_dict({"vocab_size": 1, **hf_fields, **fields})


def _fields_of(config: Any, family: Family, hf_fields: Mapping[str, Any]) -> dict[str, Any]:
    name = family.hf_name
    fields = {
        "hidden_size": config.hidden_size,
        name("layer_norm_epsilon"): config.layernorm_epsilon,
        name("state_size"): config.mamba_state_dim,
    }
    if "n_groups" in family.defaults:
        head_dim_name = "mamba_head_dim" if "mamba_head_dim" in family.defaults else "head_dim"
        heads, head_dim = config.mamba_num_heads, config.mamba_head_dim
        expand = hf_fields.get(name("expand"), 2)
        inner = int(expand * config.hidden_size) if heads is None else heads * head_dim  # as in Megatron's own mixer
        if inner % head_dim:
            raise ValueError(f"{inner} channels do not divide into heads of {head_dim}")
        fields[name("num_heads")], fields[name(head_dim_name)] = inner // head_dim, head_dim
        fields[name("n_groups")], fields[name("expand")] = config.mamba_num_groups, _expand(inner, config.hidden_size)
    elif "num_heads" in family.defaults and config.mamba_num_heads is not None:
        fields[name("num_heads")] = config.mamba_num_heads
    if family.shares_blocks:
        fields |= _shared_block(config)
    if "mlp_hidden_act" in family.defaults:
        for option in _UNSUPPORTED_OPTIONS:  # of Megatron's own attention and MLP
            if value := getattr(config, option, None):
                raise ValueError(f"{option}={value!r}: a {family.name} model has no such option")
        check_key_value_heads(config)
        block = _shared_block(config)
        fields |= {"mlp_hidden_act": block.pop("hidden_act"), "head_dim": config.kv_channels, **block}
    if "residual_in_fp32" in family.defaults:
        fields["residual_in_fp32"] = False
    if "add_bias_linear" in family.known:
        fields["add_bias_linear"] = config.add_bias_linear
    return fields


def _expand(inner: int, hidden: int) -> int | float:
    if inner % hidden == 0:
        return inner // hidden
    factor = inner / hidden
    return factor if int(factor * hidden) == inner else math.nextafter(factor, math.inf)


# Options of Megatron's own attention and MLP that the models of Hugging Face do not have.
_UNSUPPORTED_OPTIONS = (
    "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "softmax_scale", "attention_output_gate", "qk_layernorm",
    "window_size",
)  # fmt: skip


def check_key_value_heads(config: Any) -> None:
    """Raise ValueError if a tensor-parallel rank of Megatron's own attention would have a part of a key/value head."""
    groups, ranks = config.num_query_groups or config.num_attention_heads, config.tensor_model_parallel_size
    divides(groups, ranks, "key/value heads of Megatron's attention", "ranks")


def _shared_block(config: Any) -> dict[str, Any]:
    function = config.activation_func
    is_squared_relu = getattr(function, "__name__", "") == squared_relu.__name__  # Megatron has its own function
    names = [n for n, f in ACTIVATIONS.items() if f is function or f is squared_relu and is_squared_relu]
    if not names:
        raise ValueError(f"unknown activation_func {function}: expected {', '.join(ACTIVATIONS)}")
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "intermediate_size": config.ffn_hidden_size,
        "hidden_act": names[0],
    }


def spec_options(config: Stack) -> dict[str, Any]:
    """The fields of config.json that `config_of_layers` needs in addition to `transformer_options`."""
    name = FAMILIES[config.family].hf_name
    known = config.raw.keys() - set(config.unknown)
    return {name(option): config.raw[name(option)] for option in _OPTIONS if name(option) in known}


def layer_pattern(config: Stack) -> str:
    """The layer pattern of a configuration for Megatron: M for Mamba, * for attention or a shared block, - for an MLP."""
    return "".join(map(_symbol, config.layers))


def _symbol(layer: tuple[Unit, ...]) -> str:
    (unit,) = layer
    spec = unit.operators[0].spec
    if unit.side is not None or spec.attention is not None:
        return ATTENTION
    return MLP if isinstance(spec, MlpSpec) else MAMBA


def transformer_options(config: Stack, tensor_ranks: int = 1) -> dict[str, Any]:
    """The arguments of a TransformerConfig for a model with this configuration.

    In models without attention, num_attention_heads is `tensor_ranks`, because Megatron divides it by the ranks even there.
    """
    specs: list[Any] = [spec for _, spec in config.operators]
    mixer: Any = next((spec for spec in specs if spec.recurrence is not None), None)
    if mixer is None:
        raise ValueError(f"a {config.family} model without a Mamba layer lacks sizes that Megatron needs")
    sizes = mixer.recurrence
    options: dict[str, Any] = dict(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=tensor_ranks,
        normalization="RMSNorm", layernorm_epsilon=config.norm_eps, mamba_state_dim=sizes.state,
        add_bias_linear=mixer.bias, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor_ranks,
    )  # fmt: skip
    if sizes.head_dim > 1:
        options |= dict(mamba_head_dim=sizes.head_dim, mamba_num_groups=sizes.groups, mamba_num_heads=sizes.heads)
    elif sizes.groups > 1:
        options |= dict(mamba_num_heads=sizes.groups)
    block: Any = config.shared[0].spec if config.shared else None
    attention = next(iter(config.attentions), None)
    mlp = block.mlp if block else next((spec for spec in specs if isinstance(spec, MlpSpec)), None)
    if attention is not None:
        sizes = dict(num_attention_heads=attention.heads, num_query_groups=attention.kv_heads)
        options |= dict(kv_channels=attention.head_dim, **sizes)
    if mlp is not None:
        options |= dict(ffn_hidden_size=mlp.channels, activation_func=ACTIVATIONS[mlp.activation])
    if not config.shared and (attention or mlp) and (mixer.bias or mlp is not None and mlp.bias):
        raise ValueError("biases: Megatron's own attention and MLP layers have biases everywhere or nowhere")
    return options
