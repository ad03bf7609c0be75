"""Mamba: transformers' MambaForCausalLM, and state-spaces' models after conversion."""

from typing import Any

from megatron_ssm.layers.mamba1 import Mamba1Spec
from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Stack

from .common import MIXER, backbone_stack, channels, dt_range, dt_rank

DEFAULTS: dict[str, Any] = MIXER | dict(
    vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=32, tie_word_embeddings=True,
    intermediate_size=None, residual_in_fp32=True,
)  # fmt: skip
COMMON: dict[str, Any] = dict(
    pattern={"M": "linear_attention"},
    supported={"hidden_act": ("silu", "swish")},
    unsupported_by_peft=("out_proj",),
    tokenizer_class="GPTNeoXTokenizer",
)  # shared by the families without attention


def mixer_spec(fields: FieldReader, **overrides: Any) -> Mamba1Spec:
    """The mixer; intermediate_size takes precedence over expand, as in transformers."""
    inner = channels(fields) if fields["intermediate_size"] is None else fields.positive("intermediate_size")
    return Mamba1Spec(
        hidden_size=fields.positive("hidden_size"), channels=inner, state_size=fields.positive("state_size"),
        conv_kernel=fields.positive("conv_kernel"), dt_rank=dt_rank(fields), bias=fields.boolean("use_bias"),
        conv_bias=fields.boolean("use_conv_bias"), dt_range=dt_range(fields), **overrides,
    )  # fmt: skip


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    return backbone_stack(fields, mixer_spec(fields))


def new_config(options: Any) -> dict:
    """See `Family.from_options`."""
    return dict(state_size=options.mamba_state_dim)


MAMBA = Family("mamba", read, DEFAULTS, from_options=new_config, architecture="MambaForCausalLM", **COMMON)
