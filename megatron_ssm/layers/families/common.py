"""Functions that read a config.json for several families."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ssm.kernels.experts import Router
from megatron_ssm.layers.attention import AttentionSpec
from megatron_ssm.layers.gated_delta import GatedDeltaSpec
from megatron_ssm.layers.mamba2 import Mamba2Spec
from megatron_ssm.spec.fields import divides
from megatron_ssm.spec.reader import MAX_LAYERS, MAX_SIZE, FieldReader, token_ids
from megatron_ssm.spec.stack import Norm, Part, Side, Spec, Stack, Unit

# Defaults of missing fields, under our names; they are those of transformers' configuration classes.
MIXER: dict[str, Any] = dict(
    layer_norm_epsilon=1e-5, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank="auto",
    time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4,
)  # fmt: skip

ROPE: dict[str, Any] = dict(rope_parameters=None, rope_scaling=None, rope_theta=10000.0)
# Defaults of hybrids whose layers have a mixer (Mamba-2 or attention) and an MLP, and the names in their config.json
HYBRID: dict[str, Any] = MIXER | dict(
    num_hidden_layers=32, hidden_size=4096, num_heads=128, mamba_head_dim="auto", n_groups=1, state_size=256,
    time_step_limit=(0.0, math.inf), num_attention_heads=32, num_key_value_heads=None, head_dim=None, attention_bias=False,
    hidden_act="silu", tie_word_embeddings=False, initializer_range=0.02,
)  # fmt: skip
HYBRID_NAMES = dict(
    layer_norm_epsilon="rms_norm_eps", num_heads="mamba_n_heads", mamba_head_dim="mamba_d_head", n_groups="mamba_n_groups",
    state_size="mamba_d_state", conv_kernel="mamba_d_conv", expand="mamba_expand", use_conv_bias="mamba_conv_bias",
    use_bias="mamba_proj_bias",
)  # fmt: skip
# Defaults of hybrids whose layers have a gated delta net or attention and an MLP
DELTA: dict[str, Any] = dict(
    layer_norm_epsilon=1e-6, conv_kernel=4, attention_bias=False, hidden_act="silu", tie_word_embeddings=False,
    initializer_range=0.02,
)  # fmt: skip
DELTA_NAMES = dict(
    layer_norm_epsilon="rms_norm_eps", conv_kernel="linear_conv_kernel_dim", key_heads="linear_num_key_heads",
    value_heads="linear_num_value_heads", key_dim="linear_key_head_dim", value_dim="linear_value_head_dim",
)  # fmt: skip
HYBRID_IGNORED = frozenset(("mamba_chunk_size", "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype"))
# The initialization in transformers, except that Mamba-2's steps are drawn as in its paper; see `Stack.draws`
NORMAL = dict.fromkeys(("linear", "convolution", "out_proj", "mixer_out_proj", "embedding"), "normal")
NORMAL |= dict(A_log="counted")

MAMBA, ATTENTION = "linear_attention", "full_attention"
KINDS = {MAMBA: MAMBA, "mamba": MAMBA, ATTENTION: ATTENTION, "attention": ATTENTION}  # with the old names


def stack_of(fields: FieldReader, layers: Iterable[tuple[Unit, ...]], **overrides: Any) -> Stack:
    """A stack of these layers, with the fields that every family has. overrides: further fields of the stack."""
    family, raw = fields.family, dict(fields.raw)
    unknown = family.unknown_fields(raw)
    known = dict(
        vocab_size=fields.positive("vocab_size"), hidden_size=fields.positive("hidden_size"),
        norm_eps=fields.number("layer_norm_epsilon"), tie_embeddings=fields.boolean("tie_word_embeddings"),
    )  # fmt: skip
    return Stack(
        family=family.name, layers=tuple(layers), eos_token_ids=token_ids(raw.get("eos_token_id")), raw=raw,
        unknown=unknown, unknown_note=family.describe_unknown(unknown), **{**known, **overrides},
    )  # fmt: skip


def layer_count(fields: FieldReader) -> int:
    """The number of layers, at most MAX_LAYERS."""
    return fields.positive("num_hidden_layers", MAX_LAYERS)


def channels(fields: FieldReader) -> int:
    """expand * hidden_size, the channels of a mixer; ValueError below 1 or above MAX_SIZE."""
    product = fields.number("expand") * fields.positive("hidden_size")
    if not 1 <= product < MAX_SIZE + 1:  # before the conversion to int, because it may be infinite
        factors = f"{fields.hf_name('expand')}={fields['expand']!r} * hidden_size={fields['hidden_size']}"
        count = int(product) if math.isfinite(product) else product
        raise ValueError(f"config.json: {factors} is {count} channels, not between 1 and {MAX_SIZE}")
    return int(product)


def dt_rank(fields: FieldReader) -> int:
    """The rank of Mamba-1's dt; "auto" is hidden_size / 16."""
    if fields["time_step_rank"] == "auto":
        return math.ceil(fields["hidden_size"] / 16)
    return fields.positive("time_step_rank")


def dt_range(fields: FieldReader) -> tuple[float, float, float]:
    """(smallest dt, largest dt, floor) for the initialization of dt_bias."""
    return fields.number("time_step_min"), fields.number("time_step_max"), fields.number("time_step_floor")


def mamba2_spec(fields: FieldReader, heads: int, head_dim: int, **overrides: Any) -> Mamba2Spec:
    """The Mamba-2 mixer with these heads. overrides: further fields of the specification."""
    groups = fields.positive("n_groups")
    divides(heads, groups, "heads", "groups")
    return Mamba2Spec(
        hidden_size=fields.positive("hidden_size"), heads=heads, head_dim=head_dim, groups=groups,
        state_size=fields.positive("state_size"), conv_kernel=fields.positive("conv_kernel"),
        bias=fields.boolean("use_bias"), dt_range=dt_range(fields), **overrides,
    )  # fmt: skip


def hybrid_mamba2(fields: FieldReader, inner: int, **overrides: Any) -> Mamba2Spec:
    """The Mamba-2 mixer of hybrids, with `inner` channels. overrides: as in `mamba2_spec`."""
    heads, eps = fields.positive("num_heads"), fields.number("layer_norm_epsilon")
    divides(inner, heads, "channels", "mamba heads")
    head_dim = inner // heads
    if fields["mamba_head_dim"] != "auto":
        fields.check_derived("mamba_head_dim", head_dim, "the channels of a head")
    known: dict[str, Any] = dict(dt_limit=fields.limits("time_step_limit"), norm_eps=eps)
    return mamba2_spec(fields, heads, head_dim, **{**known, "conv_bias": fields.boolean("use_conv_bias"), **overrides})


def delta_spec(fields: FieldReader, **overrides: Any) -> GatedDeltaSpec:
    """The gated delta net. overrides: further fields of the specification."""
    keys, values = fields.positive("key_heads"), fields.positive("value_heads")
    divides(values, keys, "value heads", "key heads")
    known: dict[str, Any] = dict(norm_eps=fields.number("layer_norm_epsilon"))
    return GatedDeltaSpec(
        fields.positive("hidden_size"), keys, values, fields.positive("key_dim"), fields.positive("value_dim"),
        fields.positive("conv_kernel"), **{**known, **overrides},
    )  # fmt: skip


def router(fields: FieldReader, experts: str, **overrides: Any) -> Router:
    """The router of experts. experts: the field with their number. overrides: further fields of the router."""
    count, chosen = fields.positive(experts), fields.positive("num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"num_experts_per_tok={chosen} is more than {fields.hf_name(experts)}={count}")
    return Router(count, chosen, **overrides)


def attention_spec(fields: FieldReader, **overrides: Any) -> AttentionSpec:
    """Grouped-query attention. overrides: further fields of the specification."""
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    is_given = fields["num_key_value_heads"] is not None and "num_key_value_heads" not in fields.nulls
    kv_heads = fields.positive("num_key_value_heads") if is_given else heads
    divides(heads, kv_heads, "attention heads", "key/value heads")
    head_dim = hidden // heads if fields["head_dim"] is None else fields.positive("head_dim")
    if not head_dim:
        raise ValueError(f"{heads} attention heads are more than hidden_size={hidden}")
    if overrides.get("rope_theta") and head_dim % 2:
        raise ValueError(f"rotary embeddings need heads of even size, not {head_dim}")
    bias = "attention_bias" in fields and fields.boolean("attention_bias")
    return AttentionSpec(hidden, heads, kv_heads, head_dim, **{**dict(qkv_bias=bias, bias=bias), **overrides})


def rope_theta(fields: FieldReader) -> float:
    """The base of the rotary embedding; ValueError for another rope_type than the default."""
    parameters = rope_parameters(fields)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{fields.family.name} with rope_type={kind!r} is not implemented (only 'default')")
    theta = FieldReader(fields.family, {**fields.raw, **parameters}).number("rope_theta")
    if theta <= 0:
        raise ValueError(f"config.json: rope_theta={theta!r} must be positive")
    return theta


def rope_parameters(fields: FieldReader) -> dict:
    """The parameters of the rotary embedding in config.json."""
    parameters = fields["rope_scaling"] or fields["rope_parameters"] or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: rope_parameters={parameters!r} must be an object")
    return parameters


def rope_size(fields: FieldReader, head_dim: int, default: float) -> int:
    """The number of rotated elements of a head. default: the fraction of a head if config.json has none."""
    part = rope_parameters(fields).get("partial_rotary_factor", default)
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise ValueError(f"config.json: partial_rotary_factor={part!r} must be above 0 and at most 1")
    size = int(head_dim * part)
    if size < 2 or size % 2:
        raise ValueError(f"rotary embeddings need an even part of each head, not {size} of {head_dim} elements")
    return size


def layer_kinds(fields: FieldReader, kinds: Any, known: Mapping[str, str] = KINDS) -> list[str]:
    """The kind of each layer, from names in config.json; ValueError for an unknown name or a wrong number of layers."""
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise ValueError(f"config.json: {kinds!r} must be a list of {', '.join(known)}")
    if "num_hidden_layers" in fields.raw and len(kinds) != layer_count(fields):
        raise ValueError(f"config.json: {len(kinds)} kinds of layers for num_hidden_layers={layer_count(fields)}")
    return [known[kind] for kind in kinds]


def mixer_and_mlp(
    path: str,
    eps: float,
    mixers: tuple[Part, ...],
    mlps: tuple[Part, ...],
    mlp_norm: str = "pre_ff_layernorm",
    residual: float = 1.0,
    offset: float = 0.0,
    norm: str = "input_layernorm",
) -> tuple[Unit, ...]:
    """A layer of two units: mixers, then MLPs or experts.

    Args:
        path: The prefix of the layer in files.
        eps, offset: The constants of the norms (see `Norm`).
        mixers, mlps: The operators of the units.
        norm, mlp_norm: The names of the norms in files.
        residual: The scale of the output of each unit.
    """
    norms = (("norm", norm), ("mlp_norm", mlp_norm))
    first, second = (Norm(name, f"{path}{hf}.weight", eps, offset) for name, hf in norms)
    return Unit(mixers, first, residual_scale=residual), Unit(mlps, second, residual_scale=residual)


def hybrid_stack(fields: FieldReader, layers: Iterable[tuple[Unit, ...]], **overrides: Any) -> Stack:
    """The stack of a hybrid with the tensor names of transformers' Llama and transformers' initialization."""
    tied = fields.boolean("tie_word_embeddings")
    aliases = (("model.embed_tokens.weight", ("lm_head.weight",)),) if tied else ()
    draws = dict(draws=NORMAL, draws_std=fields.number("initializer_range"))
    return stack_of(fields, layers, **{**draws, "aliases": aliases, **overrides})


def mixer_layer(
    spec: Spec, path: str, eps: float, norm: str, mixer: str, side: Side | None = None, **overrides: Any
) -> tuple[Unit, ...]:  # fmt: skip
    """A layer of one unit: a norm and a mixer.

    Args:
        spec: The specification of the mixer.
        path: The prefix of the layer in files.
        eps: The eps of the norm.
        norm, mixer: The names of the norm and of the mixer in files.
        side: The invocation of a shared block, or None.
        overrides: Further fields of the mixer's part.
    """
    part = Part("mixer", spec, f"{path}{mixer}.", **overrides)
    return (Unit((part,), Norm("norm", f"{path}{norm}.weight", eps), side=side),)


# Names in files of state-spaces' code and of transformers' Mamba models
BACKBONE: Mapping[str, Any] = dict(
    root="backbone.", embeddings="backbone.embeddings.weight", final_norm="backbone.norm_f.weight"
)


def backbone_stack(fields: FieldReader, spec: Spec) -> Stack:
    """A stack of equal layers with one mixer each, with the tensor names of transformers' Mamba models."""
    eps, count = fields.number("layer_norm_epsilon"), layer_count(fields)
    layers = [mixer_layer(spec, f"backbone.layers.{i}.", eps, "norm", "mixer") for i in range(count)]
    others = ("backbone.embedding.weight", *(["lm_head.weight"] if fields.boolean("tie_word_embeddings") else []))
    aliases = (("backbone.embeddings.weight", others),)
    return stack_of(fields, layers, aliases=aliases, residual_in_fp32=fields.boolean("residual_in_fp32"), **BACKBONE)
