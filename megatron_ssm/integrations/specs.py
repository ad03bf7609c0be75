"""ModuleSpecs that put our parts into Megatron-Core's models. With `parallel`, the only importer of megatron.core."""

import copy

from attention2d import CoreAttention


def core_attention(**point):
    """The ModuleSpec of `attention2d.CoreAttention`, which Megatron builds for each layer by config.cp_comm_type.

    point: rows, cols, ulysses, overlap, of cp_comm_type="2d".
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=CoreAttention, params=point)


def with_core_attention(layer_spec, **point):
    """A copy of a transformer layer's ModuleSpec (get_gpt_layer_local_spec's, say) with that core attention."""
    spec = copy.deepcopy(layer_spec)
    spec.submodules.self_attention.submodules.core_attention = core_attention(**point)
    return spec
