"""The final norm and the language-model head, computed by the C code of native/step.c right after the last layer.

As for the layers, Python would first have to read its own data from memory again, which the weights have evicted.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_ssm.native.arguments import address
from megatron_ssm.native.kernels import usable
from megatron_ssm.parallel.layers import RMSNorm, VocabularyParallel, has_own_methods, has_plain_tensors, is_altered

from .structs import Head, Matrix


class NativeHead:
    """norm and head as step.c computes them: `head.logits(norm(x))`, for `rows` tokens x. address: of step.c's `Head`."""

    @classmethod
    def of(cls, norm: Any, head: Any, dtype: torch.dtype, size: int, rows: int) -> "NativeHead | None":
        """None if C does not compute what these modules do, after layers of `dtype` and `size`. It may on other ranks."""
        if (
            type(norm) is not RMSNorm
            or type(head) is not VocabularyParallel
            or is_altered(norm)
            or has_own_methods(head)
        ):
            return None
        if has_plain_tensors(norm) or has_plain_tensors(head):
            return None
        weight, matrix = norm.weight, head.weight
        is_supported = (
            weight.dtype is matrix.dtype is dtype and usable(weight) and weight.is_contiguous()
            and weight.shape == (size,) and matrix.shape == (head.width, size)  # without padding of the vocabulary
            and Matrix.supports(matrix, dtype, rows)
        )  # fmt: skip
        return cls(norm, head, rows) if is_supported else None

    def __init__(self, norm: Any, head: Any, rows: int):
        dtype, width = norm.weight.dtype, head.width
        is_wide = dtype is torch.float32
        self._normed = torch.empty(rows, len(norm.weight), dtype=dtype, device="cpu")
        self._narrow = None if is_wide else torch.empty(rows, width, dtype=dtype, device="cpu")
        self._width, self._field = width, "logits" if is_wide else "wide"
        self._struct = Head(
            matrix=Matrix.of(head.weight), norm=address(norm.weight), normed=address(self._normed),
            logits=address(self._narrow), width=width, eps=norm.eps,
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)

    def new_logits(self, *shape: int) -> Tensor:
        """A tensor (*shape, width) of float32 for the logits of the next call."""
        logits = torch.empty(*shape, self._width, dtype=torch.float32, device="cpu")
        setattr(self._struct, self._field, logits.data_ptr())
        return logits
