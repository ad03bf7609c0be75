"""Raises ValueError for invalid options, and for targets whose settings are not supported; each error names the setting.

The settings of DeepSpeed that are not supported (ZeRO 2 and 3 and others) are in `deepspeed_settings.py`.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from sparsefusion import MODES, SPARSIFIERS
from sparsefusion.fabric.cost_model import Fabric
from sparsefusion.gradients.session import Session
from sparsefusion.planning.plan import WIRES

CHOICES = {
    "sparsifier": SPARSIFIERS,
    "mode": MODES,
    "wire": WIRES,
    "budget": ("bytes", "paper"),
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
            raise ValueError(f"{name}={value!r} is none of {', '.join(CHOICES[name])}")


def refuse_gradients(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """ValueError: some gradients are sparse tensors, or complex. parameters: {name: parameter}."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise ValueError(f"{name} has sparse=True: SparseFusion needs dense gradients")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(f"{name} is of {parameter.dtype}: SparseFusion selects from real numbers")


def refuse_ddp(ddp: DistributedDataParallel) -> None:
    """ValueError: this DDP of torch has a communication hook or no buckets, or may skip the end of a step."""
    if ddp._comm_hooks:
        raise ValueError(f"this DDP has the communication hook {ddp._comm_hooks[0][0].__name__}; it takes one only")
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError("this DDP has the python reducer (torch._dynamo.config.optimize_ddp), which has no buckets")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        raise ValueError("this DDP has optimizers in its backward, for which it takes its one communication hook")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError("this DDP has skip_all_reduce_unused_params, which skips the end of SparseFusion's steps")


def refuse_megatron(ddp: Any) -> None:
    """ValueError: this DDP of Megatron reduces over two groups, or nothing, or has stages that skip steps on their own."""
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


def refuse_experts_with_skipped_steps(ddp: Any, session: Session) -> None:
    """ValueError: this DDP of Megatron may skip a step because of expert gradients, which the session does not see."""
    if (session.skips_nonfinite_steps or session.loss_scale) and ddp.expert_parallel_bucket_groups:
        raise ValueError(
            "SparseFusion with a loss scale, or skipped steps, does not work with Megatron's experts: a step that overflows "
            "in theirs is skipped, and what was sent of the others in it would be lost"
        )
