"""ModuleSpecs of Megatron-Core that build its models from our layers.

Megatron's pretraining scripts load a spec by its module and name: `--spec megatron_ssm.integrations.specs NAME`, where NAME
is mamba_stack_spec (Mamba-2), mamba1_stack_spec or FAMILY_stack_spec for MambaModel, and gpt_layer_spec for GPTModel.
Importing this module imports megatron.core, which takes seconds.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mamba_block import MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from attention2d import CoreAttention
from megatron_ssm.layers.families import FAMILIES

from .megatron_fields import check_hf_fields
from .megatron_layers import (
    FUSED_NORMS,
    Attention,
    HybridLayer,
    LocalCoreAttention,
    Mixer,
    Norm,
    Stack,
    UnsupportedLayer,
)

FUSED = {ours: theirs for theirs, ours in FUSED_NORMS.items()}


def core_attention(**grid: int | bool) -> ModuleSpec:
    """The ModuleSpec of `attention2d.CoreAttention`, which Megatron builds for each layer according to config.cp_comm_type.

    Args:
        grid: rows, cols, ulysses and overlap, only for cp_comm_type="2d".
    """
    return ModuleSpec(module=CoreAttention, params=grid)


def with_core_attention(layer_spec: ModuleSpec, **grid: int | bool) -> ModuleSpec:
    """A copy of a transformer layer's ModuleSpec, with `core_attention(**grid)` as its attention.

    If the layer has Megatron's own linear layers, building it with fp8 or fp4 raises ValueError.

    Args:
        layer_spec: The ModuleSpec, such as that of get_gpt_layer_local_spec.
        grid: See `core_attention`.
    """
    spec = copy.deepcopy(layer_spec)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = core_attention(**grid)
    if attention.linear_qkv is ColumnParallelLinear:
        attention.core_attention.module = LocalCoreAttention
    return spec


def stack_spec(family: str, **hf_fields: Any) -> ModuleSpec:
    """The ModuleSpec of a stack of layers of a family.

    In the layer pattern, M is a layer with our mixer. In families that share blocks, * is a hybrid layer: one of the blocks,
    and a mixer. In other families, * is a transformer layer with `core_attention()`, and - an MLP, both of Megatron's own
    linear layers. Other symbols raise ValueError.

    The layers need neither CUDA nor Transformer Engine. In distributed checkpoints, the tensors of stack_spec("mamba2") have
    the keys and the sharding of Megatron's own mamba_stack_spec.

    Args:
        family: One of `families.FAMILIES`.
        hf_fields: Fields of the family's config.json in Hugging Face's format that a TransformerConfig lacks, such as
            conv_kernel, num_mem_blocks, adapter_rank or use_mem_rope. Sizes are those of the TransformerConfig.

    Raises:
        ValueError: A field is unknown. When the model is built: a field contradicts the TransformerConfig, or the layers do
            not support one of its options (fp8, fp4, qk_layernorm; in shared blocks, other options of attention).
    """
    check_hf_fields(family, hf_fields)
    mixer = ModuleSpec(module=Mixer, params=dict(family=family, hf_fields=hf_fields))
    hybrid = FAMILIES[family].shares_blocks
    layer = MambaLayerSubmodules(Norm, mixer, get_bias_dropout_add, sharded_state_dict_keys_map=FUSED)
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=layer),
        attention_layer=ModuleSpec(module=HybridLayer, submodules=layer) if hybrid else _attention_layer(),
        mlp_layer=_unsupported("-") if hybrid else _mlp_layer(),
        moe_layer=_unsupported("E"),
    )
    return ModuleSpec(module=Stack, params=dict(family=family, hf_fields=hf_fields), submodules=layers)


def _unsupported(symbol: str) -> ModuleSpec:
    return ModuleSpec(module=UnsupportedLayer, params=dict(symbol=symbol))


def _attention_layer() -> ModuleSpec:
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=core_attention(), linear_proj=RowParallelLinear
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=ModuleSpec(
            module=Attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=FUSED,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _mlp_layer() -> ModuleSpec:
    layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=Norm,
        mlp=ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        ),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=FUSED,
    )
    return ModuleSpec(module=MLPLayer, submodules=layer)


gpt_layer_spec = with_core_attention(get_gpt_layer_local_spec(normalization="RMSNorm"))
# {prefix of a spec's name that is not the name of its family: the family}. Megatron's mamba_stack_spec is Mamba-2.
_FAMILY_OF_PREFIX = {"mamba": "mamba2", "mamba1": "mamba"}


def __getattr__(name: str) -> ModuleSpec:
    """The spec FAMILY_stack_spec, also of a family that was registered after the import of this module."""
    prefix = name.removesuffix("_stack_spec")
    family = _FAMILY_OF_PREFIX.get(prefix, prefix)
    if not name.endswith("_stack_spec") or family not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stack_spec(family)


# Megatron's scripts look for a name in the module's dictionary.
for _prefix in (*FAMILIES, *_FAMILY_OF_PREFIX):
    if FAMILIES[_FAMILY_OF_PREFIX.get(_prefix, _prefix)].pattern:
        globals()[f"{_prefix}_stack_spec"] = __getattr__(f"{_prefix}_stack_spec")
