"""Finds the adapter and the process groups of a framework's object.

The groups, over which ranks compare whether they can attach to it, can be read before any of its settings is checked.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from .adapter import Adapter
from .deepspeed_engine import DeepSpeedEngine
from .deepspeed_engine import model_group as deepspeed_model_group
from .megatron_ddp import MegatronDDP
from .torch_ddp import TorchDDP


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


def adapter_for(target: object) -> Adapter:
    """The adapter of `target`, by its methods. ValueError if the framework or its settings are not supported."""
    if isinstance(target, DistributedDataParallel):
        return TorchDDP(target)
    if _is_megatron_ddp(target):
        return MegatronDDP(target)
    if _is_deepspeed_engine(target):
        return DeepSpeedEngine(target)
    kinds = {kind.__name__ for kind in type(target).__mro__}
    is_sharded = kinds & {"FullyShardedDataParallel", "FSDPModule"}
    raise ValueError(
        f"SparseFusion attaches to DistributedDataParallel of torch or Megatron-Core, or to a DeepSpeed engine, not to "
        f"{type(target).__name__}" + (", whose gradients are sharded over the ranks" if is_sharded else "")
    )


def target_groups(target: Any) -> TargetGroups:
    """The process groups of `target`, the same on all of its ranks, even if SparseFusion does not support it."""
    data = model = None
    if isinstance(target, DistributedDataParallel):
        data = target.process_group
    elif _is_megatron_ddp(target):
        data, model = target.dp_cp_group, target.tp_group if target.tp_group.size() > 1 else None
    elif _is_deepspeed_engine(target):
        data, model = target.seq_data_parallel_group, deepspeed_model_group(target.mpu)
    parameter = next(target.module.parameters(), None) if data is not None else None
    return TargetGroups(data, model, torch.device("cpu") if parameter is None else parameter.device)


def _is_megatron_ddp(target: object) -> bool:
    return hasattr(target, "bucket_groups") and hasattr(target, "finish_grad_sync")


def _is_deepspeed_engine(target: object) -> bool:
    return hasattr(target, "zero_optimization_stage") and hasattr(target, "allreduce_gradients")
