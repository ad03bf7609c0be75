"""Raises ValueErrors for invalid options, and for unsupported settings of frameworks such as ZeRO 2 and 3."""

import sys
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from commfabric.fabric.cost_model import Fabric
from sparsefusion import EXCHANGES, MODES, SPARSIFIERS
from sparsefusion.gradients.session import Session
from sparsefusion.planning.plan import WIRES

from .deepspeed_settings import skips_nonfinite_steps

OLDEST_DEEPSPEED = "0.19.4"  # older versions have other arguments of ZeRO 1's methods, or skip other steps
CHOICES = {
    "sparsifier": SPARSIFIERS,
    "mode": MODES,
    "wire": WIRES,
    "budget": ("none", "bytes", "paper"),
    "exchange": EXCHANGES,
    "on_nonfinite": ("raise", "skip-known"),
}


def refuse_options(
    density: object,
    density_warmup: object,
    fabric: object,
    model_group: object,
    functions: Mapping[str, object],
    names: Mapping[str, object],
) -> None:
    """Check the options of a `SparseFusion`. functions: {option: function or None}. names: {option: one of CHOICES}."""
    if not isinstance(density, Real) or not 0 < float(density) <= 1:
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
        if value not in CHOICES[name]:
            raise ValueError(f"unknown {name} {value!r}: expected {', '.join(CHOICES[name])}")


def refuse_gradients(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """ValueError if some gradients are sparse or complex tensors. parameters: {name: parameter}."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ValueError(f"{name} has sparse=True: SparseFusion needs dense gradients")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(f"{name} is {parameter.dtype}: SparseFusion needs real gradients")


def refuse_ddp(ddp: DistributedDataParallel) -> None:
    """ValueError if torch's DDP has a communication hook or no buckets, or may skip the end of a step."""
    if ddp._comm_hooks:
        raise ValueError(f"this DDP has the communication hook {ddp._comm_hooks[0][0].__name__}; it accepts only one")
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError("this DDP has the python reducer (torch._dynamo.config.optimize_ddp), which has no buckets")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        raise ValueError("this DDP has optimizers in its backward pass, which use its one communication hook")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError("this DDP has skip_all_reduce_unused_params, which skips the end of SparseFusion's steps")


def refuse_megatron(ddp: Any) -> None:
    """ValueError if Megatron's DDP reduces nothing or over two groups, or has stages that skip steps independently."""
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
            "SparseFusion does not work with Megatron's pipeline parallelism, whose stages have their own steps"
        )


def refuse_experts_with_skipped_steps(ddp: Any, session: Session) -> None:
    """ValueError if Megatron's DDP may skip a step because of gradients of experts, which the session does not see."""
    if (session.skips_nonfinite_steps or session.loss_scale) and ddp.expert_parallel_bucket_groups:
        raise ValueError(
            "SparseFusion with a loss scale, or skipped steps, does not work with Megatron's experts: a step is skipped if "
            "their gradients overflow, and the elements that it sent of other gradients would be lost"
        )


def refuse_deepspeed(engine: Any) -> int:
    """The ZeRO stage of the engine. ValueError if it is 2 or 3, or if the version or a feature is not supported."""
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        raise ValueError(f"ZeRO stage {stage} shards gradients over the ranks; SparseFusion needs stage 0 or 1")
    for is_used, feature in _unsupported_features(engine, engine.optimizer, stage):
        if is_used:
            raise ValueError(f"SparseFusion does not work with DeepSpeed's {feature}")
    return stage


def _unsupported_features(engine: Any, optimizer: Any, stage: int) -> Iterator[tuple[object, str]]:
    """Pairs (is used, name) of unsupported features, in the order in which they are reported."""
    version = TorchVersion(sys.modules["deepspeed"].__version__)
    yield version < OLDEST_DEEPSPEED, f"version {version}: {OLDEST_DEEPSPEED} is the oldest"
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
        yield left_out, f"optimizer, which skips steps without checking {', '.join(left_out[:3])}"
    if stage:
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda group: False)
        yield not hasattr(optimizer, "average_tensor"), f"{type(optimizer).__name__}: leave out grad_accum_dtype"
        yield not optimizer.contiguous_gradients, "contiguous_gradients: false"
        yield any(map(compact, range(len(optimizer.bit16_groups)))), "grad_accum_dtype beside another dtype"
        yield optimizer.cpu_offload, "offload_optimizer"
        yield optimizer.overlap_comm and torch.cuda.is_available(), "overlap_comm on CUDA"
