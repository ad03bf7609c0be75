"""AdamW: torch's, or on CUDA the FusedAdam of Transformer Engine or of NVIDIA's apex, one launch for many parameters.

All of them keep `exp_avg` and `exp_avg_sq` with each parameter. FusedAdam keeps both in float32 and the number of steps in
each group (transformer_engine/pytorch/optimizers/fused_adam.py, apex/optimizers/fused_adam.py); torch keeps both in the
parameter's type and the number of steps with each parameter. FusedAdam is not given parameters without elements (a rank's
part of a small vocabulary): Transformer Engine's raises, and apex's may leave out others.
"""

import functools

import torch

from .optional_imports import Borrowed, borrow, nvidia_apex, version_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # that FusedAdam takes


def _transformer_engines():
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam


def _apexs():
    if nvidia_apex() is False:  # what another project does when it is imported, nobody knows
        raise ImportError("it is another project than NVIDIA's")
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    if not multi_tensor_applier.available:
        raise ImportError("it was built without its CUDA extensions")
    return FusedAdam


@functools.cache
def found() -> tuple[Borrowed, ...]:
    """Transformer Engine's and apex's, in the order in which they are tried; what comes after one that works is not."""
    best = borrow("transformer-engine", _transformer_engines)
    return (best,) if best.item else (best, borrow("apex", _apexs))


def on_cuda(parameter) -> bool:
    """Whether FusedAdam can reach a parameter."""
    return parameter.is_cuda


def adamw(groups, **settings) -> torch.optim.Optimizer:
    """The fastest optimizer that takes all parameters of these groups; settings: lr, betas, eps."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(on_cuda(parameter) and parameter.dtype in TYPES for parameter in parameters) and found()[-1].item:
        return _fused(found()[-1].item, groups, settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def _fused(FusedAdam, groups, settings):
    """FusedAdam of what has elements; what has none has moments too, for checkpoints."""
    filled = [{**group, "params": [p for p in group["params"] if p.numel()]} for group in groups]
    optimizer = FusedAdam(filled, adam_w_mode=True, **settings)
    for parameter in (p for group in groups for p in group["params"] if not p.numel()):
        moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = moments
    return optimizer


def counts_by_group(optimizer) -> bool:
    """Whether it keeps the number of steps in its groups, and moments in float32."""
    return not isinstance(optimizer, torch.optim.AdamW)


def zero_gradients(optimizer) -> None:
    """In place: DDP's gradients are views of its buckets. apex's own zero_grad drops them whatever it is told."""
    torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)


def told(dtype=torch.float32) -> tuple[str, str]:
    """Whose optimizer trains parameters of a type on CUDA, and why no other."""
    if dtype not in TYPES:
        return "torch", f"FusedAdam has no {str(dtype).removeprefix('torch.')}"
    *_, last = found()
    whys = "; ".join(each.why for each in found() if each.why)
    return f"{last.package} {version_of(last.package)}" if last.item else "torch", whys
