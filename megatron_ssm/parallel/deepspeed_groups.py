"""Our process groups under the names by which DeepSpeed asks a "model parallelism unit" (mpu) for its own."""

import torch.distributed as dist

from .groups import TIMEOUT, Groups


class DeepSpeedGroups:
    """The `mpu` of `deepspeed.initialize`: the tensor-parallel ranks are its model-parallel ranks, and its data-parallel
    ranks are all ranks that sum their gradients, those of context parallelism included.

    All ranks of the world make it together, after torch.distributed is initialized. Sends nothing.
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
        """Which part of its replica this rank holds."""
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        """How many parts a replica has."""
        return dist.get_world_size(self._tensor)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that hold the same part of the model."""
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """How many ranks hold the same part of the model."""
        return dist.get_world_size(self._data)
