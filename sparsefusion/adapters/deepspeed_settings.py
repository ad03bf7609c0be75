"""What an engine of DeepSpeed's is set to: over which ranks, in which dtype, what it skips, what it does elsewhere."""

import sys

import torch
from torch.torch_version import TorchVersion

from sparsefusion.gradients.session import usual_dtype

OLDEST = "0.19.4"  # before it, ZeRO 1's methods take other arguments, or other steps are skipped


def refuse_deepspeed(engine) -> int:
    """An engine of stage 2 or 3, too old, or with what reduces gradients elsewhere; returns the stage of another one."""
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        raise ValueError(f"ZeRO stage {stage} divides gradients over the ranks; SparseFusion needs stage 0 or 1")
    for wrong, what in _strange(engine, engine.optimizer, stage):
        if wrong:
            raise ValueError(f"SparseFusion does not work with DeepSpeed's {what}")
    return stage


def skips_what_is_not_finite(optimizer, stage) -> bool:
    """Whether a step of DeepSpeed's with a gradient that is not finite is skipped, whatever the dtype."""
    if not stage:
        return hasattr(optimizer, "overflow")
    judges = hasattr(sys.modules[type(optimizer).__module__], "is_invalid_grad_norm")  # since 0.19.8
    by_norm = judges and optimizer.compute_grad_norm and optimizer.dtype != torch.bfloat16
    return optimizer.check_grad_overflow or by_norm


def model_group(mpu):
    """The ranks over which the model is divided, by the names that DeepSpeed knows, or None."""
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    ask = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    group = ask() if ask else None
    return group if group is not None and group.size() > 1 else None


def dtype_sent(engine, stage, parameters):
    """In which DeepSpeed sends most numbers of gradients; torch_autocast's, of ZeRO 1, are each parameter's own."""
    if not stage or engine.sequence_parallel_size > 1:
        return engine.communication_data_type
    return usual_dtype(parameters, engine.optimizer.get_param_comm_dtype)


def _strange(engine, optimizer, stage):
    """(whether it is there, what) of all that reduces gradients elsewhere; in this order."""
    version = TorchVersion(sys.modules["deepspeed"].__version__)
    yield version < OLDEST, f"version {version}: {OLDEST} is the oldest"
    given = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    sent = engine.communication_data_type
    narrow = next((p.dtype for p in given.values() if torch.promote_types(p.dtype, sent) != p.dtype), None)
    yield narrow and engine.sequence_parallel_size == 1, f"communication_data_type {sent} of {narrow} gradients"
    stages = getattr(engine.mpu, "get_pipeline_model_parallel_world_size", lambda: 1)()
    yield engine.pipeline_parallelism or stages > 1, "pipeline parallelism"
    yield engine.has_moe_layers, "mixtures of experts"
    scalers = (
        getattr(engine, "torch_autocast_z0_gradscaler", None),
        getattr(optimizer, "torch_autocast_gradscaler", None),
    )
    yield any(scaler is not None for scaler in scalers), "torch_autocast with float16"
    if not stage and skips_what_is_not_finite(optimizer, stage):
        judged = {id(p) for group in optimizer.fp16_groups for p in group}
        left_out = [name for name, p in given.items() if p.numel() and id(p) not in judged]
        yield left_out, f"optimizer, which skips steps without having looked at {', '.join(left_out[:3])}"
    if stage:
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda group: False)
        yield not hasattr(optimizer, "average_tensor"), f"{type(optimizer).__name__}: leave out grad_accum_dtype"
        yield not optimizer.contiguous_gradients, "contiguous_gradients: false"
        yield any(map(compact, range(len(optimizer.bit16_groups)))), "grad_accum_dtype beside another dtype"
        yield optimizer.cpu_offload, "offload_optimizer"
        yield optimizer.overlap_comm and torch.cuda.is_available(), "overlap_comm on CUDA"
