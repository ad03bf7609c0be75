"""What several families read alike."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ssm.operators.mamba2 import Mamba2Spec
from megatron_ssm.stack.fields import divides
from megatron_ssm.stack.reader import MAX_LAYERS, MAX_SIZE, FieldReader, token_ids
from megatron_ssm.stack.stack import Norm, Part, Side, Spec, Stack, Unit

# Defaults of fields that a config.json leaves out, under our names; they are those of transformers' configuration classes.
MIXER: dict[str, Any] = dict(
    layer_norm_epsilon=1e-5, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank="auto",
    time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4,
)  # fmt: skip


def stack_of(fields: FieldReader, layers: Iterable[tuple[Unit, ...]], **more: Any) -> Stack:
    """The stack with these layers, and the fields that every family has. more: other fields of the stack."""
    family, raw = fields.family, dict(fields.raw)
    unknown = family.unknown_fields(raw)
    known = dict(
        vocab_size=fields.positive("vocab_size"), hidden_size=fields.positive("hidden_size"),
        norm_eps=fields.number("layer_norm_epsilon"), tie_embeddings=fields.boolean("tie_word_embeddings"),
    )  # fmt: skip
    return Stack(
        family=family.name, layers=tuple(layers), eos_token_ids=token_ids(raw.get("eos_token_id")), raw=raw,
        unknown=unknown, unknown_note=family.describe_unknown(unknown), **{**known, **more},
    )  # fmt: skip


def layer_count(fields: FieldReader) -> int:
    """The number of layers; ValueError for one that no model has."""
    return fields.positive("num_hidden_layers", MAX_LAYERS)


def channels(fields: FieldReader) -> int:
    """expand * hidden_size: the channels of a mixer; ValueError unless there is at least one."""
    product = fields.number("expand") * fields.positive("hidden_size")
    if not 1 <= product < MAX_SIZE + 1:  # before it is converted: it may be infinite
        factors = f"{fields.hf_name('expand')}={fields['expand']!r} * hidden_size={fields['hidden_size']}"
        count = int(product) if math.isfinite(product) else product
        raise ValueError(f"config.json: {factors} is {count} channels, not between 1 and {MAX_SIZE}")
    return int(product)


def dt_rank(fields: FieldReader) -> int:
    """The rank of Mamba-1's dt; "auto" is a sixteenth of the hidden size."""
    if fields["time_step_rank"] == "auto":
        return math.ceil(fields["hidden_size"] / 16)
    return fields.positive("time_step_rank")


def dt_range(fields: FieldReader) -> tuple[float, float, float]:
    """The smallest and largest dt of new models, and a floor."""
    return fields.number("time_step_min"), fields.number("time_step_max"), fields.number("time_step_floor")


def mamba2_spec(fields: FieldReader, heads: int, head_dim: int, **more: Any) -> Mamba2Spec:
    """The mixer with these heads, and the fields that its families have. more: other fields of the specification."""
    groups = fields.positive("n_groups")
    divides(heads, groups, "heads", "groups")
    return Mamba2Spec(
        hidden_size=fields.positive("hidden_size"), heads=heads, head_dim=head_dim, groups=groups,
        state_size=fields.positive("state_size"), conv_kernel=fields.positive("conv_kernel"),
        bias=fields.boolean("use_bias"), dt_range=dt_range(fields), **more,
    )  # fmt: skip


def mixer_layer(
    spec: Spec, path: str, eps: float, norm: str, mixer: str, side: Side | None = None, **more: Any
) -> tuple[Unit, ...]:  # fmt: skip
    """A layer of one unit: a norm and a mixer. path: of the layer in files; norm, mixer: their names there.

    side: the use of a shared block. more: other fields of the mixer's part.
    """
    part = Part("mixer", spec, f"{path}{mixer}.", **more)
    return (Unit((part,), Norm("norm", f"{path}{norm}.weight", eps), side=side),)


# Names in the files of state-spaces' code and of transformers' Mamba models
BACKBONE: Mapping[str, Any] = dict(
    root="backbone.", embeddings="backbone.embeddings.weight", final_norm="backbone.norm_f.weight"
)


def backbone_stack(fields: FieldReader, spec: Spec) -> Stack:
    """A stack of equal layers, each with one mixer, under the names of transformers' Mamba models."""
    eps, count = fields.number("layer_norm_epsilon"), layer_count(fields)
    layers = [mixer_layer(spec, f"backbone.layers.{i}.", eps, "norm", "mixer") for i in range(count)]
    others = ("backbone.embedding.weight", *(["lm_head.weight"] if fields.boolean("tie_word_embeddings") else []))
    aliases = (("backbone.embeddings.weight", others),)
    return stack_of(fields, layers, aliases=aliases, residual_in_fp32=fields.boolean("residual_in_fp32"), **BACKBONE)
