"""Options that are none, and targets whose gradients cannot be taken over, by name; all raise ValueError."""

from numbers import Integral, Real

import torch
from torch import nn
from torch.distributed import ProcessGroup

from . import MODES, SPARSIFIERS
from .fabric import Fabric
from .plan import WIRES

KNOWN = {
    "sparsifier": SPARSIFIERS,
    "mode": MODES,
    "wire": WIRES,
    "budget": ("bytes", "paper"),
    "on_nonfinite": ("raise", "skip-known"),
}


def refuse_options(density, density_warmup, fabric, model_group, functions, names) -> None:
    """Of a `SparseFusion`. functions: {option: function or None}. names: {option: one of KNOWN's}."""
    if not isinstance(density, Real) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} must be above 0 and at most 1")
    if not isinstance(density_warmup, Integral) or density_warmup < 0:
        raise ValueError(f"density_warmup={density_warmup!r} must be a number of steps")
    if fabric is not None and not isinstance(fabric, Fabric):
        raise ValueError(f"fabric={fabric!r} must be a Fabric: Fabric.load(path) reads one")
    if model_group is not None and not isinstance(model_group, ProcessGroup):
        raise ValueError(f"model_group={model_group!r} must be a process group that this rank is in")
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}={value!r} must be a function")
    for name, value in names.items():
        if value not in KNOWN[name]:
            raise ValueError(f"{name}={value!r} is none of {', '.join(KNOWN[name])}")


def refuse_gradients(module, parameters) -> None:
    """ValueError: gradients without a fixed size, or of complex numbers. parameters: {name: parameter}."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise ValueError(f"{name} has sparse=True: SparseFusion selects from whole gradients")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(f"{name} is of {parameter.dtype}: SparseFusion selects from real numbers")


def refuse_ddp(ddp) -> None:
    """One of torch's that has a communication hook, or no buckets, or may skip the end of a step."""
    if ddp._comm_hooks:
        raise ValueError(f"this DDP has the communication hook {ddp._comm_hooks[0][0].__name__}; it takes one only")
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError("this DDP has the python reducer (torch._dynamo.config.optimize_ddp), which has no buckets")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError("this DDP has skip_all_reduce_unused_params, which skips the end of SparseFusion's steps")


def refuse_megatron(ddp) -> None:
    """One of Megatron's that reduces over two groups, or nothing, or whose steps are skipped by ranks it does not know."""
    if getattr(ddp.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
        raise ValueError("num_distributed_optimizer_instances > 1 reduces over two groups, and SparseFusion over one")
    for option in ("check_for_large_grads", "reduce_scatter_with_fp32_accumulation"):
        if getattr(ddp.ddp_config, option, False):
            raise ValueError(f"SparseFusion does not work with Megatron's {option}")
    if not ddp.bucket_groups:
        raise ValueError("this Megatron DDP has no parameters that are reduced over the data-parallel group")
    stages = ddp.pp_group if isinstance(ddp.pp_group, list) else [ddp.pp_group]
    if any(group.size() > 1 for group in stages):
        raise ValueError(
            "SparseFusion does not work with Megatron's pipeline parallelism: a stage has a step of its own"
        )


def refuse_partly_skipped(ddp, session) -> None:
    """One of Megatron's that skips steps for gradients that the session does not see."""
    if (session.skips or session.loss_scale) and ddp.expert_parallel_bucket_groups:
        raise ValueError(
            "SparseFusion with a loss scale, or skipped steps, does not work with Megatron's experts: a step that overflows "
            "in theirs is skipped, and what was sent of the others in it would be lost"
        )


def refuse_deepspeed(engine) -> int:
    """An engine of stage 2 or 3, or with what reduces gradients elsewhere; returns the stage of another one."""
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
    by_norm = getattr(optimizer, "compute_grad_norm", False) and optimizer.dtype != torch.bfloat16
    return getattr(optimizer, "check_grad_overflow", False) or by_norm


def _strange(engine, optimizer, stage):
    """(whether it is there, what) of all that reduces gradients elsewhere; in this order."""
    own, sent = next(iter(engine.module.parameters())).dtype, engine.communication_data_type
    wider = torch.promote_types(own, sent) != own and engine.sequence_parallel_size == 1
    yield wider, f"communication_data_type {sent} of {own} gradients"
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
        given = {name: p for name, p in engine.module.named_parameters() if p.requires_grad and p.numel()}
        left_out = [name for name, p in given.items() if id(p) not in judged]
        yield left_out, f"optimizer, which skips steps without having looked at {', '.join(left_out[:3])}"
    if stage:
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda group: False)
        yield not hasattr(optimizer, "average_tensor"), f"{type(optimizer).__name__}: leave out grad_accum_dtype"
        yield not optimizer.contiguous_gradients, "contiguous_gradients: false"
        yield any(map(compact, range(len(optimizer.bit16_groups)))), "grad_accum_dtype beside another dtype"
        yield optimizer.cpu_offload, "offload_optimizer"
        yield optimizer.overlap_comm and torch.cuda.is_available(), "overlap_comm on CUDA"
