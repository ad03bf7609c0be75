"""The kernels of each operation and the calls that they support: one table, which dispatch reads and `doctor` prints.

torch computes every call that no kernel supports. The table has conditions on dtypes, devices and one size; `torch_for`
describes the others, which `cuda_scans`, `gated_delta` and `convolution` check. Three operations are dispatched
elsewhere: products with matrices by a table in C (`kernels.products.kernels_for`), AdamW by `fused_adam.adamw_on_cuda`, and
the RMS norm by `kernels.kernels.supports_rms_norm`.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cuda_kernels, kernels

ANY = range(1, sys.maxsize)
FP32, TYPES = (torch.float32,), cuda_kernels.TYPES
STATES, TAPS = range(1, kernels.LARGEST_STATE + 1), range(1, kernels.LONGEST_KERNEL + 1)  # limits of the C kernels
CUDA_STATES, CUDA_TAPS = range(1, 257), range(2, 5)  # selective_scan.cpp and chunk_delta_h.py; causal_conv1d.cpp


@dataclass(frozen=True)
class Implementation:
    """A kernel of an operation.

    Attributes:
        device: "cpu" or "cuda".
        package: "C", or a distribution.
        kernel: The name of a CUDA kernel in `cuda_kernels.KERNELS`.
        tokens: "one token" or "several tokens" if the kernel supports only such calls; otherwise "".
        trained: The dtypes in which the kernel has gradients.
        sizes: The supported sizes of a state, or numbers of taps of a convolution.
        torch_for: The unsupported calls, in words.
    """

    operation: str
    device: str
    package: str
    kernel: str
    tokens: str
    trained: tuple[torch.dtype, ...]
    sizes: range
    torch_for: str

    def takes(self, size: int, first: Tensor, *others: Tensor | None) -> bool:
        """Return True if the kernel is installed and supports a call of this size with these tensors; None is ignored."""
        if size not in self.sizes or (torch.is_grad_enabled() and first.dtype not in self.trained):
            return False
        if self.device == "cpu":
            return kernels.usable(first, *others)
        return cuda_kernels.is_usable(self.kernel, first, *others)

    @property
    def why_not(self) -> str:
        return kernels.LIBRARY.why if self.device == "cpu" else cuda_kernels.load_kernel(self.kernel).why


STATE = f"states of more than {STATES[-1]} values"
NO_TF32 = "float32 where products may not be TF32 (one token may)"

SELECTIVE_SCAN = Implementation("selective scan", "cpu", "C", "", "", FP32, STATES, STATE)
SSD = Implementation("SSD", "cpu", "C", "", "", FP32, STATES, STATE)
GATED_DELTA = Implementation(
    "gated delta rule", "cpu", "C", "", "", FP32, STATES, f"keys of more than {STATES[-1]} values"
)
CONVOLUTION = Implementation(
    "convolution", "cpu", "C", "", "", FP32, TAPS, f"more than {TAPS[-1]} taps, training in bfloat16"
)
RMS_NORM = Implementation("RMS norm", "cpu", "C", "", "", (), ANY, "training")

CUDA_SELECTIVE_SCAN = Implementation(
    "selective scan", "cuda", "mamba-ssm", "selective_scan_fn", "several tokens", TYPES, CUDA_STATES,
    f"states of more than {CUDA_STATES[-1]} values, a state that is continued in training",
)  # fmt: skip
CUDA_SELECTIVE_STEP = Implementation(
    "selective scan", "cuda", "mamba-ssm", "selective_state_update", "one token", (), ANY, "one token in training"
)
CUDA_SSD = Implementation(
    "SSD", "cuda", "mamba-ssm", "mamba_chunk_scan_combined", "several tokens", TYPES, ANY, NO_TF32
)
CUDA_SSD_STEP = Implementation(
    "SSD", "cuda", "mamba-ssm", "selective_state_update", "one token", (), ANY, "one token in training"
)
CUDA_GATED_DELTA = Implementation(
    "gated delta rule", "cuda", "flash-linear-attention", "chunk_gated_delta_rule", "several tokens", TYPES, CUDA_STATES,
    f"{NO_TF32}, keys of more than {CUDA_STATES[-1]} values",
)  # fmt: skip
CUDA_GATED_DELTA_STEP = Implementation(
    "gated delta rule", "cuda", "flash-linear-attention", "fused_recurrent_gated_delta_rule", "one token", (), ANY, ""
)
CUDA_CONVOLUTION = Implementation(
    "convolution", "cuda", "causal-conv1d", "causal_conv1d_fn", "several tokens", TYPES, CUDA_TAPS,
    f"taps other than {CUDA_TAPS[0]} to {CUDA_TAPS[-1]}, channels not a multiple of 8",
)  # fmt: skip
CUDA_CONVOLUTION_STEP = Implementation(
    "convolution", "cuda", "causal-conv1d", "causal_conv1d_update", "one token", (), CUDA_TAPS, "one token in training"
)

IMPLEMENTATIONS = (
    SELECTIVE_SCAN, SSD, GATED_DELTA, CONVOLUTION, RMS_NORM,
    CUDA_SELECTIVE_SCAN, CUDA_SELECTIVE_STEP, CUDA_SSD, CUDA_SSD_STEP, CUDA_GATED_DELTA, CUDA_GATED_DELTA_STEP,
    CUDA_CONVOLUTION, CUDA_CONVOLUTION_STEP,
)  # fmt: skip
