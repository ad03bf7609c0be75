"""ModuleSpecs that put `attention2d` into Megatron-Core's models. Only this module and `parallel.groups` import it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from attention2d import CoreAttention

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def core_attention(**grid: int | bool) -> ModuleSpec:
    """The ModuleSpec of `attention2d.CoreAttention`, which Megatron builds for each layer according to config.cp_comm_type.

    grid: rows, cols, ulysses and overlap, for cp_comm_type="2d" only.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=CoreAttention, params=grid)


def with_core_attention(layer_spec: ModuleSpec, **grid: int | bool) -> ModuleSpec:
    """A copy of a transformer layer's ModuleSpec, such as get_gpt_layer_local_spec's, with `core_attention(**grid)`."""
    spec = copy.deepcopy(layer_spec)
    spec.submodules.self_attention.submodules.core_attention = core_attention(**grid)
    return spec
