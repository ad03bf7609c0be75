"""AdamW: torch's, or on CUDA the FusedAdam of Transformer Engine or of NVIDIA's apex, one launch for many parameters.

All of them keep `exp_avg` and `exp_avg_sq` with each parameter. FusedAdam keeps both in float32 and the number of steps in
each group (transformer_engine/pytorch/optimizers/fused_adam.py, apex/optimizers/fused_adam.py); torch keeps both in the
parameter's type and the number of steps with each parameter. FusedAdam is not given parameters without elements (a rank's
part of a small vocabulary): Transformer Engine's raises, and apex's may leave out others.
"""

import functools

import torch

from .optional_imports import OptionalImport, import_optional, nvidia_apex, version_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # that FusedAdam takes


def _load_transformer_engine():
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam


def _load_apex():
    if nvidia_apex() is False:  # importing another project could have any effect
        raise ImportError("it is another project than NVIDIA's")
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    if not multi_tensor_applier.available:
        raise ImportError("it was built without its CUDA extensions")
    return FusedAdam


@functools.cache
def fused_adams() -> tuple[OptionalImport, ...]:
    """FusedAdam of Transformer Engine and of apex, in the order in which they are tried, up to the first that works."""
    best = import_optional("transformer-engine", _load_transformer_engine)
    return (best,) if best.item else (best, import_optional("apex", _load_apex))


def on_cuda(parameter) -> bool:
    """Whether a parameter is on CUDA, as FusedAdam requires."""
    return parameter.is_cuda


def adamw(groups, **settings) -> torch.optim.Optimizer:
    """The fastest optimizer that supports all parameters of these groups. settings: lr, betas, eps."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(on_cuda(parameter) and parameter.dtype in TYPES for parameter in parameters) and fused_adams()[-1].item:
        return _fused(fused_adams()[-1].item, groups, settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def _fused(FusedAdam, groups, settings):
    """FusedAdam of the parameters that have elements. The others get empty moments, for checkpoints."""
    filled = [{**group, "params": [p for p in group["params"] if p.numel()]} for group in groups]
    optimizer = FusedAdam(filled, adam_w_mode=True, **settings)
    for parameter in (p for group in groups for p in group["params"] if not p.numel()):
        moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = moments
    return optimizer


def counts_by_group(optimizer) -> bool:
    """Whether an optimizer counts steps per group, and keeps its moments in float32 (FusedAdam does)."""
    return not isinstance(optimizer, torch.optim.AdamW)


def zero_gradients(optimizer) -> None:
    """Set gradients to zero in place, because DDP's are views of its buckets. apex's zero_grad would always drop them."""
    torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)


def adamw_on_cuda(dtype=torch.float32) -> tuple[str, str]:
    """(whose AdamW trains parameters of this dtype on CUDA, why no other one does)."""
    if dtype not in TYPES:
        return "torch", f"FusedAdam has no {str(dtype).removeprefix('torch.')}"
    *_, last = fused_adams()
    whys = "; ".join(each.why for each in fused_adams() if each.why)
    return f"{last.package} {version_of(last.package)}" if last.item else "torch", whys
