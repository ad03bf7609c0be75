"""This package's process groups with the interface of a "model parallelism unit" (mpu) of DeepSpeed."""

import torch.distributed as dist

from .groups import TIMEOUT, Groups


class DeepSpeedGroups:
    """The `mpu` of `deepspeed.initialize`. Its model-parallel ranks are the tensor-parallel ranks.

    Its data-parallel ranks are all ranks that sum their gradients, including context-parallel ones. All ranks of the world
    create it together, after torch.distributed is initialized. Sends nothing.
    """

    def __init__(self, groups: Groups):
        alone = None
        if groups.tensor is None or groups.data_context is None:
            alone = dist.new_group([dist.get_rank()], TIMEOUT, use_local_synchronization=True)
        self._tensor, self._data = groups.tensor or alone, groups.data_context or alone

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of one replica of the model."""
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        """This rank's part of the model, a number."""
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        """The number of parts of a replica."""
        return dist.get_world_size(self._tensor)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's number among the ranks that hold the same part of the model."""
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """The number of ranks that hold the same part of the model."""
        return dist.get_world_size(self._data)
