"""AdamW: torch's, or on CUDA the FusedAdam of Transformer Engine or NVIDIA's apex, which updates many parameters per launch.

| | `exp_avg` and `exp_avg_sq` of each parameter | number of steps |
|---|---|---|
| torch | in the parameter's dtype | stored for each parameter |
| FusedAdam | in float32 | stored for each group |

See transformer_engine/pytorch/optimizers/fused_adam.py and apex/optimizers/fused_adam.py.
FusedAdam gets no parameters without elements, such as a rank's part of a small vocabulary: with them, Transformer Engine's
raises an error, and apex's may skip other parameters.
"""

import functools
from typing import Any

import torch

from .optional_imports import OptionalImport, import_optional, nvidia_apex, version_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of parameters that FusedAdam supports


def _load_transformer_engine() -> type:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam


def _load_apex() -> type:
    if nvidia_apex() is False:  # importing an unknown project could have any effect
        raise ImportError("it is not NVIDIA's project")
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    if not multi_tensor_applier.available:
        raise ImportError("it was built without its CUDA extensions")
    return FusedAdam


@functools.cache
def fused_adams() -> tuple[OptionalImport, ...]:
    """The imports of FusedAdam from Transformer Engine and then apex, up to the first that succeeds.

    So only the last one may have an `item`.
    """
    best = import_optional("transformer-engine", _load_transformer_engine)
    return (best,) if best.item else (best, import_optional("apex", _load_apex))


def on_cuda(parameter: torch.Tensor) -> bool:
    return parameter.is_cuda


def adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """The fastest AdamW that supports all parameters.

    The ranks of a run must use the same package, because the optimizers round differently.

    Args:
        groups: Parameter groups, as for torch: {"params": ..., option: value}.
        settings: lr, betas and eps.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    are_supported = all(on_cuda(parameter) and parameter.dtype in TYPES for parameter in parameters)
    if not are_supported or not (FusedAdam := fused_adams()[-1].item):
        return torch.optim.AdamW(groups, fused=True, **settings)
    # FusedAdam gets the parameters with elements. The others get empty moments, which checkpoints expect.
    filled = [{**group, "params": [p for p in group["params"] if p.numel()]} for group in groups]
    optimizer = FusedAdam(filled, adam_w_mode=True, **settings)
    for parameter in (p for p in parameters if not p.numel()):
        moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = moments
    return optimizer


def counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer counts steps per group and stores its moments in float32, as FusedAdam does."""
    return not isinstance(optimizer, torch.optim.AdamW)


def zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set gradients to zero in place, because DDP's are views of its buckets. apex's zero_grad would set them to None."""
    torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)


def adamw_on_cuda(dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """(package and version of the AdamW that `adamw` uses for this dtype on CUDA, the reasons against the others)."""
    if dtype not in TYPES:
        return "torch", f"FusedAdam has no {str(dtype).removeprefix('torch.')}"
    *_, last = fused_adams()
    reasons = "; ".join(package.why for package in fused_adams() if package.why)
    return f"{last.package} {version_of(last.package)}" if last.item else "torch", reasons
