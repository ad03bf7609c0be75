"""Reads the settings of a DeepSpeed engine: process groups, dtypes, and whether steps are skipped."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sparsefusion.gradients.session import most_common_dtype


def skips_nonfinite_steps(optimizer: Any, stage: int) -> bool:
    """Return True if DeepSpeed skips a step whose gradients are not finite."""
    if not stage:
        return hasattr(optimizer, "overflow")
    checks_norm = hasattr(sys.modules[type(optimizer).__module__], "is_invalid_grad_norm")  # since 0.19.8
    by_norm = checks_norm and optimizer.compute_grad_norm and optimizer.dtype != torch.bfloat16
    return optimizer.check_grad_overflow or by_norm


def model_group(mpu: object) -> ProcessGroup | None:
    """The ranks over which the model is divided, from the methods of `mpu` that DeepSpeed calls; None for one rank."""
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    get_group = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    group = get_group() if get_group else None
    return group if group is not None and group.size() > 1 else None


def sent_dtype(engine: Any, stage: int, parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype in which DeepSpeed sends most gradients. It depends on the parameter with ZeRO 1 and torch_autocast."""
    if not stage or engine.sequence_parallel_size > 1:
        return engine.communication_data_type
    return most_common_dtype(parameters, engine.optimizer.get_param_comm_dtype)
