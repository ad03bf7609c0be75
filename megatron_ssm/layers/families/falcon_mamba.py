"""Falcon-Mamba: Mamba with norms of dt, B and C; transformers' FalconMambaForCausalLM."""

from typing import Any

from megatron_ssm.spec.reader import Family, FieldReader
from megatron_ssm.spec.stack import Stack

from .common import backbone_stack
from .mamba import COMMON, DEFAULTS, mixer_spec


def read(fields: FieldReader) -> Stack:
    """See `Family`."""
    return backbone_stack(fields, mixer_spec(fields, inner_norm_eps=fields.number("mixer_rms_eps")))


def new_config(options: Any) -> dict:
    """See `Family.from_options`."""
    return dict(state_size=options.mamba_state_dim)


FALCON_MAMBA = Family(
    "falcon_mamba",
    read,
    DEFAULTS | dict(mixer_rms_eps=1e-6),
    ignored=frozenset({"use_falcon_mambapy"}),
    from_options=new_config,
    architecture="FalconMambaForCausalLM",
    **COMMON,
)
