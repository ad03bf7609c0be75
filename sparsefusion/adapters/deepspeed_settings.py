"""Reads the settings of a DeepSpeed engine: process groups, dtypes, skipped steps, and features that are not supported."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from sparsefusion.gradients.session import most_common_dtype

OLDEST = "0.19.4"  # in older versions, ZeRO 1's methods have other arguments, or other steps are skipped


def refuse_deepspeed(engine: Any) -> int:
    """The ZeRO stage of the engine. ValueError: it is 2 or 3, the version is too old, or a feature is not supported."""
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        raise ValueError(f"ZeRO stage {stage} divides gradients over the ranks; SparseFusion needs stage 0 or 1")
    for is_used, feature in _unsupported_features(engine, engine.optimizer, stage):
        if is_used:
            raise ValueError(f"SparseFusion does not work with DeepSpeed's {feature}")
    return stage


def skips_nonfinite_steps(optimizer: Any, stage: int) -> bool:
    """Whether DeepSpeed skips a step whose gradients are not finite."""
    if not stage:
        return hasattr(optimizer, "overflow")
    checks_norm = hasattr(sys.modules[type(optimizer).__module__], "is_invalid_grad_norm")  # since 0.19.8
    by_norm = checks_norm and optimizer.compute_grad_norm and optimizer.dtype != torch.bfloat16
    return optimizer.check_grad_overflow or by_norm


def model_group(mpu: object) -> ProcessGroup | None:
    """The ranks over which the model is divided, from the methods that DeepSpeed looks for, or None if there is one only."""
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    get_group = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    group = get_group() if get_group else None
    return group if group is not None and group.size() > 1 else None


def sent_dtype(engine: Any, stage: int, parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype in which DeepSpeed sends most gradients. With ZeRO 1 and torch_autocast, each parameter has its own."""
    if not stage or engine.sequence_parallel_size > 1:
        return engine.communication_data_type
    return most_common_dtype(parameters, engine.optimizer.get_param_comm_dtype)


def _unsupported_features(engine: Any, optimizer: Any, stage: int) -> Iterator[tuple[object, str]]:
    """(whether it is used, its name) of each feature that is not supported, in the order in which they are reported."""
    version = TorchVersion(sys.modules["deepspeed"].__version__)
    yield version < OLDEST, f"version {version}: {OLDEST} is the oldest"
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    sent = engine.communication_data_type
    narrow = next((p.dtype for p in trained.values() if torch.promote_types(p.dtype, sent) != p.dtype), None)
    yield narrow and engine.sequence_parallel_size == 1, f"communication_data_type {sent} of {narrow} gradients"
    stages = getattr(engine.mpu, "get_pipeline_model_parallel_world_size", lambda: 1)()
    yield engine.pipeline_parallelism or stages > 1, "pipeline parallelism"
    yield engine.has_moe_layers, "mixtures of experts"
    scalers = (
        getattr(engine, "torch_autocast_z0_gradscaler", None),
        getattr(optimizer, "torch_autocast_gradscaler", None),
    )
    yield any(scaler is not None for scaler in scalers), "torch_autocast with float16"
    if not stage and skips_nonfinite_steps(optimizer, stage):
        checked = {id(p) for group in optimizer.fp16_groups for p in group}
        left_out = [name for name, p in trained.items() if p.numel() and id(p) not in checked]
        yield left_out, f"optimizer, which skips steps without having looked at {', '.join(left_out[:3])}"
    if stage:
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda group: False)
        yield not hasattr(optimizer, "average_tensor"), f"{type(optimizer).__name__}: leave out grad_accum_dtype"
        yield not optimizer.contiguous_gradients, "contiguous_gradients: false"
        yield any(map(compact, range(len(optimizer.bit16_groups)))), "grad_accum_dtype beside another dtype"
        yield optimizer.cpu_offload, "offload_optimizer"
        yield optimizer.overlap_comm and torch.cuda.is_available(), "overlap_comm on CUDA"
