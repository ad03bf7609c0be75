"""The process groups of a framework's object, over which ranks compare whether they can attach to it.

They can be read before any setting of the object is checked.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from .deepspeed_settings import model_group as deepspeed_model_group


class TargetGroups(NamedTuple):
    """The process groups of a framework's object.

    Attributes:
        data: The ranks that average gradients; None if the framework is unknown.
        model: The ranks over which the framework divides the model, or None.
        device: The device of the parameters.
    """

    data: ProcessGroup | None
    model: ProcessGroup | None
    device: torch.device


def is_megatron_ddp(target: object) -> bool:
    """Return True if the object has the methods of Megatron-Core's DistributedDataParallel."""
    return hasattr(target, "bucket_groups") and hasattr(target, "finish_grad_sync")


def is_deepspeed_engine(target: object) -> bool:
    """Return True if the object has the methods of DeepSpeed's engine."""
    return hasattr(target, "zero_optimization_stage") and hasattr(target, "allreduce_gradients")


def target_groups(target: Any) -> TargetGroups:
    """The process groups of `target`, the same on all of its ranks, even if SparseFusion does not support it."""
    data = model = None
    if isinstance(target, DistributedDataParallel):
        data = target.process_group
    elif is_megatron_ddp(target):
        data, model = target.dp_cp_group, target.tp_group if target.tp_group.size() > 1 else None
    elif is_deepspeed_engine(target):
        data, model = target.seq_data_parallel_group, deepspeed_model_group(target.mpu)
    parameter = next(target.module.parameters(), None) if data is not None else None
    return TargetGroups(data, model, torch.device("cpu") if parameter is None else parameter.device)
