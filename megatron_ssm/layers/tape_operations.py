"""The operations of a tape and their operands, as the C structs of native/tape.h."""

import ctypes

import torch
from torch import Tensor

from commfabric.native.library import FLOAT, INT, POINTER, SIZE
from megatron_ssm.kernels import products
from megatron_ssm.kernels.arguments import are_float32
from megatron_ssm.kernels.kernels import TYPES
from megatron_ssm.kernels.quantized_matrices import QuantizedMatrix

SUM_IN_PYTHON, NO_MEMORY, UNUSUAL, STOPPED = -1, -2, -3, -4  # results of C's `run_tape`
ONE_RANK, IN_C, IN_PYTHON = range(3)  # the ways to compute an all-reduce
KINDS = """embed sum convert concat norm matmul head_matmuls logits conv step_sizes ssd selective_scan inner_norms
    gated_norm add residual activate rotate append attend head_norms delta_rates gated_delta norm_gated squares whole_norm
    score route experts stop""".split()
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu", "relu2", "sigmoid")


class Matrix(ctypes.Structure):
    """A floating-point or quantized matrix."""

    _fields_ = [("values", POINTER), ("scales", POINTER), ("type", SIZE)]

    @classmethod
    def of(cls, weight: Tensor | QuantizedMatrix) -> "Matrix":
        """The struct for a tensor or a `QuantizedMatrix`."""
        if isinstance(weight, Tensor):
            return cls(weight.data_ptr(), None, TYPES[weight.dtype])
        return cls(weight.values.data_ptr(), weight.scales.data_ptr(), TYPES[weight.values.dtype])

    @staticmethod
    def supports(weight: Tensor | QuantizedMatrix, dtype: torch.dtype, rows: int, has_gaps: bool = False) -> bool:
        """Return True if C multiplies rows of `dtype` without copying the matrix. has_gaps: see `products.has_kernel`."""
        values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        return (
            values.is_cpu and values.is_contiguous() and not torch.is_autocast_enabled("cpu")
            and products.has_kernel(values.dtype, dtype, rows, products.columns_of(values), has_gaps)
            and are_float32(scales) and (scales is None or scales.is_contiguous())
        )  # fmt: skip


class Sum(ctypes.Structure):
    """An all-reduce."""

    _fields_ = [
        *((name, POINTER) for name in ("call", "channel", "parts", "total", "squares")),
        *((name, INT) for name in ("count", "done_by")),
    ]


class View(ctypes.Structure):
    """Columns of a buffer."""

    _fields_ = [("offset", SIZE), ("first", SIZE), ("stride", SIZE)]


class Op(ctypes.Structure):
    """An operation. native/tape.c describes its numbers n and f."""

    _fields_ = [
        *((name, INT) for name in ("kind", "type", "from_type", "flag")),
        *((name, View) for name in "xyz"),
        ("matrix", Matrix),
        ("down", Matrix),
        *((name, POINTER) for name in ("weight", "bias", "A_log", "D", "dt_bias")),
        ("slot", SIZE),
        ("sum", SIZE),
        ("n", SIZE * 8),
        ("f", FLOAT * 3),
    ]


class Slot(ctypes.Structure):
    """A tensor of the cache."""

    _fields_ = [("data", POINTER), ("next", POINTER), ("stride", SIZE), ("next_stride", SIZE)]


class Tape(ctypes.Structure):
    """The tape of one call."""

    _fields_ = [
        ("ops", POINTER),
        *((name, SIZE) for name in ("start", "stop", "at")),
        *((name, POINTER) for name in "arena sums slots sequences lengths ids logits".split()),
        *((name, SIZE) for name in ("batch", "tokens", "vocabulary")),
        *((name, INT) for name in ("speculative", "prompt", "threads")),
    ]
