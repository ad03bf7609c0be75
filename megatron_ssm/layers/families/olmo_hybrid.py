"""OLMo Hybrid: a gated delta net or attention in each layer, then an MLP; transformers' OlmoHybridForCausalLM.

Layers with attention normalize the outputs of attention and MLP, the others their inputs.
"""

from dataclasses import replace
from typing import Any

from megatron_ssm.layers.gated_delta import APART
from megatron_ssm.layers.mlp import MlpSpec
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Norm, Part, Stack, Unit

from .common import (
    ATTENTION,
    DELTA,
    DELTA_NAMES,
    MAMBA,
    ROPE,
    attention_spec,
    delta_spec,
    dt_range,
    hybrid_stack,
    layer_count,
    layer_kinds,
    mixer_and_mlp,
    rope_parameters,
    rope_theta,
)

DEFAULTS: dict[str, Any] = DELTA | ROPE | dict(
    vocab_size=100352, hidden_size=3840, num_hidden_layers=32, intermediate_size=11008, num_attention_heads=30,
    num_key_value_heads=None, head_dim=None, layer_types=None, key_heads=None, value_heads=None, key_dim=None,
    value_dim=None, allow_neg_eigval=True, time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4,
    A_min=0.0, A_max=16.0,
)  # fmt: skip
NAMES = DELTA_NAMES | dict(
    time_step_min="linear_dt_min", time_step_max="linear_dt_max", time_step_floor="linear_dt_init_floor",
    A_min="linear_a_log_min", A_max="linear_a_log_max", allow_neg_eigval="linear_allow_neg_eigval",
)  # fmt: skip
GATE_EPS = 1e-5  # the eps of the norm of the gated delta net, which config.json cannot change


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    hidden, eps = fields.positive("hidden_size"), fields.number("layer_norm_epsilon")
    attention = attention_spec(fields, qk_norm_eps=eps, whole_norms=True)
    outer = None if "rope_theta" in fields.nulls else fields["rope_theta"]
    if rope_parameters(fields).get("rope_theta", outer) is not None:  # only a base of null means no rotary embedding
        attention = replace(attention, rope_theta=rope_theta(fields))
    delta = delta_spec(_with_heads(fields), norm_eps=GATE_EPS, files=APART, dt_range=dt_range(fields))
    delta = replace(
        delta, max_beta=2.0 if fields.boolean("allow_neg_eigval") else 1.0,
        A_range=_range(fields),
    )  # fmt: skip
    mlp, layers = MlpSpec(hidden, fields.positive("intermediate_size")), []
    others: list[tuple[str, tuple[str, ...]]] = []  # (name of a norm that transformers writes, its other names)
    recut: list[tuple[str, ...]] = []  # tensors that transformers saves as equal parts of their concatenation
    for index, kind in enumerate(_kinds(fields)):
        path = f"model.layers.{index}."
        dense = Part("mlp", mlp, f"{path}mlp.")
        if kind == MAMBA:
            names = tuple(
                (ours, f"{path}linear_attn.{theirs}") for ours, theirs in (("out_proj", "o_proj"), ("norm", "o_norm"))
            )
            mixer = Part("mixer", delta, f"{path}linear_attn.", names)
            recut.append(tuple(f"{path}linear_attn.{part}_conv1d.weight" for part in "qkv"))
            layers.append(
                mixer_and_mlp(path, eps, (mixer,), (dense,), "feedforward_layer_norm", norm="attention_layer_norm")
            )
        else:
            mixer = Part("attention", attention, f"{path}self_attn.")
            first, second = f"{path}feedforward_layer_norm.weight", f"{path}post_feedforward_layernorm.weight"
            first_unit = Unit((mixer,), post_norm=Norm("norm", first, eps))
            layers.append((first_unit, Unit((dense,), post_norm=Norm("mlp_norm", second, eps))))
            others.append((first, (f"{path}post_attention_layernorm.weight",)))
    stack = hybrid_stack(fields, layers)
    return replace(stack, aliases=(*stack.aliases, *others), recut=tuple(recut))


def _with_heads(fields: FieldReader) -> FieldReader:
    """The fields, with the sizes of the gated delta net that are derived from others."""
    raw = dict(fields.raw)

    def default(name: str, value: int) -> None:
        if fields[name] is None:
            raw[fields.hf_name(name)] = value

    heads = fields.positive("num_attention_heads")
    default("key_heads", heads)
    default("value_heads", heads)
    keys = FieldReader(fields.family, raw).positive("key_heads")
    default("key_dim", max(1, int(0.75 * fields.positive("hidden_size") / keys)))
    default("value_dim", 2 * FieldReader(fields.family, raw).positive("key_dim"))
    return FieldReader(fields.family, raw)


def _range(fields: FieldReader) -> tuple[float, float]:
    """The smallest and the largest exp(A_log) of a new model."""
    low, high = fields.number("A_min"), fields.number("A_max")
    if not 0 <= low <= high:
        raise ValueError(f"config.json: linear_a_log_min={low} and linear_a_log_max={high} must be 0 <= min <= max")
    return low, high


def _kinds(fields: FieldReader) -> list[str]:
    """The kind of each layer."""
    if fields["layer_types"] is not None:
        return layer_kinds(fields, fields["layer_types"])
    kinds = [ATTENTION if index % 4 == 3 else MAMBA for index in range(layer_count(fields))]
    return kinds if ATTENTION in kinds else [*kinds[:-1], ATTENTION]


OLMO_HYBRID = Family(
    "olmo_hybrid",
    read,
    DEFAULTS,
    NAMES,
    supported={"linear_use_gate": (True,), "hidden_act": ("silu", "swish")},
    ignored=frozenset(("sliding_window",)),
    architecture="OlmoHybridForCausalLM",
)
