"""The gated delta rule by flash-linear-attention's CUDA kernels, with the interface of `kernels.gated_delta`.

`fused_recurrent_gated_delta_rule` computes one token after the other, and has no gradient of g. `chunk_gated_delta_rule` has
all gradients, including those of the states. Both normalize q and k, and (since fla-core 0.6) support several value heads
for each key head.
"""

import torch
from torch import Tensor

from . import cuda_kernels
from .implementations import CUDA_GATED_DELTA, CUDA_GATED_DELTA_STEP


def supports_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, one_by_one: bool
) -> bool:
    """Return True if a kernel supports these arguments of `gated_delta.gated_delta`.

    The kernel for chunks multiplies float32 in TF32. So torch computes float32, unless torch itself may use TF32, or a lower
    precision under autocast.
    """
    inputs = (q, k, v, g, beta, state)
    if _is_recurrent(v, one_by_one):
        return CUDA_GATED_DELTA_STEP.takes(k.shape[3], *inputs)
    fits = CUDA_GATED_DELTA.takes(k.shape[3], *inputs)
    may_round = cuda_kernels.may_use_tf32() or torch.is_autocast_enabled(v.device.type)
    return fits and (may_round or cuda_kernels.common_dtype(q, k, v) is not torch.float32)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, one_by_one: bool
) -> tuple[Tensor, Tensor]:
    """`gated_delta.gated_delta` by flash-linear-attention, which copies tensors that are not contiguous."""
    dtype = cuda_kernels.common_dtype(q, k, v)
    implementation = CUDA_GATED_DELTA_STEP if _is_recurrent(v, one_by_one) else CUDA_GATED_DELTA
    y, final_state = cuda_kernels.load_kernel(implementation.kernel).item(
        q.to(dtype), k.to(dtype), v.to(dtype), g=g, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return y.to(v.dtype), final_state


def _is_recurrent(v: Tensor, one_by_one: bool) -> bool:
    return not torch.is_grad_enabled() and (one_by_one or v.shape[1] == 1)
