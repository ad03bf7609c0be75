"""Our modules in Megatron's models: initial values, sharded state dicts, and Megatron's names of tensors.

The parameters are those of our layers, one for each `Field`: in_proj.weight.z, .x, .B, .C and .dt. Megatron's sharded state
dict has one tensor for each field, so `dist_checkpointing` can reshard them, and can load checkpoints of Megatron's own
mixer. A plain state dict has Megatron's packed tensors instead (in_proj.weight).
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import nn

from megatron_ssm.model.initialization import draw
from megatron_ssm.model.parameters import attach_field
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.spec.fields import Field, field_of
from megatron_ssm.spec.stack import Part


class SplitModule(nn.Module):
    """A module with parameters that are split over the tensor-parallel ranks as their fields say.

    Attributes:
        megatron_names: {our name of a parameter: Megatron's name}, where the names differ.
        packed: {Megatron's name of a part of a packed tensor: name of the tensor}.
        tensor_ranks: The tensor-parallel ranks.
    """

    megatron_names: dict[str, str]
    packed: dict[str, str]
    tensor_ranks: Ranks

    def prepare_part(self, part: Part, ranks: Ranks, config: Any, layers: int) -> None:
        """Attach the fields of the part to the parameters, and initialize the parameters.

        Each field is drawn in full on the CPU, and this rank keeps its part, so initial values do not depend on the number
        of ranks. If `part.hf` is empty, parameters get Megatron's names, which are the usual names of their fields.

        Args:
            part: The operator, with its fields.
            config: Megatron's TransformerConfig, whose init_method and output_layer_init_method initialize projections.
            layers: The number of layers of the model.
        """
        self.tensor_ranks, self.megatron_names, self.packed = ranks, {}, {}
        parameters = dict(self.named_parameters())
        for field in part.spec.fields():
            parameter = parameters[field.name]
            attach_field(parameter, field, (ranks.rank, ranks.size, 0, 1))
            if not part.hf:
                is_packed = field.name.count(".") == 2  # in a `Packed`: LAYER.weight.PART
                name = f"{field.hf}.{field.name.rpartition('.')[2]}" if is_packed else field.hf
                self.megatron_names[field.name] = name
                if is_packed:
                    self.packed[name] = field.hf
            if config.perform_initialization:
                whole = _initial(field, config, layers)
                with torch.no_grad():
                    parameter.copy_(whole[field.piece(ranks.rank, ranks.size)])
        self.register_state_dict_post_hook(_pack)
        self.register_load_state_dict_pre_hook(_unpack)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """{name of a parameter: `ShardedTensor`} for Megatron's `dist_checkpointing`. Sends nothing.

        Keys in the checkpoint are those of Megatron's own modules. Megatron passes `sharded_offsets` and `metadata`.
        """
        group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        copy = 0 if group is None else dist.get_rank(group)
        return {
            prefix + name: self._sharded(parameter, prefix + self.megatron_name(name), sharded_offsets, copy)
            for name, parameter in self.named_parameters()
        }

    def _sharded(self, parameter: nn.Parameter, key: str, prepended: tuple, data_copy: int) -> ShardedTensor:
        field, ranks = field_of(parameter), self.tensor_ranks
        copies, axes, offsets = field.copies(ranks.size), len(prepended), []
        if field.split is not None:
            offsets = [(field.split + axes, ranks.rank // copies, ranks.size // copies)]
        replica = (0, ranks.rank % copies, data_copy)
        return ShardedTensor.from_rank_offsets(
            key, parameter, *prepended, *offsets, replica_id=replica, prepend_axis_num=axes
        )

    def megatron_name(self, name: str) -> str:
        """Megatron's name of one of our parameters. For a part of a packed tensor, this is TENSOR.PART."""
        return self.megatron_names.get(name, name)

    def tensor_name(self, name: str) -> str:
        """The name of the tensor in a plain state dict that contains one of our parameters."""
        theirs = self.megatron_name(name)
        return self.packed.get(theirs, theirs)


def _initial(field: Field, config: Any, layers: int) -> torch.Tensor:
    method = {"linear": config.init_method, "out_proj": config.output_layer_init_method}.get(field.init)
    if method is None or len(field.shape) != 2:
        return draw(field, layers)
    whole = torch.empty(field.shape)
    method(whole)
    return whole


def _pack(module: SplitModule, state: dict, prefix: str, _metadata: Any) -> None:
    """Concatenate our parameters, in their order, to Megatron's tensors after `state_dict`."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, _ in module.named_parameters():
        theirs = module.tensor_name(name)
        parts.setdefault(theirs, []).append(state.pop(prefix + name))
    for name, tensors in parts.items():
        state[prefix + name] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _unpack(module: SplitModule, state: dict, prefix: str, *_others: Any) -> None:
    """Split Megatron's tensors into our parameters before `load_state_dict`. Other names in the state dict stay."""
    rows: dict[str, dict[str, int]] = {}
    for name, parameter in module.named_parameters():
        rows.setdefault(module.tensor_name(name), {})[name] = len(parameter)
    for theirs, sizes in rows.items():
        if (whole := state.pop(prefix + theirs, None)) is not None:
            if len(whole) != sum(sizes.values()):
                raise ValueError(f"{prefix}{theirs} has {len(whole)} rows, not {sum(sizes.values())}")
            state.update(zip((prefix + name for name in sizes), whole.split(list(sizes.values())), strict=True))
